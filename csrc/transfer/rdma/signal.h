// Signal: something has changed. Who waits reads the count first, then looks, then waits for it to move on.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace torch_mooncake::transfer::rdma {

class Signal {
 public:
  uint64_t count() const {
    std::lock_guard lock(mutex_);
    return count_;
  }
  void notify() {
    {
      std::lock_guard lock(mutex_);
      ++count_;
    }
    moved_.notify_all();
  }
  void wait_past(uint64_t seen, std::chrono::nanoseconds patience) {
    std::unique_lock lock(mutex_);
    moved_.wait_for(lock, patience, [&] { return count_ != seen; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable moved_;
  uint64_t count_ = 0;
};

}  // namespace torch_mooncake::transfer::rdma
