// RdmaEndpoint: too few queue pairs for all peers, and no rail at all.
#include <algorithm>

#include "common/log.h"
#include "transfer/engine_impl.h"
#include "transfer/rdma/endpoint.h"
#include "transfer/rdma/later.h"
#include "transfer/rdma/passive_pair.h"
#include "transfer/tcp/endpoint.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr int64_t kOtherWayMs = 5000;

}  // namespace

// ---- Making room

Result<std::unique_ptr<QueuePair>> RdmaEndpoint::queue_pair_on(const std::shared_ptr<Nic>& nic, uint32_t requests,
                                                               uint32_t receives) {
  auto made = nic->device().make_queue_pair(requests, receives);
  if (made || made.status().code() != Code::busy) return made;
  RdmaEndpoint* idlest = nullptr;
  std::vector<PeerImplPtr> peers = peer_.engine().peers();
  int64_t since = INT64_MAX;
  for (auto& peer : peers) {
    auto* endpoint = peer->endpoint<RdmaEndpoint>();
    if (int64_t used = endpoint ? endpoint->idle_since(*nic) : INT64_MAX; used < since) {
      idlest = endpoint;
      since = used;
    }
  }
  if (!idlest || !idlest->evict(*nic)) return made;
  return nic->device().make_queue_pair(requests, receives);
}

int64_t RdmaEndpoint::idle_since(const Nic& nic) const {
  Turn turn(*this);
  auto* lane = idle_lane(nic);
  return lane ? lane->used_ns_ : INT64_MAX;
}

RdmaLane* RdmaEndpoint::idle_lane(const Nic& nic) const {
  RdmaLane* idlest = nullptr;
  for (auto& lane : lanes_) {
    if (lane->nic_.get() != &nic || lane->state_ != RdmaLane::State::up || !lane->posted_.empty()) continue;
    if (idlest && idlest->used_ns_ <= lane->used_ns_) continue;
    // The peer may not have heard of an immediate that is done: its end stays until it has.
    if (std::any_of(notifying_.begin(), notifying_.end(),
                    [&](auto& one) { return one.second->rides_on(lane->connection_); }))
      continue;
    idlest = lane.get();
  }
  return idlest;
}

bool RdmaEndpoint::evict(const Nic& nic) {
  HeldPairPtr pair;
  {
    Turn turn(*this);
    auto* lane = idle_lane(nic);
    if (!lane || over_) return false;
    pair = lane->release_queue_pair();
    set_evicted(*lane);
    disconnect(*lane, turn);
  }
  pair->destroy();  // here: the caller wants its room
  return true;
}

// It is as good as up: what comes asks for it.
void RdmaEndpoint::set_evicted(RdmaLane& lane) {
  lane.state_ = RdmaLane::State::evicted;
  lane.asked_ = lane.waits_for_room_ = false;
  lane.failures_ = 0;
  hopeless_ = {};
}

// There is something to carry.
void RdmaEndpoint::recall_evicted(Later& later) {
  for (auto& lane : lanes_) {
    if (lane->state_ != RdmaLane::State::evicted) continue;
    lane->away_ns_ = steady_ns();
    connect(lane, later);
    look_for_hope(later);
  }
}

// ---- No rail

void RdmaEndpoint::look_for_hope(Later& later) {
  std::weak_ptr<PeerImpl> weak = peer_.weak_from_this();
  later.add([this, weak, &rpc = peer_.engine().rpc()] {
    rpc.add_timer(Deadline::after_ms(RdmaLane::kHopeNs / 1'000'000 + 1), [this, weak] {
      auto peer = weak.lock();
      if (!peer) return;
      Turn turn(*this);
      lose_hope(turn);
    });
  });
}

