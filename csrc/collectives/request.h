// Request: one pending send or receive between two ranks, and the two ways its work gets done.
//
// Moving large messages takes steps that may block (opening the peer's region, reading it), which the I/O threads that
// deliver control messages must not take. Such a step is handed over with defer(): to the thread that is waiting for
// the request, if there is one, so that no further thread has to wake up; else to the hub's Progress thread.
//
// Threads: everything is safe from any thread. A request ends once; its buffer may be reused from then on. on_end
// callbacks run on whichever thread ended the request and must not block.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "common/api.h"
#include "common/clock.h"
#include "common/status.h"

namespace torch_mooncake::coll {

// One thread that runs what nobody waits for. Asleep when there is nothing to do.
class TM_API Progress {
 public:
  Progress();
  ~Progress() { stop(); }
  void enqueue(std::function<void()> job);  // dropped after stop()
  // Runs what is queued, then ends the thread. From the thread itself it only asks.
  void stop();

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

class Waiter;

class TM_API Request : public std::enable_shared_from_this<Request> {
 public:
  // A step of the work. `may_block`: the caller has nothing else to do, so waiting inside is fine.
  using Step = std::function<void(bool may_block)>;

  Request(int peer, std::shared_ptr<Progress> progress, std::shared_ptr<void> keep)
      : peer_(peer), progress_(std::move(progress)), keep_(std::move(keep)) {}
  static std::shared_ptr<Request> ended_with(int peer, Status status);

  bool ended() const;
  Status status() const;  // ok while pending
  // The rank at the other end; for a receive from any source the rank that sent, -1 before it is known.
  int peer() const;
  // `deadline_exceeded` if `deadline` passes first; the request then goes on.
  Status wait(Deadline deadline);
  void on_end(std::function<void()> fn);  // runs at once if it is over
  // Ends the request with `why`; at once if nothing moves its bytes, else as soon as they are at rest.
  void cancel(Status why);

  // For the group that runs the request.
  void finish(Status status);  // only the first call counts; then drops the kept buffer
  void defer(Step step);
  void set_peer(int peer);
  void set_cancel(std::function<void(Status)> fn);  // replaces finish() as what cancel() does
  const std::shared_ptr<void>& keep() const { return keep_; }

 private:
  friend class Waiter;
  mutable std::mutex mutex_;
  std::condition_variable ended_cv_;
  bool ended_ = false;
  Status status_;
  int peer_;
  Waiter* waiter_ = nullptr;  // detached under mutex_ before it dies
  std::deque<Step> steps_;
  std::vector<std::function<void()>> on_end_;
  std::function<void(Status)> cancel_;
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<void> keep_;
};
using RequestPtr = std::shared_ptr<Request>;

// Waits until all have ended or one has failed, running their steps meanwhile. Returns the failure, or
// deadline_exceeded naming the ranks that are still awaited. What is pending then goes on: cancel it.
TM_API Status wait_all(std::span<const RequestPtr> requests, Deadline deadline);
// The same until those in `first`, which are among them, have ended: the others go on meanwhile.
TM_API Status wait_first(std::span<const RequestPtr> requests, std::span<const RequestPtr> first, Deadline deadline);

}  // namespace torch_mooncake::coll
