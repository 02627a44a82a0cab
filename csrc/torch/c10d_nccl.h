// DenseByNccl: MooncakeBackendOptions(cuda="nccl"). Collectives of dense, contiguous CUDA tensors go to a
// ProcessGroupNCCL, as far as NCCL knows their type and operation; everything else is the "mooncake" backend's: CPU and
// sparse tensors, tensors that are not contiguous, bitwise operations, messages (NCCL knows neither tags nor any
// source).
//
// What goes where is decided by each rank from its own arguments, so they must agree in that, too. The order of
// collectives is kept on each of the two; between them it is that of the streams. Threads and errors: those of the
// backend that does the work.
#pragma once

#include "torch/c10d_backend.h"

namespace torch_mooncake::dist {

class DenseByNccl final : public c10d::Backend {
 public:
  using Ptr = c10::intrusive_ptr<c10d::Backend>;
  DenseByNccl(Ptr ours, Ptr nccl);
  const Ptr& ours() const { return ours_; }
  const Ptr& nccl() const { return nccl_; }

  const std::string getBackendName() const override { return ours_->getBackendName(); }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return ours_->getBackendOptions(); }
  void setTimeout(Ms timeout) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(TensorList& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(TensorList& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(TensorList& outputs, std::vector<TensorList>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(TensorList& tensors, int to, int tag) override { return ours_->send(tensors, to, tag); }
  WorkPtr recv(TensorList& tensors, int from, int tag) override { return ours_->recv(tensors, from, tag); }
  WorkPtr recvAnysource(TensorList& tensors, int tag) override { return ours_->recvAnysource(tensors, tag); }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool all) override { ours_->monitoredBarrier(opts, all); }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return ours_->getSequenceNumberForGroup(); }
  void waitForPendingWorks() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  // Memory that suits NCCL, and its connections.
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return nccl_->getMemAllocator(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return nccl_->allocateTensor(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return nccl_->supportsTensorAlloc(device); }
  void eagerConnectSingleDevice(at::Device device) override { nccl_->eagerConnectSingleDevice(device); }

 private:
  // NCCL if all of these are for it.
  c10d::Backend& mover(std::initializer_list<const TensorList*> lists) const;
  c10d::Backend& reducer(const c10d::ReduceOp& op, std::initializer_list<const TensorList*> lists) const;
  const Ptr ours_, nccl_;
};

}  // namespace torch_mooncake::dist
