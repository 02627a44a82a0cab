#include "kv/cpu/scale_runs.h"
#include "kv/cpu/simd.h"

#ifdef __x86_64__

#include <algorithm>
#include <bit>

#include "kv/cpu/numbers.h"

#define TM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define TM_AVX512_INLINE __attribute__((target("avx512f,avx512bw,avx512vl"), always_inline)) inline

namespace torch_mooncake::kv {
namespace {

constexpr int kLanes = 16;

template <WideType kWide>
TM_AVX512_INLINE __m512 load(const std::byte* at, __mmask16 lanes) {
  if constexpr (kWide == WideType::fp32) return _mm512_maskz_loadu_ps(lanes, at);
  const __m256i words = _mm256_maskz_loadu_epi16(lanes, at);
  if constexpr (kWide == WideType::fp16) return _mm512_cvtph_ps(words);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

template <WideType kWide>
TM_AVX512_INLINE void store(std::byte* at, __mmask16 lanes, __m512 values) {
  if constexpr (kWide == WideType::fp32) return _mm512_mask_storeu_ps(at, lanes, values);
  if constexpr (kWide == WideType::fp16)
    return _mm256_mask_storeu_epi16(at, lanes, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_mask_storeu_epi16(at, lanes, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// 448 at most in magnitude, NaN as 0x7F or 0xFF; one byte a lane. `x` is before the scaling: it knows about NaN.
TM_AVX512_INLINE __m128i to_fp8(__m512 x, __m512 y) {
  const __m512i bits = _mm512_castps_si512(y);
  __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  magnitude = _mm512_min_epu32(magnitude, _mm512_set1_epi32(0x43E00000));  // 448
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
  __m512i fp8 = _mm512_srli_epi32(
      _mm512_add_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x7FFFF - (120 << 23))), odd), 20);
  // Below 2^-6: a sum whose last place is 2^-9 rounds.
  const __mmask16 small = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(121 << 23));
  const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(16384.0f));
  fp8 = _mm512_mask_sub_epi32(fp8, small, _mm512_castps_si512(sum), _mm512_set1_epi32(0x46800000));  // 16384
  fp8 = _mm512_mask_mov_epi32(fp8, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7F));
  const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(x), 31);
  return _mm512_cvtepi32_epi8(_mm512_or_si512(fp8, _mm512_slli_epi32(sign, 7)));
}

TM_AVX512_INLINE __m512 from_fp8(__m128i bytes) {
  const __m512i wide = _mm512_cvtepu8_epi32(bytes), magnitude = _mm512_and_si512(wide, _mm512_set1_epi32(0x7F));
  __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
  const __mmask16 small = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(8));
  const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
  bits = _mm512_mask_mov_epi32(bits, small, _mm512_castps_si512(scaled));
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7F)),
                               _mm512_set1_epi32(0x7FC00000));
  return _mm512_castsi512_ps(_mm512_or_si512(bits, _mm512_slli_epi32(_mm512_srli_epi32(wide, 7), 31)));
}

TM_AVX512_INLINE __m128i to_int8(__m512 x, __m512 y) {
  y = _mm512_max_ps(_mm512_min_ps(y, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-127.0f));
  return _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), y));
}

TM_AVX512_INLINE __mmask16 lanes_of(int64_t n) { return n >= kLanes ? 0xFFFF : static_cast<__mmask16>((1u << n) - 1); }

TM_AVX512_INLINE __m512i finite(__m512i magnitude, uint32_t inf) {
  return _mm512_maskz_mov_epi32(_mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(static_cast<int>(inf))),
                                magnitude);
}

