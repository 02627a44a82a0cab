// quantize_pages, dequantize_pages and quantize_blocks over torch's stable ABI; errors as in ops_pages.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

#include "kv/quantize.h"

namespace torch_mooncake::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

kv::WideType wide_type(ScalarType type);
kv::NarrowType narrow_type(ScalarType type);
void require_wide(ScalarType type, const char* what);
void require_narrow(ScalarType type, const char* what);

std::tuple<Tensor, Tensor> quantize_pages(const Tensor& pages, const std::vector<int64_t>& scale_axes,
                                          ScalarType dtype);
void quantize_pages_out(const Tensor& pages, const std::vector<int64_t>& scale_axes, const Tensor& q,
                        const Tensor& scales);
Tensor dequantize_pages(const Tensor& q, const Tensor& scales, const std::vector<int64_t>& scale_axes,
                        ScalarType dtype);
void dequantize_pages_out(const Tensor& q, const Tensor& scales, const std::vector<int64_t>& scale_axes,
                          const Tensor& out);

// ops_blocks.cpp
std::tuple<Tensor, Tensor> quantize_blocks(const Tensor& weight, int64_t block_rows, int64_t block_columns,
                                           ScalarType dtype);
void quantize_blocks_out(const Tensor& weight, int64_t block_rows, int64_t block_columns, const Tensor& q,
                         const Tensor& scales);

}  // namespace torch_mooncake::ops
