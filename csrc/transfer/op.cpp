#include "transfer/op.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "common/log.h"
#include "transfer/engine_impl.h"
#include "transfer/peer.h"

namespace torch_mooncake::transfer {

// ---- Event

namespace {

constexpr int64_t kSpinNs = 50'000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

uint64_t this_thread() { return std::hash<std::thread::id>{}(std::this_thread::get_id()); }

}  // namespace

void Event::set() {
  if (word_.exchange(kSet, std::memory_order_acq_rel) == kWaiting)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

bool Event::wait(Deadline deadline) {
  if (is_set()) return true;
  for (int64_t until = std::min(steady_ns() + kSpinNs, deadline.ns()); steady_ns() < until;) {
    for (int i = 0; i < 16; ++i) {
      if (is_set()) return true;
      relax();
    }
  }
  while (!is_set()) {
    if (deadline.expired()) return false;
    uint32_t clear = kClear;
    word_.compare_exchange_strong(clear, kWaiting, std::memory_order_acq_rel);
    if (is_set()) return true;
    timespec at{deadline.ns() / 1'000'000'000, deadline.ns() % 1'000'000'000};
    // FUTEX_WAIT_BITSET takes an absolute time of the steady clock.
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_BITSET_PRIVATE, kWaiting,
            deadline.is_never() ? nullptr : &at, nullptr, FUTEX_BITSET_MATCH_ANY);
  }
  return true;
}

// ---- OpImpl

OpImpl::OpImpl(PeerImplPtr peer, Direction direction, std::vector<Slice> slices, OpOptions options)
    : peer_(std::move(peer)),
      direction_(direction),
      slices_(std::move(slices)),
      options_(std::move(options)),
      starter_(this_thread()) {
  for (auto& slice : slices_) nbytes_ += slice.nbytes;
  int64_t budget = options_.deadline.is_never() ? 0 : options_.deadline.remaining_ns();
  grace_ns_ = std::max<int64_t>(budget / 10, 250'000'000);
}

OpImpl::~OpImpl() = default;

OpState OpImpl::state() const { return state_.load(std::memory_order_acquire); }

Status OpImpl::status() const {
  if (!ended() || state() == OpState::done) return {};
  std::lock_guard lock(mutex_);
  return failure_;
}

std::string OpImpl::transport() const {
  std::lock_guard lock(mutex_);
  return transport_;
}

Status OpImpl::start() {
  for (auto& slice : slices_) {
    auto* region = static_cast<RegionImpl*>(slice.local.get());
    if (used_.empty() || used_.back() != region) used_.push_back(region);
  }
  std::sort(used_.begin(), used_.end());
  used_.erase(std::unique(used_.begin(), used_.end()), used_.end());
  for (size_t i = 0; i < used_.size(); ++i) {
    if (used_[i]->usage().acquire(peer_->name())) continue;
    for (size_t taken = 0; taken < i; ++taken) used_[taken]->usage().release(peer_->name());
    return {Code::closed, used_[i]->name() + " was deregistered"};
  }
  auto endpoint_of = [this](const Slice& slice) {
    return static_cast<RemoteRegionImpl*>(slice.remote.get())->path(direction_).endpoint;
  };
  auto differs = [&](const Slice& a, const Slice& b) { return endpoint_of(a) != endpoint_of(b); };
  if (std::adjacent_find(slices_.begin(), slices_.end(), differs) != slices_.end()) {
    one_group_ = false;
    std::stable_sort(slices_.begin(), slices_.end(),
                     [&](const Slice& a, const Slice& b) { return std::less<>{}(endpoint_of(a), endpoint_of(b)); });
  }
  auto self = shared_from_this();
  peer_->track(this, true);
  auto slices = std::span<const Slice>(slices_);
  while (!slices.empty()) {
    auto* endpoint = endpoint_of(slices.front());
    auto end = std::find_if(slices.begin(), slices.end(), [&](auto& s) { return endpoint_of(s) != endpoint; });
    auto group = slices.first(end - slices.begin());
    {
      std::lock_guard lock(mutex_);
      transport_ += (transport_.empty() ? "" : "+") + endpoint->name();
    }
    endpoint->submit(self, group);
    slices = slices.subspan(group.size());
  }
  part_done(nullptr, {});
  if (!ended() && !options_.deadline.is_never()) {
    uint64_t timer = peer_->engine().rpc().add_timer(options_.deadline, [weak = weak_from_this()] {
      if (auto op = weak.lock()) op->stop({Code::deadline_exceeded, "its deadline passed"});
    });
    std::lock_guard lock(mutex_);
    timer_ = timer;
  }
  return {};
}

void OpImpl::add(PartPtr part) {
  Status why;
  {
    std::lock_guard lock(mutex_);
    ++parts_left_;
    parts_.push_back(part);
    if (!stopping_) return;
    why = failure_;
  }
  part->stop(why);
}

std::string OpImpl::take_notify() {
  std::lock_guard lock(mutex_);
  // The part that asks is the only one so far; a group of its own makes it the last as well.
  if (!one_group_ || parts_.size() > 1) return {};
  return std::exchange(options_.notify, {});
}

void OpImpl::part_done(const PartPtr& part, const Status& status) {
  if (!status.is_ok()) stop(status);
  {
    std::lock_guard lock(mutex_);
    if (part) {
      auto it = std::find(parts_.begin(), parts_.end(), part);
      if (it == parts_.end()) return;
      parts_.erase(it);
    }
    if (--parts_left_ > 0) return;
    if (!failure_.is_ok() || options_.notify.empty()) {
      ending_ = true;
    } else {
      notifying_ = true;
    }
  }
  finish_parts();
}

void OpImpl::finish_parts() {
  if (!notifying_) return end(failure_);
  peer_->notify(options_.notify, [self = shared_from_this()](const Status& status) {
    {
      std::lock_guard lock(self->mutex_);
      if (self->ending_) return;
      self->ending_ = true;
      if (!status.is_ok() && self->failure_.is_ok()) self->failure_ = status;
    }
    self->end(self->failure_);
  });
}

void OpImpl::stop(const Status& why) {
  std::vector<PartPtr> parts;
  bool end_now = false;
  {
    std::lock_guard lock(mutex_);
    if (ending_ || stopping_) return;
    failure_ = why;
    stopping_.store(true, std::memory_order_release);
    parts = parts_;
    if (notifying_) end_now = ending_ = true;  // all bytes are there; whether the notification is, nobody knows
  }
  if (end_now) return end(why);
  for (auto& part : parts) part->stop(why);
}

Status OpImpl::stop_reason() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void OpImpl::cancel() {
  auto engine = peer_->lock_engine();
  if (engine) stop({Code::cancelled, "cancelled by its owner"});
}

// Everything of this op is at rest: publish the outcome, let go of the memory.
void OpImpl::end(const Status& status) {
  for (auto* region : used_) region->usage().release(peer_->name());
  auto state = status.is_ok()                             ? OpState::done
               : status.code() == Code::deadline_exceeded ? OpState::timeout
               : status.code() == Code::cancelled         ? OpState::cancelled
                                                          : OpState::failed;
  Status final = status.is_ok() ? status : status.with(describe());
  uint64_t timer;
  {
    std::lock_guard lock(mutex_);
    failure_ = final;
    timer = std::exchange(timer_, 0);
    if (state == OpState::done || direction_ == Direction::read) remote_quiescent_ = true;
  }
  auto& engine = peer_->engine();
  if (timer) engine.rpc().cancel_timer(timer);
  engine.count_op(state != OpState::done);
  peer_->track(this, false);
  struct Rest {
    std::vector<Slice> slices;
    std::shared_ptr<void> keep;
    std::function<void(const Status&)> on_end;
    Status status;
  };
  auto rest = std::make_shared<Rest>(
      Rest{std::move(slices_), std::move(options_.keep), std::move(options_.on_end), std::move(final)});
  auto callbacks = engine.callbacks();  // from here on the engine may go
  bool on_caller = this_thread() == starter_ && !rest->on_end;
  state_.store(state, std::memory_order_release);
  if (!on_caller) {
    callbacks->post([rest = std::move(rest)] {
      if (rest->on_end) rest->on_end(rest->status);
    });
  }
  ended_.set();
}

Status OpImpl::wait(Deadline deadline) {
  if (!ended()) {
    std::vector<PartPtr> parts;
    {
      std::lock_guard lock(mutex_);
      parts = parts_;
    }
    for (auto& part : parts) part->help();
  }
  if (!ended_.wait(deadline))
    return {Code::deadline_exceeded, describe() + ": not over yet when the wait's deadline passed"};
  return status();
}

std::string OpImpl::describe() const {
  return (direction_ == Direction::read ? "read of " : "write of ") + std::to_string(nbytes_) +
         (direction_ == Direction::read ? " bytes from " : " bytes to ") + peer_->name() + " (" +
         std::to_string(bytes_done()) + " done)";
}

}  // namespace torch_mooncake::transfer
