#include "collectives/stream_gate.h"

#include <unistd.h>

#include "transfer/cuda/queue.h"

namespace torch_mooncake::coll {
namespace {

using transfer::CudaDriver;
using transfer::CudaQueue;

constexpr int64_t kSpinNs = 50'000;
constexpr int kPollUs = 30;

// Asks until it is so, ever less often.
template <typename IsDone>
Status poll(Deadline deadline, IsDone is_done, const std::function<Status()>& trouble) {
  const int64_t begin = steady_ns();
  for (;;) {
    TM_ASSIGN(const bool done, is_done());
    if (done) return {};
    if (trouble) TM_TRY(trouble());
    if (deadline.expired()) return {Code::deadline_exceeded, "timed out waiting for work on a CUDA stream"};
    if (steady_ns() - begin > kSpinNs) usleep(kPollUs);
  }
}

}  // namespace

StreamGate::StreamGate(std::shared_ptr<CudaDriver> driver, CudaQueue* queue)
    : driver_(std::move(driver)), queue_(queue) {}

Result<StreamGatePtr> StreamGate::after(int device, Stream stream) {
  TM_ASSIGN(auto driver, CudaDriver::get());
  TM_ASSIGN(auto* queue, CudaQueue::of(driver, device));
  TM_ASSIGN(const bool captured, driver->capturing(device, stream));
  if (captured) return Status(Code::unsupported, "cannot be captured into a CUDA graph");
  StreamGatePtr gate(new StreamGate(driver, queue));
  TM_ASSIGN(gate->before_, driver->record(device, stream));
  return gate;
}

StreamGate::~StreamGate() {
  open();
  if (before_) driver_->destroy_event(queue_->device(), before_);
}

Result<bool> StreamGate::reached() {
  std::lock_guard lock(mutex_);
  if (before_) {
    auto reached = driver_->reached(queue_->device(), before_);
    if (reached.is_ok() && !*reached) return false;
    driver_->destroy_event(queue_->device(), std::exchange(before_, nullptr));
    settle(reached.status());
  }
  if (!reached_) return false;
  TM_TRY(Status(before_status_));
  return true;
}

void StreamGate::settle(const Status& status) {
  reached_ = true;
  if (!status.is_ok()) before_status_ = status.with("work on the CUDA stream before it");
}

void StreamGate::when_reached(std::function<void()> ready) {
  void* event;
  {
    std::lock_guard lock(mutex_);
    event = std::exchange(before_, nullptr);
  }
  if (!event) return ready();
  queue_->when_reached(event, [self = shared_from_this(), ready = std::move(ready)](const Status& status) {
    {
      std::lock_guard lock(self->mutex_);
      self->settle(status);
    }
    ready();
  });
}

Status StreamGate::wait(Deadline deadline, const std::function<Status()>& trouble) {
  return poll(
      deadline, [this] { return reached(); }, trouble);
}

void StreamGate::open() {
  std::lock_guard lock(mutex_);
  open_ = true;
  opened_.notify_all();
  if (flag_) __atomic_store_n(flag_.get(), 1u, __ATOMIC_RELEASE);
}

Status StreamGate::hold(Stream stream) {
  std::lock_guard lock(mutex_);
  if (open_) return {};
  TM_ASSIGN(const bool captured, driver_->capturing(queue_->device(), stream));
  if (captured) return {Code::unsupported, "cannot be captured into a CUDA graph"};
  if (!flag_) {
    TM_ASSIGN(auto* word, queue_->take_flag());
    // Another operation's when this gate is gone and every stream has passed it.
    flag_.reset(word, [queue = queue_](uint32_t* w) { queue->give_flag(w); });
  }
  TM_TRY(driver_->wait_flag(queue_->device(), stream, flag_.get(), 1));
  auto passed = driver_->record(queue_->device(), stream);
  if (passed.is_ok())
    queue_->when_reached(*passed, [flag = flag_](const Status&) {});
  else
    new std::shared_ptr<uint32_t>(flag_);  // nobody knows when the stream has passed it: it is no other operation's
  return {};
}

void StreamGate::wait_if_held() {
  std::unique_lock lock(mutex_);
  opened_.wait(lock, [&] { return open_ || !flag_; });
}

Result<void*> make_own_stream(int device) {
  TM_ASSIGN(auto driver, CudaDriver::get());
  return driver->make_stream(device);
}

Status copy_on_stream(int device, void* to, const void* from, uint64_t nbytes, void* stream) {
  TM_ASSIGN(auto driver, CudaDriver::get());
  return driver->copy(device, to, from, nbytes, stream);
}

Result<std::shared_ptr<std::byte>> make_pinned(int device, uint64_t nbytes) {
  TM_ASSIGN(auto driver, CudaDriver::get());
  TM_ASSIGN(void* memory, driver->allocate_pinned(device, nbytes));
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(memory),
                                    [driver, device](std::byte* p) { driver->free_pinned(device, p); });
}

Status wait_for_stream(int device, void* stream, Deadline deadline) {
  TM_ASSIGN(auto driver, CudaDriver::get());
  TM_ASSIGN(auto event, driver->record(device, stream));
  Status status = poll(
      deadline, [&] { return driver->reached(device, event); }, nullptr);
  driver->destroy_event(device, event);
  return status;
}

}  // namespace torch_mooncake::coll
