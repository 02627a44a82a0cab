#include "rpc/session_impl.h"

#include <fcntl.h>

#include <algorithm>

#include "rpc/socket.h"

namespace torch_mooncake::rpc {

SessionImpl::SessionImpl(std::shared_ptr<Core> core, Setup setup)
    : core_(std::move(core)),
      setup_(std::move(setup)),
      self_(core_->identity()),
      reactor_(core_->reactors[setup_.key.id[0] % core_->reactors.size()]) {}

bool SessionImpl::alive() const {
  if (core_->forked()) return false;
  std::lock_guard lock(mutex_);
  return !ended_;
}

Status SessionImpl::status() const {
  if (core_->forked()) return {Code::forked, "this session belongs to the parent process"};
  std::lock_guard lock(mutex_);
  return status_;
}

bool SessionImpl::same_host() const {
  if (core_->forked()) return false;
  std::lock_guard lock(mutex_);
  return has_unix_lane_ && setup_.peer.host_id == self_.host_id;
}

int SessionImpl::peer_pid() const {
  if (core_->forked()) return 0;
  std::lock_guard lock(mutex_);
  return has_unix_lane_ && setup_.peer.host_id == self_.host_id ? peer_pid_ : 0;
}

std::shared_ptr<const UniqueFd> SessionImpl::peer_process() const {
  if (!same_host()) return nullptr;
  std::lock_guard lock(mutex_);
  return peer_process_;
}

bool SessionImpl::over_unix() const {
  std::lock_guard lock(mutex_);
  return has_unix_lane_;
}

std::shared_ptr<LaneImpl> SessionImpl::control() const {
  std::lock_guard lock(mutex_);
  return control_;
}

std::vector<std::shared_ptr<Lane>> SessionImpl::lanes() const {
  if (core_->forked()) return {};
  std::lock_guard lock(mutex_);
  return {lanes_.begin(), lanes_.end()};
}

Result<std::shared_ptr<LaneImpl>> SessionImpl::add_lane(UniqueFd fd, uint32_t index, int peer_pid) {
  auto self = std::static_pointer_cast<SessionImpl>(shared_from_this());
  std::lock_guard lock(mutex_);
  if (ended_) return status_;
  bool taken = std::any_of(lanes_.begin(), lanes_.end(), [&](auto& lane) { return lane->index() == index; });
  if (taken) return {Code::corrupt, "lane index " + std::to_string(index) + " is taken"};
  if (lanes_.size() >= kMaxLanes) return {Code::busy, "the session has " + std::to_string(kMaxLanes) + " lanes"};
  int socket = fd.get();
  auto lane = std::make_shared<LaneImpl>(core_, self, std::move(fd), index);
  lanes_.push_back(lane);
  if (index == 0) {
    control_ = lane;
    is_numbered_ = !lane->is_unix();
  }
  if (lane->is_unix()) {
    has_unix_lane_ = true;
    peer_pid_ = peer_pid;
    if (!peer_process_)
      if (auto process = open_peer_process(socket, peer_pid); process.valid())
        peer_process_ = std::make_shared<const UniqueFd>(std::move(process));
  }
  return lane;
}

Status SessionImpl::open_lanes(int n, Deadline deadline) {
  TM_TRY(core_->usable());
  if (!setup_.is_initiator) return {Code::unsupported, "only the side that connected opens lanes"};
  while (true) {
    {
      std::lock_guard lock(mutex_);
      if (ended_) return status_;
      // One that is dead, or killed, may still be among them, while its end is being told.
      const auto lives = [](auto& lane) { return lane->alive() && !lane->is_killed(); };
      if (std::count_if(lanes_.begin(), lanes_.end(), lives) >= n) return {};
    }
    TM_TRY(open_lane({}, deadline).status());
  }
}

Result<std::shared_ptr<Lane>> SessionImpl::open_lane(const LaneTarget& wanted, Deadline deadline) {
  TM_TRY(core_->usable());
  if (!setup_.is_initiator) return {Code::unsupported, "only the side that connected opens lanes"};
  if (core_->in_own_thread()) return {Code::internal, "open_lane on one of the endpoint's own threads"};
  LaneTarget target = wanted;
  if (target.address.empty()) target.address = setup_.dialled;
  uint32_t index;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return status_;
    index = next_lane_++;
  }
  TM_ASSIGN(auto dialled, dial_lane(core_, setup_.key, index, target, deadline));
  TM_ASSIGN(auto lane, add_lane(std::move(dialled.fd), index, dialled.peer_pid));
  TM_TRY(lane->start());
  return std::shared_ptr<Lane>(std::move(lane));
}

