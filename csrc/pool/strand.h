// Strand: runs tasks one at a time, in order, on the threads of whoever brings them: at once on the caller's thread if
// nobody is inside, else on the thread that is. So what it guards needs no locks, and nobody waits or is woken for it.
//
// Threads: run() from any, also from within a task (it runs later). close() waits for the task being run; what comes
// later is dropped. Not from within a task.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace torch_mooncake::pool {

class Strand {
 public:
  void run(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    tasks_.push_back(std::move(task));
    if (active_) return;
    active_ = true;
    while (!tasks_.empty()) {
      auto next = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      next();
      next = {};
      lock.lock();
    }
    active_ = false;
    idle_.notify_all();
  }
  // Runs it and waits for it. False: closed, and it was not run.
  bool run_and_wait(const std::function<void()>& task) {
    std::mutex m;
    std::condition_variable cv;
    bool done = false;
    {
      std::lock_guard lock(mutex_);
      if (closed_) return false;
    }
    run([&] {
      task();
      std::lock_guard lock(m);
      done = true;
      cv.notify_all();
    });
    std::unique_lock lock(m);
    while (!cv.wait_for(lock, std::chrono::milliseconds(100), [&] { return done; })) {
      lock.unlock();
      {
        std::lock_guard outer(mutex_);
        if (closed_ && !active_) return done;
      }
      lock.lock();
    }
    return true;
  }
  void close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    tasks_.clear();
    idle_.wait(lock, [&] { return !active_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<std::function<void()>> tasks_;
  bool active_ = false, closed_ = false;
};

}  // namespace torch_mooncake::pool
