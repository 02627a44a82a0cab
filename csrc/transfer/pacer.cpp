#include "transfer/pacer.h"

#include <algorithm>
#include <vector>

#include "transfer/op.h"

namespace torch_mooncake::transfer {

// ---- TokenBucket

int64_t TokenBucket::ready_ns(int64_t now_ns) const {
  if (rate_ == 0) return now_ns;
  double tokens = tokens_ + static_cast<double>(now_ns - filled_ns_) * static_cast<double>(rate_) / 1e9;
  return tokens >= 0 ? now_ns : now_ns + static_cast<int64_t>(-tokens * 1e9 / static_cast<double>(rate_)) + 1;
}

void TokenBucket::take(uint64_t nbytes, int64_t now_ns) {
  if (rate_ == 0) return;
  refill(now_ns);
  tokens_ -= static_cast<double>(nbytes);
}

void TokenBucket::refill(int64_t now_ns) {
  if (filled_ns_ != 0) tokens_ += static_cast<double>(now_ns - filled_ns_) * static_cast<double>(rate_) / 1e9;
  tokens_ = std::min(tokens_, static_cast<double>(rate_) / 20);
  filled_ns_ = now_ns;
}

// ---- Pacer

Pacer::Pacer(rpc::Endpoint& rpc, uint64_t foreground_rate, uint64_t background_rate)
    : rpc_(rpc), buckets_{TokenBucket(foreground_rate), TokenBucket(background_rate)} {}

// Of a limited priority so little at a time that the rate is even over 50 ms.
uint64_t Pacer::instalment(const TokenBucket& bucket) const {
  if (!bucket.limited()) return kInstalmentBytes;
  return std::clamp<uint64_t>(bucket.rate() / 20, 64 << 10, kInstalmentBytes);
}

bool Pacer::begin(Priority priority, uint64_t nbytes) {
  bool foreground = priority == Priority::foreground;
  if (foreground) foreground_.fetch_add(1, std::memory_order_relaxed);
  auto& bucket = buckets_[static_cast<int>(priority)];
  if (nbytes == 0 || (foreground && !bucket.limited())) return true;
  if (nbytes > instalment(bucket)) return false;
  if (!foreground && (nbytes > kInstalmentBytes / 16 || foreground_.load(std::memory_order_relaxed) > 0)) return false;
  std::lock_guard lock(mutex_);
  int64_t now = steady_ns();
  if (stopped_ || !queues_[static_cast<int>(priority)].empty() || bucket.ready_ns(now) > now) return false;
  bucket.take(nbytes, now);
  return true;
}

void Pacer::enqueue(std::shared_ptr<OpImpl> op) {
  {
    std::lock_guard lock(mutex_);
    auto& queue = queues_[static_cast<int>(op->priority())];
    queue.push_back({std::move(op), steady_ns()});
    waiting_ = true;
  }
  poke();
}

void Pacer::instalment_over(Priority priority, uint64_t nbytes) {
  if (priority != Priority::background) return;
  {
    std::lock_guard lock(mutex_);
    background_in_flight_ -= nbytes;
  }
  poke();
}

void Pacer::over(Priority priority) {
  if (priority == Priority::foreground && foreground_.fetch_sub(1, std::memory_order_relaxed) == 1) poke();
}

void Pacer::poke() {
  if (!waiting_ || poked_.exchange(true)) return;
  worker_.post([self = shared_from_this()] {
    self->poked_ = false;
    self->pump();
  });
}

void Pacer::pump() {
  int64_t again_ns = INT64_MAX;
  while (serve(Priority::foreground, &again_ns) || serve(Priority::background, &again_ns)) again_ns = INT64_MAX;
  std::lock_guard lock(mutex_);
  waiting_ = !queues_[0].empty() || !queues_[1].empty();
  if (again_ns == INT64_MAX || stopped_) return;
  if (timer_ns_ <= again_ns && timer_ns_ > steady_ns()) return;
  timer_ns_ = again_ns;
  rpc_.add_timer(Deadline::at_ns(again_ns), [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->poke();
  });
}

// Submits one instalment of that priority. False: nothing may be submitted now; *again_ns: when to look again.
bool Pacer::serve(Priority priority, int64_t* again_ns) {
  std::shared_ptr<OpImpl> op;
  uint64_t nbytes = 0;
  {
    std::lock_guard lock(mutex_);
    auto& queue = queues_[static_cast<int>(priority)];
    auto& bucket = buckets_[static_cast<int>(priority)];
    if (queue.empty()) return false;
    auto stopping = std::find_if(queue.begin(), queue.end(), [](auto& w) { return w.op->stopping(); });
    if (stopping != queue.end() || stopped_) {
      auto it = stopping != queue.end() ? stopping : queue.begin();
      op = std::move(it->op);
      queue.erase(it);
    } else {
      int64_t now = steady_ns(), at = bucket.ready_ns(now);
      if (priority == Priority::background) {
        bool alone = foreground_.load(std::memory_order_relaxed) == 0;
        if (!alone) at = std::max(at, queue.front().since_ns + kAgeingNs);
        if (background_in_flight_ >= (alone ? kWindowBytes : kInstalmentBytes)) return false;
      }
      if (at > now) {
        *again_ns = std::min(*again_ns, at);
        return false;
      }
      op = std::move(queue.front().op);
      queue.pop_front();
      nbytes = std::min(instalment(bucket), op->unsubmitted());
      bucket.take(nbytes, now);
      if (priority == Priority::background) background_in_flight_ += nbytes;
    }
  }
  if (nbytes == 0) op->stop({Code::closed, "the engine was closed"});  // unless it is stopping for another reason
  if (nbytes == 0 || !op->submit_instalment(nbytes)) {
    op->all_submitted();
    return true;
  }
  std::lock_guard lock(mutex_);
  queues_[static_cast<int>(priority)].push_back({std::move(op), steady_ns()});
  waiting_ = true;
  return true;
}

void Pacer::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  pump();
  worker_.stop();
}

}  // namespace torch_mooncake::transfer
