// Scalar conversions between float32 and the narrow float types, all rounding to nearest even, from bits alone: what
// the vector kernels do too, and their tails.
#pragma once

#include <bit>
#include <cstdint>

namespace torch_mooncake::kv {

inline constexpr uint32_t kFloatInf = 0x7F800000, kFloatAbs = 0x7FFFFFFF;

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half} >> 15 << 31, magnitude = half & 0x7FFF;
  if (magnitude >= 0x7C00) return std::bit_cast<float>(sign | kFloatInf | (magnitude & 0x3FF) << 13);
  if (magnitude >= 0x0400) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));
}

inline float bfloat_to_float(uint16_t bfloat) { return std::bit_cast<float>(uint32_t{bfloat} << 16); }

inline uint16_t float_to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 31 << 15, magnitude = bits & kFloatAbs;
  uint32_t half;
  if (magnitude > kFloatInf) {
    half = 0x7E00;
  } else if (magnitude >= (143u << 23)) {  // 2^16: over the largest, even rounded down
    half = 0x7C00;
  } else if (magnitude < (113u << 23)) {  // below 2^-14: a sum whose last place is 2^-24 rounds
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & kFloatAbs) > kFloatInf) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// float8_e4m3fn: bias 7, no infinity, 0x7F is NaN, the largest is 448. Larger values saturate.
inline uint8_t float_to_fp8(float value) {
  constexpr uint32_t kLargest = 0x43E00000 /* 448 */, kSmallestNormal = 121u << 23 /* 2^-6 */;
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 31 << 7;
  uint32_t magnitude = bits & kFloatAbs, fp8;
  if (magnitude > kFloatInf) return static_cast<uint8_t>(sign | 0x7F);
  if (magnitude > kLargest) magnitude = kLargest;
  if (magnitude < kSmallestNormal) {  // a sum whose last place is 2^-9 rounds
    fp8 = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 16384.0f) - std::bit_cast<uint32_t>(16384.0f);
  } else {
    fp8 = (magnitude - (120u << 23) + 0x7FFFF + (magnitude >> 20 & 1)) >> 20;
  }
  return static_cast<uint8_t>(sign | fp8);
}

inline float fp8_to_float(uint8_t fp8) {
  const uint32_t sign = uint32_t{fp8} >> 7 << 31, magnitude = fp8 & 0x7F;
  if (magnitude == 0x7F) return std::bit_cast<float>(sign | 0x7FC00000);
  if (magnitude >= 8) return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-9f));
}

}  // namespace torch_mooncake::kv
