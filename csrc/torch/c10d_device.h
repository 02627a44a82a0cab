// CUDA tensors in the "mooncake" backend, by torch's device-generic interfaces and the engine's driver: nothing here
// includes or links CUDA, so the same code is built with every torch.
//
// An operation keeps its place among streams by a gate (collectives/stream_gate.h): it comes after what was queued on
// the caller's current stream when it was called, and wait() makes the then current stream wait for it. Neither blocks
// the host. What has to be computed (reductions, copies of tensors that are not contiguous) runs on a stream of the
// backend's own, on which nothing else is queued: it never stands behind a wait of the user's, whatever stream that is
// on. Temporary tensors are allocated on that stream.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "collectives/device.h"
#include "collectives/stream_gate.h"
#include "torch/c10d_work.h"

namespace torch_mooncake::dist {

// The CUDA device that all these tensors are on; nullopt: none of them is on one. Raises if they are on several.
std::optional<c10::Device> device_of(const TensorList& inputs, const TensorList& outputs, const char* op);

// What one backend has on one device. Threads: safe from any; pinned memory is the executor's.
class DeviceContext {
 public:
  // `staged_bytes`: what pinned memory is going to be needed for. Made before any stream waits for us: then the driver
  // might not pin any.
  DeviceContext(c10::Device device, uint64_t staged_bytes);
  c10::Device device() const { return device_; }
  const c10::Stream& stream() const { return stream_; }  // the backend's own
  // A gate behind what is queued on the caller's current stream. Raises if there can be none.
  coll::StreamGatePtr gate(const char* op);
  // Until all operations have ended that a stream was told to wait for: their callers take them for done.
  void settle();
  // Makes the caller's current stream wait for the gate; false: this device cannot, the host has to.
  bool hold(coll::StreamGate& gate);
  // Completes a future with this value for streams to come: its callbacks run now, ordered after the gate. False: as
  // above.
  bool complete_behind(coll::StreamGate& gate, const std::function<void()>& mark);
  Result<std::byte*> pinned(uint64_t nbytes);  // one piece of memory, grown as needed
  void abandon_pinned();

 private:
  c10::Stream take_side_stream();
  const c10::Device device_;
  const c10::Stream stream_;
  struct SideStreams {
    std::mutex mutex;
    std::vector<c10::Stream> free;
  };
  const std::shared_ptr<SideStreams> side_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<coll::StreamGate>> gates_;  // of operations under way
  std::shared_ptr<std::byte> pinned_;
  uint64_t pinned_bytes_ = 0;
};
using DeviceContextPtr = std::shared_ptr<DeviceContext>;

// out = in[0] op in[1] op …, as coll::reduce_many() does it; contiguous tensors of one type on one device, any.
void reduce_tensors(const at::Tensor& out, const TensorList& in, coll::DType dtype, coll::ReduceOp op);

// One collective on CUDA tensors, from the call to its end; what the algorithms ask of the device.
class DeviceOp final : public coll::Device {
 public:
  DeviceOp(DeviceContextPtr on, coll::StreamGatePtr gate, TensorList tensors, uint64_t staged_bytes);
  const DeviceContextPtr& context() const { return on_; }
  const coll::StreamGatePtr& gate() const { return gate_; }
  // In the executor: waits for the gate, then runs the body with the backend's own stream as the current one, and waits
  // for what it queued there.
  Status run(const coll::Call& call, const std::function<Status(const coll::Call&)>& body);

  uint64_t staged_bytes() const override { return staged_bytes_; }
  Result<std::byte*> scratch(uint64_t nbytes) override;
  Result<std::byte*> pinned(uint64_t nbytes) override { return on_->pinned(nbytes); }
  Status copy(void* to, const void* from, uint64_t nbytes) override;
  Status reduce_many(void* out, std::span<const void* const> in, uint64_t count, coll::DType dtype,
                     coll::ReduceOp op) override;
  Status wait(Deadline deadline) override;
  std::shared_ptr<void> keep() override { return kept_; }

