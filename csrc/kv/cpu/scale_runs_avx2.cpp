#include <algorithm>
#include <bit>
#include <cstring>

#include "kv/cpu/numbers.h"
#include "kv/cpu/scale_runs.h"
#include "kv/cpu/simd.h"

#ifdef __x86_64__

#define TM_AVX2 __attribute__((target("avx2,f16c")))
#define TM_AVX2_INLINE __attribute__((target("avx2,f16c"), always_inline)) inline

namespace torch_mooncake::kv {
namespace {

constexpr int kLanes = 16;  // two registers of eight
constexpr int kGroups = 32;

template <WideType kWide>
TM_AVX2_INLINE __m256 load(const std::byte* at) {
  if constexpr (kWide == WideType::fp32) return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  if constexpr (kWide == WideType::fp16) return _mm256_cvtph_ps(words);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

template <WideType kWide>
TM_AVX2_INLINE void store(std::byte* at, __m256 values) {
  if constexpr (kWide == WideType::fp32) return _mm256_storeu_ps(reinterpret_cast<float*>(at), values);
  __m128i words;
  if constexpr (kWide == WideType::fp16) {
    words = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    words = _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), words);
}

// Finite and at most 448 in magnitude; a byte in 32 bits. Adding a power of two whose last place is that of fp8 rounds.
TM_AVX2_INLINE __m256i to_fp8(__m256 y) {
  const __m256i bits = _mm256_castps_si256(y), magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
  const __m256i exponent = _mm256_max_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7F800000)),
                                            _mm256_set1_epi32(121 << 23));  // 2^-6 at least
  const __m256i power = _mm256_add_epi32(exponent, _mm256_set1_epi32(20 << 23));
  const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(power));
  const __m256i mantissa = _mm256_sub_epi32(_mm256_castps_si256(sum), power);  // 8 to 16; 0 to 8 below 2^-6
  const __m256i base = _mm256_sub_epi32(_mm256_srli_epi32(exponent, 20), _mm256_set1_epi32((120 << 3) + 8));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  return _mm256_or_si256(_mm256_add_epi32(base, mantissa), sign);
}

TM_AVX2_INLINE __m256i to_int8(__m256 y) { return _mm256_and_si256(_mm256_cvtps_epi32(y), _mm256_set1_epi32(0xFF)); }

TM_AVX2_INLINE __m256 from_fp8(__m256i wide) {
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi32(0x7F));
  __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
  const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
  bits = _mm256_blendv_epi8(bits, _mm256_castps_si256(scaled), _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude));
  bits =
      _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7FC00000), _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7F)));
  return _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_slli_epi32(_mm256_srli_epi32(wide, 7), 31)));
}

TM_AVX2_INLINE uint32_t largest_of_lanes(__m256i lanes) {
  __m128i largest = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  largest = _mm_max_epu32(largest, _mm_shuffle_epi32(largest, _MM_SHUFFLE(1, 0, 3, 2)));
  largest = _mm_max_epu32(largest, _mm_shuffle_epi32(largest, _MM_SHUFFLE(2, 3, 0, 1)));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(largest));
}

TM_AVX2_INLINE __m256i largest_fp32(__m256i largest, __m256i bits) {
  return _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)));
}
// In 16 bits: the order of magnitudes is that of their bits.
TM_AVX2_INLINE __m256i largest_words(__m256i largest, __m256i bits) {
  return _mm256_max_epu16(largest, _mm256_and_si256(bits, _mm256_set1_epi16(0x7FFF)));
}

// As a float32's: what the lanes hold, 32 bits wide (fp32) or 16 (fp16, bf16).
template <WideType kWide>
TM_AVX2_INLINE uint32_t largest_bits(__m256i lanes) {
  if constexpr (kWide == WideType::fp32) return largest_of_lanes(lanes);
  const uint32_t word = largest_of_lanes(
      _mm256_max_epu32(_mm256_srli_epi32(lanes, 16), _mm256_and_si256(lanes, _mm256_set1_epi32(0xFFFF))));
  if constexpr (kWide == WideType::fp16) return std::bit_cast<uint32_t>(half_to_float(static_cast<uint16_t>(word)));
  return word << 16;
}

