// One thread and its queue of tasks, run in order. The thread is made by the first task, so an engine that never needs
// it never has it.
//
// Threads: post() is safe from any thread. stop() runs what is queued, then joins; from the worker's own thread it
// detaches instead (a callback may drop the last reference to its engine). After stop(), post() runs the task on the
// caller's thread. In a forked child the thread does not exist: tasks run on the caller's thread, nothing is joined.
#pragma once

#include <functional>
#include <memory>

namespace torch_mooncake::transfer {

class Worker {
 public:
  explicit Worker(const char* name);  // at most 15 characters, a literal
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void post(std::function<void()> task);
  bool in_thread() const;
  size_t depth() const;  // tasks that wait; 0 in a forked child
  void stop();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace torch_mooncake::transfer
