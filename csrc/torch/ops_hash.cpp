#include "torch/ops_hash.h"

#include <torch/csrc/stable/ops.h>

#include "kv/page_hash.h"
#include "torch/ops_tensors.h"

namespace torch_mooncake::ops {
namespace {

void check_page_size(int64_t page_size) {
  if (page_size < 1) refuse("page_size must be at least 1, not ", page_size);
}

// Dense tokens and roots of one device.
struct Input {
  Input(const Tensor& token_ids, const Tensor& root, const char* root_name) : tokens(token_ids), roots(root) {
    const ScalarType type = token_ids.scalar_type();
    if (token_ids.dim() != 1) refuse("token_ids has to be one-dimensional, not of shape ", shape_text(token_ids));
    if (type != ScalarType::Int && type != ScalarType::Long) refuse("token_ids has to be int32 or int64");
    if (root.scalar_type() != ScalarType::Byte) refuse(root_name, " has to be uint8");
    require_cpu_or_cuda(token_ids, "token_ids");
    require_same_device(root, root_name, token_ids, "token_ids");
    if (!contiguous_from(tokens, 0)) tokens = torch::stable::contiguous(tokens);
    if (!contiguous_from(roots, 0)) roots = torch::stable::contiguous(roots);
  }
  Tensor tokens, roots;
};

Tensor hash(const Input& in, const int64_t* offsets, int64_t prompts, int64_t page_size) {
  const int64_t num_tokens = in.tokens.numel();
  const std::vector<int64_t> shape{num_tokens / page_size, kv::kPageHashNbytes};
  Tensor hashes = prompts == 1 ? torch::stable::new_empty(in.tokens, shape, ScalarType::Byte)
                               : torch::stable::new_zeros(in.tokens, shape, ScalarType::Byte);
  kv::PageHashing call{in.tokens.const_data_ptr(),
                       in.tokens.scalar_type() == ScalarType::Long,
                       num_tokens,
                       offsets,
                       prompts,
                       page_size,
                       static_cast<const uint8_t*>(in.roots.const_data_ptr()),
                       in.roots.dim() == 2 ? kv::kPageHashNbytes : 0,
                       static_cast<uint8_t*>(hashes.mutable_data_ptr())};
  if (in.tokens.is_cpu()) {
    raise(kv::hash_pages(call, torch_parallel_for));
  } else {
    CudaCall cuda(in.tokens, kv::cuda_workspace_nbytes(call));
    raise(kv::cuda_hash_pages(call, cuda.run()));
  }
  return hashes;
}

}  // namespace

Tensor hash_pages(const Tensor& token_ids, int64_t page_size, const Tensor& root) {
  check_page_size(page_size);
  require_shape(root, "root", {kv::kPageHashNbytes});
  Input in(token_ids, root, "root");
  const int64_t offsets[] = {0, in.tokens.numel()};
  return hash(in, offsets, 1, page_size);
}

Tensor hash_pages_batch(const Tensor& token_ids, const Tensor& offsets, int64_t page_size, const Tensor& roots) {
  check_page_size(page_size);
  if (offsets.dim() != 1 || offsets.numel() < 1)
    refuse("offsets has shape ", shape_text(offsets), ", expected [prompts + 1]");
  if (offsets.scalar_type() != ScalarType::Long) refuse("offsets has to be int64");
  if (!offsets.is_cpu()) refuse("offsets is on ", device_text(offsets), ": it has to be on the cpu");
  const int64_t prompts = offsets.numel() - 1;
  if (roots.dim() == 2)
    require_shape(roots, "roots", {prompts, kv::kPageHashNbytes});
  else
    require_shape(roots, "roots", {kv::kPageHashNbytes});
  Input in(token_ids, roots, "roots");
  const Tensor dense = contiguous_from(offsets, 0) ? offsets : torch::stable::contiguous(offsets);
  return hash(in, static_cast<const int64_t*>(dense.const_data_ptr()), prompts, page_size);
}

}  // namespace torch_mooncake::ops
