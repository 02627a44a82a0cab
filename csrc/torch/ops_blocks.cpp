#include <torch/csrc/stable/ops.h>

#include "kv/quantize_blocks.h"
#include "torch/ops_quantize.h"
#include "torch/ops_tensors.h"

namespace torch_mooncake::ops {
namespace {

int64_t checked_block(int64_t block, const char* name) {
  if (block == -1) return 0;
  if (block < 1) refuse(name, " is ", block, ", not 1 or more, or -1");
  return block;
}

std::vector<int64_t> scale_shape(const Tensor& weight, int64_t block_rows, int64_t block_columns) {
  if (weight.dim() < 2) refuse("weight has ", weight.dim(), " dimensions: rows and columns are needed");
  std::vector<int64_t> shape = shape_of(weight);
  const size_t rows = shape.size() - 2;
  shape[rows] = kv::blocks_of(shape[rows], checked_block(block_rows, "block_rows"));
  shape[rows + 1] = kv::blocks_of(shape[rows + 1], checked_block(block_columns, "block_cols"));
  return shape;
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_blocks(const Tensor& weight, int64_t block_rows, int64_t block_columns,
                                           ScalarType dtype) {
  require_wide(weight.scalar_type(), "weight");
  require_narrow(dtype, "dtype");
  const std::vector<int64_t> shape = scale_shape(weight, block_rows, block_columns);
  Tensor q = torch::stable::new_empty(weight, shape_of(weight), dtype);
  Tensor scales = torch::stable::new_empty(weight, shape, ScalarType::Float);
  quantize_blocks_out(weight, block_rows, block_columns, q, scales);
  return {q, scales};
}

void quantize_blocks_out(const Tensor& weight, int64_t block_rows, int64_t block_columns, const Tensor& q,
                         const Tensor& scales) {
  require_cpu_or_cuda(weight, "weight");
  require_wide(weight.scalar_type(), "weight");
  require_narrow(q.scalar_type(), "q");
  if (scales.scalar_type() != ScalarType::Float) refuse("scales has to be float32");
  require_shape(scales, "scales", scale_shape(weight, block_rows, block_columns));
  require_shape(q, "q", shape_of(weight));
  if (!contiguous_from(scales, 0)) refuse("scales has to be contiguous");
  require_same_device(q, "q", weight, "weight");
  require_same_device(scales, "scales", weight, "weight");
  require_own_places(q, "q");
  if (Range(q).shares(Range(weight))) refuse("q and weight share memory");

  kv::BlockScaling call;
  call.wide_type = wide_type(weight.scalar_type());
  call.narrow_type = narrow_type(q.scalar_type());
  call.wide = data_of(weight, false);
  call.narrow = data_of(q, true);
  call.scales = reinterpret_cast<float*>(data_of(scales, true));
  auto dim = [&](int64_t d) { return kv::QuantizeDim{weight.size(d), weight.stride(d), q.stride(d), 0}; };
  for (int64_t d = 0; d + 2 < weight.dim(); ++d) call.batch.push_back(dim(d));
  call.rows = dim(weight.dim() - 2);
  call.columns = dim(weight.dim() - 1);
  call.block_rows = checked_block(block_rows, "block_rows");
  call.block_columns = checked_block(block_columns, "block_cols");
  auto pages = kv::page_scalings(call);
  if (!pages) refuse("weight: ", pages.status().message());
  for (const kv::PageScaling& part : *pages) {
    if (weight.is_cpu()) {
      raise(kv::quantize_pages(part, torch_parallel_for));
    } else {
      CudaCall cuda(weight, 0);
      raise(kv::cuda_quantize_pages(part, cuda.run()));
    }
  }
}

}  // namespace torch_mooncake::ops
