// Turn: a mutex that is waited for up to a deadline. (std::timed_mutex would do, but ThreadSanitizer does not follow
// it.)
//
//     TM_TRY(turn.lock(deadline));
//     std::lock_guard guard(turn, std::adopt_lock);
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "common/clock.h"
#include "common/status.h"

namespace torch_mooncake::pool {

class Turn {
 public:
  Status lock(Deadline deadline) {
    std::unique_lock lock(mutex_);
    const auto is_free = [this] { return !taken_; };
    const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(deadline.ns())};
    if (deadline.is_never()) {
      given_.wait(lock, is_free);
    } else if (!given_.wait_until(lock, until, is_free)) {
      return {Code::deadline_exceeded, "another call had the turn"};
    }
    taken_ = true;
    return {};
  }
  void unlock() {
    std::lock_guard lock(mutex_);
    taken_ = false;
    given_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable given_;
  bool taken_ = false;
};

}  // namespace torch_mooncake::pool
