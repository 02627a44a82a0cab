#include <algorithm>
#include <bit>
#include <cstring>

#include "kv/cpu/numbers.h"
#include "kv/cpu/scale_runs.h"
#include "kv/cpu/simd.h"

#ifdef __x86_64__

#define TM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define TM_AVX512_INLINE __attribute__((target("avx512f,avx512bw,avx512vl"), always_inline)) inline

namespace torch_mooncake::kv {
namespace {

constexpr int kLanes = 64;  // a line of bytes
constexpr int kGroups = 32;

template <WideType kWide>
TM_AVX512_INLINE __m512 load(const std::byte* at) {
  if constexpr (kWide == WideType::fp32) return _mm512_loadu_ps(at);
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  if constexpr (kWide == WideType::fp16) return _mm512_cvtph_ps(words);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

template <WideType kWide>
TM_AVX512_INLINE void store(std::byte* at, __m512 values) {
  if constexpr (kWide == WideType::fp32) return _mm512_storeu_ps(at, values);
  __m256i words;
  if constexpr (kWide == WideType::fp16) {
    words = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), words);
}

// The fp8 of |y|, finite and at most 448, in the lowest byte of each lane. Adding a power of two whose last place is
// that of fp8 rounds: the sum's mantissa is then the fp8's with its leading one (8 to 16; 0 to 8 below 2^-6), and its
// exponent that of the fp8 but for a constant, which is in the lowest byte of the power already.
TM_AVX512_INLINE __m512i fp8_of(__m512 y) {
  constexpr int kLowest = 256 - (((120 + 20) << 3) + 8) % 256;  // even: what is rounded to even stays so
  const __m512i bits = _mm512_castps_si512(y), magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __m512i exponent = _mm512_max_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7F800000)),
                                            _mm512_set1_epi32(121 << 23));  // 2^-6 at least
  const __m512i power = _mm512_add_epi32(exponent, _mm512_set1_epi32((20 << 23) + kLowest));
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(power)));
  return _mm512_add_epi32(sum, _mm512_srli_epi32(sum, 20));
}

TM_AVX512_INLINE __m512 from_fp8(__m128i bytes) {
  const __m512i wide = _mm512_cvtepu8_epi32(bytes), magnitude = _mm512_and_si512(wide, _mm512_set1_epi32(0x7F));
  __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
  const __mmask16 small = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(8));
  const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
  bits = _mm512_mask_mov_epi32(bits, small, _mm512_castps_si512(scaled));
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7F)),
                               _mm512_set1_epi32(0x7FC00000));
  // bits | (wide << 24 & sign)
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, _mm512_slli_epi32(wide, 24),
                                                       _mm512_set1_epi32(static_cast<int>(0x80000000)), 0xF8));
}

TM_AVX512_INLINE __m512i largest_fp32(__m512i largest, __m512i bits) {
  return _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
}
// In 16 bits: the order of magnitudes is that of their bits.
TM_AVX512_INLINE __m512i largest_words(__m512i largest, __m512i bits) {
  return _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7FFF)));
}

// As a float32's: what the lanes hold, 32 bits wide (fp32) or 16 (fp16, bf16).
template <WideType kWide>
TM_AVX512_INLINE uint32_t largest_bits(__m512i lanes) {
  if constexpr (kWide == WideType::fp32) return _mm512_reduce_max_epu32(lanes);
  const uint32_t word = _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_srli_epi32(lanes, 16), _mm512_and_si512(lanes, _mm512_set1_epi32(0xFFFF))));
  if constexpr (kWide == WideType::fp16) return std::bit_cast<uint32_t>(half_to_float(static_cast<uint16_t>(word)));
  return word << 16;
}

// Row after row, as the elements lie; a register for each of up to kGroups groups.
template <WideType kWide>
TM_AVX512 void amax(const std::byte* wide, const Tile& tile, uint32_t* largest) {
  constexpr auto larger = kWide == WideType::fp32 ? largest_fp32 : largest_words;
  const int64_t nbytes = tile.n * nbytes_of(kWide);
  for (int64_t first = 0; first < tile.groups; first += kGroups) {
    const int64_t groups = std::min<int64_t>(kGroups, tile.groups - first);
    __m512i lanes[kGroups];
    for (int64_t g = 0; g < groups; ++g) lanes[g] = _mm512_setzero_si512();
    for (int64_t r = 0; r < tile.rows; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const std::byte* run = wide + r * tile.wide_row + (first + g) * tile.wide_group;
        __m512i all = lanes[g];
        int64_t i = 0;
        for (; i + 64 <= nbytes; i += 64) all = larger(all, _mm512_loadu_si512(run + i));
        if (i < nbytes) all = larger(all, _mm512_maskz_loadu_epi8(~__mmask64{0} >> (64 - (nbytes - i)), run + i));
        lanes[g] = all;
      }
    for (int64_t g = 0; g < groups; ++g) {
      uint32_t& group = largest[(first + g) * tile.scale_group];
      group = std::max(group, largest_bits<kWide>(lanes[g]));
    }
  }
}

