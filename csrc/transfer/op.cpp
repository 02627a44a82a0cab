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
#include "transfer/wire.h"

namespace torch_mooncake::transfer {

// ---- Event

namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Drops empty extents, joins those that are adjacent on both sides, drops batches that are left without any (but one).
// Returns the bytes.
uint64_t tidy(std::vector<Batch>& batches) {
  uint64_t nbytes = 0;
  for (auto& batch : batches) {
    auto& extents = batch.extents;
    size_t kept = 0;
    for (auto& e : extents) {
      if (e.nbytes == 0) continue;
      nbytes += e.nbytes;
      if (kept > 0) {
        auto& last = extents[kept - 1];
        if (last.local_offset + last.nbytes == e.local_offset && last.remote_offset + last.nbytes == e.remote_offset) {
          last.nbytes += e.nbytes;
          continue;
        }
      }
      extents[kept++] = e;
    }
    extents.resize(kept);
  }
  auto first_empty = std::stable_partition(batches.begin(), batches.end(), [](auto& b) { return !b.extents.empty(); });
  if (first_empty == batches.begin() && first_empty != batches.end()) ++first_empty;
  batches.erase(first_empty, batches.end());
  return nbytes;
}

uint64_t this_thread() { return std::hash<std::thread::id>{}(std::this_thread::get_id()); }

}  // namespace

