// MooncakeBackend: torch.distributed's "mooncake", a c10d::Backend over csrc/collectives.
//
// One object serves all tensors of a group, on the CPU and on CUDA devices (c10d_device.h); any other device raises
// NotImplementedError before anything is sent. Collectives run one after another on the group's executor; sends and
// receives go their own way, so that a pending isend/irecv never holds up a collective or another message. A
// synchronous collective with nothing before it runs on the caller's thread. The GIL is never taken.
//
// Ownership: works keep their tensors and the group. Threads: every method is safe from any thread; the order of
// collectives is the order of the calls. Errors: arguments that make no sense raise at the call; what fails later is
// raised by wait() as DistBackendError and breaks the group (every later collective raises the same, on all ranks).
// After shutdown() or abort() everything raises. The destructor shuts down.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/seats.h"
#include "torch/c10d_device.h"
#include "torch/c10d_work.h"

namespace torch_mooncake::dist {

class MooncakeBackend final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(Ms timeout = kBackendDefaultTimeout) : c10d::Backend::Options("mooncake", timeout) {}
    std::string host = "127.0.0.1";  // address this rank listens on
    std::string host_id;             // empty: the boot id; equal ids may share memory
    std::vector<std::string> transports = {"local", "shm", "tcp"};
    std::vector<std::string> nics;  // which of them, as EngineOptions says; and settings of "rdma"
    std::string rdma;
    std::string cuda = "mooncake";           // who runs dense collectives of CUDA tensors; or "nccl"
    uint64_t cuda_staged_bytes = 256 << 10;  // up to so much they go by way of the host; equal on all ranks
    Ms heartbeat{500};                       // period; this and the next are those of the process' first group
    Ms heartbeat_timeout{5000};              // silence after which a rank is lost
    std::string join;                        // what contact() of a running group said: take the place of a rank of it
    bool own_timeout = false;                // `timeout` was asked for; else it is the group's
    std::string algorithms;                  // as coll::Algorithms::parse() takes them; rank 0's hold for the group
  };
  using BackendPtr = c10::intrusive_ptr<Backend>;

  // Meets the other ranks through the store (keys under "tm/"), each publishing its address; raises DistStoreError
  // naming the ranks that did not come within the timeout. With options->join the store is not used: waits until the
  // ranks of that group let this one in (reseat()).
  static c10::intrusive_ptr<MooncakeBackend> create(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    std::vector<int64_t> global_ranks,
                                                    c10::intrusive_ptr<Options> options);
  MooncakeBackend(int rank, int size, c10::intrusive_ptr<Options> options, coll::SeatsPtr seats);
  ~MooncakeBackend() override;

  std::string explain() const { return seats_->group()->explain(); }  // see coll::Group
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

#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;  // c10d_window.h
#endif

  // ---- who is in the group: ranks keep their numbers whoever is gone, getSize() counts the empty seats, too
  std::vector<int> active_ranks() const;
  std::vector<int> waiting_ranks() const;  // that a replacement has asked to be
  // What a replacement needs to know, for options->join. Holds the token that all ranks prove to each other.
  std::string contact() const;
  // Called by all that stay, after what is queued has run: goes on without `remove` and all that were lost, and with
  // the replacements of `admit`, for which it waits. Returns the active ranks.
  std::vector<int> reseat(const std::vector<int>& remove, const std::vector<int>& admit, int at_least, Ms timeout);

  // A part of this group, by its ranks here; needs no store. Null: without this rank.
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  // Works in a group that has lost ranks, too.
  bool supportsShrinking() const override { return true; }
  BackendPtr shrink(const std::vector<int64_t>& exclude, int flags,
                    const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  BackendPtr merge(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                   const int& rank, const int& size) override;

  void setSequenceNumberForGroup() override {}  // starts at 0 on all ranks
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // The hook runs after each collective, on the thread that ran it.
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { executor_.drain(); }
  void enableCollectivesTiming() override {}  // is always on
  c10d::ErrorType getError() override { return error_; }
  void abort() override;
  void shutdown() override;

 private:
  friend class MooncakeWindow;
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
    bool reads_only = false;                 // on this rank: nothing comes into `outputs`
    std::optional<c10::Device> device = {};  // without tensors: whose current stream it comes after
  };
  WorkPtr run(Plan plan, Body body);
  Status run_body(coll::Group& group, const Body& body, uint64_t sequence, Deadline deadline, DeviceOp* on,
                  std::exception_ptr& raised);
  DeviceContextPtr context_of(c10::Device device);
  void settle_devices();
  DeviceOpPtr device_op_of(const Plan& plan);  // null: it is on the host
  void tell_hook(const CollectiveWork& work);
  WorkPtr message(bool sending, TensorList& tensors, int peer, int tag);
  WorkPtr joint(std::vector<WorkPtr> works);
  Ms timeout_or_default(Ms timeout) const { return timeout.count() < 0 ? options_->timeout : timeout; }
  Deadline deadline_of(Ms timeout) const { return Deadline::after_ms(timeout_or_default(timeout).count()); }

  // An options object of ours like the one given, or like this group's.
  c10::intrusive_ptr<Options> options_like(const c10::intrusive_ptr<c10d::Backend::Options>& opts) const;
  BackendPtr part(std::string name, const std::vector<int>& ranks, c10::intrusive_ptr<Options> options);

  c10::intrusive_ptr<Options> options_;
  const coll::SeatsPtr seats_;
  Executor executor_;
  std::shared_ptr<Executor> finisher_ = std::make_shared<Executor>();  // ends of messages
  std::mutex order_mutex_;                                             // sequence number and place in the queue
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> messages_{0};
  coll::Scratch scratch_;  // the executor's
  std::mutex devices_mutex_;
  std::map<c10::DeviceIndex, DeviceContextPtr> devices_;
  const std::shared_ptr<PendingMessages> pending_messages_ = std::make_shared<PendingMessages>();
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::mutex coalescing_mutex_;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  // How often a part was made of the same ranks under the same name, since the last change of seats. Under
  // order_mutex_.
  std::map<std::pair<std::string, std::vector<int>>, uint64_t> parts_;
};

}  // namespace torch_mooncake::dist
