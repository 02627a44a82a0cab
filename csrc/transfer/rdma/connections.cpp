// RdmaEndpoint: making, failing, fencing and remaking of lanes; the peer's pairs; notifications.
#include <algorithm>
#include <cstring>

#include "common/log.h"
#include "transfer/engine_impl.h"
#include "transfer/rdma/endpoint.h"
#include "transfer/rdma/later.h"
#include "transfer/rdma/passive_pair.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr int kFirstRetryMs = 100, kLastRetryMs = 500;
constexpr int64_t kAnswerMs = 5000;
constexpr uint32_t kMostGids = 256;
constexpr uint32_t kMostGidPairs = 8;  // that are tried in a row

std::string no_gids_in_common(const std::string& nic, std::span<const Gid> ours, std::span<const Gid> theirs) {
  auto list = [](std::span<const Gid> gids) {
    std::string out;
    for (auto& gid : gids) out += (out.empty() ? "" : ", ") + gid.to_string();
    return out.empty() ? "none" : out;
  };
  return nic + ": no two GIDs of one kind; here " + list(ours) + "; there " + list(theirs);
}

}  // namespace

std::string RdmaLane::rail() const { return nic_->info().name + " -> NIC " + std::to_string(remote_nic_); }

// ---- Our lanes

// Each NIC of either side is on at least one rail.
void RdmaEndpoint::make_lanes(uint32_t remote_nics, Later& later) {
  remote_nics_ = remote_nics;
  up_ns_ = steady_ns();
  auto& nics = peer_.engine().nics();
  size_t rails = std::max<size_t>(nics.size(), remote_nics);
  for (size_t i = 0; i < rails; ++i)
    lanes_.push_back(std::make_shared<RdmaLane>(*this, peer_.weak_from_this(), nics[i % nics.size()],
                                                static_cast<uint32_t>(i % remote_nics)));
  for (auto& lane : lanes_) connect(lane, later);
}

Status RdmaEndpoint::wait_for_lane(std::unique_lock<std::mutex>& lock, Deadline deadline) {
  for (;;) {
    if (over_) return peer_.session()->status();
    bool hope = false;
    Status error;
    for (auto& lane : lanes_) {
      if (lane->state_ == RdmaLane::State::up || lane->state_ == RdmaLane::State::evicted) return {};
      if (lane->state_ == RdmaLane::State::down && lane->failures_ > 0)
        error = lane->last_error_;
      else
        hope = true;
    }
    if (!hope) return error.with("no RDMA rail to " + peer_.name());
    if (deadline.expired()) return {Code::deadline_exceeded, "no RDMA rail to " + peer_.name() + " in time"};
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(deadline.remaining_ns(), 1'000'000'000)));
  }
}

// The mutex is held; making a queue pair may take the kernel a while, so another thread does.
void RdmaEndpoint::connect(const RdmaLanePtr& lane, Later& later) {
  lane->state_ = RdmaLane::State::connecting;
  lane->connection_ = next_connection_++;
  later.add([this, lane, peer = peer_.shared_from_this()] {
    peer->engine().repair().post([this, lane, peer] { make_queue_pair(lane); });
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
  Later later;
  std::lock_guard lock(mutex_);
  if (!status || over_) {
    if (made) later.destroy(lane->nic_, std::move(*made));
    return not_connected(lane, over_ ? peer_.session()->status() : status, later);
  }
  if (!lane->landing_) lane->landing_ = std::move(*slot);
  lane->queue_pair_ = std::move(*made);
  auto address = lane->queue_pair_->address();
  lane->nic_->add(address.number, lane);
  ByteWriter request;
  request.put(lane->connection_).put(lane->remote_nic_).put(lane->gid_pair_);
  address.encode(request);
  request.put(static_cast<uint32_t>(gids.size()));
  for (auto& gid : gids) gid.encode(request);
  later.add([this, lane, gids = std::move(gids), peer = peer_.shared_from_this(), connection = lane->connection_,
             body = request.take()] {
    peer->session()->call(kRdmaConnect, body, Deadline::after_ms(kAnswerMs),
                          [this, lane, gids, peer, connection](Result<rpc::Message> answer) {
                            auto shared = std::make_shared<Result<rpc::Message>>(std::move(answer));
                            peer->engine().repair().post([this, lane, gids, peer, connection, shared] {
                              finish_connect(lane, connection, gids, std::move(*shared));
                            });
                          });
  });
}

void RdmaEndpoint::finish_connect(const RdmaLanePtr& lane, uint64_t connection, const std::vector<Gid>& gids,
                                  Result<rpc::Message> answer) {
  Later later;
  std::lock_guard lock(mutex_);
  if (lane->connection_ != connection || lane->state_ != RdmaLane::State::connecting) return;
  Status status = over_ ? peer_.session()->status() : answer.status();
  if (status) {
    ByteReader in(answer->body);
    auto pairs = in.get<uint32_t>();
    auto ours = in.get<uint32_t>();
    auto theirs = Gid::decode(in);
    auto remote = QueuePairAddress::decode(in);
    auto identity = in.get<uint64_t>();
    auto key = in.get<uint32_t>();
    if (!in.done() || ours >= gids.size() || pairs == 0) {
      status = {Code::corrupt, peer_.name() + " answered connect with bytes we cannot read"};
    } else {
      lane->gid_pairs_ = pairs;
      lane->our_gid_ = gids[ours];
      lane->remote_gid_ = theirs;
      status = lane->queue_pair_->connect(remote, gids[ours], theirs);
      if (status) status = lane->post_check(identity, key);
      if (!status) lane->posted_.clear();
    }
  }
  if (!status) return not_connected(lane, status, later);
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
  lane->last_error_ = {};
  lane->used_ns_ = steady_ns();
  changed_.notify_all();
  pump(later);
}

void RdmaEndpoint::not_connected(const RdmaLanePtr& lane, const Status& why, Later& later) {
  const bool made_there = lane->state_ == RdmaLane::State::checking;
  lane->state_ = RdmaLane::State::down;
  lane->last_error_ = why;
  lane->posted_.clear();
  later.destroy(lane->nic_, lane->release_queue_pair());
  if (over_) return changed_.notify_all();
  if (made_there) disconnect(*lane, later);
  if (why.code() == Code::busy && ready_.empty()) {  // others use the room, and there is nothing to carry
    lane->state_ = RdmaLane::State::evicted;
    return changed_.notify_all();
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
  changed_.notify_all();
  reconnect_later(*lane, later);
  lose_hope(why, later);
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
      Later soon;
      std::lock_guard lock(mutex_);
      if (over_ || lane->state_ != RdmaLane::State::down) return;
      if (lane->nic_->up()) return connect(lane, soon);
      ++lane->failures_;
      reconnect_later(*lane, soon);
      lose_hope({Code::io, lane->nic_->info().name + ": its port is down"}, soon);
    });
  });
}

