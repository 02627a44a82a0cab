// reshard_heads over torch's stable ABI; errors as in ops_pages.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace torch_mooncake::ops {

using torch::stable::Tensor;

void reshard_heads(const std::vector<Tensor>& sources, const std::vector<Tensor>& outs, int64_t kv_heads,
                   int64_t source_head_axis, int64_t out_head_axis, const std::vector<int64_t>& source_ranks,
                   int64_t source_tp, const std::vector<int64_t>& out_ranks, int64_t out_tp);

}  // namespace torch_mooncake::ops
