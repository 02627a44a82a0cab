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

template <int kNbytes>
TM_AVX2 int64_t avx2(const std::byte* a, const std::byte* b, int64_t n, uint16_t first, uint16_t* positions) {
  uint16_t* to = positions;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
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

#define TM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,popcnt")))
#define TM_AVX512_INLINE \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,popcnt"), always_inline)) inline

// As differ().
template <int kNbytes>
TM_AVX512_INLINE uint32_t differ_avx512(const std::byte* a, const std::byte* b) {
  if constexpr (kNbytes == 1) {
    return _mm256_cmpneq_epi8_mask(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)),
                                   _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
  } else {
    uint32_t bits = 0;
    constexpr int kLanes = 64 / kNbytes;
    for (int v = 0; v < kNbytes / 2; ++v) {
      const __m512i x = _mm512_loadu_si512(a + 64 * v), y = _mm512_loadu_si512(b + 64 * v);
      if constexpr (kNbytes == 2) return _mm512_cmpneq_epi16_mask(x, y);
      if constexpr (kNbytes == 4) bits |= uint32_t{_mm512_cmpneq_epi32_mask(x, y)} << (v * kLanes);
      if constexpr (kNbytes == 8) bits |= uint32_t{_mm512_cmpneq_epi64_mask(x, y)} << (v * kLanes);
    }
    return bits;
  }
}

template <int kNbytes>
TM_AVX512 int64_t avx512(const std::byte* a, const std::byte* b, int64_t n, uint16_t first, uint16_t* positions) {
  alignas(64) static constexpr uint16_t kCount[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  __m512i at = _mm512_add_epi16(_mm512_load_si512(kCount), _mm512_set1_epi16(static_cast<int16_t>(first)));
  uint16_t* to = positions;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const uint32_t bits = differ_avx512<kNbytes>(a + i * kNbytes, b + i * kNbytes);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi16(bits, at));
    to += __builtin_popcount(bits);
    at = _mm512_add_epi16(at, _mm512_set1_epi16(32));
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
FindChanges find_changes_avx512(int64_t element_nbytes) {
  return for_delta_size(element_nbytes, []<int kNbytes>() -> FindChanges { return avx512<kNbytes>; });
}
#endif

}  // namespace torch_mooncake::kv
