// RdmaEndpoint: making, checking, failing, fencing and remaking of our lanes.
#include <algorithm>
#include <cstring>

#include "common/log.h"
#include "transfer/engine_impl.h"
#include "transfer/rdma/endpoint.h"
#include "transfer/rdma/later.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr int kFirstRetryMs = 100, kLastRetryMs = 500;
constexpr int64_t kAnswerMs = 5000;
constexpr uint32_t kMostGidPairs = 8;  // that are tried in a row

}  // namespace

std::string RdmaLane::rail() const { return nic_->info().name + " -> NIC " + std::to_string(remote_nic_); }

// Each NIC of either side is on at least one rail.
void RdmaEndpoint::make_lanes(uint32_t remote_nics, Later& later) {
  remote_nics_ = remote_nics;
  auto& nics = peer_.engine().nics();
  size_t rails = std::max<size_t>(nics.size(), remote_nics);
  for (size_t i = 0; i < rails; ++i) {
    lanes_.push_back(std::make_shared<RdmaLane>(*this, peer_.weak_from_this(), i, nics[i % nics.size()],
                                                static_cast<uint32_t>(i % remote_nics)));
    lanes_.back()->away_ns_ = steady_ns();
  }
  lane_count_ = rails;
  for (auto& lane : lanes_) connect(lane, later);
}

