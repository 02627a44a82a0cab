// quantize_pages and dequantize_pages over torch's stable ABI; errors as in ops_pages.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

namespace torch_mooncake::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> quantize_pages(const Tensor& pages, const std::vector<int64_t>& scale_axes,
                                          ScalarType dtype);
void quantize_pages_out(const Tensor& pages, const std::vector<int64_t>& scale_axes, const Tensor& q,
                        const Tensor& scales);
Tensor dequantize_pages(const Tensor& q, const Tensor& scales, const std::vector<int64_t>& scale_axes,
                        ScalarType dtype);
void dequantize_pages_out(const Tensor& q, const Tensor& scales, const std::vector<int64_t>& scale_axes,
                          const Tensor& out);

}  // namespace torch_mooncake::ops