void SessionImpl::on_lane_dead(LaneImpl& lane, const Status& why) {
  std::vector<std::function<void(Lane&, const Status&)>> callbacks;
  {
    std::lock_guard lock(mutex_);
    callbacks = lane_callbacks_;
  }
  for (auto& fn : callbacks) fn(lane, why);
  {
    std::lock_guard lock(mutex_);
    heard_before_ns_ = std::max(heard_before_ns_, lane.last_heard_ns());
  }
  control_lost(lane, why);
  std::vector<std::function<void(const Status&)>> last;
  std::shared_ptr<LaneImpl> dropped, dropped_control, dropped_next;
  Status status;
  {
    std::lock_guard lock(mutex_);
    auto found = std::find_if(lanes_.begin(), lanes_.end(), [&](auto& l) { return l.get() == &lane; });
    if (found != lanes_.end()) {
      dropped = std::move(*found);
      lanes_.erase(found);
    }
    if (control_.get() == &lane) dropped_control = std::move(control_);         // the session is over,
    if (next_control_.get() == &lane) dropped_next = std::move(next_control_);  // perhaps while control moved
    if (ended_ && lanes_.empty() && !told_) {
      told_ = true;
      last.swap(close_callbacks_);
      lane_callbacks_.clear();
      status = status_;
    } else {
      return;
    }
  }
  for (auto& fn : last) fn(status);
  core_->remove_session(this);
}

void SessionImpl::on_close(std::function<void(const Status&)> fn) {
  Status status;
  {
    std::lock_guard lock(mutex_);
    if (!told_) {
      close_callbacks_.push_back(std::move(fn));
      return;
    }
    status = status_;
  }
  fn(status);
}

void SessionImpl::on_lane_close(std::function<void(Lane&, const Status&)> fn) {
  std::lock_guard lock(mutex_);
  if (!told_) lane_callbacks_.push_back(std::move(fn));
}

void SessionImpl::close(const Status& why) {
  if (core_->forked()) return;
  std::vector<std::shared_ptr<LaneImpl>> lanes;
  std::map<uint64_t, Pending> calls;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = true;
    status_ = why.is_ok() ? Status(Code::closed, "the session was closed") : why;
    lanes = lanes_;
    calls.swap(calls_);
  }
  for (auto& lane : lanes) lane->kill(status_);
  if (calls.empty()) return;
  auto fail = [reason = status_, shared = std::make_shared<std::map<uint64_t, Pending>>(std::move(calls)),
               reactor = reactor_] {
    for (auto& [id, pending] : *shared) {
      if (pending.timer) reactor->cancel_timer(pending.timer);
      pending.done(reason);
      pending.done = nullptr;
    }
  };
  // Never on the closer's thread, which may hold a lock that a callback takes.
  if (!reactor_->post(fail)) fail();
}

void SessionImpl::beat(int64_t now_ns, int64_t period_ns, int64_t limit_ns, bool forgive) {
  std::shared_ptr<LaneImpl> control;
  int64_t heard = 0;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    if (forgive) forgiven_ns_ = now_ns;
    heard = std::max(forgiven_ns_, heard_before_ns_);
    for (auto& lane : lanes_) heard = std::max(heard, lane->last_heard_ns());
    control = control_;
  }
  int64_t silence = now_ns - heard;
  if (silence > limit_ns) {
    Status why{Code::peer_lost,
               setup_.peer.name + " has been silent for " + std::to_string(silence / 1'000'000) + " ms"};
    log::warning("rpc", why.message());
    close(why);
    return;
  }
  // By what was really heard, and on this lane: what is on the wire shows whether its link is cut.
  if (control && now_ns - control->last_heard_ns() > period_ns / 2) {
    FrameHeader ping;
    ping.type = FrameType::ping;
    (void)control->send_control(ping);  // a lane that died tells by itself
  }
  check_control(now_ns, limit_ns);
}

void SessionImpl::set_state(Slot slot, std::shared_ptr<void> state) {
  std::lock_guard lock(mutex_);
  states_[slot].swap(state);
}

std::shared_ptr<void> SessionImpl::state(Slot slot) const {
  std::lock_guard lock(mutex_);
  return states_[slot];
}

}  // namespace torch_mooncake::rpc