// What waits for lanes that have all been away for a while goes over TCP, if that is allowed, or fails.
void RdmaEndpoint::lose_hope(Later& later) {
  if (over_ || lanes_.empty()) return;
  const int64_t now = steady_ns();
  auto given_up = [&](auto& lane) { return lane->given_up(now); };
  const bool all = std::all_of(lanes_.begin(), lanes_.end(), given_up);
  Status why;
  for (auto& lane : lanes_)
    if (given_up(lane) && !lane->last_error_) why = lane->last_error_;
  why = {Code::peer_lost, "no RDMA rail to " + peer_.name() + ": " + (why ? "none is up" : why.to_string())};
  for (auto& part : std::deque(ready_)) {
    const auto needs = needs_of_next(*part);
    auto waits_for = [&](auto& lane) { return lane->rank(needs) >= 0 && !given_up(lane); };
    if (all || std::none_of(lanes_.begin(), lanes_.end(), waits_for)) without_rails(part, why, later);
  }
  if (!all) return;
  hopeless_ = why;
  for (auto& [id, part] : notifying_) {  // its data is there: only the immediate cannot be carried
    if (part->counting_) continue;
    part->immediate_due_ = false;
    if (std::exchange(part->ready_, false)) std::erase(ready_, part);
    send_last_by_message(id, later);
  }
}

// Nothing of the part is posted, or unsettled.
void RdmaEndpoint::without_rails(const RdmaPartPtr& part, const Status& why, Later& later) {
  if (part->notify_id_ != 0 || part->posted_ > 0 || part->unsettled_ > 0 || part->over_) return;
  const bool host = std::all_of(part->regions_.begin(), part->regions_.end(), [](auto& r) {
    return r.local->host() && static_cast<RemoteRegionImpl&>(*r.theirs).descriptor().kind == MemoryKind::host;
  });
  auto* stream = peer_.endpoint<StreamEndpoint>();
  if (!host || !stream || !stream->available()) return stop(part, why, later);
  part->ready_ = false;
  std::erase(ready_, part);
  part->leaving_ = true;
  later.add([this, part, stream, lost = why, peer = peer_.shared_from_this()] {
    // Not on a thread that dials: TCP's lanes are waited for.
    peer->engine().mover().post([this, part, stream, lost, peer] { go_by(*stream, part, lost); });
  });
}

// The part's bytes over TCP: what is not done of a write; all of a read, as what is done has not been checked.
void RdmaEndpoint::go_by(StreamEndpoint& stream, const RdmaPartPtr& part, const Status& lost) {
  const bool write = part->is_write();
  std::vector<Batch> batches;
  for (auto& regions : part->regions_) batches.push_back({regions.ours, regions.theirs, {}});
  auto move = [&](const RdmaSlice& slice) {
    if (slice.check) return;
    auto& regions = part->regions_[slice.regions];
    batches[slice.regions].extents.push_back({slice.local - reinterpret_cast<uint64_t>(regions.ours->data()),
                                              slice.remote - regions.remote->address, slice.nbytes});
  };
  {
    Turn turn(*this);
    if (part->over_) return;
    if (write) {
      for (uint32_t slice : part->again_) move(part->slices_[slice]);
      for (size_t i = part->next_; i < part->slices_.size(); ++i) move(part->slices_[i]);
    } else {
      for (auto& slice : part->slices_) move(slice);
    }
  }
  uint64_t left = 0;
  for (auto& batch : batches)
    for (auto& extent : batch.extents) left += extent.nbytes;
  std::erase_if(batches, [](auto& batch) { return batch.extents.empty(); });
  auto& remote = static_cast<RemoteRegionImpl&>(*part->regions_.front().theirs);
  auto opened = stream.open({remote.descriptor(), remote.grant()}, part->op().direction(),  //
                            Deadline::after_ms(kOtherWayMs));
  bool stopped;
  {
    Turn turn(*this);
    if (part->over_) return;
    if (!opened || !*opened) {
      part->leaving_ = false;
      return stop(part, lost, turn);
    }
    part->left_ = true;  // from here on this thread ends it
    stopped = part->stopped_;
  }
  if (!stopped) {
    static log::Once once(1000);
    if (uint64_t n = once.pass())
      log::warning("transfer",
                   lost.with(n > 1 ? std::to_string(n) + " ops go over TCP" : "an op goes over TCP").to_string());
    peer_.engine().metrics().failover();
    const uint64_t done = write ? part->nbytes_ - left : 0;
    // What RDMA has read is read again.
    if (!write) part->op().add_bytes_done(uint64_t{0} - std::exchange(part->counted_nbytes_, 0));
    if (!part->notify_.empty()) part->op().give_back_notify(std::exchange(part->notify_, {}));
    part->op().moves_to(name(), stream.name(), done == 0);
    stream.submit(part->op_ptr(), batches);
    part->nbytes_ = done;
  }
  Turn turn(*this);
  end(part, turn);
}

}  // namespace torch_mooncake::transfer::rdma
