// A few threads for calls that wait in a disk. They are made as tasks come, up to kMost, and stay.
//
// Ownership: tasks that run hold what they need; the destructor runs what is queued, then joins (from a thread of its
// own: detaches). In a forked child, where there are no threads, it leaves everything as it is. Threads: post() is safe
// from any thread and never waits for a task.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace torch_mooncake::transfer {

class Threads {
 public:
  static constexpr size_t kMost = 16;

  Threads();
  ~Threads();
  Threads(const Threads&) = delete;
  void post(std::vector<std::function<void()>> tasks);

 private:
  struct State;  // outlives a thread that hangs
  void start();

  const pid_t pid_ = getpid();
  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
};

}  // namespace torch_mooncake::transfer