void Event::set() {
  if (word_.exchange(kSet, std::memory_order_acq_rel) == kWaiting)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

bool Event::wait(Deadline deadline, int64_t spin_until_ns) {
  if (is_set()) return true;
  for (int64_t until = std::min(spin_until_ns, deadline.ns()); steady_ns() < until;) {
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

OpImpl::OpImpl(PeerImplPtr peer, Direction direction, std::vector<Batch> batches, OpOptions options)
    : peer_(std::move(peer)),
      direction_(direction),
      batches_(std::move(batches)),
      options_(std::move(options)),
      starter_(this_thread()) {
  nbytes_ = tidy(batches_);
  int64_t budget = options_.deadline.is_never() ? 0 : std::max<int64_t>(0, options_.deadline.ns() - began_ns_);
  grace_ns_ = std::max<int64_t>(budget / 10, 250'000'000);
}

OpImpl::~OpImpl() = default;

OpState state_of(const Status& outcome) {
  switch (outcome.code()) {
    case Code::ok:
      return OpState::done;
    case Code::deadline_exceeded:
      return OpState::timeout;
    case Code::cancelled:
      return OpState::cancelled;
    default:
      return OpState::failed;
  }
}

std::string OpImpl::peers() const { return peer_->identity().name; }

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

Status OpImpl::acquire_regions() {
  for (auto& batch : batches_) used_.push_back(static_cast<RegionImpl*>(batch.local.get()));
  std::sort(used_.begin(), used_.end());
  used_.erase(std::unique(used_.begin(), used_.end()), used_.end());
  for (size_t i = 0; i < used_.size(); ++i) {
    if (inner_) used_[i]->usage().acquire_always(peer_->name());  // the outer op has leave
    if (inner_ || used_[i]->usage().acquire(peer_->name())) continue;
    for (size_t taken = 0; taken < i; ++taken) used_[taken]->usage().release(peer_->name());
    Status status(Code::closed, used_[i]->name() + " was deregistered");
    used_.clear();
    return status;
  }
  return {};
}

Status OpImpl::start() {
  TM_TRY(acquire_regions());
  peer_->track(this, true);
  if (inner_) {  // the outer op is counted and paced
    sort_by_path();
    submit(batches_);
    part_done(nullptr, {});
    return {};
  }
  pace();
  if (!ended()) arm_timer();
  return {};
}

Status OpImpl::begin() {
  TM_TRY(acquire_regions());
  peer_->track(this, true);
  {
    std::lock_guard lock(mutex_);
    waiting_ = true;
  }
  arm_timer();
  return {};
}

void OpImpl::launch() {
  {
    std::lock_guard lock(mutex_);
    if (!std::exchange(waiting_, false)) return;
  }
  pace();
}

void OpImpl::pace() {
  peer_->engine().metrics().op_began();
  sort_by_path();
  begun_ = true;
  auto& pacer = peer_->engine().pacer();
  if (pacer.begin(options_.priority, nbytes_)) {
    submit(batches_);
    part_done(nullptr, {});
  } else {
    unsubmitted_ = nbytes_;
    pacer.enqueue(shared_from_this());
  }
}

void OpImpl::arm_timer() {
  if (options_.deadline.is_never()) return;
  uint64_t timer = peer_->engine().rpc().add_timer(options_.deadline, [weak = weak_from_this()] {
    if (auto op = weak.lock()) op->stop({Code::deadline_exceeded, "its deadline passed"});
  });
  std::lock_guard lock(mutex_);
  timer_ = timer;
}

TransportEndpoint* OpImpl::endpoint_of(const Batch& batch) const {
  return static_cast<RemoteRegionImpl&>(*batch.remote)
      .path(direction_, static_cast<RegionImpl&>(*batch.local).local_kind())
      .endpoint;
}

void OpImpl::sort_by_path() {
  auto before = [&](const Batch& a, const Batch& b) { return std::less<>{}(endpoint_of(a), endpoint_of(b)); };
  if (!std::is_sorted(batches_.begin(), batches_.end(), before))
    std::stable_sort(batches_.begin(), batches_.end(), before);
}

// One submit() for each path; a list too long for one message is cut.
void OpImpl::submit(std::span<const Batch> rest) {
  while (!rest.empty()) {
    auto* endpoint = endpoint_of(rest.front());
    size_t count = 0, extents = 0;
    while (count < rest.size() && endpoint_of(rest[count]) == endpoint &&
           extents + rest[count].extents.size() <= kMaxPieces)
      extents += rest[count++].extents.size();
    if (count < rest.size()) one_submit_ = false;
    if (count > 0) {
      submit_to(*endpoint, rest.first(count));
      rest = rest.subspan(count);
      continue;
    }
    auto& all = rest.front().extents;  // one batch that is too long alone
    for (size_t at = 0; at < all.size(); at += kMaxPieces) {
      auto end = all.begin() + std::min(all.size(), at + kMaxPieces);
      Batch some{rest.front().local, rest.front().remote, {all.begin() + at, end}};
      submit_to(*endpoint, {&some, 1});
    }
    rest = rest.subspan(1);
  }
}

void OpImpl::submit_to(TransportEndpoint& endpoint, std::span<const Batch> batches) {
  if (auto name = endpoint.name(); name != last_transport_) {
    std::lock_guard lock(mutex_);
    last_transport_ = std::move(name);
    if (transport_.find(last_transport_) == std::string::npos)
      transport_ += (transport_.empty() ? "" : "+") + last_transport_;
  }
  endpoint.submit(shared_from_this(), batches);
}

// ---- In instalments, by the pacer

// The next `nbytes` of the list.
std::vector<Batch> OpImpl::cut(uint64_t nbytes) {
  std::vector<Batch> out;
  while (nbytes > 0) {
    auto& batch = batches_[next_batch_];
    Batch some{batch.local, batch.remote, {}};
    for (; nbytes > 0 && next_extent_ < batch.extents.size();) {
      auto& e = batch.extents[next_extent_];
      uint64_t n = std::min(nbytes, e.nbytes - next_byte_);
      some.extents.push_back({e.local_offset + next_byte_, e.remote_offset + next_byte_, n});
      nbytes -= n;
      next_byte_ += n;
      if (next_byte_ < e.nbytes) break;
      next_byte_ = 0;
      ++next_extent_;
    }
    if (next_extent_ == batch.extents.size()) {
      ++next_batch_;
      next_extent_ = 0;
    }
    out.push_back(std::move(some));
  }
  return out;
}

bool OpImpl::submit_instalment(uint64_t nbytes) {
  unsubmitted_ -= nbytes;
  bool more = unsubmitted_ > 0;
  auto some = cut(nbytes);
  uint32_t id;
  {
    std::lock_guard lock(mutex_);
    id = ++last_instalment_;
    instalments_.push_back({id, nbytes, 1});
    if (more) one_submit_ = false;
  }
  submit(some);
  uint64_t over;
  {
    std::lock_guard lock(mutex_);
    over = leave_instalment(id);
  }
  if (over) peer_->engine().pacer().instalment_over(options_.priority, over);
  return more && !stopping();
}

uint64_t OpImpl::leave_instalment(uint32_t id) {
  auto it = std::find_if(instalments_.begin(), instalments_.end(), [&](auto& i) { return i.id == id; });
  if (it == instalments_.end() || --it->parts > 0) return 0;
  uint64_t nbytes = it->nbytes;
  instalments_.erase(it);
  return nbytes;
}

// ---- Parts

void OpImpl::add(PartPtr part) {
  Status why;
  {
    std::lock_guard lock(mutex_);
    ++parts_left_;
    parts_.push_back({part, last_instalment_});
    restless_.push_back(part.get());
    if (!instalments_.empty() && instalments_.back().id == last_instalment_) ++instalments_.back().parts;
    if (!stopping_) return;
    why = failure_;
  }
  part->stop(why);
}

std::string OpImpl::take_notify() {
  std::lock_guard lock(mutex_);
  // The part that asks is the only one so far; a submit of its own makes it the last as well.
  if (!one_submit_ || parts_.size() > 1) return {};
  return std::exchange(options_.notify, {});
}

void OpImpl::give_back_notify(std::string text) {
  std::lock_guard lock(mutex_);
  options_.notify = std::move(text);
}

void OpImpl::moves_to(const std::string& from, const std::string& to, bool all) {
  std::lock_guard lock(mutex_);
  if (all && transport_ == from && one_submit_) {
    transport_ = to;
  } else if (transport_.find(to) == std::string::npos) {
    transport_ += "+" + to;
  }
}

void OpImpl::part_done(const PartPtr& part, const Status& status) {
  if (!status.is_ok()) stop(status);
  uint64_t over = 0;
  bool last;
  {
    std::lock_guard lock(mutex_);
    if (part) {
      auto it = std::find_if(parts_.begin(), parts_.end(), [&](auto& live) { return live.part == part; });
      if (it == parts_.end()) return;
      over = leave_instalment(it->instalment);
      parts_.erase(it);
      if (status.is_ok()) std::erase(restless_, part.get());
    }
    last = --parts_left_ == 0;
    if (last && (!failure_.is_ok() || options_.notify.empty()))
      ending_ = true;
    else if (last)
      notifying_ = true;
  }
  if (over) peer_->engine().pacer().instalment_over(options_.priority, over);
  if (last) finish_parts();
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
  std::vector<LivePart> parts;
  bool end_now = false, never_launched = false;
  {
    std::lock_guard lock(mutex_);
    if (ending_ || stopping_) return;
    failure_ = why;
    never_launched = std::exchange(waiting_, false);
    stopping_.store(true, std::memory_order_release);
    parts = parts_;
    if (notifying_) end_now = ending_ = true;  // all bytes are there; whether the notification is, nobody knows
  }
  if (end_now) return end(why);
  for (auto& live : parts) live.part->stop(why);
  if (unsubmitted_ > 0) peer_->engine().pacer().stopped();
  if (never_launched) part_done(nullptr, {});
}

Status OpImpl::stop_reason() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void OpImpl::quiescent(const Part& part) {
  std::function<void()> tell;
  {
    std::lock_guard lock(mutex_);
    std::erase(restless_, &part);
    if (!is_over_ || !restless_.empty()) return;
    remote_quiescent_.store(true, std::memory_order_release);
    tell = std::exchange(when_quiescent_, nullptr);
  }
  if (tell) tell();
}

void OpImpl::when_quiescent(std::function<void()> fn) {
  {
    std::lock_guard lock(mutex_);
    if (!remote_quiescent_) {
      when_quiescent_ = std::move(fn);
      return;
    }
  }
  fn();
}

void OpImpl::cancel() {
  auto engine = peer_->lock_engine();
  if (engine) stop({Code::cancelled, "cancelled by its owner"});
}

// Everything of this op is at rest: publish the outcome, let go of the memory.
void OpImpl::end(const Status& status) {
  for (auto* region : used_) region->usage().release(peer_->name());
  auto state = state_of(status);
  Status final = status.is_ok() || inner_ ? status : status.with(describe());
  uint64_t timer;
  std::function<void()> tell_quiescent;
  {
    std::lock_guard lock(mutex_);
    failure_ = final;
    timer = std::exchange(timer_, 0);
    is_over_ = true;
    if (restless_.empty() || direction_ == Direction::read) {
      remote_quiescent_.store(true, std::memory_order_release);
      tell_quiescent = std::exchange(when_quiescent_, nullptr);
    }
  }
  if (tell_quiescent) tell_quiescent();
  auto& engine = peer_->engine();
  if (timer) engine.rpc().cancel_timer(timer);
  if (begun_) {
    engine.metrics().op_ended(direction_ == Direction::write, transport_, nbytes_, steady_ns() - began_ns_, state);
    engine.pacer().over(options_.priority);
  }
  peer_->track(this, false);
  struct Rest {
    std::vector<Batch> batches;
    std::shared_ptr<void> keep;
    std::function<void(const Status&)> on_end;
    Status status;
  };
  auto rest = std::make_shared<Rest>(
      Rest{std::move(batches_), std::move(options_.keep), std::move(options_.on_end), std::move(final)});
  auto callbacks = engine.callbacks();                                 // from here on the engine may go
  bool here = inner_ || (this_thread() == starter_ && !rest->on_end);  // an inner op's regions have other holders
  auto inner = std::move(inner_);
  if (at_end_) std::exchange(at_end_, nullptr)();
  std::vector<Watchers::Entry> watchers;
  {
    std::lock_guard lock(mutex_);
    state_.store(state, std::memory_order_release);
    watchers = watchers_.take();
  }
  if (!here) {
    callbacks->post([rest = std::move(rest)] {
      if (rest->on_end) rest->on_end(rest->status);
    });
  }
  ended_.set();
  for (auto& watcher : watchers) watcher.tell();
  if (inner) inner(rest->status);
}

void OpImpl::refuse(const Status& why) {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(ending_, true)) return;
  }
  end(why);
}

bool OpImpl::watch(std::shared_ptr<OpWatcher> watcher, uint64_t tag) {
  std::lock_guard lock(mutex_);
  if (ended()) return false;
  watchers_.add(std::move(watcher), tag);
  return true;
}

void OpImpl::help(Deadline deadline, int64_t spin_until_ns) {
  if (ended() || deadline.expired()) return;
  std::vector<LivePart> parts;
  {
    std::lock_guard lock(mutex_);
    parts = parts_;
  }
  for (auto& live : parts) live.part->help(deadline, spin_until_ns);
}

Status OpImpl::wait(Deadline deadline) {
  int64_t spin_until_ns = Event::spin_end_ns();
  help(deadline, spin_until_ns);
  if (!ended_.wait(deadline, spin_until_ns))
    return {Code::deadline_exceeded, describe() + ": not over yet when the wait's deadline passed"};
  return status();
}

std::string OpImpl::describe() const {
  return (direction_ == Direction::read ? "read of " : "write of ") + std::to_string(nbytes_) +
         (direction_ == Direction::read ? " bytes from " : " bytes to ") + peer_->name() + " (" +
         std::to_string(bytes_done()) + " done)";
}

}  // namespace torch_mooncake::transfer
