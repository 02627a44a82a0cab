// MooncakeBackend: torch.distributed's "mooncake", a c10d::Backend over csrc/collectives.
//
// One object serves all tensors of a group. CPU tensors only so far: any other device raises NotImplementedError before
// anything is sent. Collectives run one after another on the group's executor; sends and receives go their own way, so
// that a pending isend/irecv never holds up a collective or another message. A synchronous collective with nothing
// before it runs on the caller's thread. The GIL is never taken.
//
// Ownership: works keep their tensors and the group. Threads: every method is safe from any thread; the order of
// collectives is the order of the calls. Errors: arguments that make no sense raise at the call; what fails later is
// raised by wait() as DistBackendError and breaks the group (every later collective raises the same, on all ranks).
// After shutdown() or abort() everything raises. The destructor shuts down.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "collectives/collectives.h"
#include "torch/c10d_work.h"

namespace torch_mooncake::dist {

class MooncakeBackend final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(Ms timeout = kBackendDefaultTimeout) : c10d::Backend::Options("mooncake", timeout) {}
    std::string host = "127.0.0.1";  // address this rank listens on
    std::string host_id;             // empty: the boot id; equal ids may share memory
    std::vector<std::string> transports = {"local", "shm", "tcp"};
    std::string algorithms;  // as coll::Algorithms::parse() takes them; rank 0's hold for the group
  };

  // Meets the other ranks through the store (keys under "tm/"), each publishing its address; raises DistStoreError
  // naming the ranks that did not come within the timeout.
  MooncakeBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::vector<int64_t> global_ranks,
                  c10::intrusive_ptr<Options> options);
  ~MooncakeBackend() override;

  std::string explain() const { return group_->explain(); }  // see coll::Group
  const std::string getBackendName() const override { return "mooncake"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(Ms timeout) override { options_->timeout = timeout; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) override;  // COO, SUM
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
  WorkPtr send(TensorList& tensors, int to, int tag) override;
  WorkPtr recv(TensorList& tensors, int from, int tag) override;
  WorkPtr recvAnysource(TensorList& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  void setSequenceNumberForGroup() override {}  // starts at 0 on all ranks
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void waitForPendingWorks() override { executor_.drain(); }
  c10d::ErrorType getError() override { return error_; }
  void abort() override;
  void shutdown() override;

 private:
  // What a collective does when its turn comes.
  using Body = std::function<Status(const coll::Call&)>;
  struct Plan {
    c10d::OpType type;
    const char* title;  // "mooncake:all_reduce", for the profiler
    const char* name;
    Ms timeout;
    bool async;
    TensorList outputs;
    TensorList inputs;
  };
  WorkPtr run(Plan plan, Body body);
  Status run_body(const Body& body, uint64_t sequence, Deadline deadline, std::exception_ptr& raised);
  WorkPtr message(bool sending, TensorList& tensors, int peer, int tag);
  WorkPtr joint(std::vector<WorkPtr> works);
  Ms timeout_or_default(Ms timeout) const { return timeout.count() < 0 ? options_->timeout : timeout; }

  c10::intrusive_ptr<Options> options_;
  coll::GroupPtr group_;
  Executor executor_;
  std::shared_ptr<Executor> finisher_ = std::make_shared<Executor>();  // ends of messages
  std::mutex order_mutex_;                                             // sequence number and place in the queue
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> messages_{0};
  coll::Scratch scratch_;  // the executor's
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::mutex coalescing_mutex_;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

}  // namespace torch_mooncake::dist
