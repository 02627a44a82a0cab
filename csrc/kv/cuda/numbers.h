// Bits of small floating-point types, in integer arithmetic and correctly rounded single-precision operations only, so
// that every device gets the same ones. kv/quantize.h says what they have to be.
#pragma once

#include <cstdint>
#include <cstring>

#include "kv/host_device.h"
#include "kv/quantize.h"

namespace torch_mooncake::kv::cuda {

inline constexpr uint32_t kSign = 0x80000000u;
inline constexpr uint32_t kInfinity = 0x7F800000u;

TM_HD uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

TM_HD float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// Rounded to nearest even, never fused with a neighbour.
TM_HD float times(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
TM_HD float plus(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
TM_HD float over(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// The float32 of an element's bits, as bits: exact, NaN with its sign.
template <WideType kType>
TM_HD uint32_t widen(uint32_t element) {
  if constexpr (kType == WideType::fp32) return element;
  if constexpr (kType == WideType::bf16) return element << 16;
  const uint32_t sign = (element & 0x8000u) << 16, rest = element & 0x7FFFu;
  const uint32_t finite = bits_of(times(float_of(rest << 13), 0x1p112f));
  return sign | (rest >= 0x7C00u ? kInfinity | (rest & 0x3FFu) << 13 : finite);
}

// Rounded to nearest even; NaN (any) becomes the quiet one of its sign.
template <WideType kType>
TM_HD uint32_t narrow_to(uint32_t bits) {
  const uint32_t sign = bits & kSign, rest = bits & ~kSign;
  if constexpr (kType == WideType::fp32) return rest > kInfinity ? sign | 0x7FC00000u : bits;
  if constexpr (kType == WideType::bf16) {
    if (rest > kInfinity) return sign >> 16 | 0x7FC0u;
    return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  }
  if (rest > kInfinity) return sign >> 16 | 0x7E00u;
  if (rest >= bits_of(65520.0f)) return sign >> 16 | 0x7C00u;
  // Below 2^-14 halves are 2^-24 apart, as are float32 in [0.5, 1): an addition rounds there.
  if (rest < bits_of(0x1p-14f)) return (sign >> 16) | (bits_of(plus(float_of(rest), 0.5f)) - bits_of(0.5f));
  return (sign >> 16) | (((rest + 0xFFFu + (rest >> 13 & 1u)) >> 13) - (112u << 10));
}

// `x` is the float32 element (bits), `inverse` 1 / scale.
template <NarrowType kType>
TM_HD uint32_t quantized(uint32_t x, float inverse) {
  const bool nan = (x & ~kSign) > kInfinity;
  const float y = times(float_of(x & ~kSign), inverse);  // the sign goes its own way: devices differ in that of NaN
  if constexpr (kType == NarrowType::int8) {
    const float clamped = y < 127.0f ? y : 127.0f;
    const uint32_t whole = bits_of(plus(clamped, 0x1p23f)) - bits_of(0x1p23f);
    return nan ? 0u : ((x & kSign) != 0 ? 0u - whole : whole) & 0xFFu;
  }
  const uint32_t sign = x >> 24 & 0x80u, bits = bits_of(y);
  if (nan) return sign | 0x7Fu;
  if (bits >= bits_of(448.0f)) return sign | 0x7Eu;
  // Below 2^-6 they are 2^-9 apart, as are float32 in [2^14, 2^15).
  if (bits < bits_of(0x1p-6f)) return sign | (bits_of(plus(y, 0x1p14f)) - bits_of(0x1p14f));
  return sign | (((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - (120u << 3));
}

// Bits of float32(q) * scale.
template <NarrowType kType>
TM_HD uint32_t dequantized(uint32_t q, float scale) {
  if constexpr (kType == NarrowType::int8) return bits_of(times(static_cast<float>(static_cast<int8_t>(q)), scale));
  const uint32_t sign = (q & 0x80u) << 24, rest = q & 0x7Fu;
  if (rest == 0x7Fu) return sign | 0x7FC00000u;
  return bits_of(times(float_of(sign | bits_of(times(float_of(rest << 20), 0x1p120f))), scale));
}

// |x| as bits, which order as the numbers do; 0 for what is not finite.
TM_HD uint32_t finite_magnitude(uint32_t x) {
  const uint32_t rest = x & ~kSign;
  return rest < kInfinity ? rest : 0u;
}

TM_HD float scale_of(uint32_t amax, NarrowType type) {
  const float scale = over(float_of(amax), type == NarrowType::fp8_e4m3fn ? 448.0f : 127.0f);
  return scale > kScaleFloor ? scale : kScaleFloor;
}

}  // namespace torch_mooncake::kv::cuda
