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

template <WideType kWide, bool kFinite>
void amax(const std::byte* wide, const Tile& tile, uint32_t* largest) {
  for_runs(tile, [&](int64_t at, int64_t, int64_t group) {
    for (int64_t i = 0; i < tile.n; ++i) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(load<kWide>(wide + at, i)) & kFloatAbs;
      if (!kFinite || magnitude < kFloatInf) largest[group] = std::max(largest[group], magnitude);
    }
  });
}

template <NarrowType kNarrow>
std::byte narrowed(float x, float inverse) {
  const bool nan = std::isnan(x);
  if constexpr (kNarrow == NarrowType::fp8_e4m3fn) return std::byte{float_to_fp8(nan ? x : x * inverse)};
  const float y = nan ? 0.0f : std::clamp(x * inverse, -127.0f, 127.0f);
  return static_cast<std::byte>(static_cast<int8_t>(std::nearbyint(y)));
}

template <NarrowType kNarrow>
float widened(std::byte q) {
  if constexpr (kNarrow == NarrowType::fp8_e4m3fn) return fp8_to_float(std::to_integer<uint8_t>(q));
  return static_cast<float>(static_cast<int8_t>(q));
}

template <WideType kWide, NarrowType kNarrow>
void quantize(const std::byte* wide, std::byte* narrow, const Tile& tile, const float* inverse) {
  for_runs(tile, [&](int64_t from, int64_t to, int64_t group) {
    for (int64_t i = 0; i < tile.n; ++i)
      narrow[to + i] = narrowed<kNarrow>(load<kWide>(wide + from, i), inverse[group]);
  });
}

template <WideType kWide, NarrowType kNarrow>
void dequantize(const std::byte* narrow, std::byte* wide, const Tile& tile, const float* scales) {
  for_runs(tile, [&](int64_t to, int64_t from, int64_t group) {
    for (int64_t i = 0; i < tile.n; ++i) store<kWide>(wide + to, i, widened<kNarrow>(narrow[from + i]) * scales[group]);
  });
}

template <WideType kWide, NarrowType kNarrow>
constexpr ScaleRuns kRuns{amax<kWide, false>, amax<kWide, true>, quantize<kWide, kNarrow>, quantize<kWide, kNarrow>,
                          dequantize<kWide, kNarrow>};

template <WideType kWide>
ScaleRuns of(NarrowType narrow) {
  return narrow == NarrowType::fp8_e4m3fn ? kRuns<kWide, NarrowType::fp8_e4m3fn> : kRuns<kWide, NarrowType::int8>;
}

}  // namespace

ScaleRuns scale_runs_portable(WideType wide, NarrowType narrow) {
  if (wide == WideType::fp32) return of<WideType::fp32>(narrow);
  if (wide == WideType::fp16) return of<WideType::fp16>(narrow);
  return of<WideType::bf16>(narrow);
}

}  // namespace torch_mooncake::kv