// Sixteen elements.
template <WideType kWide, NarrowType kNarrow>
TM_AVX512_INLINE void quantize_16(const std::byte* wide, std::byte* narrow, __m512 factor) {
  const __m512 x = load<kWide>(wide), y = _mm512_mul_ps(x, factor);
  __m512i q;
  if constexpr (kNarrow == NarrowType::int8) {
    q = _mm512_cvtps_epi32(y);
  } else {  // the fp8, and the sign in front of it
    const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(x), 24);
    q = _mm512_ternarylogic_epi32(fp8_of(y), sign, _mm512_set1_epi32(0x80), 0xF8);  // a | (b & c)
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(narrow), _mm512_cvtepi32_epi8(q));
}

// 32 of bf16 in their places: those of even index shifted up, those of odd index as they are.
template <NarrowType kNarrow>
TM_AVX512_INLINE void quantize_32_bf16(const std::byte* wide, std::byte* narrow, __m512 factor) {
  const __m512i x = _mm512_loadu_si512(wide), upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), factor);
  const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)), factor);
  constexpr bool kFp8 = kNarrow == NarrowType::fp8_e4m3fn;
  const __m512i low = kFp8 ? fp8_of(even) : _mm512_cvtps_epi32(even);
  const __m512i high = _mm512_slli_epi32(kFp8 ? fp8_of(odd) : _mm512_cvtps_epi32(odd), 16);
  __m512i q = _mm512_ternarylogic_epi32(upper, high, low, 0xCA);  // a ? b : c
  if constexpr (kFp8) q = _mm512_ternarylogic_epi32(q, _mm512_srli_epi16(x, 8), _mm512_set1_epi16(0x80), 0xF8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(narrow), _mm512_cvtepi16_epi8(q));
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX512_INLINE void quantize_lanes(const std::byte* wide, std::byte* narrow, __m512 factor) {
  if constexpr (kWide == WideType::bf16) {
    for (int i = 0; i < kLanes; i += 32) quantize_32_bf16<kNarrow>(wide + 2 * i, narrow + i, factor);
  } else {
    for (int i = 0; i < kLanes; i += 16) quantize_16<kWide, kNarrow>(wide + i * nbytes_of(kWide), narrow + i, factor);
  }
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX512 void quantize_finite(const std::byte* wide, std::byte* narrow, const Tile& tile, const float* inverse) {
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t g = 0; g < tile.groups; ++g) {
      const std::byte* from = wide + r * tile.wide_row + g * tile.wide_group;
      std::byte* to = narrow + r * tile.narrow_row + g * tile.narrow_group;
      const __m512 factor = _mm512_set1_ps(inverse[g * tile.scale_group]);
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
TM_AVX512_INLINE void dequantize_lanes(const std::byte* narrow, std::byte* wide, __m512 factor) {
  for (int i = 0; i < kLanes; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(narrow + i));
    const __m512 q =
        kNarrow == NarrowType::fp8_e4m3fn ? from_fp8(bytes) : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    store<kWide>(wide + i * nbytes_of(kWide), _mm512_mul_ps(q, factor));
  }
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX512 void dequantize(const std::byte* narrow, std::byte* wide, const Tile& tile, const float* scales) {
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t g = 0; g < tile.groups; ++g) {
      const std::byte* from = narrow + r * tile.narrow_row + g * tile.narrow_group;
      std::byte* to = wide + r * tile.wide_row + g * tile.wide_group;
      const __m512 factor = _mm512_set1_ps(scales[g * tile.scale_group]);
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

ScaleRuns scale_runs_avx512(WideType wide, NarrowType narrow) {
  if (wide == WideType::fp32) return of<WideType::fp32>(narrow);
  if (wide == WideType::fp16) return of<WideType::fp16>(narrow);
  return of<WideType::bf16>(narrow);
}

}  // namespace torch_mooncake::kv

#endif
