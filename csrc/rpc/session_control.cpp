// Control messages of a session over TCP outlive the lane that carries them. They are numbered and kept until the peer
// acknowledges them. When the lane dies and others live, the initiator chooses one and says on it which message it has
// received last; the acceptor, once its own end of the old lane is dead (so that nothing of it is still being handled),
// answers alike; then both send again what the other has not received. Messages are handled once, by their numbers.
//
// A Unix lane, which carries fds and breaks only with its peer, ends the session instead.
#include <algorithm>

#include "rpc/session_impl.h"

namespace torch_mooncake::rpc {
namespace {

constexpr size_t kMaxKeptBytes = 64 << 20;
constexpr size_t kAcknowledgeEvery = 64, kAcknowledgeBytes = 256 << 10;
constexpr size_t kMaxAhead = 1 << 16;  // messages received beyond a gap
constexpr int64_t kLookMs = 500;       // how often an offered lane that has not answered is looked at

bool is_after(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) > 0; }

FrameHeader notice(FrameType type, uint32_t received) {
  FrameHeader header;
  header.type = type;
  header.id = received;
  return header;
}

}  // namespace

Status SessionImpl::send_message(FrameHeader header, std::string body, std::vector<UniqueFd> fds) {
  std::shared_ptr<LaneImpl> lane;
  bool is_kept = false;
  SharedBody shared = share(std::move(body));
  {
    std::lock_guard lock(mutex_);
    if (ended_) return status_;
    if (is_numbered_ && !fds.empty()) return {Code::unsupported, "file descriptors need a Unix socket"};
    if (is_numbered_) {
      if (++last_sent_ == 0) ++last_sent_;
      header.sequence = last_sent_;
      unacknowledged_bytes_ += kHeaderBytes + shared->size();
      unacknowledged_.push_back({header, shared});
      if (unacknowledged_bytes_ > kMaxKeptBytes && !is_moving_) {
        unacknowledged_.clear();
        unacknowledged_bytes_ = 0;
        can_move_ = false;
        dropped_ = last_sent_;
      }
      is_kept = can_move_;
      if (is_moving_) return {};
    }
    if (!control_) return {Code::peer_lost, "the control lane is gone"};
    lane = control_;
  }
  Status sent = lane->send_control(header, std::move(shared), std::move(fds));
  return is_kept ? Status() : sent;
}

bool SessionImpl::accept_message(LaneImpl& lane, const FrameHeader& header) {
  bool is_control, acknowledge = false;
  uint32_t received = 0;
  {
    std::lock_guard lock(mutex_);
    // The peer may use a lane that it has taken a moment before we see that we have.
    is_control = control_.get() == &lane || next_control_.get() == &lane;
    if (is_control && header.sequence != 0) {
      if (!is_after(header.sequence, received_) || received_above_.count(header.sequence)) return false;
      auto next = [&] { return received_ + 1 == 0 ? 1 : received_ + 1; };
      if (header.sequence == next()) {
        received_ = header.sequence;
        while (!received_above_.empty() && received_above_.erase(next()) > 0) received_ = next();
      } else {
        received_above_.insert(header.sequence);
      }
      bytes_since_acknowledged_ += header.body_bytes;
      acknowledge = ++since_acknowledged_ >= kAcknowledgeEvery || bytes_since_acknowledged_ >= kAcknowledgeBytes;
      if (acknowledge) since_acknowledged_ = bytes_since_acknowledged_ = 0;
      received = received_;
      is_control = received_above_.size() <= kMaxAhead;
    }
  }
  if (!is_control) {
    lane.kill({Code::corrupt, "a control message on lane " + std::to_string(lane.index())});
    return false;
  }
  if (acknowledge) (void)lane.send_control(notice(FrameType::acknowledged, received));
  return true;
}

void SessionImpl::forget_acknowledged(uint32_t sequence) {
  while (!unacknowledged_.empty() && !is_after(unacknowledged_.front().header.sequence, sequence)) {
    unacknowledged_bytes_ -= kHeaderBytes + unacknowledged_.front().body->size();
    unacknowledged_.pop_front();
  }
  if (!can_move_ && !is_after(dropped_, sequence)) can_move_ = true;
}

void SessionImpl::control_lost(LaneImpl& lane, const Status& why) {
  std::shared_ptr<LaneImpl> lost, taken;
  bool survives = false;
  uint32_t received = 0;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    bool was_control = control_.get() == &lane, was_next = next_control_.get() == &lane;
    if (!was_control && !is_moving_) return;
    survives = is_numbered_ && can_move_ && std::any_of(lanes_.begin(), lanes_.end(), [&](auto& other) {
                 return other.get() != &lane && other->alive() && !other->is_unix();
               });
    if (survives && was_control) {
      lost = std::move(control_);
      is_moving_ = true;
      moving_since_ns_ = steady_ns();
      moved_why_ = why;
    }
    if (was_next) next_control_ = nullptr;
    if (!setup_.is_initiator) taken = next_control_;
    received = next_received_;
    if (survives && setup_.is_initiator && next_control_) return;  // an offer is out
  }
  if (!survives) return close(why);
  if (setup_.is_initiator) return offer_control();
  if (taken) take_control(taken, received);
}

