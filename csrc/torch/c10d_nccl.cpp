#include "torch/c10d_nccl.h"

namespace torch_mooncake::dist {
namespace {

bool is_for_nccl(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided && !needs_staging(tensor);
}

// Whatever NCCL and torch's binding of it reduce, on any of their versions.
bool nccl_reduces(const c10d::ReduceOp& op, at::ScalarType type) {
  using Op = c10d::ReduceOp;
  const bool floating = type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
  const bool integer = type == at::kByte || type == at::kChar || type == at::kInt || type == at::kLong;
  switch (op.op_) {
    case Op::SUM:
    case Op::PRODUCT:
    case Op::MIN:
    case Op::MAX:
      return floating || integer;
    case Op::AVG:
    case Op::PREMUL_SUM:
      return floating;
    default:
      return false;
  }
}

}  // namespace

DenseByNccl::DenseByNccl(Ptr ours, Ptr nccl)
    : Backend(ours->getRank(), ours->getSize()), ours_(std::move(ours)), nccl_(std::move(nccl)) {
  init();
}

c10d::Backend& DenseByNccl::mover(std::initializer_list<const TensorList*> lists) const {
  size_t n = 0;
  for (const TensorList* list : lists) {
    for (const auto& tensor : *list) {
      if (!is_for_nccl(tensor)) return *ours_;
      ++n;
    }
  }
  return n > 0 ? *nccl_ : *ours_;
}

c10d::Backend& DenseByNccl::reducer(const c10d::ReduceOp& op, std::initializer_list<const TensorList*> lists) const {
  for (const TensorList* list : lists) {
    for (const auto& tensor : *list) {
      if (!tensor.defined() || !nccl_reduces(op, tensor.scalar_type())) return *ours_;
    }
  }
  return mover(lists);
}

WorkPtr DenseByNccl::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  return mover({&tensors}).broadcast(tensors, opts);
}
WorkPtr DenseByNccl::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  return reducer(opts.reduceOp, {&tensors}).allreduce(tensors, opts);
}
WorkPtr DenseByNccl::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  return ours_->allreduce_sparse(tensors, opts);
}
WorkPtr DenseByNccl::allreduce_coalesced(TensorList& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return reducer(opts.reduceOp, {&tensors}).allreduce_coalesced(tensors, opts);
}
WorkPtr DenseByNccl::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  return reducer(opts.reduceOp, {&tensors}).reduce(tensors, opts);
}
WorkPtr DenseByNccl::allgather(std::vector<TensorList>& outputs, TensorList& inputs,
                               const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == 1, "mooncake: all_gather: one list of outputs is expected");
  return mover({&outputs[0], &inputs}).allgather(outputs, inputs, opts);
}
WorkPtr DenseByNccl::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  const TensorList both = {output, input};
  return mover({&both})._allgather_base(output, input, opts);
}
// NCCL's backend has none.
WorkPtr DenseByNccl::allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                                         const c10d::AllgatherOptions& opts) {
  return ours_->allgather_coalesced(outputs, inputs, opts);
}
WorkPtr DenseByNccl::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  return mover({&outputs, &inputs}).allgather_into_tensor_coalesced(outputs, inputs, opts);
}
// The ranks other than the root have one side only: what they decide by is what all have.
// Only the root has a list, in which tensors may lie as NCCL cannot take them: no rank can tell for all.
WorkPtr DenseByNccl::gather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::GatherOptions& opts) {
  return ours_->gather(outputs, inputs, opts);
}
WorkPtr DenseByNccl::scatter(TensorList& outputs, std::vector<TensorList>& inputs, const c10d::ScatterOptions& opts) {
  return ours_->scatter(outputs, inputs, opts);
}
WorkPtr DenseByNccl::reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(inputs.size() == 1, "mooncake: reduce_scatter: one list of inputs is expected");
  return reducer(opts.reduceOp, {&outputs, &inputs[0]}).reduce_scatter(outputs, inputs, opts);
}
WorkPtr DenseByNccl::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& opts) {
  const TensorList both = {output, input};
  return reducer(opts.reduceOp, {&both})._reduce_scatter_base(output, input, opts);
}
WorkPtr DenseByNccl::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  return reducer(opts.reduceOp, {&outputs, &inputs}).reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}
WorkPtr DenseByNccl::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                   std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  const TensorList both = {output, input};
  return mover({&both}).alltoall_base(output, input, output_splits, input_splits, opts);
}
WorkPtr DenseByNccl::alltoall(TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& opts) {
  return mover({&outputs, &inputs}).alltoall(outputs, inputs, opts);
}
WorkPtr DenseByNccl::barrier(const c10d::BarrierOptions& opts) {
  return (opts.device && opts.device->is_cuda() ? nccl_ : ours_)->barrier(opts);
}

void DenseByNccl::startCoalescing() {
  ours_->startCoalescing();
  nccl_->startCoalescing();
}
WorkPtr DenseByNccl::endCoalescing() {
  std::vector<WorkPtr> works = {ours_->endCoalescing()};
  if (auto theirs = nccl_->endCoalescing()) works.push_back(theirs);  // none if nothing of NCCL's was called
  return c10::make_intrusive<JointWork>(std::move(works));
}

void DenseByNccl::setTimeout(Ms timeout) {
  ours_->setTimeout(timeout);
  nccl_->setTimeout(timeout);
}
void DenseByNccl::waitForPendingWorks() {
  ours_->waitForPendingWorks();
  nccl_->waitForPendingWorks();
}
c10d::ErrorType DenseByNccl::getError() {
  const auto error = ours_->getError();
  return error == c10d::ErrorType::SUCCESS ? nccl_->getError() : error;
}
void DenseByNccl::abort() {
  nccl_->abort();
  ours_->abort();
}
void DenseByNccl::shutdown() {
  nccl_->shutdown();
  ours_->shutdown();
}

}  // namespace torch_mooncake::dist
