// Runs of contiguous elements: the largest, in 8 bits, and back. kv/quantize.h says which bits; all paths give the
// same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv/quantize.h"

namespace torch_mooncake::kv {

struct ScaleRuns {
  // The bits of the largest finite |x| as float32; 0 if there is none.
  uint32_t (*amax)(const std::byte* wide, int64_t n);
  void (*quantize)(const std::byte* wide, std::byte* narrow, int64_t n, float inverse);
  void (*dequantize)(const std::byte* narrow, std::byte* wide, int64_t n, float scale);
};

ScaleRuns scale_runs_portable(WideType wide, NarrowType narrow);
#ifdef __x86_64__
ScaleRuns scale_runs_avx2(WideType wide, NarrowType narrow);    // AVX2, F16C
ScaleRuns scale_runs_avx512(WideType wide, NarrowType narrow);  // AVX-512 F, BW, VL
#endif

}  // namespace torch_mooncake::kv