// Initiator.
void SessionImpl::offer_control() {
  while (true) {
    std::shared_ptr<LaneImpl> lane;
    uint32_t received = 0;
    {
      std::lock_guard lock(mutex_);
      if (ended_ || !is_moving_ || next_control_) return;
      int best = -1;
      for (auto& other : lanes_) {
        if (!other->alive() || other->is_unix() || other->is_killed()) continue;
        // One that the peer's kernel answers on; of those the one last heard.
        int rank = other->progress().timeouts == 0 ? 1 : 0;
        if (rank < best || (rank == best && other->last_heard_ns() < lane->last_heard_ns())) continue;
        best = rank;
        lane = other;
      }
      if (!lane) break;
      next_control_ = lane;
      received = received_;
    }
    if (!lane->send_control(notice(FrameType::control, received))) {
      std::lock_guard lock(mutex_);
      if (next_control_ == lane) next_control_ = nullptr;
      continue;
    }
    return look_at_offered(lane);
  }
  close(moved_why_);
}

// A peer whose process stands still answers late, and its lanes are as good as before: only a lane whose bytes the
// peer's kernel does not take either is given up, and the last one not even then. Whether the peer is lost is for the
// heartbeats to say, and without them for the kernel's own limit of silence.
void SessionImpl::look_at_offered(const std::shared_ptr<LaneImpl>& lane) {
  std::weak_ptr<SessionImpl> weak = std::static_pointer_cast<SessionImpl>(shared_from_this());
  std::weak_ptr<LaneImpl> weak_lane = lane;
  reactor().add_timer(steady_ns() + kLookMs * 1'000'000, [weak, weak_lane] {
    auto self = weak.lock();
    auto offered = weak_lane.lock();
    if (!self || !offered) return;
    bool others;
    {
      std::lock_guard lock(self->mutex_);
      if (self->ended_ || !self->is_moving_ || self->next_control_ != offered) return;
      others = std::any_of(self->lanes_.begin(), self->lanes_.end(), [&](auto& other) {
        return other != offered && other->alive() && !other->is_unix() && !other->is_killed();
      });
    }
    if (!others || offered->progress().timeouts == 0) return self->look_at_offered(offered);
    offered->kill({Code::peer_lost, offered->describe() + " carries nothing"});  // and the next is offered
  });
}

void SessionImpl::on_control_frame(LaneImpl& lane, uint32_t received) {
  std::shared_ptr<LaneImpl> old, self;
  {
    std::lock_guard lock(mutex_);
    if (ended_ || !is_numbered_ || control_.get() == &lane) return;
    auto found = std::find_if(lanes_.begin(), lanes_.end(), [&](auto& l) { return l.get() == &lane; });
    if (found == lanes_.end()) return;
    self = *found;
    if (setup_.is_initiator) {
      if (!is_moving_ || next_control_ != self) return;  // the answer to an offer that was given up
    } else {
      next_control_ = self;
      next_received_ = received;
      old = control_;
    }
  }
  // What the old lane has brought is handled when it is dead, and not before; see control_lost().
  if (old) return old->kill({Code::peer_lost, "the peer has moved control to another lane"});
  take_control(self, received);
}

void SessionImpl::take_control(const std::shared_ptr<LaneImpl>& lane, uint32_t received) {
  uint32_t ours = 0;
  {
    std::lock_guard lock(mutex_);
    if (ended_ || !is_moving_ || next_control_ != lane) return;
    forget_acknowledged(received);
    ours = received_;
  }
  if (!setup_.is_initiator && !lane->send_control(notice(FrameType::control, ours))) return;
  bool moved = false;
  std::string why;
  {
    // In one step, so that whoever sends meanwhile comes behind them, however fast that is.
    std::lock_guard lock(mutex_);
    if (ended_ || next_control_ != lane) return;
    moved = lane->alive();
    for (auto& message : unacknowledged_) {
      if (!is_after(message.header.sequence, received)) continue;
      if (lane->queue_control(message.header, message.body).is_ok()) continue;
      moved = lane->alive();  // killed, and not buried yet: control_lost() comes, and moves it again
      break;
    }
    why = moved_why_.message();
    if (moved) {
      next_control_ = nullptr;
      control_ = lane;
      is_moving_ = false;
    }
  }
  if (!moved) return control_lost(*lane, Status(Code::peer_lost, why));
  lane->send_queued();
  log::warning("rpc", setup_.peer.name + ": control moved to " + lane->describe() + ": " + why);
}

// The control lane is idle most of the time: whether its link is cut shows at the pings.
void SessionImpl::check_control(int64_t now_ns, int64_t limit_ns) {
  std::shared_ptr<LaneImpl> control;
  bool others = false;
  {
    std::lock_guard lock(mutex_);
    if (ended_ || !is_numbered_) return;
    if (is_moving_ && now_ns - std::max(moving_since_ns_, forgiven_ns_) > limit_ns) {
      control = nullptr;
    } else if (!control_ || lanes_.size() < 2) {
      return;
    } else {
      control = control_;
      others = std::any_of(lanes_.begin(), lanes_.end(), [&](auto& lane) {
        return lane != control_ && lane->alive() && lane->rail() != control_->rail() && lane->progress().timeouts == 0;
      });
    }
  }
  if (!control) return close({Code::peer_lost, setup_.peer.name + ": no lane for control: " + moved_why_.message()});
  if (others && control->progress().timeouts > 0)
    control->kill({Code::peer_lost, control->describe() + " carries nothing while other rails do"});
}

}  // namespace torch_mooncake::rpc