TM_AVX512 uint32_t amax_fp32(const std::byte* wide, int64_t n) {
  const __m512i clear = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i largest[4] = {};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int k = 0; k < 4; ++k)
      largest[k] = _mm512_max_epu32(
          largest[k], finite(_mm512_and_si512(_mm512_loadu_si512(wide + 4 * (i + kLanes * k)), clear), 0x7F800000));
  for (; i < n; i += kLanes)
    largest[0] = _mm512_max_epu32(
        largest[0],
        finite(_mm512_and_si512(_mm512_maskz_loadu_epi32(lanes_of(n - i), wide + 4 * i), clear), 0x7F800000));
  return _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_max_epu32(largest[0], largest[1]), _mm512_max_epu32(largest[2], largest[3])));
}

// In 16 bits: the order of magnitudes is that of their bits.
template <uint16_t kInf>
TM_AVX512_INLINE __m512i larger_words(__m512i largest, __m512i words) {
  const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF));
  return _mm512_mask_max_epu16(largest, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(kInf)), largest,
                               magnitude);
}

template <uint16_t kInf>
TM_AVX512_INLINE uint32_t amax_words(const std::byte* wide, int64_t n) {
  __m512i even = _mm512_setzero_si512(), odd = even;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    even = larger_words<kInf>(even, _mm512_loadu_si512(wide + 2 * i));
    odd = larger_words<kInf>(odd, _mm512_loadu_si512(wide + 2 * i + 64));
  }
  for (; i < n; i += 32) {
    const __mmask32 lanes = n - i >= 32 ? 0xFFFFFFFF : (1u << (n - i)) - 1;
    even = larger_words<kInf>(even, _mm512_maskz_loadu_epi16(lanes, wide + 2 * i));
  }
  even = _mm512_max_epu16(even, odd);
  return _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_srli_epi32(even, 16), _mm512_and_si512(even, _mm512_set1_epi32(0xFFFF))));
}
TM_AVX512 uint32_t amax_bf16(const std::byte* wide, int64_t n) { return amax_words<0x7F80>(wide, n) << 16; }
TM_AVX512 uint32_t amax_fp16(const std::byte* wide, int64_t n) {
  return std::bit_cast<uint32_t>(half_to_float(static_cast<uint16_t>(amax_words<0x7C00>(wide, n))));
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX512 void quantize(const std::byte* wide, std::byte* narrow, int64_t n, float inverse) {
  const __m512 factor = _mm512_set1_ps(inverse);
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_of(n - i);
    const __m512 x = load<kWide>(wide + i * nbytes_of(kWide), lanes), y = _mm512_mul_ps(x, factor);
    _mm_mask_storeu_epi8(narrow + i, lanes, kNarrow == NarrowType::fp8_e4m3fn ? to_fp8(x, y) : to_int8(x, y));
  }
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX512 void dequantize(const std::byte* narrow, std::byte* wide, int64_t n, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_of(n - i);
    const __m128i bytes = _mm_maskz_loadu_epi8(lanes, narrow + i);
    const __m512 q =
        kNarrow == NarrowType::fp8_e4m3fn ? from_fp8(bytes) : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    store<kWide>(wide + i * nbytes_of(kWide), lanes, _mm512_mul_ps(q, factor));
  }
}

template <WideType kWide>
ScaleRuns of(NarrowType narrow) {
  auto* amax = kWide == WideType::fp32 ? amax_fp32 : kWide == WideType::fp16 ? amax_fp16 : amax_bf16;
  if (narrow == NarrowType::fp8_e4m3fn)
    return {amax, quantize<kWide, NarrowType::fp8_e4m3fn>, dequantize<kWide, NarrowType::fp8_e4m3fn>};
  return {amax, quantize<kWide, NarrowType::int8>, dequantize<kWide, NarrowType::int8>};
}

}  // namespace

ScaleRuns scale_runs_avx512(WideType wide, NarrowType narrow) {
  if (wide == WideType::fp32) return of<WideType::fp32>(narrow);
  if (wide == WideType::fp16) return of<WideType::fp16>(narrow);
  return of<WideType::bf16>(narrow);
}

}  // namespace torch_mooncake::kv

#endif