 private:
  const DeviceContextPtr on_;
  const coll::StreamGatePtr gate_;
  const uint64_t staged_bytes_;
  std::shared_ptr<TensorList> kept_;  // the collective's own, and its scratch memory
  at::Tensor scratch_;
};
using DeviceOpPtr = std::shared_ptr<DeviceOp>;

// A work whose wait() holds a stream instead of the host, but for barriers and with a timeout. What fails after wait()
// has returned is raised by the next one, and by later collectives.
template <typename Base>
class OnStream : public Base {
 public:
  template <typename... Args>
  OnStream(DeviceContextPtr on, coll::StreamGatePtr gate, Args&&... args)
      : Base(std::forward<Args>(args)...), on_(std::move(on)), gate_(std::move(gate)) {}
  bool wait(Ms timeout = kNoTimeout) override {
    if (timeout.count() > 0 || this->opType_ == c10d::OpType::BARRIER) return Base::wait(timeout);
    synchronize();
    return true;
  }
  void synchronize() override {
    bool ended;
    {
      std::lock_guard lock(this->mutex_);
      ended = this->completed_;
    }
    if (ended || !on_->hold(*gate_)) (void)Base::wait(kNoTimeout);
  }
  void blockCurrentStream() override { synchronize(); }
  FuturePtr getFuture() override {
    const auto list = c10::ListType::create(c10::TensorType::get());
    bool ended;
    FuturePtr future;
    {
      std::lock_guard lock(this->mutex_);
      if (this->future_) return this->future_;
      future = this->future_ = c10::make_intrusive<c10::ivalue::Future>(list, std::vector<c10::Device>{on_->device()});
      ended = this->completed_;
    }
    if (ended) {
      this->mark(future);
      return future;
    }
    // If the device cannot wait, the future is completed when the work ends.
    on_->complete_behind(*gate_, [&] {
      if (!this->marked_.test_and_set()) future->markCompleted(c10::IValue(this->outputs_));
    });
    return future;
  }

 private:
  const DeviceContextPtr on_;
  const coll::StreamGatePtr gate_;
};

// A send or a receive of a CUDA tensor: posted once the work before it on the caller's stream is done.
class DeviceMessage : public BaseWork {
 public:
  DeviceMessage(coll::GroupPtr group, c10d::OpType type, const char* title, std::string what, uint64_t seq,
                at::Tensor tensor, at::Tensor staging, DeviceContextPtr on, coll::StreamGatePtr gate,
                std::shared_ptr<Executor> finisher);
  int sourceRank() const override;  // waits for the end: nobody knows it before
  // Takes over the request (once).
  void follow(coll::RequestPtr request);
  coll::StreamGate& gate() { return *gate_; }

 protected:
  std::string awaited() const override;

 private:
  void finalize(const Status& status);
  coll::GroupPtr group_;
  at::Tensor staging_;
  DeviceContextPtr on_;
  coll::StreamGatePtr gate_;
  std::shared_ptr<Executor> finisher_;
  mutable std::mutex request_mutex_;
  coll::RequestPtr request_;
};

// Messages whose streams have not come to them. They are posted as soon as these have, those of one peer and tag in the
// order of the calls.
class PendingMessages : public std::enable_shared_from_this<PendingMessages> {
 public:
  struct Key {
    bool sending;
    int peer;  // -1: any
    int tag;
  };
  void add(Key key, coll::StreamGatePtr gate, std::shared_ptr<Executor> finisher, std::function<void()> post);
  // Posts all, ready or not: the group has ended, so that they fail at once.
  void flush();

 private:
  struct Pending {
    Key key;
    std::function<void()> post;
    std::shared_ptr<std::atomic<bool>> ready;
  };
  void pump(bool all);
  std::mutex posting_mutex_;  // taken first
  std::mutex mutex_;
  std::vector<Pending> pending_;
};

}  // namespace torch_mooncake::dist
