// gather, scatter and page-to-page copies over torch's stable ABI. One implementation serves CPU and CUDA; the tensors'
// devices decide.
//
// Errors become Python exceptions that name the argument: IndexError for a page id out of range, ValueError for shapes,
// layouts, dtypes, devices and duplicates. On error nothing has been written.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace torch_mooncake::ops {

using torch::stable::Tensor;

Tensor gather_pages(const Tensor& pool, const Tensor& page_ids);
void gather_pages_out(const Tensor& pool, const Tensor& page_ids, const Tensor& out);
void scatter_pages(const Tensor& pool, const Tensor& page_ids, const Tensor& pages);
void gather_pages_layers(const std::vector<Tensor>& pools, const Tensor& page_ids, const Tensor& out);
void scatter_pages_layers(const std::vector<Tensor>& pools, const Tensor& page_ids, const Tensor& pages);
void copy_pages(const std::vector<Tensor>& src, const Tensor& src_ids, const std::vector<Tensor>& dst,
                const Tensor& dst_ids);

}  // namespace torch_mooncake::ops