void RdmaEndpoint::fail(RdmaLane& lane, const Status& why, Later& later) {
  if (lane.state_ == RdmaLane::State::checking) return checked(lane.shared_from_this(), why, later);
  if (lane.state_ != RdmaLane::State::up) return;
  lane.state_ = RdmaLane::State::failing;
  up_ns_ = steady_ns();
  lane.last_error_ = why;
  lane.flush_by_ns_ = steady_ns() + RdmaLane::kFlushNs;
  lane.queue_pair_->fail();
  if (!over_) {
    peer_.engine().metrics().failover();
    log::warning("transfer", peer_.name() + ": " + lane.rail() + " is taken out: " + why.to_string());
  }
  if (lane.posted_.empty()) return flushed(lane, later);
  lane.nic_->watch();
}

// A NIC that does not flush (it has died) lets go of the memory when the queue pair is destroyed. This thread is the
// NIC's, so nobody else handles its completions now.
bool RdmaEndpoint::late(RdmaLane& lane, int64_t now_ns) {
  std::unique_ptr<QueuePair> pair;
  {
    Later later;
    std::lock_guard lock(mutex_);
    const bool checking = lane.state_ == RdmaLane::State::checking;
    if (!checking && lane.state_ != RdmaLane::State::failing) return false;
    if (now_ns < lane.flush_by_ns_) return true;
    if (checking) {
      checked(lane.shared_from_this(), {Code::io, lane.nic_->info().name + " completes nothing"}, later);
      return false;
    }
    pair = lane.release_queue_pair();
  }
  pair.reset();
  Later later;
  std::lock_guard lock(mutex_);
  while (!lane.posted_.empty()) {
    auto posted = lane.pop();
    auto part = posted.part;
    --part->posted_;
    ++part->unsettled_;
    lane.unsettled_.push_back(std::move(posted));
    if (part->stopped_ && part->posted_ == 0) end(part, later);
  }
  flushed(lane, later);
  return false;
}

