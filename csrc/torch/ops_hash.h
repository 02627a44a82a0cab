// hash_pages over torch's stable ABI; errors as in ops_pages.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace torch_mooncake::ops {

using torch::stable::Tensor;

Tensor hash_pages(const Tensor& token_ids, int64_t page_size, const Tensor& root);
Tensor hash_pages_batch(const Tensor& token_ids, const Tensor& offsets, int64_t page_size, const Tensor& roots);

}  // namespace torch_mooncake::ops
