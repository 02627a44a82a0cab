#include "transfer/cuda/queue.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "common/clock.h"
#include "transfer/worker.h"

namespace torch_mooncake::transfer {
namespace {

constexpr int64_t kSpinNs = 50'000;
constexpr int kPollUs = 30;

Worker& pinner() {
  static auto* worker = new Worker("tm-cuda-pin");
  return *worker;
}

}  // namespace

Result<CudaQueue*> CudaQueue::of(std::shared_ptr<CudaDriver> driver, int device) {
  static std::mutex* mutex = new std::mutex;
  static auto* made = new std::map<std::pair<CudaDriver*, int>, CudaQueue*>;
  std::lock_guard lock(*mutex);
  auto& queue = (*made)[{driver.get(), device}];
  if (!queue) {
    TM_ASSIGN(auto stream, driver->make_stream(device));
    queue = new CudaQueue(std::move(driver), device, stream);
  }
  return queue;
}

CudaQueue::CudaQueue(std::shared_ptr<CudaDriver> driver, int device, CudaStream stream)
    : driver_(std::move(driver)), device_(device), stream_(stream) {}

void CudaQueue::copy(const std::vector<Copy>& copies, Done done) {
  Status status;
  {
    std::lock_guard lock(mutex_);  // copies and their event stay together on the stream
    for (auto& c : copies)
      if (status = driver_->copy(device_, c.dst, c.src, c.nbytes, stream_); !status) break;
  }
  auto event = driver_->record(device_, stream_);
  if (!event) return done(status ? event.status() : status);
  // Even if a copy could not be queued, those before it are under way.
  when_reached(*event, [status, done = std::move(done)](const Status& reached) { done(status ? reached : status); });
}

void CudaQueue::when_reached(CudaEvent event, Done done) {
  std::lock_guard lock(mutex_);
  pending_.push_back({event, std::move(done)});
  if (!thread_.joinable()) {
    sigset_t all, before;  // signals of the process belong to the user's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { poll(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  wake_.notify_one();
}

void CudaQueue::poll() {
  pthread_setname_np(pthread_self(), "tm-cuda");
  int64_t last_reached = steady_ns();
  for (;;) {
    std::vector<Pending> now;
    {
      std::unique_lock lock(mutex_);
      if (pending_.empty()) {
        wake_.wait(lock, [&] { return !pending_.empty(); });
        last_reached = steady_ns();
      }
      now.swap(pending_);
    }
    std::vector<Pending> later;
    bool any = false;
    for (auto& p : now) {
      auto reached = driver_->reached(device_, p.event);
      if (reached && !*reached) {
        later.push_back(std::move(p));
        continue;
      }
      any = true;
      driver_->destroy_event(device_, p.event);
      p.done(reached.status());
    }
    {
      std::lock_guard lock(mutex_);
      pending_.insert(pending_.begin(), std::make_move_iterator(later.begin()), std::make_move_iterator(later.end()));
    }
    if (any) {
      last_reached = steady_ns();
    } else if (steady_ns() - last_reached > kSpinNs) {
      usleep(kPollUs);
    }
  }
}

std::byte* CudaQueue::take_block(Waiter waiter) {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      auto* block = free_.back();
      free_.pop_back();
      return block;
    }
    waiters_.push_back(std::move(waiter));
    if (blocks_ >= kMostBlocks) return nullptr;
    ++blocks_;
  }
  pinner().post([this] { make_block(); });
  return nullptr;
}

void CudaQueue::make_block() {
  auto made = driver_->allocate_pinned(device_, kBlockBytes);
  if (made) return give_block(static_cast<std::byte*>(*made));
  std::deque<Waiter> waiters;
  {
    std::lock_guard lock(mutex_);
    if (--blocks_ == 0) waiters.swap(waiters_);  // otherwise they get what others give back
  }
  for (auto& waiter : waiters) waiter(made.status());
}

void CudaQueue::give_block(std::byte* block) {
  std::unique_lock lock(mutex_);
  free_.push_back(block);
  // A waiter need not take it (it was stopped, or has enough under way): then it is the next one's turn.
  while (!free_.empty() && !waiters_.empty()) {
    auto waiter = std::move(waiters_.front());
    waiters_.pop_front();
    lock.unlock();
    waiter({});
    lock.lock();
  }
}

Result<uint32_t*> CudaQueue::take_flag() {
  constexpr size_t kPage = 4096;
  std::unique_lock lock(mutex_);
  if (flags_.empty()) {
    lock.unlock();  // copies and their ends do not wait for the driver to pin memory
    TM_ASSIGN(auto* page, driver_->allocate_pinned(device_, kPage));
    lock.lock();
    for (size_t i = 0; i < kPage / sizeof(uint32_t); ++i) flags_.push_back(static_cast<uint32_t*>(page) + i);
  }
  auto* flag = flags_.back();
  flags_.pop_back();
  __atomic_store_n(flag, 0u, __ATOMIC_RELEASE);
  return flag;
}

void CudaQueue::give_flag(uint32_t* flag) {
  std::lock_guard lock(mutex_);
  flags_.push_back(flag);
}

}  // namespace torch_mooncake::transfer
