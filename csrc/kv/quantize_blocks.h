// Matrices in 8 bits with a scale for each block of elements, as checkpoints have them: 128 x 128 (`weight_scale_inv`),
// or one scale a row. The arithmetic, and so every bit, is that of kv/quantize.h; a block at the right or lower edge
// has the elements that there are.
#pragma once

#include <cstdint>
#include <vector>

#include "common/api.h"
#include "kv/quantize.h"

namespace torch_mooncake::kv {

// [batch..., rows, columns]; strides in elements, as in QuantizeDim. `scale_stride` is not looked at: scales are
// contiguous, [batch..., row blocks, column blocks].
struct BlockScaling {
  WideType wide_type = WideType::fp32;
  NarrowType narrow_type = NarrowType::fp8_e4m3fn;
  std::byte* wide = nullptr;
  std::byte* narrow = nullptr;
  float* scales = nullptr;
  std::vector<QuantizeDim> batch;
  QuantizeDim rows{}, columns{};
  int64_t block_rows = 128, block_columns = 128;  // 0: all of them, in one block however many there are
};

constexpr int64_t blocks_of(int64_t size, int64_t block) { return block == 0 ? 1 : (size + block - 1) / block; }

// The same as calls of quantize_pages: whole blocks, and those at the edges, up to four. `unsupported` where the batch
// has more dimensions than they take.
TM_API Result<std::vector<PageScaling>> page_scalings(const BlockScaling& call);

}  // namespace torch_mooncake::kv
