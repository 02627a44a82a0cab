#include "torch/c10d_tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "torch/compat.h"

namespace torch_mooncake::dist {

void check_tensor(const at::Tensor& tensor, const char* op) {
  TORCH_CHECK(tensor.defined(), "mooncake: ", op, ": undefined tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.device().is_cpu() || tensor.device().is_cuda(), "mooncake: ", op, ": tensors on ",
                              tensor.device(), " are not supported, only on cpu and cuda");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "mooncake: ", op, ": ", tensor.layout(),
                              " tensors are not supported, only dense ones");
}

void check_writable(const at::Tensor& tensor, const char* op) {
  TORCH_CHECK_VALUE(tensor.layout() != at::kStrided || at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "mooncake: ", op, ": an expanded tensor cannot be written to: clone() it first");
}

const at::Tensor& only(const TensorList& tensors, const char* op) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "mooncake: ", op, ": one tensor is expected, not ", tensors.size());
  check_tensor(tensors[0], op);
  return tensors[0];
}

coll::DType dtype_of(const at::Tensor& tensor, const char* op) {
  using coll::DType;
  switch (tensor.scalar_type()) {
    case at::kByte:
      return DType::u8;
    case at::kChar:
      return DType::i8;
    case at::kUInt16:
      return DType::u16;
    case at::kShort:
      return DType::i16;
    case at::kUInt32:
      return DType::u32;
    case at::kInt:
      return DType::i32;
    case at::kUInt64:
      return DType::u64;
    case at::kLong:
      return DType::i64;
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kFloat:
      return DType::f32;
    case at::kDouble:
      return DType::f64;
    case at::kComplexFloat:
      return DType::c64;
    case at::kComplexDouble:
      return DType::c128;
    case at::kBool:
      return DType::boolean;
    default:
      TORCH_CHECK_TYPE(false, "mooncake: ", op, ": cannot reduce tensors of ", tensor.scalar_type());
  }
}

coll::ReduceOp reduce_op_of(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* name) {
  using Torch = c10d::ReduceOp;
  coll::ReduceOp out = coll::ReduceOp::sum;
  switch (op.op_) {
    case Torch::SUM:
      break;
    case Torch::PREMUL_SUM:
      TORCH_CHECK(tensor.is_floating_point() || tensor.is_complex(), "mooncake: ", name,
                  ": cannot use ReduceOp.PREMUL_SUM with ", tensor.scalar_type());
      break;
    case Torch::AVG:
      out = coll::ReduceOp::avg;
      break;
    case Torch::PRODUCT:
      out = coll::ReduceOp::product;
      break;
    case Torch::MIN:
      out = coll::ReduceOp::min;
      break;
    case Torch::MAX:
      out = coll::ReduceOp::max;
      break;
    case Torch::BAND:
      out = coll::ReduceOp::band;
      break;
    case Torch::BOR:
      out = coll::ReduceOp::bor;
      break;
    case Torch::BXOR:
      out = coll::ReduceOp::bxor;
      break;
    default:
      TORCH_CHECK_VALUE(false, "mooncake: ", name, ": unknown reduce operation");
  }
  const Status status = coll::check_reducible(dtype_of(tensor, name), out);
  TORCH_CHECK(status.is_ok(), "mooncake: ", name, ": ", status.message());
  return out;
}

at::Tensor premultiplied(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
  const auto* factor = static_cast<const compat::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(factor != nullptr, "mooncake: PREMUL_SUM without its factor");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (factor->tensor_factor.defined()) return tensor * factor->tensor_factor.to(tensor.scalar_type());
  return tensor * factor->double_factor;
}

at::Tensor readable(const at::Tensor& tensor) { return needs_staging(tensor) ? contiguous_copy(tensor) : tensor; }

Writable::Writable(const at::Tensor& tensor, bool keep_content) : tensor_(tensor), memory_(tensor) {
  if (needs_staging(tensor)) memory_ = keep_content ? contiguous_copy(tensor) : contiguous_like(tensor);
}

void Writable::commit() const {
  if (!memory_.is_same(tensor_)) copy_tensor(tensor_, memory_);
}

std::vector<Writable> writable(const TensorList& tensors) {
  std::vector<Writable> out;
  out.reserve(tensors.size());
  for (const auto& tensor : tensors) out.emplace_back(tensor, false);
  return out;
}

}  // namespace torch_mooncake::dist
