// Deltas over torch's stable ABI; errors as in ops_pages.h, and a blob that is malformed is a ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace torch_mooncake::ops {

using torch::stable::Tensor;

Tensor delta_encode(const Tensor& base, const Tensor& fresh, int64_t limit);
void delta_apply(const Tensor& blob, const Tensor& target);
Tensor delta_table(const Tensor& blob);
void delta_seal(const Tensor& blob, int64_t elements, int64_t element_nbytes, int64_t token_nbytes, int64_t changed);
Tensor delta_encode_ranges(const Tensor& base, const Tensor& fresh, const Tensor& offsets, const Tensor& nbytes,
                           int64_t element_nbytes, int64_t limit);
void delta_apply_ranges(const Tensor& blob, const Tensor& target, const Tensor& offsets, const Tensor& nbytes,
                        const std::optional<Tensor>& base);

}  // namespace torch_mooncake::ops
