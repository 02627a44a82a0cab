// Pages in 8 bits with a scale for each group of elements (a page's head), free of torch. Bit for bit the same on every
// device:
//
//   amax  = the largest finite |x| of the group, exact
//   scale = max(amax / largest, 2^-100)      float32, rounded to nearest even; largest is 448 (fp8 e4m3fn) or 127
//   (int8) y     = x * (1 / scale)                  float32, each operation rounded to nearest even, no fused
//   multiply-add fp8:  clamp(y, -448, 448), rounded to nearest even as torch casts it; NaN stays NaN (0x7F, or 0xFF
//   with the sign set) int8: clamp(y rounded to nearest even, -127, 127); NaN becomes 0 dequantised = float32(q) *
//   scale         float32, then rounded to nearest even to fp16 or bf16
//
// The floor 2^-100 gives groups of zeros a scale, and keeps all numbers normal: flushing denormals changes no result.
// Infinities do not count for amax and become +-largest.
// |dequantised - x| for finite x, before the rounding to fp16 or bf16: fp8 at most max(2^-4 |x|, 2^-10 scale) * (1 +
// 2^-20), int8 at most scale / 2 * (1 + 2^-15).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/api.h"
#include "common/status.h"
#include "kv/parallel.h"

namespace torch_mooncake::kv {

enum class WideType : uint8_t { fp32, fp16, bf16 };
enum class NarrowType : uint8_t { fp8_e4m3fn, int8 };

inline constexpr int kMaxQuantizeDims = 6;
inline constexpr float kScaleFloor = 0x1p-100f;
constexpr float largest_of(NarrowType type) { return type == NarrowType::fp8_e4m3fn ? 448.0f : 127.0f; }
constexpr int64_t nbytes_of(WideType type) { return type == WideType::fp32 ? 4 : 2; }

// One dimension; strides in elements of each side. scale_stride is 0 where the group goes on.
struct QuantizeDim {
  int64_t size;
  int64_t wide_stride;
  int64_t narrow_stride;
  int64_t scale_stride;
};

// The elements of the wide and the narrow tensor, outermost dimension first. The first `block_dims` dimensions all have
// a scale_stride: a group lies within one block (the rest of the dimensions), so blocks are independent.
struct PageScaling {
  WideType wide_type = WideType::fp32;
  NarrowType narrow_type = NarrowType::fp8_e4m3fn;
  std::byte* wide = nullptr;  // read by quantize, written by dequantize
  std::byte* narrow = nullptr;
  float* scales = nullptr;  // contiguous; groups() of them
  int64_t groups_per_block = 1;
  int num_dims = 0;
  int block_dims = 0;
  QuantizeDim dims[kMaxQuantizeDims] = {};

  int64_t product(int from, int to) const {
    int64_t n = 1;
    for (int d = from; d < to; ++d) n *= dims[d].size;
    return n;
  }
  int64_t blocks() const { return product(0, block_dims); }
  int64_t block_elements() const { return product(block_dims, num_dims); }
};

// CPU. Writes narrow and scales.
TM_API Status quantize_pages(const PageScaling& call, const ParallelFor& parallel_for = serial_for);
// CPU. Writes wide.
TM_API Status dequantize_pages(const PageScaling& call, const ParallelFor& parallel_for = serial_for);

}  // namespace torch_mooncake::kv
