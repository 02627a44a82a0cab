#include "kv/cpu/scale_runs.h"
#include "kv/cpu/simd.h"

#ifdef __x86_64__

#include <algorithm>
#include <bit>

#include "kv/cpu/numbers.h"

#define TM_AVX2 __attribute__((target("avx2,f16c")))
#define TM_AVX2_INLINE __attribute__((target("avx2,f16c"), always_inline)) inline

namespace torch_mooncake::kv {
namespace {

constexpr int kLanes = 8;

template <WideType kWide>
TM_AVX2_INLINE __m256 load(const std::byte* at) {
  if constexpr (kWide == WideType::fp32) return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  if constexpr (kWide == WideType::fp16) return _mm256_cvtph_ps(words);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

// The low half of eight 32-bit lanes with values of at most 16 bits.
TM_AVX2_INLINE __m128i words_of(__m256i lanes) {
  return _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
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
    words = words_of(_mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), words);
}

// 448 at most in magnitude, NaN as 0x7F or 0xFF; one byte a lane. `x` is before the scaling: it knows about NaN.
TM_AVX2_INLINE __m256i to_fp8(__m256 x, __m256 y) {
  __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(y), _mm256_set1_epi32(0x7FFFFFFF));
  magnitude = _mm256_min_epu32(magnitude, _mm256_set1_epi32(0x43E00000));  // 448
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
  __m256i fp8 = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x7FFFF - (120 << 23))), odd), 20);
  // Below 2^-6: a sum whose last place is 2^-9 rounds.
  const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(121 << 23), magnitude);
  const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(16384.0f));
  fp8 = _mm256_blendv_epi8(fp8, _mm256_sub_epi32(_mm256_castps_si256(sum), _mm256_set1_epi32(0x46800000)), small);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  fp8 = _mm256_blendv_epi8(fp8, _mm256_set1_epi32(0x7F), nan);
  return _mm256_or_si256(fp8, _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(x), 31), 7));
}

TM_AVX2_INLINE __m256 from_fp8(__m256i wide) {
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi32(0x7F));
  __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
  const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
  bits = _mm256_blendv_epi8(bits, _mm256_castps_si256(scaled), _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude));
  bits =
      _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7FC00000), _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7F)));
  return _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_slli_epi32(_mm256_srli_epi32(wide, 7), 31)));
}

// As signed bytes in 32-bit lanes, the upper bits cleared.
TM_AVX2_INLINE __m256i to_int8(__m256 x, __m256 y) {
  y = _mm256_max_ps(_mm256_min_ps(y, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-127.0f));
  const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_ORD_Q));
  const __m256i rounded = _mm256_and_si256(_mm256_cvtps_epi32(y), number);
  return _mm256_and_si256(rounded, _mm256_set1_epi32(0xFF));
}

TM_AVX2_INLINE uint32_t largest_of_lanes(__m256i lanes) {
  __m128i largest = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  largest = _mm_max_epu32(largest, _mm_shuffle_epi32(largest, _MM_SHUFFLE(1, 0, 3, 2)));
  largest = _mm_max_epu32(largest, _mm_shuffle_epi32(largest, _MM_SHUFFLE(2, 3, 0, 1)));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(largest));
}

TM_AVX2 uint32_t amax_fp32(const std::byte* wide, int64_t n) {
  __m256i largest[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes)
    for (int k = 0; k < 2; ++k) {
      __m256i magnitude = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(wide + 4 * (i + k * kLanes)));
      magnitude = _mm256_and_si256(magnitude, _mm256_set1_epi32(0x7FFFFFFF));
      const __m256i finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), magnitude);
      largest[k] = _mm256_max_epu32(largest[k], _mm256_and_si256(magnitude, finite));
    }
  const uint32_t tail = scale_runs_portable(WideType::fp32, NarrowType::int8).amax(wide + 4 * i, n - i);
  return std::max(tail, largest_of_lanes(_mm256_max_epu32(largest[0], largest[1])));
}

