#include "kv/quantize_blocks.h"

#include <string>

namespace torch_mooncake::kv {
namespace {

// Blocks of one size along a dimension.
struct Span {
  int64_t first_block, blocks, size;
};

std::vector<Span> spans_of(int64_t size, int64_t block) {
  if (block == 0) return {{0, 1, size}};
  std::vector<Span> spans;
  if (size / block > 0) spans.push_back({0, size / block, block});
  if (size % block > 0) spans.push_back({size / block, 1, size % block});
  return spans;
}

}  // namespace

Result<std::vector<PageScaling>> page_scalings(const BlockScaling& call) {
  const int64_t row_blocks = blocks_of(call.rows.size, call.block_rows);
  const int64_t column_blocks = blocks_of(call.columns.size, call.block_columns);
  std::vector<QuantizeDim> batch;
  int64_t step = row_blocks * column_blocks;
  for (auto dim = call.batch.rbegin(); dim != call.batch.rend(); ++dim) {
    const QuantizeDim outer{dim->size, dim->wide_stride, dim->narrow_stride, step};
    step *= dim->size;
    if (outer.size == 1) continue;
    if (!batch.empty()) {  // one with the dimension inside it, if that is the same walk
      QuantizeDim& inner = batch.front();
      if (outer.wide_stride == inner.size * inner.wide_stride &&
          outer.narrow_stride == inner.size * inner.narrow_stride) {
        inner.size *= outer.size;
        continue;
      }
    }
    batch.insert(batch.begin(), outer);
  }
  if (batch.size() + 4 > static_cast<size_t>(kMaxQuantizeDims))
    return {Code::unsupported, "matrices in " + std::to_string(batch.size()) +
                                   " dimensions that do not merge into fewer: at most " +
                                   std::to_string(kMaxQuantizeDims - 4) + " can be taken"};
  std::vector<PageScaling> calls;
  for (const Span& rows : spans_of(call.rows.size, call.block_rows))
    for (const Span& columns : spans_of(call.columns.size, call.block_columns)) {
      const int64_t row = rows.first_block * call.block_rows, column = columns.first_block * call.block_columns;
      PageScaling pages;
      pages.wide_type = call.wide_type;
      pages.narrow_type = call.narrow_type;
      pages.wide =
          call.wide + (row * call.rows.wide_stride + column * call.columns.wide_stride) * nbytes_of(call.wide_type);
      pages.narrow = call.narrow + row * call.rows.narrow_stride + column * call.columns.narrow_stride;
      pages.scales = call.scales + rows.first_block * column_blocks + columns.first_block;
      auto add = [&](const QuantizeDim& dim) { pages.dims[pages.num_dims++] = dim; };
      auto blocks = [](const QuantizeDim& dim, const Span& span, int64_t scale_stride) {
        return QuantizeDim{span.blocks, span.size * dim.wide_stride, span.size * dim.narrow_stride, scale_stride};
      };
      for (const QuantizeDim& dim : batch) add(dim);
      add(blocks(call.rows, rows, column_blocks));
      pages.block_dims = pages.num_dims;
      add({rows.size, call.rows.wide_stride, call.rows.narrow_stride, 0});
      if (columns.blocks > 1) add(blocks(call.columns, columns, 1));
      add({columns.size, call.columns.wide_stride, call.columns.narrow_stride, 0});
      pages.groups_per_block = columns.blocks;
      calls.push_back(pages);
    }
  return calls;
}

}  // namespace torch_mooncake::kv
