#include "kv/cpu/scale_runs.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kv/cpu/numbers.h"

namespace torch_mooncake::kv {
namespace {

template <typename T>
T element(const std::byte* at, int64_t i) {
  T value;
  std::memcpy(&value, at + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}
template <typename T>
void put(std::byte* at, int64_t i, T value) {
  std::memcpy(at + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

template <WideType kWide>
float load(const std::byte* at, int64_t i) {
  if constexpr (kWide == WideType::fp32) return element<float>(at, i);
  if constexpr (kWide == WideType::fp16) return half_to_float(element<uint16_t>(at, i));
  if constexpr (kWide == WideType::bf16) return bfloat_to_float(element<uint16_t>(at, i));
}

template <WideType kWide>
void store(std::byte* at, int64_t i, float value) {
  if constexpr (kWide == WideType::fp32) put(at, i, value);
  if constexpr (kWide == WideType::fp16) put(at, i, float_to_half(value));
  if constexpr (kWide == WideType::bf16) put(at, i, float_to_bfloat(value));
}

template <WideType kWide>
uint32_t amax(const std::byte* wide, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(load<kWide>(wide, i)) & kFloatAbs;
    if (magnitude < kFloatInf) largest = std::max(largest, magnitude);
  }
  return largest;
}

template <WideType kWide, NarrowType kNarrow>
void quantize(const std::byte* wide, std::byte* narrow, int64_t n, float inverse) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = load<kWide>(wide, i);
    if constexpr (kNarrow == NarrowType::fp8_e4m3fn) {
      put(narrow, i, std::isnan(x) ? float_to_fp8(x) : float_to_fp8(x * inverse));
    } else {
      put(narrow, i,
          std::isnan(x) ? int8_t{0} : static_cast<int8_t>(std::nearbyint(std::clamp(x * inverse, -127.0f, 127.0f))));
    }
  }
}

template <WideType kWide, NarrowType kNarrow>
void dequantize(const std::byte* narrow, std::byte* wide, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (kNarrow == NarrowType::fp8_e4m3fn)
      store<kWide>(wide, i, fp8_to_float(element<uint8_t>(narrow, i)) * scale);
    else
      store<kWide>(wide, i, static_cast<float>(element<int8_t>(narrow, i)) * scale);
  }
}

template <WideType kWide>
ScaleRuns of(NarrowType narrow) {
  if (narrow == NarrowType::fp8_e4m3fn)
    return {amax<kWide>, quantize<kWide, NarrowType::fp8_e4m3fn>, dequantize<kWide, NarrowType::fp8_e4m3fn>};
  return {amax<kWide>, quantize<kWide, NarrowType::int8>, dequantize<kWide, NarrowType::int8>};
}

}  // namespace

ScaleRuns scale_runs_portable(WideType wide, NarrowType narrow) {
  if (wide == WideType::fp32) return of<WideType::fp32>(narrow);
  if (wide == WideType::fp16) return of<WideType::fp16>(narrow);
  return of<WideType::bf16>(narrow);
}

}  // namespace torch_mooncake::kv
