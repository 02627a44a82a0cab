#include "collectives/request.h"

#include <algorithm>
#include <chrono>

namespace torch_mooncake::coll {
namespace {
std::chrono::steady_clock::time_point time_point(Deadline deadline) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline.ns()));
}
// false: the deadline has passed.
template <typename Ready>
bool sleep_until(std::condition_variable& cv, std::unique_lock<std::mutex>& lock, Deadline deadline, Ready ready) {
  if (deadline.is_never()) {
    cv.wait(lock, ready);
    return true;
  }
  return cv.wait_until(lock, time_point(deadline), ready);
}
}  // namespace

struct Progress::State {
  std::mutex mutex;
  std::condition_variable cv;
  std::deque<std::function<void()>> jobs;
  bool stopping = false;
};

Progress::Progress() : state_(std::make_shared<State>()) {
  thread_ = std::thread([state = state_] {
    std::unique_lock lock(state->mutex);
    for (;;) {
      state->cv.wait(lock, [&] { return state->stopping || !state->jobs.empty(); });
      if (state->jobs.empty()) return;
      auto job = std::move(state->jobs.front());
      state->jobs.pop_front();
      lock.unlock();
      job();
      job = nullptr;  // what it holds is freed without the lock
      lock.lock();
    }
  });
}

void Progress::enqueue(std::function<void()> job) {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->stopping) return;
    state_->jobs.push_back(std::move(job));
  }
  state_->cv.notify_one();
}

void Progress::stop() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->cv.notify_one();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // a job dropped the last reference; the thread ends when that job returns
  } else {
    thread_.join();
  }
}

// The meeting point of one waiting thread and the requests it waits for.
class Waiter {
 public:
  Waiter(std::span<const RequestPtr> requests, std::span<const RequestPtr> first) : requests_(requests), first_(first) {
    for (const auto& request : requests_) attach(request);
  }
  ~Waiter() {
    for (const auto& request : requests_) detach(request);
    for (auto& [request, step] : steps_) request->defer(std::move(step));
  }

  Status run(Deadline deadline) {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (!steps_.empty()) {
        auto [request, step] = std::move(steps_.front());
        steps_.pop_front();
        const bool last = ended_ + 1 == requests_.size() && steps_.empty();
        lock.unlock();
        step(last);
        lock.lock();
        continue;
      }
      if (is_over()) return {};
      if (!sleep_until(cv_, lock, deadline, [&] { return !steps_.empty() || is_over(); })) {
        return {Code::deadline_exceeded, "timed out"};
      }
    }
  }

  // Called with the request's mutex held, so that this object cannot go away meanwhile.
  void push(RequestPtr request, Request::Step step) {
    std::lock_guard lock(mutex_);
    steps_.emplace_back(std::move(request), std::move(step));
    cv_.notify_one();
  }
  void one_ended(const Request* request, bool failed) {
    std::lock_guard lock(mutex_);
    ++ended_;
    if (is_first(request)) --missing_;
    failed_ |= failed;
    cv_.notify_one();
  }

 private:
  void attach(const RequestPtr& request) {
    std::lock_guard lock(request->mutex_);
    std::lock_guard own(mutex_);  // those attached before may go on already
    if (request->ended_) {
      ++ended_;
      failed_ |= !request->status_.is_ok();
      return;
    }
    if (is_first(request.get())) ++missing_;
    request->waiter_ = this;
    while (!request->steps_.empty()) {
      steps_.emplace_back(request, std::move(request->steps_.front()));
      request->steps_.pop_front();
    }
  }
  void detach(const RequestPtr& request) {
    std::lock_guard lock(request->mutex_);
    if (request->waiter_ == this) request->waiter_ = nullptr;
  }

  bool is_over() const { return failed_ || missing_ == 0; }
  bool is_first(const Request* request) const {
    return first_.data() == requests_.data() ||
           std::any_of(first_.begin(), first_.end(), [&](const RequestPtr& r) { return r.get() == request; });
  }

  const std::span<const RequestPtr> requests_, first_;
  std::mutex mutex_;
  std::condition_variable cv_;
  std::deque<std::pair<RequestPtr, Request::Step>> steps_;
  size_t ended_ = 0, missing_ = 0;  // of all; of the first
  bool failed_ = false;
};

