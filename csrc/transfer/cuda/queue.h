// CudaQueue: the engine's own stream on one device, the thread that polls its events, and pinned blocks.
//
// Ownership: of() gives one queue a device, made on first use; it stays, as the device's context does. Threads: all
// methods are safe from any thread and never wait for the device; `done` runs on the polling thread and must not block.
// No host callbacks of CUDA are used: they would run on the driver's threads, in the user's way. The thread sleeps when
// nothing is pending, and between polls.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "transfer/cuda/driver.h"

namespace torch_mooncake::transfer {

class CudaQueue {
 public:
  static constexpr size_t kBlockBytes = 1 << 20, kMostBlocks = 32;  // pinned

  static Result<CudaQueue*> of(std::shared_ptr<CudaDriver> driver, int device);
  CudaQueue(std::shared_ptr<CudaDriver> driver, int device, CudaStream stream);

  struct Copy {
    void* dst;
    const void* src;
    size_t nbytes;
  };
  using Done = std::function<void(const Status&)>;
  // Between device memory and device memory or pinned blocks. `done` once: nothing is touched any more.
  void copy(const std::vector<Copy>& copies, Done done);
  // `done` when the event has been reached, or the work before it has failed. Takes the event.
  void when_reached(CudaEvent event, Done done);

  // Null: none is free. Then `waiter` is called once, on another thread or later: ok when one may be free, which it
  // need not take; io: there is none, and no memory can be pinned. Memory is pinned by a thread of its own, for that
  // may take the driver a while.
  using Waiter = std::function<void(const Status&)>;
  std::byte* take_block(Waiter waiter);
  void give_block(std::byte* block);

  // A word of pinned memory, zero, for CudaDriver::wait_flag().
  Result<uint32_t*> take_flag();
  void give_flag(uint32_t* flag);

  CudaDriver& driver() const { return *driver_; }
  int device() const { return device_; }

 private:
  void poll();
  void make_block();

  const std::shared_ptr<CudaDriver> driver_;
  const int device_;
  const CudaStream stream_;

  struct Pending {
    CudaEvent event;
    Done done;
  };
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Pending> pending_;
  std::vector<std::byte*> free_;
  size_t blocks_ = 0;
  std::vector<uint32_t*> flags_;
  std::deque<Waiter> waiters_;
  std::thread thread_;  // made by the first event
};

}  // namespace torch_mooncake::transfer