// In 16 bits: the order of magnitudes is that of their bits.
template <int16_t kInf>
TM_AVX2_INLINE uint32_t amax_words(const std::byte* wide, int64_t whole) {
  __m256i largest[2] = {};
  for (int64_t i = 0; i < whole; i += 32)
    for (int k = 0; k < 2; ++k) {
      __m256i magnitude = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(wide + 2 * (i + k * 16)));
      magnitude = _mm256_and_si256(magnitude, _mm256_set1_epi16(0x7FFF));
      const __m256i finite = _mm256_cmpgt_epi16(_mm256_set1_epi16(kInf), magnitude);
      largest[k] = _mm256_max_epu16(largest[k], _mm256_and_si256(magnitude, finite));
    }
  const __m256i words = _mm256_max_epu16(largest[0], largest[1]);
  return largest_of_lanes(
      _mm256_max_epu32(_mm256_srli_epi32(words, 16), _mm256_and_si256(words, _mm256_set1_epi32(0xFFFF))));
}
TM_AVX2 uint32_t amax_bf16(const std::byte* wide, int64_t n) {
  const int64_t whole = n / 32 * 32;
  const uint32_t tail = scale_runs_portable(WideType::bf16, NarrowType::int8).amax(wide + 2 * whole, n - whole);
  return std::max(tail, amax_words<0x7F80>(wide, whole) << 16);
}
TM_AVX2 uint32_t amax_fp16(const std::byte* wide, int64_t n) {
  const int64_t whole = n / 32 * 32;
  const uint32_t tail = scale_runs_portable(WideType::fp16, NarrowType::int8).amax(wide + 2 * whole, n - whole);
  const float half = half_to_float(static_cast<uint16_t>(amax_words<0x7C00>(wide, whole)));
  return std::max(tail, std::bit_cast<uint32_t>(half));
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX2 void quantize(const std::byte* wide, std::byte* narrow, int64_t n, float inverse) {
  const __m256 factor = _mm256_set1_ps(inverse);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    __m128i words[2];
    for (int k = 0; k < 2; ++k) {
      const __m256 x = load<kWide>(wide + (i + k * kLanes) * nbytes_of(kWide)), y = _mm256_mul_ps(x, factor);
      words[k] = words_of(kNarrow == NarrowType::fp8_e4m3fn ? to_fp8(x, y) : to_int8(x, y));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(narrow + i), _mm_packus_epi16(words[0], words[1]));
  }
  scale_runs_portable(kWide, kNarrow).quantize(wide + i * nbytes_of(kWide), narrow + i, n - i, inverse);
}

template <WideType kWide, NarrowType kNarrow>
TM_AVX2 void dequantize(const std::byte* narrow, std::byte* wide, int64_t n, float scale) {
  const __m256 factor = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(narrow + i));
    const __m256 q = kNarrow == NarrowType::fp8_e4m3fn ? from_fp8(_mm256_cvtepu8_epi32(bytes))
                                                       : _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    store<kWide>(wide + i * nbytes_of(kWide), _mm256_mul_ps(q, factor));
  }
  scale_runs_portable(kWide, kNarrow).dequantize(narrow + i, wide + i * nbytes_of(kWide), n - i, scale);
}

template <WideType kWide>
ScaleRuns of(NarrowType narrow) {
  auto* amax = kWide == WideType::fp32 ? amax_fp32 : kWide == WideType::fp16 ? amax_fp16 : amax_bf16;
  if (narrow == NarrowType::fp8_e4m3fn)
    return {amax, quantize<kWide, NarrowType::fp8_e4m3fn>, dequantize<kWide, NarrowType::fp8_e4m3fn>};
  return {amax, quantize<kWide, NarrowType::int8>, dequantize<kWide, NarrowType::int8>};
}

}  // namespace

ScaleRuns scale_runs_avx2(WideType wide, NarrowType narrow) {
  if (wide == WideType::fp32) return of<WideType::fp32>(narrow);
  if (wide == WideType::fp16) return of<WideType::fp16>(narrow);
  return of<WideType::bf16>(narrow);
}

}  // namespace torch_mooncake::kv

#endif