// Nothing of the lane touches our memory any more. The peer destroys its end before anything is posted again.
void RdmaEndpoint::flushed(RdmaLane& lane, Later& later) {
  lane.state_ = RdmaLane::State::fencing;
  if (over_) return settled(lane, later);
  later.add([this, lane = lane.shared_from_this(), peer = peer_.shared_from_this(), connection = lane.connection_] {
    peer->session()->call(kRdmaDisconnect, ByteWriter().put(connection).take(), Deadline::never(),
                          [this, lane, peer, connection](Result<rpc::Message> answer) {
                            if (!answer) return;  // the session is over: session_over() has settled it, or will
                            Later soon;
                            std::lock_guard lock(mutex_);
                            if (lane->connection_ == connection && lane->state_ == RdmaLane::State::fencing)
                              settled(*lane, soon);
                          });
  });
}

void RdmaEndpoint::settled(RdmaLane& lane, Later& later) {
  lane.state_ = RdmaLane::State::down;
  later.destroy(lane.nic_, lane.release_queue_pair());
  for (auto& posted : std::exchange(lane.unsettled_, {})) {
    auto& part = posted.part;
    --part->unsettled_;
    if (part->stopped_) {
      if (!over_ && part->posted_ == 0 && part->unsettled_ == 0) part->op().quiescent(*part);
      continue;
    }
    if (posted.slice == RdmaPart::kImmediate || part->over_) continue;
    peer_.engine().metrics().resent(1);
    part->again_.push_back(posted.slice);
    make_ready(part);
  }
  // The peer may have destroyed its end before it heard of an immediate, also of one that is done: only the answer to
  // the notification counts. It knows which it has delivered.
  for (auto& part : notifying_) {
    if (part->immediate_on_ != lane.connection_) continue;
    part->immediate_due_ = true;
    make_ready(part);
  }
  reconnect_later(lane, later);
  pump(later);
}

void RdmaEndpoint::port_down(RdmaLane& lane) {
  Later later;
  std::lock_guard lock(mutex_);
  fail(lane, {Code::io, "its port is down"}, later);
}

// ---- The peer's lanes

void RdmaEndpoint::on_connect(rpc::Message message, rpc::Responder responder) {
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  peer_.engine().repair().post([this, peer = peer_.shared_from_this(), body = std::move(message.body), shared] {
    Later later;
    auto made = accept(body, later);
    made ? shared->ok(std::move(*made)) : shared->fail(made.status());
  });
}

Result<std::string> RdmaEndpoint::accept(std::string_view body, Later& later) {
  ByteReader in(body);
  auto connection = in.get<uint64_t>();
  auto index = in.get<uint32_t>();
  auto which = in.get<uint32_t>();
  auto remote = QueuePairAddress::decode(in);
  std::vector<Gid> theirs(std::min(in.get_count(17), kMostGids));
  for (auto& gid : theirs) gid = Gid::decode(in);
  auto& engine = peer_.engine();
  if (!in.done() || index >= engine.nics().size()) return Status(Code::invalid_argument, "malformed rdma connect");
  auto& nic = engine.nics()[index];
  if (!nic->up()) return Status(Code::io, nic->info().name + ": its port is down");
  auto ours = nic->device().gids();
  auto pairs = rank_pairs(ours, theirs);
  if (pairs.empty()) return Status(Code::io, no_gids_in_common(nic->info().name, ours, theirs));
  auto [our_index, their_index] = pairs[which % pairs.size()];
  TM_ASSIGN(auto made, queue_pair_on(nic, 1, kReceives));
  auto pair = std::make_shared<PassivePair>(*this, peer_.shared_from_this(), nic, std::move(made));
  nic->add(pair->number(), pair);
  TM_TRY(pair->queue_pair().connect(remote, ours[our_index], theirs[their_index]).with(nic->info().name));
  TM_TRY(pair->queue_pair().post_receives(kReceives).with(nic->info().name));
  ByteWriter out;
  out.put(static_cast<uint32_t>(pairs.size())).put(static_cast<uint32_t>(their_index));
  ours[our_index].encode(out);
  pair->queue_pair().address().encode(out);
  out.put(engine.nic_identity()->address()).put(engine.nic_identity()->remote_key(nic->index()));
  std::lock_guard lock(mutex_);
  if (over_) return peer_.session()->status();
  later.add([before = std::exchange(passive_[connection], std::move(pair))] {});
  return out.take();
}

