#include "rpc/reactor.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <utility>

#include "common/clock.h"
#include "rpc/fork_guard.h"
#include "rpc/spin_gate.h"

namespace torch_mooncake::rpc {

Result<std::shared_ptr<Reactor>> Reactor::create(const std::string& thread_name) {
  std::shared_ptr<Reactor> reactor(new Reactor);
  reactor->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  reactor->event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!reactor->epoll_.valid() || !reactor->event_.valid()) return Status::from_errno("epoll", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (::epoll_ctl(reactor->epoll_.get(), EPOLL_CTL_ADD, reactor->event_.get(), &event) != 0) {
    return Status::from_errno("epoll_ctl", errno);
  }
  ForkGuard::add(reactor->epoll_.get());
  ForkGuard::add(reactor->event_.get());
  reactor->thread_ = std::thread([reactor] { reactor->run(); });
  ::pthread_setname_np(reactor->thread_.native_handle(), thread_name.substr(0, 15).c_str());
  return reactor;
}

Reactor::~Reactor() {
  ForkGuard::remove(epoll_.get());
  ForkGuard::remove(event_.get());
}

void Reactor::wake() {
  if (woken_.exchange(true)) return;
  uint64_t one = 1;
  while (::write(event_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

bool Reactor::post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    tasks_.push_back(std::move(task));
  }
  wake();
  return true;
}

Result<uint64_t> Reactor::watch(int fd, uint32_t events, std::shared_ptr<EventTarget> target) {
  uint64_t token;
  {
    std::lock_guard lock(mutex_);
    token = next_id_++;
    targets_.emplace(token, std::move(target));
  }
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    auto status = Status::from_errno("epoll_ctl", errno);
    std::lock_guard lock(mutex_);
    targets_.erase(token);
    return status;
  }
  return token;
}

void Reactor::rearm(uint64_t token, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Reactor::unwatch(uint64_t token, int fd) {
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  std::shared_ptr<EventTarget> dropped;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  if (auto found = targets_.find(token); found != targets_.end()) {
    dropped = std::move(found->second);
    targets_.erase(found);
  }
}

uint64_t Reactor::add_timer(int64_t at_ns, std::function<void()> fn) {
  uint64_t id;
  bool earlier;
  {
    std::lock_guard lock(mutex_);
    id = next_id_++;
    timers_.emplace(std::pair(at_ns, id), std::move(fn));
    timer_times_.emplace(id, at_ns);
    earlier = at_ns < sleeping_until_;
  }
  if (earlier && !in_thread()) wake();
  return id;
}

void Reactor::cancel_timer(uint64_t id) {
  std::function<void()> dropped;
  std::lock_guard lock(mutex_);
  auto found = timer_times_.find(id);
  if (found == timer_times_.end()) return;
  auto timer = timers_.find({found->second, id});
  dropped = std::move(timer->second);
  timers_.erase(timer);
  timer_times_.erase(found);
}

void Reactor::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void Reactor::run_tasks() {
  std::vector<std::function<void()>> batch;
  {
    std::lock_guard lock(mutex_);
    batch.swap(tasks_);
  }
  for (auto& task : batch) {
    task();
    task = nullptr;
  }
}

int64_t Reactor::run_timers() {
  while (true) {
    std::function<void()> fn;
    {
      std::lock_guard lock(mutex_);
      if (timers_.empty()) return sleeping_until_ = INT64_MAX;
      auto first = timers_.begin();
      if (first->first.first > steady_ns()) return sleeping_until_ = first->first.first;
      fn = std::move(first->second);
      timer_times_.erase(first->first.second);
      timers_.erase(first);
    }
    fn();
  }
}

// What never ran may hold its owner alive: it is dropped here.
void Reactor::drop_all() {
  expected_ = nullptr;
  std::unique_lock lock(mutex_);
  auto timers = std::move(timers_);
  auto targets = std::move(targets_);
  timers_.clear();
  targets_.clear();
  timer_times_.clear();
  lock.unlock();
}

// The expected target is looked at directly: that saves asking epoll on the way of its next request. Everybody else is
// asked for in between, first of all, so that who is quick does not starve the others.
int Reactor::wait(epoll_event* events, int most, int wait_ms) {
  auto expected = std::exchange(expected_, nullptr);
  if (!expected || wait_ms == 0) return ::epoll_wait(epoll_.get(), events, most, wait_ms);
  int64_t until = steady_ns() + SpinGate::kSpinNs;
  for (unsigned i = 0; steady_ns() < until; ++i) {
    if (i % 4 == 0) {
      if (int n = ::epoll_wait(epoll_.get(), events, most, 0); n != 0) return n;
    } else if (expected->look()) {
      return 0;
    }
  }
  return ::epoll_wait(epoll_.get(), events, most, wait_ms);
}

void Reactor::run() {
  thread_id_ = std::this_thread::get_id();
  epoll_event events[64];
  while (true) {
    int64_t next = run_timers();
    int wait_ms = Deadline::at_ns(next).remaining_ms();
    {
      std::lock_guard lock(mutex_);
      if (!tasks_.empty()) {
        wait_ms = 0;
      } else if (stopping_) {
        break;
      }
    }
    int n = wait(events, 64, wait_ms);
    for (int i = 0; i < n; ++i) {
      uint64_t token = events[i].data.u64;
      if (token == 0) {
        uint64_t count;
        (void)!::read(event_.get(), &count, sizeof count);
        woken_ = false;  // before the queue is looked at: a post after this writes again
        continue;
      }
      std::shared_ptr<EventTarget> target;
      {
        std::lock_guard lock(mutex_);
        auto found = targets_.find(token);
        if (found == targets_.end()) continue;  // unwatched by an earlier event of this batch
        target = found->second;
      }
      target->on_events(events[i].events);
    }
    run_tasks();
  }
  drop_all();
}

}  // namespace torch_mooncake::rpc