Status RdmaEndpoint::wait_for_lane(const RdmaMemory& memory, Deadline deadline) {
  for (;;) {
    const uint64_t seen = changed_.count();
    {
      Turn turn(*this);
      if (over_) return peer_.session()->status();
      bool hope = false, any = false;
      Status error(Code::io, "its record names none of the NICs that there are rails to");
      for (auto& lane : lanes_) {
        if (!memory.has(lane->remote_nic_)) continue;
        if (lane->state_ == RdmaLane::State::up || lane->state_ == RdmaLane::State::evicted) return {};
        const bool failed = lane->state_ == RdmaLane::State::down && lane->failures_ > 0;
        if (failed && !std::exchange(any, true)) error = lane->last_error_;
        hope = hope || !failed;
      }
      if (!hope) return error.with("no RDMA rail to " + peer_.name());
    }
    if (deadline.expired()) return {Code::deadline_exceeded, "no RDMA rail to " + peer_.name() + " in time"};
    changed_.wait_past(seen, std::chrono::nanoseconds(std::min<int64_t>(deadline.remaining_ns(), 1'000'000'000)));
  }
}

// The mutex is held; making a queue pair may take the kernel a while, so another thread does.
void RdmaEndpoint::connect(const RdmaLanePtr& lane, Later& later) {
  lane->state_ = RdmaLane::State::connecting;
  lane->connection_ = next_connection_++;
  lane->asked_ = false;
  later.add([this, lane, peer = peer_.shared_from_this()] {
    peer->engine().repair(lane->nic_->index()).post([this, lane, peer] { make_queue_pair(lane); });
  });
}

// connect: u64 connection, u32 NIC of the target, u32 which pair of GIDs, address, u32 GIDs, each. Answer: u32 pairs,
// u32 position of our GID in the list, its own GID, address, u64 where its engine's id is, u32 key of that.
void RdmaEndpoint::make_queue_pair(const RdmaLanePtr& lane) {
  auto made = queue_pair_on(lane->nic_, RdmaLane::kDepth, 0);
  auto gids = lane->nic_->device().gids();
  auto slot = peer_.engine().words().take();
  Status status = made.status();
  if (status && gids.empty())
    status = {Code::io, lane->nic_->info().name + " has no GID: its interface has no address"};
  if (status) status = slot.status();
  if (status && !(*slot)->has(lane->nic_->index())) status = {Code::io, lane->nic_->info().name + " is gone"};
  HeldPairPtr pair;
  if (made) pair = std::make_shared<HeldPair>(lane->nic_, std::move(*made));
  Turn turn(*this);
  if (!status || over_) {
    turn.later().destroy(std::move(pair));
    return not_connected(lane, over_ ? peer_.session()->status() : status, turn);
  }
  if (!lane->landing_) lane->landing_ = std::move(*slot);
  lane->queue_pair_ = std::move(pair);
  lane->asked_ = true;
  auto address = lane->queue_pair_->address();
  lane->nic_->add(address.number, lane);
  ByteWriter request;
  request.put(lane->connection_).put(lane->remote_nic_).put(lane->gid_pair_);
  address.encode(request);
  request.put(static_cast<uint32_t>(gids.size()));
  for (auto& gid : gids) gid.encode(request);
  turn.later().add([this, lane, gids = std::move(gids), peer = peer_.shared_from_this(), connection = lane->connection_,
                    body = request.take()] {
    peer->session()->call(kRdmaConnect, body, Deadline::after_ms(kAnswerMs),
                          [this, lane, gids, peer, connection](Result<rpc::Message> answer) {
                            auto shared = std::make_shared<Result<rpc::Message>>(std::move(answer));
                            auto& repair = peer->engine().repair(lane->nic_->index());
                            repair.post([this, lane, gids, peer, connection, shared] {
                              finish_connect(lane, connection, gids, *shared);
                            });
                          });
  });
}

void RdmaEndpoint::finish_connect(const RdmaLanePtr& lane, uint64_t connection, const std::vector<Gid>& gids,
                                  const Result<rpc::Message>& answer) {
  auto still = [&] { return lane->connection_ == connection && lane->state_ == RdmaLane::State::connecting; };
  Status status = answer.status();
  // That is our own patience, not the deadline of anybody who waits.
  if (status.code() == Code::deadline_exceeded)
    status = {Code::io, peer_.name() + " did not answer connect within " + std::to_string(kAnswerMs / 1000) + " s"};
  QueuePairAddress remote;
  uint64_t identity = 0;
  uint32_t key = 0;
  HeldPairPtr pair;
  Gid our_gid, remote_gid;
  if (status) {
    ByteReader in(answer->body);
    auto pairs = in.get<uint32_t>();
    auto ours = in.get<uint32_t>();
    remote_gid = Gid::decode(in);
    remote = QueuePairAddress::decode(in);
    identity = in.get<uint64_t>();
    key = in.get<uint32_t>();
    if (!in.done() || ours >= gids.size() || pairs == 0) {
      status = {Code::corrupt, peer_.name() + " answered connect with bytes we cannot read"};
    } else {
      our_gid = gids[ours];
      Turn turn(*this);
      if (!still()) return;
      lane->gid_pairs_ = pairs;
      lane->our_gid_ = our_gid;
      lane->remote_gid_ = remote_gid;
      pair = lane->queue_pair_;
    }
  }
  if (pair) status = pair->connect(remote, our_gid, remote_gid);  // may ask the network for a neighbour's address
  Turn turn(*this);
  if (!still()) return;
  if (over_) status = peer_.session()->status();
  if (status) {
    status = lane->post_check(identity, key);
    if (!status) lane->posted_.clear();
  }
  if (!status) return not_connected(lane, status, turn);
  lane->state_ = RdmaLane::State::checking;
  lane->flush_by_ns_ = steady_ns() + RdmaLane::kCheckNs;
  lane->nic_->watch();
}

// What the check has read, or why it could not.
void RdmaEndpoint::checked(const RdmaLanePtr& lane, const Status& outcome, Later& later) {
  if (lane->state_ != RdmaLane::State::checking) return;
  const auto gids = lane->our_gid_.to_string() + " -> " + lane->remote_gid_.to_string();
  if (!outcome)
    return not_connected(
        lane,
        outcome.with("no answer from its NIC (" + gids +
                     "); a firewall (RoCE v2 is UDP port 4791), a switch with a smaller MTU, or another "
                     "network: torch-mooncake doctor"),
        later);
  Id128 found;
  const uint64_t halves[] = {lane->landing_->get(0), lane->landing_->get(1)};
  std::memcpy(found.data(), halves, sizeof halves);
  if (found != peer_.identity().engine)
    return not_connected(lane, {Code::io, "another engine answers there (" + gids + ")"}, later);
  lane->state_ = RdmaLane::State::up;
  lane->was_up_ = true;
  hopeless_ = {};
  lane->failures_ = 0;
  lane->gid_pairs_tried_ = 0;
  lane->waits_for_room_ = false;
  lane->last_error_ = {};
  lane->used_ns_ = steady_ns();
  changed_.notify();
  pump(later);
}

void RdmaEndpoint::not_connected(const RdmaLanePtr& lane, const Status& why, Later& later) {
  lane->state_ = RdmaLane::State::down;
  lane->last_error_ = why;
  lane->posted_.clear();
  later.destroy(lane->release_queue_pair());
  if (over_) return changed_.notify();
  // The peer may have made its end, whatever we have heard of it.
  if (std::exchange(lane->asked_, false)) disconnect(*lane, later);
  lane->waits_for_room_ = why.code() == Code::busy;
  if (lane->waits_for_room_) {  // that others use: nothing is wrong with the addresses, or the rail
    if (ready_.empty()) {
      set_evicted(*lane);
      return changed_.notify();
    }
    reconnect_later(*lane, later);
    return lose_hope(later);
  }
  // Another pair of GIDs may do; then another NIC of the peer's, for a lane that has never reached this one.
  if (++lane->gid_pairs_tried_ < std::min(lane->gid_pairs_, kMostGidPairs)) {
    lane->gid_pair_ = (lane->gid_pair_ + 1) % lane->gid_pairs_;
    return connect(lane, later);
  }
  lane->gid_pairs_tried_ = 0;
  if (++lane->failures_ == 1) log::warning("transfer", peer_.name() + ": " + lane->rail() + ": " + why.to_string());
  if (!lane->was_up_) {
    lane->remote_nic_ = (lane->remote_nic_ + 1) % remote_nics_;
    lane->gid_pair_ = 0;
    lane->gid_pairs_ = 1;
  }
  changed_.notify();
  reconnect_later(*lane, later);
  lose_hope(later);
}

// The peer destroys its end, of which nothing is wanted any more.
void RdmaEndpoint::disconnect(RdmaLane& lane, Later& later) {
  later.add([peer = peer_.shared_from_this(), connection = lane.connection_] {
    peer->session()->call(kRdmaDisconnect, ByteWriter().put(connection).take(), Deadline::never(),
                          [peer](Result<rpc::Message>) {});
  });
}

void RdmaEndpoint::reconnect_later(RdmaLane& lane, Later& later) {
  if (over_) return;
  int delay_ms = std::min(kFirstRetryMs << std::min(lane.failures_, 8), kLastRetryMs);
  std::weak_ptr<PeerImpl> weak = peer_.weak_from_this();
  later.add([this, weak, delay_ms, lane = lane.shared_from_this(), &rpc = peer_.engine().rpc()] {
    rpc.add_timer(Deadline::after_ms(delay_ms), [this, weak, lane] {
      auto peer = weak.lock();
      if (!peer) return;
      Turn turn(*this);
      if (over_ || lane->state_ != RdmaLane::State::down) return;
      if (lane->nic_->up()) return connect(lane, turn);
      ++lane->failures_;
      lane->last_error_ = {Code::io, lane->nic_->info().name + ": its port is down"};
      reconnect_later(*lane, turn);
      lose_hope(turn);
    });
  });
}

void RdmaEndpoint::fail(RdmaLane& lane, const Status& why, Later& later) {
  if (lane.state_ == RdmaLane::State::checking) return checked(lane.shared_from_this(), why, later);
  if (lane.state_ != RdmaLane::State::up) return;
  lane.state_ = RdmaLane::State::failing;
  lane.away_ns_ = steady_ns();
  lane.last_error_ = why;
  lane.flush_by_ns_ = steady_ns() + RdmaLane::kFlushNs;
  if (!over_) {
    peer_.engine().metrics().failover();
    log::warning("transfer", peer_.name() + ": " + lane.rail() + " is taken out: " + why.to_string());
    look_for_hope(later);
  }
  if (lane.posted_.empty()) return flushed(lane, later);
  lane.nic_->watch();
  later.add([pair = lane.queue_pair_, &engine = peer_.engine()] {
    engine.repair(pair->nic()->index()).post([pair] { pair->fail(); });
  });
}

// A NIC that does not flush (it has died) lets go of the memory when the queue pair is destroyed. This thread is the
// NIC's, or that has ended: nobody else handles its completions now.
bool RdmaEndpoint::late(RdmaLane& lane, int64_t now_ns) {
  HeldPairPtr pair;
  {
    Turn turn(*this);
    const bool checking = lane.state_ == RdmaLane::State::checking;
    if (!checking && lane.state_ != RdmaLane::State::failing) return false;
    if (now_ns < lane.flush_by_ns_) return true;
    if (checking) {
      checked(lane.shared_from_this(), {Code::io, lane.nic_->info().name + " completes nothing"}, turn);
      return false;
    }
    pair = lane.release_queue_pair();
  }
  if (pair) pair->destroy();
  Turn turn(*this);
  while (!lane.posted_.empty()) {
    auto posted = lane.pop();
    turn.later().keep(posted.part);
    if (!posted.moves()) continue;
    auto& part = posted.part;
    --part->posted_;
    ++part->unsettled_;
    lane.unsettled_.push_back(posted);
    if (part->stopped_ || part->answered_) end_at_rest(part, turn);
  }
  flushed(lane, turn);
  pump(turn);
  return false;
}

// Nothing of the lane touches our memory any more. The peer destroys its end before anything is posted again.
void RdmaEndpoint::flushed(RdmaLane& lane, Later& later) {
  lane.state_ = RdmaLane::State::fencing;
  changed_.notify();
  if (over_) return settled(lane, later);
  later.add([this, lane = lane.shared_from_this(), peer = peer_.shared_from_this(), connection = lane.connection_] {
    peer->session()->call(kRdmaDisconnect, ByteWriter().put(connection).take(), Deadline::never(),
                          [this, lane, peer, connection](Result<rpc::Message> answer) {
                            if (!answer) return;  // the session is over: session_over() has settled it, or will
                            Turn turn(*this);
                            if (lane->connection_ == connection && lane->state_ == RdmaLane::State::fencing)
                              settled(*lane, turn);
                          });
  });
}

void RdmaEndpoint::settled(RdmaLane& lane, Later& later) {
  lane.state_ = RdmaLane::State::down;
  lane.asked_ = false;
  later.destroy(lane.release_queue_pair());
  for (auto& posted : std::exchange(lane.unsettled_, {})) {
    auto& part = posted.part;
    later.keep(part);
    --part->unsettled_;
    if (part->stopped_) {
      if (!over_ && part->posted_ == 0 && part->unsettled_ == 0) later.add([part] { part->op().quiescent(*part); });
      continue;
    }
    if (part->over_ || part->answered_) continue;
    if (part->notify_id_ != 0) {  // whoever is to be notified may have been: asked below
      part->held_.push_back(posted.slice);
      continue;
    }
    peer_.engine().metrics().resent(1);
    part->again_.push_back(posted.slice);
    make_ready(part);
  }
  // The peer may have destroyed its end before it heard of an immediate, also of one that is done: only the answer to
  // the notification counts. It knows which it has delivered.
  for (auto& [id, part] : notifying_) {
    if (!part->rides_on(lane.connection_)) continue;
    if (part->counting_) {
      recall(part, later);
    } else {
      part->immediate_due_ = true;
      make_ready(part);
    }
  }
  reconnect_later(lane, later);
  pump(later);
}

void RdmaEndpoint::port_down(RdmaLane& lane) {
  Turn turn(*this);
  fail(lane, {Code::io, "its port is down"}, turn);
}

}  // namespace torch_mooncake::transfer::rdma