RequestPtr Request::ended_with(int peer, Status status) {
  auto request = std::make_shared<Request>(peer, nullptr, nullptr);
  request->ended_ = true;
  request->status_ = std::move(status);
  return request;
}

bool Request::ended() const {
  std::lock_guard lock(mutex_);
  return ended_;
}

Status Request::status() const {
  std::lock_guard lock(mutex_);
  return status_;
}

int Request::peer() const {
  std::lock_guard lock(mutex_);
  return peer_;
}

void Request::set_peer(int peer) {
  std::lock_guard lock(mutex_);
  peer_ = peer;
}

Status Request::wait(Deadline deadline) {
  {
    std::unique_lock lock(mutex_);
    if (ended_) return status_;
    if (waiter_ != nullptr) {  // somebody else does the work; watch
      const bool in_time = sleep_until(ended_cv_, lock, deadline, [&] { return ended_; });
      return in_time ? status_ : Status(Code::deadline_exceeded, "timed out waiting for rank " + std::to_string(peer_));
    }
  }
  const RequestPtr self = shared_from_this();
  return wait_all({&self, 1}, deadline);
}

void Request::on_end(std::function<void()> fn) {
  {
    std::lock_guard lock(mutex_);
    if (!ended_) {
      on_end_.push_back(std::move(fn));
      return;
    }
  }
  fn();
}

void Request::cancel(Status why) {
  std::function<void(Status)> fn;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    fn = cancel_;
  }
  fn ? fn(std::move(why)) : finish(std::move(why));
}

void Request::set_cancel(std::function<void(Status)> fn) {
  std::lock_guard lock(mutex_);
  if (!ended_) cancel_ = std::move(fn);
}

void Request::finish(Status status) {
  std::vector<std::function<void()>> callbacks;
  std::shared_ptr<void> keep;
  std::function<void(Status)> cancel;
  std::deque<Step> steps;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = true;
    status_ = std::move(status);
    callbacks.swap(on_end_);
    keep.swap(keep_);
    cancel.swap(cancel_);
    steps.swap(steps_);
    ended_cv_.notify_all();
    if (waiter_ != nullptr) {
      waiter_->one_ended(this, !status_.is_ok());
      waiter_ = nullptr;
    }
  }
  for (auto& fn : callbacks) fn();
}

void Request::defer(Step step) {
  {
    std::lock_guard lock(mutex_);
    if (waiter_ != nullptr) return waiter_->push(shared_from_this(), std::move(step));
    steps_.push_back(std::move(step));
    if (progress_ == nullptr) return;
  }
  // A waiting thread that comes before the progress thread takes the step away.
  progress_->enqueue([self = shared_from_this()] {
    Step next;
    {
      std::lock_guard lock(self->mutex_);
      if (self->steps_.empty()) return;
      next = std::move(self->steps_.front());
      self->steps_.pop_front();
    }
    next(false);
  });
}

Status wait_all(std::span<const RequestPtr> requests, Deadline deadline) {
  return wait_first(requests, requests, deadline);
}

Status wait_first(std::span<const RequestPtr> requests, std::span<const RequestPtr> first, Deadline deadline) {
  bool pending = false;
  for (const auto& request : first) pending |= !request->ended();
  Status timed_out;
  if (pending) {
    Waiter waiter(requests, first);
    timed_out = waiter.run(deadline);
  }
  std::string late;
  for (const auto& request : requests) {
    if (Status status = request->status(); !status.is_ok()) return status;
  }
  for (const auto& request : first) {
    if (!timed_out.is_ok() && !request->ended()) {
      const std::string rank = request->peer() < 0 ? "any rank" : "rank " + std::to_string(request->peer());
      if (late.find(rank + ",") == std::string::npos) late += (late.empty() ? "" : " ") + rank + ",";
    }
  }
  if (late.empty()) return {};
  late.pop_back();
  return {Code::deadline_exceeded, "timed out waiting for " + late};
}

}  // namespace torch_mooncake::coll
