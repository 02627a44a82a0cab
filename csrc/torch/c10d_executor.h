// Executor: runs tasks one after another, in the order they were submitted, on a thread of its own that starts with the
// first task that needs it, and ends when there was none for a while. A caller that is going to wait anyway may run its
// task itself when nothing is before it: that saves two thread switches.
//
// Threads: everything is safe from any thread. stop() runs what is queued, then ends the thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "common/clock.h"

namespace torch_mooncake::dist {

class Executor {
 public:
  static constexpr std::chrono::seconds kIdle{2};
  ~Executor() { stop(); }

  // false: stopped, the task was not taken. `order`, if given, is a lock of the caller's that decides about the place
  // in the queue; it is released as soon as the place is taken.
  bool submit(std::function<void()> task, bool caller_waits, std::unique_lock<std::mutex>* order = nullptr) {
    std::unique_lock lock(mutex_);
    if (stopping_) return false;
    if (caller_waits && tasks_.empty() && !running_) {
      running_ = true;
      lock.unlock();
      if (order != nullptr) order->unlock();
      task();
      task = nullptr;
      lock.lock();
      running_ = false;
      cv_.notify_all();
      return true;
    }
    tasks_.push_back(std::move(task));
    if (!has_thread_) {
      if (thread_.joinable()) thread_.join();  // it has ended, but for its return
      thread_ = std::thread([this] { loop(); });
      has_thread_ = true;
    }
    cv_.notify_all();
    return true;
  }

  // Returns when everything submitted before has run; false: that took longer than until `deadline`.
  bool drain(Deadline deadline = Deadline::never()) {
    std::unique_lock lock(mutex_);
    const auto idle = [&] { return tasks_.empty() && !running_; };
    if (!deadline.is_never()) return cv_.wait_for(lock, std::chrono::nanoseconds(deadline.remaining_ns()), idle);
    cv_.wait(lock, idle);
    return true;
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty() && !running_;
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      cv_.notify_all();
    }
    if (!thread_.joinable()) return;
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      const bool woken = cv_.wait_for(lock, kIdle, [&] { return !running_ && (stopping_ || !tasks_.empty()); });
      if (!woken && (running_ || !tasks_.empty())) continue;
      if (tasks_.empty()) {
        has_thread_ = false;
        return;
      }
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      running_ = true;
      lock.unlock();
      task();
      task = nullptr;  // tensors are freed without the lock
      lock.lock();
      running_ = false;
      cv_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable cv_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
  bool has_thread_ = false;
  bool running_ = false;
  bool stopping_ = false;
};

}  // namespace torch_mooncake::dist
