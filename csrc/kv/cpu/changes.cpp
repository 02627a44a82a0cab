#include "kv/cpu/changes.h"

#include "kv/cpu/simd.h"
#include "kv/delta_segment.h"

namespace torch_mooncake::kv {
namespace {

template <int kNbytes>
int64_t portable(const std::byte* a, const std::byte* b, int64_t n, uint16_t first, uint16_t* positions) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    positions[found] = static_cast<uint16_t>(first + i);
    found += delta_element<kNbytes>(a, i) != delta_element<kNbytes>(b, i);
  }
  return found;
}

#ifdef __x86_64__
#define TM_AVX2 __attribute__((target("avx2,bmi")))
#define TM_AVX2_INLINE __attribute__((target("avx2,bmi"), always_inline)) inline

template <int kNbytes>
TM_AVX2_INLINE __m256i equal(const std::byte* a, const std::byte* b, int vector) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a) + vector);
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b) + vector);
  if constexpr (kNbytes == 1) return _mm256_cmpeq_epi8(x, y);
  if constexpr (kNbytes == 2) return _mm256_cmpeq_epi16(x, y);
  if constexpr (kNbytes == 4) return _mm256_cmpeq_epi32(x, y);
  return _mm256_cmpeq_epi64(x, y);
}

// A bit for each of 32 elements: set where they differ.
template <int kNbytes>
TM_AVX2_INLINE uint32_t differ(const std::byte* a, const std::byte* b) {
  uint32_t same;
  if constexpr (kNbytes == 1) {
    same = static_cast<uint32_t>(_mm256_movemask_epi8(equal<1>(a, b, 0)));
  } else if constexpr (kNbytes == 2) {
    const __m256i bytes = _mm256_packs_epi16(equal<2>(a, b, 0), equal<2>(a, b, 1));
    same = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, _MM_SHUFFLE(3, 1, 2, 0))));
  } else {
    same = 0;
    constexpr int kLanes = 32 / kNbytes;
    for (int v = 0; v < kNbytes; ++v) {
      const __m256i lanes = equal<kNbytes>(a, b, v);
      const int bits = kNbytes == 4 ? _mm256_movemask_ps(_mm256_castsi256_ps(lanes))
                                    : _mm256_movemask_pd(_mm256_castsi256_pd(lanes));
      same |= static_cast<uint32_t>(bits) << (v * kLanes);
    }
  }
  return ~same;
}

constexpr int64_t kAhead = 2048;  // bytes

template <int kNbytes>
TM_AVX2 int64_t avx2(const std::byte* a, const std::byte* b, int64_t n, uint16_t first, uint16_t* positions) {
  uint16_t* to = positions;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int line = 0; line < 32 * kNbytes; line += 64) {  // the hardware does not look beyond a page
      __builtin_prefetch(a + i * kNbytes + line + kAhead);
      __builtin_prefetch(b + i * kNbytes + line + kAhead);
    }
    uint32_t bits = differ<kNbytes>(a + i * kNbytes, b + i * kNbytes);
    const int count = __builtin_popcount(bits);
    const auto at = static_cast<uint16_t>(first + i);
    // Four at a time, whether there are so many or not: what is too much is overwritten, and nothing is guessed wrong.
    for (int done = 0; done < count || done == 0; done += 4)
      for (int k = 0; k < 4; ++k) {
        to[done + k] = static_cast<uint16_t>(at + _tzcnt_u32(bits));
        bits = _blsr_u32(bits);
      }
    to += count;
  }
  return to - positions +
         portable<kNbytes>(a + i * kNbytes, b + i * kNbytes, n - i, static_cast<uint16_t>(first + i), to);
}
#endif

}  // namespace

FindChanges find_changes_portable(int64_t element_nbytes) {
  return for_delta_size(element_nbytes, []<int kNbytes>() -> FindChanges { return portable<kNbytes>; });
}
#ifdef __x86_64__
FindChanges find_changes_avx2(int64_t element_nbytes) {
  return for_delta_size(element_nbytes, []<int kNbytes>() -> FindChanges { return avx2<kNbytes>; });
}
#endif

}  // namespace torch_mooncake::kv
