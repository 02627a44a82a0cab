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

constexpr int64_t kHopeNs = 3'000'000'000;  // without any rail: so long ops wait for one
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
  std::lock_guard lock(mutex_);
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
                    [&](auto& part) { return part->immediate_on_ == lane->connection_; }))
      continue;
    idlest = lane.get();
  }
  return idlest;
}

bool RdmaEndpoint::evict(const Nic& nic) {
  Later later;
  std::lock_guard lock(mutex_);
  auto* lane = idle_lane(nic);
  if (!lane || over_) return false;
  lane->state_ = RdmaLane::State::evicted;
  lane->release_queue_pair().reset();  // here: the caller wants its room
  disconnect(*lane, later);
  return true;
}

void RdmaEndpoint::recall_evicted(Later& later) {
  for (auto& lane : lanes_)
    if (lane->state_ == RdmaLane::State::evicted) connect(lane, later);
}

// ---- No rail

// None for a while, and none comes up: what waits for one goes over TCP, if that is allowed, or fails.
void RdmaEndpoint::lose_hope(const Status& why, Later& later) {
  using State = RdmaLane::State;
  if (over_ || steady_ns() - up_ns_ < kHopeNs) return;
  for (auto& lane : lanes_)
    if (lane->failures_ == 0 || lane->state_ == State::up || lane->state_ == State::failing ||
        lane->state_ == State::fencing)
      return;
  hopeless_ = {Code::peer_lost, "no RDMA rail to " + peer_.name() + ": " + why.to_string()};
  for (auto part : std::deque(ready_)) without_rails(part, later);
  for (auto& part : notifying_) {  // its data is there: only the immediate cannot be carried
    part->immediate_due_ = false;
    if (std::exchange(part->ready_, false)) std::erase(ready_, part);
    later.add([peer = peer_.shared_from_this(), id = part->notify_id_] {
      (void)peer->session()->post(kRdmaImmediate, ByteWriter().put(id).take());
    });
  }
}

// Nothing of the part is posted, or unsettled.
void RdmaEndpoint::without_rails(const RdmaPartPtr& part, Later& later) {
  if (part->notifying_ || part->posted_ > 0 || part->unsettled_ > 0) return;
  const bool host = std::all_of(part->regions_.begin(), part->regions_.end(), [](auto& r) {
    return r.local->host() && static_cast<RemoteRegionImpl&>(*r.theirs).descriptor().kind == MemoryKind::host;
  });
  auto* stream = peer_.endpoint<StreamEndpoint>();
  if (!host || !stream || !stream->available()) return stop(part, hopeless_, later);
  part->ready_ = false;
  std::erase(ready_, part);
  part->leaving_ = true;
  later.add([this, part, stream, lost = hopeless_, peer = peer_.shared_from_this()] {
    // Not on a thread that dials: TCP's lanes are waited for.
    peer->engine().mover().post([this, part, stream, lost, peer] { go_by(*stream, part, lost); });
  });
}

// The part's bytes over TCP: what is not done of a write; all of a read, as what is done has not been checked.
void RdmaEndpoint::go_by(StreamEndpoint& stream, const RdmaPartPtr& part, const Status& lost) {
  const bool write = part->op().direction() == Direction::write;
  std::vector<Batch> batches;
  for (auto& regions : part->regions_) batches.push_back({regions.ours, regions.theirs, {}});
  auto move = [&](const RdmaSlice& slice) {
    if (slice.check) return;
    auto& regions = part->regions_[slice.regions];
    batches[slice.regions].extents.push_back({slice.local - reinterpret_cast<uint64_t>(regions.ours->data()),
                                              slice.remote - regions.remote->address, slice.nbytes});
  };
  Later later;
  {
    std::lock_guard lock(mutex_);
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
    std::lock_guard lock(mutex_);
    if (part->over_) return;
    if (!opened || !*opened) {
      part->leaving_ = false;
      return stop(part, lost, later);
    }
    part->left_ = true;  // from here on this thread ends it
    stopped = part->stopped_;
    if (!stopped) {
      log::warning("transfer", lost.with("an op goes over TCP").to_string());
      peer_.engine().metrics().failover();
    }
  }
  if (!stopped) {
    const uint64_t done = part->nbytes_ - left;
    if (!write) part->op().add_bytes_done(uint64_t{0} - part->op().bytes_done());
    if (!part->notify_.empty()) part->op().give_back_notify(std::exchange(part->notify_, {}));
    stream.submit(part->op_ptr(), batches);
    part->nbytes_ = write ? done : 0;
  }
  std::lock_guard lock(mutex_);
  end(part, later);
}

void RdmaEndpoint::on_immediate(rpc::Message message) {
  ByteReader in(message.body);
  auto id = in.get<uint32_t>();
  if (in.done()) immediate(id);
}

}  // namespace torch_mooncake::transfer::rdma
