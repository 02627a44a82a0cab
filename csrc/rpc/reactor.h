// Reactor: one I/O thread with epoll, timers and a task queue. It sleeps when there is nothing to do.
//
// Threads: every method is safe from any thread. Tasks, timers and events run on the reactor's thread and must not
// block. Targets are kept alive while watched and while their events run. After stop() (which runs the tasks posted
// before it), posted tasks are dropped: post() returns false.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/fd.h"
#include "common/status.h"

struct epoll_event;

namespace torch_mooncake::rpc {

class EventTarget {
 public:
  virtual ~EventTarget() = default;
  virtual void on_events(uint32_t events) = 0;  // EPOLLIN | EPOLLOUT | EPOLLHUP | …, level-triggered
  // Takes what has come, without asking epoll first; false if nothing has. On the reactor's thread.
  virtual bool look() { return false; }
};

class Reactor {
 public:
  static Result<std::shared_ptr<Reactor>> create(const std::string& thread_name);
  ~Reactor();  // after stop(), which its owner always calls: the thread itself holds a reference
  bool in_thread() const { return thread_id_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  bool post(std::function<void()> task);

  // Watching gives a token; the fd must stay open until unwatch() has returned. No event of the token is delivered
  // after unwatch() was called on the reactor's thread.
  Result<uint64_t> watch(int fd, uint32_t events, std::shared_ptr<EventTarget> target);
  void rearm(uint64_t token, int fd, uint32_t events);
  void unwatch(uint64_t token, int fd);

  uint64_t add_timer(int64_t at_ns, std::function<void()> fn);
  void cancel_timer(uint64_t id);

  // From an event of this target: its next may well come within microseconds (a request of a caller who spins was
  // answered), so the thread looks for it for up to 50 µs before it sleeps.
  void expect_soon(std::shared_ptr<EventTarget> target) { expected_ = std::move(target); }

  // Runs what was posted, then ends the thread. Not from the reactor's own thread.
  void stop();

 private:
  Reactor() = default;
  void run();
  void drop_all();
  void run_tasks();
  int64_t run_timers();  // when the next is due, INT64_MAX if none
  void wake();
  int wait(epoll_event* events, int most, int wait_ms);

  UniqueFd epoll_, event_;
  std::thread thread_;
  std::atomic<std::thread::id> thread_id_{};
  std::atomic<bool> woken_{false};
  std::shared_ptr<EventTarget> expected_;  // the reactor's thread only

  std::mutex mutex_;  // all below
  bool stopping_ = false;
  std::vector<std::function<void()>> tasks_;
  std::unordered_map<uint64_t, std::shared_ptr<EventTarget>> targets_;
  std::map<std::pair<int64_t, uint64_t>, std::function<void()>> timers_;  // by (time, id)
  std::unordered_map<uint64_t, int64_t> timer_times_;
  int64_t sleeping_until_ = 0;  // what the thread's epoll_wait was given
  uint64_t next_id_ = 1;        // tokens and timers; 0 is the eventfd
};

}  // namespace torch_mooncake::rpc