void RdmaEndpoint::on_disconnect(rpc::Message message, rpc::Responder responder) {
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  peer_.engine().repair().post([this, peer = peer_.shared_from_this(), body = std::move(message.body), shared] {
    std::shared_ptr<PassivePair> pair;
    {
      std::lock_guard lock(mutex_);
      auto it = passive_.find(ByteReader(body).get<uint64_t>());
      if (it != passive_.end()) {
        pair = std::move(it->second);
        passive_.erase(it);
      }
    }
    // The NIC's thread may hold it for the length of a callback; the answer waits for its real end.
    std::weak_ptr<PassivePair> weak = pair;
    pair.reset();
    while (!weak.expired()) std::this_thread::yield();
    shared->ok();
  });
}

// keys: u64 region, u64 generation. Answer: its record.
void RdmaEndpoint::on_keys(rpc::Message message, rpc::Responder responder) {
  ByteReader in(message.body);
  auto id = in.get<uint64_t>();
  auto generation = in.get<uint64_t>();
  auto region = peer_.engine().regions().find(id, generation);
  if (!in.done() || !region || region->kind() != MemoryKind::host)
    return responder.fail({Code::key_not_found, "that region is not registered any more"});
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  peer_.engine().repair().post([peer = peer_.shared_from_this(), region, shared] {
    Status status = peer->engine().ensure_nic_keys(*region);
    auto keys = region->nic_keys();
    if (status && !keys) status = {Code::key_not_found, region->name() + " is not registered any more"};
    status ? shared->ok(keys->record().body) : shared->fail(status);
  });
}

// ---- Notifications: the text comes as a message, the immediate behind the data

void RdmaEndpoint::begin_notify(const RdmaPartPtr& part, Later& later) {
  if (notifying_.size() >= kNotifying) return wait_to_notify_.push_back(part);
  notifying_.insert(part);
  part->notifying_ = part->immediate_due_ = true;
  part->notify_id_ = next_notify_++;
  make_ready(part);
  later.add([this, part, peer = peer_.shared_from_this()] {
    ByteWriter request;
    request.put(part->notify_id_).put(static_cast<uint8_t>(part->flush_there_)).put(std::string_view(part->notify_));
    peer->session()->call(kRdmaNotify, request.take(), Deadline::never(),
                          [this, part, peer](Result<rpc::Message> answer) {
                            Later soon;
                            std::lock_guard lock(mutex_);
                            if (part->over_ || part->stopped_) return;
                            if (std::exchange(part->ready_, false)) std::erase(ready_, part);
                            part->immediate_due_ = false;
                            part->outcome_ = answer.status();
                            end(part, soon);
                            pump(soon);
                          });
  });
}

void RdmaEndpoint::on_notify(rpc::Message message, rpc::Responder responder) {
  ByteReader in(message.body);
  auto id = in.get<uint32_t>();
  const bool flush = in.get<uint8_t>() != 0;
  auto text = in.get_string();
  if (!in.done()) return responder.fail({Code::invalid_argument, "malformed rdma notification"});
  Later later;
  std::lock_guard lock(mutex_);
  if (over_) return;
  auto& incoming = incoming_[id];
  incoming.text = std::move(text);
  incoming.flush = flush;
  incoming.responder = std::move(responder);
  deliver(id, later);
}

void RdmaEndpoint::immediate(uint32_t id) {
  Later later;
  std::lock_guard lock(mutex_);
  if (over_ || id < delivered_below_ || delivered_.count(id)) return;
  incoming_[id].immediate = true;
  deliver(id, later);
}

void RdmaEndpoint::deliver(uint32_t id, Later& later) {
  auto it = incoming_.find(id);
  if (!it->second.immediate || !it->second.text) return;
  auto incoming = std::make_shared<Incoming>(std::move(it->second));
  incoming_.erase(it);
  delivered_.insert(id);
  while (!delivered_.empty() && *delivered_.begin() == delivered_below_) {
    delivered_.erase(delivered_.begin());
    ++delivered_below_;
  }
  later.add([incoming, peer = peer_.shared_from_this()] {
    auto deliver = [incoming, peer](const Status& there) mutable {
      if (!there) return incoming->responder.fail(there);
      peer->engine().notes()->push({peer->identity().engine, peer->identity().name, std::move(*incoming->text)});
      incoming->responder.ok();
      auto callbacks = peer->engine().callbacks();
      callbacks->post([incoming = std::move(incoming), peer = std::move(peer)] {});  // perhaps the last references
    };
    // Behind the data also for whoever works on a device.
    incoming->flush ? peer->engine().flush_nic_writes(deliver) : deliver({});
  });
}

}  // namespace torch_mooncake::transfer::rdma