// Row after row, as the elements lie; a register for each of up to kGroups groups.
template <WideType kWide>
TM_AVX2 void amax(const std::byte* wide, const Tile& tile, uint32_t* largest) {
  constexpr auto larger = kWide == WideType::fp32 ? largest_fp32 : largest_words;
  const int64_t nbytes = tile.n * nbytes_of(kWide);
  for (int64_t first = 0; first < tile.groups; first += kGroups) {
    const int64_t groups = std::min<int64_t>(kGroups, tile.groups - first);
    __m256i lanes[kGroups];
    for (int64_t g = 0; g < groups; ++g) lanes[g] = _mm256_setzero_si256();
    for (int64_t r = 0; r < tile.rows; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const std::byte* run = wide + r * tile.wide_row + (first + g) * tile.wide_group;
        __m256i all = lanes[g];
        int64_t i = 0;
        for (; i + 32 <= nbytes; i += 32)
          all = larger(all, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(run + i)));
        if (i < nbytes) {
          alignas(32) std::byte rest[32] = {};
          std::memcpy(rest, run + i, static_cast<size_t>(nbytes - i));
          all = larger(all, _mm256_load_si256(reinterpret_cast<const __m256i*>(rest)));
        }
        lanes[g] = all;
      }
    for (int64_t g = 0; g < groups; ++g) {
      uint32_t& group = largest[(first + g) * tile.scale_group];
      group = std::max(group, largest_bits<kWide>(lanes[g]));
    }
  }
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX2_INLINE void quantize_lanes(const std::byte* wide, std::byte* narrow, __m256 factor) {
  __m128i words[2];
  for (int k = 0; k < 2; ++k) {
    const __m256 y = _mm256_mul_ps(load<kWide>(wide + k * 8 * nbytes_of(kWide)), factor);
    const __m256i q = kNarrow == NarrowType::fp8_e4m3fn ? to_fp8(y) : to_int8(y);
    words[k] = _mm_packus_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(narrow), _mm_packus_epi16(words[0], words[1]));
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX2 void quantize_finite(const std::byte* wide, std::byte* narrow, const Tile& tile, const float* inverse) {
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t g = 0; g < tile.groups; ++g) {
      const std::byte* from = wide + r * tile.wide_row + g * tile.wide_group;
      std::byte* to = narrow + r * tile.narrow_row + g * tile.narrow_group;
      const __m256 factor = _mm256_set1_ps(inverse[g * tile.scale_group]);
      int64_t i = 0;
      for (; i + kLanes <= tile.n; i += kLanes)
        quantize_lanes<kWide, kNarrow>(from + i * nbytes_of(kWide), to + i, factor);
      if (i == tile.n) continue;
      const auto rest = static_cast<size_t>(tile.n - i);
      std::byte last[kLanes * 4] = {}, last_narrow[kLanes];
      std::memcpy(last, from + i * nbytes_of(kWide), rest * nbytes_of(kWide));
      quantize_lanes<kWide, kNarrow>(last, last_narrow, factor);
      std::memcpy(to + i, last_narrow, rest);
    }
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX2_INLINE void dequantize_lanes(const std::byte* narrow, std::byte* wide, __m256 factor) {
  for (int k = 0; k < 2; ++k) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(narrow + 8 * k));
    const __m256 q = kNarrow == NarrowType::fp8_e4m3fn ? from_fp8(_mm256_cvtepu8_epi32(bytes))
                                                       : _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    store<kWide>(wide + k * 8 * nbytes_of(kWide), _mm256_mul_ps(q, factor));
  }
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX2 void dequantize(const std::byte* narrow, std::byte* wide, const Tile& tile, const float* scales) {
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t g = 0; g < tile.groups; ++g) {
      const std::byte* from = narrow + r * tile.narrow_row + g * tile.narrow_group;
      std::byte* to = wide + r * tile.wide_row + g * tile.wide_group;
      const __m256 factor = _mm256_set1_ps(scales[g * tile.scale_group]);
      int64_t i = 0;
      for (; i + kLanes <= tile.n; i += kLanes)
        dequantize_lanes<kWide, kNarrow>(from + i, to + i * nbytes_of(kWide), factor);
      if (i == tile.n) continue;
      const auto rest = static_cast<size_t>(tile.n - i);
      std::byte last[kLanes] = {}, last_wide[kLanes * 4];
      std::memcpy(last, from + i, rest);
      dequantize_lanes<kWide, kNarrow>(last, last_wide, factor);
      std::memcpy(to + i * nbytes_of(kWide), last_wide, rest * nbytes_of(kWide));
    }
}

template <WideType kWide, NarrowType kNarrow>
ScaleRuns of() {
  ScaleRuns runs = scale_runs_portable(kWide, kNarrow);
  runs.amax = amax<kWide>;
  runs.quantize_finite = quantize_finite<kWide, kNarrow>;
  runs.dequantize = dequantize<kWide, kNarrow>;
  return runs;
}

template <WideType kWide>
ScaleRuns of(NarrowType narrow) {
  return narrow == NarrowType::fp8_e4m3fn ? of<kWide, NarrowType::fp8_e4m3fn>() : of<kWide, NarrowType::int8>();
}

}  // namespace

ScaleRuns scale_runs_avx2(WideType wide, NarrowType narrow) {
  if (wide == WideType::fp32) return of<WideType::fp32>(narrow);
  if (wide == WideType::fp16) return of<WideType::fp16>(narrow);
  return of<WideType::bf16>(narrow);
}

}  // namespace torch_mooncake::kv

#endif
