// Tensors as the collectives see them: checked arguments, raw pieces of memory, contiguous stand-ins.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "collectives/collectives.h"
#include "torch/c10d_work.h"

namespace torch_mooncake::dist {

void check_tensor(const at::Tensor& tensor, const char* op);    // dense, CPU or CUDA
void check_writable(const at::Tensor& tensor, const char* op);  // no element of it is two (an expanded tensor)
// The one tensor of an argument that is a list for historical reasons.
const at::Tensor& only(const TensorList& tensors, const char* op);
coll::DType dtype_of(const at::Tensor& tensor, const char* op);
// Names the pair if it has no meaning. PREMUL_SUM is a SUM of floats or complex numbers that are scaled first.
coll::ReduceOp reduce_op_of(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* name);
// The factor of PREMUL_SUM applied to a copy; the tensor itself for any other operation.
at::Tensor premultiplied(const c10d::ReduceOp& op, const at::Tensor& tensor);

inline coll::Piece piece_of(const at::Tensor& tensor) { return {tensor.mutable_data_ptr(), tensor.nbytes()}; }
inline coll::ConstPiece const_piece_of(const at::Tensor& tensor) { return {tensor.const_data_ptr(), tensor.nbytes()}; }

// A contiguous view of an input: itself or a copy.
at::Tensor readable(const at::Tensor& tensor);
// A contiguous stand-in for an output; commit() copies it back if it is one. `keep_content`: it is an input, too.
class Writable {
 public:
  Writable(const at::Tensor& tensor, bool keep_content);
  const at::Tensor& memory() const { return memory_; }
  void commit() const;

 private:
  at::Tensor tensor_;
  at::Tensor memory_;
};
std::vector<Writable> writable(const TensorList& tensors);

}  // namespace torch_mooncake::dist
