// RdmaEndpoint: what is said of it, opening regions, and submitting.
#include "transfer/rdma/endpoint.h"

#include <algorithm>

#include "common/log.h"
#include "transfer/engine_impl.h"
#include "transfer/rdma/later.h"
#include "transfer/rdma/passive_pair.h"
#include "transfer/tcp/endpoint.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer::rdma {

void RdmaEndpoint::attach(EngineImpl& engine) {
  auto forward = [](auto member) {
    return [member](PeerImpl& peer, rpc::Message request, rpc::Responder responder) {
      auto* endpoint = peer.endpoint<RdmaEndpoint>();
      if (endpoint == nullptr) return responder.fail({Code::unsupported, "rdma is not allowed at this engine"});
      (endpoint->*member)(std::move(request), std::move(responder));
    };
  };
  engine.handle(kRdmaConnect, forward(&RdmaEndpoint::on_connect));
  engine.handle(kRdmaDisconnect, forward(&RdmaEndpoint::on_disconnect));
  engine.handle(kRdmaNotify, forward(&RdmaEndpoint::on_notify));
  engine.handle(kRdmaForget, forward(&RdmaEndpoint::on_forget));
  engine.handle(kRdmaKeys, forward(&RdmaEndpoint::on_keys));
  engine.handle(kRdmaImmediate, [](PeerImpl& peer, rpc::Message message, rpc::Responder) {
    if (auto* endpoint = peer.endpoint<RdmaEndpoint>()) endpoint->on_immediate(std::move(message));
  });
  engine.handle(kRdmaFlush, [](PeerImpl& peer, rpc::Message, rpc::Responder responder) {
    auto shared = std::make_shared<rpc::Responder>(std::move(responder));
    peer.engine().flush_nic_writes([shared](const Status& s) { s ? shared->ok() : shared->fail(s); });
  });
}

RdmaEndpoint::~RdmaEndpoint() = default;

bool RdmaEndpoint::available() const {
  if (!peer_.features().rdma) return false;
  auto usable = [](auto& lane) {
    return lane->state_ == RdmaLane::State::up || lane->state_ == RdmaLane::State::evicted;
  };
  Turn turn(*this);
  return !over_ && (lanes_.empty() || std::any_of(lanes_.begin(), lanes_.end(), usable));
}

Explanation RdmaEndpoint::explain() const {
  Explanation out{.transport = name(),
                  .option = "rdma",
                  .serves =
                      "any host memory, and CUDA memory that NICs reach (a device that does not "
                      "order their writes is flushed by its owner's CPU)"};
  out.lanes = lane_stats();
  bool allowed = peer_.features().rdma, can = available();
  Turn turn(*this);
  if (!can) out.no_read = allowed ? "no rail is up" : "the peer does not allow rdma";
  for (auto& lane : lanes_)
    if (allowed && !can && !lane->last_error_) out.no_read = lane->rail() + ": " + lane->last_error_.to_string();
  out.no_write = out.no_read;
  uint64_t slice = peer_.engine().options().slice_bytes;
  for (auto direction : {"read", "write"})
    out.sizes.push_back({direction, UINT64_MAX,
                         "by the NICs, in slices of up to " + std::to_string(slice >> 10) + " KiB over " +
                             std::to_string(lanes_.size()) + " rails"});
  return out;
}

std::vector<LaneStats> RdmaEndpoint::lane_stats() const {
  std::vector<LaneStats> out;
  Turn turn(*this);
  for (auto& lane : lanes_) {
    LaneStats stats{.transport = "rdma", .lane = "rdma " + lane->rail(), .rail = lane->rail()};
    stats.alive = lane->state_ == RdmaLane::State::up;
    stats.bytes_sent = lane->bytes_sent_;
    stats.bytes_received = lane->bytes_received_;
    stats.queued_bytes = lane->posted_nbytes_;
    stats.facts = {{"MTU", int64_t{lane->nic_->info().mtu}}};
    if (auto speed = lane->nic_->info().speed_mbps)
      stats.facts.emplace_back("Gbit/s", static_cast<double>(speed) / 1e3);
    out.push_back(std::move(stats));
  }
  return out;
}

Result<RemoteMemoryPtr> RdmaEndpoint::open(const OpenedRegion& opened, Direction, Deadline deadline) {
  auto* record = opened.descriptor.find(AccessKind::rdma);
  if (record == nullptr) return RemoteMemoryPtr();  // it is not registered with NICs: a file, say
  auto by_tcp = [&](const Status& why) -> Result<RemoteMemoryPtr> {
    const bool other_way = peer_.session()->alive() && peer_.endpoint<StreamEndpoint>() && peer_.features().tcp;
    if (!other_way || why.code() == Code::deadline_exceeded || why.code() == Code::key_not_found) return why;
    log::warning("transfer", why.with("memory of " + peer_.name() + " is reached over TCP").to_string());
    return RemoteMemoryPtr();
  };
  std::string asked;
  if (record->empty()) {  // the owner registers it when it is asked
    ByteWriter request;
    request.put(opened.descriptor.region).put(opened.descriptor.generation);
    auto answer = peer_.session()->call_sync(kRdmaKeys, request.take(), deadline);
    if (!answer) return by_tcp(answer.status());
    asked = std::move(answer->body);
    record = &asked;
  }
  TM_ASSIGN(auto memory, parse_rdma_record(*record, opened.descriptor.nbytes));
  memory->generation = opened.descriptor.generation;
  {
    Turn turn(*this);
    if (lanes_.empty()) make_lanes(static_cast<uint32_t>(memory->nics.size()), turn);
  }
  if (Status found = wait_for_lane(*memory, deadline); !found) return by_tcp(found);
  return RemoteMemoryPtr(memory);
}

// ---- Submitting

void RdmaEndpoint::submit(const OpImplPtr& op, std::span<const Batch> batches) {
  auto part = std::make_shared<RdmaPart>(*this, op);
  part->notify_ = op->take_notify();
  const Status prepared = prepare(*part, batches, false);
  op->add(part);
  if (prepared) return enqueue(std::move(part));
  // Registering takes the time that pinning takes. Another thread does it, and keeps what it works on.
  struct Work {
    RdmaPartPtr part;
    PeerImplPtr peer;
    std::vector<Batch> batches;
  };
  auto work = std::make_shared<Work>(Work{part, op->peer_ptr(), {batches.begin(), batches.end()}});
  for (auto& batch : batches) static_cast<RegionImpl&>(*batch.local).usage().acquire_always(peer_.name());
  peer_.engine().pinner().post([this, work]() mutable {
    const Status status = prepare(*work->part, work->batches, true);
    for (auto& batch : work->batches) static_cast<RegionImpl&>(*batch.local).usage().release(peer_.name());
    status ? enqueue(work->part) : stop(work->part, status);
    auto callbacks = work->peer->engine().callbacks();
    callbacks->post([work = std::move(work)] {});  // perhaps the last references
  });
}

// What a part needs: keys of our regions, room for the answers of a read's check, slices. Anything but ok, without
// leave to wait: there is something to register first.
Status RdmaEndpoint::prepare(RdmaPart& part, std::span<const Batch> batches, bool may_wait) {
  auto& engine = peer_.engine();
  for (auto& batch : batches) {
    auto& region = static_cast<RegionImpl&>(*batch.local);
    if (region.nic_keys()) continue;
    if (!may_wait) return {Code::busy, region.name() + " is not registered with the NICs yet"};
    TM_TRY(engine.ensure_nic_keys(region));
  }
  if (!part.is_write()) {
    for (size_t i = 0; i < batches.size(); ++i) {
      auto& batch = batches[i];
      auto& path = static_cast<RemoteRegionImpl&>(*batch.remote)
                       .path(Direction::read, static_cast<RegionImpl&>(*batch.local).local_kind());
      auto* memory = static_cast<const RdmaMemory*>(path.memory.get());
      auto same = [&](auto& check) { return check.remote == memory; };
      if (batch.extents.empty() || std::any_of(part.checks_.begin(), part.checks_.end(), same)) continue;
      auto slot = engine.words().try_take();
      if (!slot && !may_wait) {
        part.checks_.clear();
        return {Code::busy, "no word is free"};
      }
      if (!slot) {
        TM_ASSIGN(slot, engine.words().take());
      }
      part.checks_.push_back({memory, std::move(slot), static_cast<uint32_t>(i)});
    }
  }
  cut(part, batches);
  return {};
}

// Slices end at the chunks of both sides. They are small enough that all lanes get some of a long list.
void RdmaEndpoint::cut(RdmaPart& part, std::span<const Batch> batches) const {
  uint64_t total = 0;
  size_t extents = 0;
  for (auto& batch : batches) {
    extents += batch.extents.size();
    for (auto& extent : batch.extents) total += extent.nbytes;
  }
  uint64_t share = total / (4 * std::max<size_t>(1, lane_count_));
  uint64_t most = std::clamp<uint64_t>(share, 64 << 10, peer_.engine().options().slice_bytes);
  part.nbytes_ = total;
  part.slices_.reserve(extents + part.checks_.size());
  for (auto& batch : batches) {
    auto& region = static_cast<RegionImpl&>(*batch.local);
    auto& remote = static_cast<RemoteRegionImpl&>(*batch.remote);
    auto& path = remote.path(part.op().direction(), region.local_kind());  // that of host memory may be another's
    auto* memory = static_cast<const RdmaMemory*>(path.memory.get());
    auto* keys = region.nic_keys().get();  // the op keeps the region, and that its keys
    auto local_base = reinterpret_cast<uint64_t>(region.data());
    part.regions_.push_back({keys, memory, batch.local, batch.remote});
    const bool write = part.is_write();
    (write ? part.flush_there_ : part.flush_here_) |= write ? memory->flush : keys->flush();
    auto regions = static_cast<uint32_t>(part.regions_.size() - 1);
    for (auto extent : batch.extents) {
      while (extent.nbytes > 0) {
        uint64_t local_left = keys->chunk_nbytes() - extent.local_offset % keys->chunk_nbytes();
        uint64_t remote_left = memory->chunk_nbytes - extent.remote_offset % memory->chunk_nbytes;
        uint64_t n = std::min({extent.nbytes, most, local_left, remote_left});
        part.slices_.push_back({local_base + extent.local_offset, memory->address + extent.remote_offset,
                                static_cast<uint32_t>(n), regions,
                                static_cast<uint32_t>(extent.local_offset / keys->chunk_nbytes()),
                                static_cast<uint32_t>(extent.remote_offset / memory->chunk_nbytes), false});
        extent.local_offset += n;
        extent.remote_offset += n;
        extent.nbytes -= n;
      }
    }
  }
}

// Whoever has the mutex takes it up; if nobody has, this thread.
void RdmaEndpoint::enqueue(RdmaPartPtr part) {
  inbox_.put(std::move(part));
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (mutex_.try_lock()) Turn turn(*this, std::adopt_lock);
}

void RdmaEndpoint::take_in(Later& later) {
  if (inbox_.empty()) return;
  for (auto& part : inbox_.take()) {
    later.keep(part);
    if (part->stopped_) continue;
    if (over_) {
      stop(part, peer_.session()->status(), later);
    } else if (part->slices_.empty()) {
      moved(part, later);
    } else {
      ready_or_leave(part, later);
    }
  }
  pump(later);
}

// ---- The end

void RdmaEndpoint::session_over(const Status& why) {
  std::unordered_map<uint64_t, std::shared_ptr<PassivePair>> passive;
  {
    Turn turn(*this);
    Later& later = turn;
    if (std::exchange(over_, true)) return;
    passive.swap(passive_);
    incoming_.clear();
    for (auto part : std::deque(ready_)) stop(part, why, later);
    for (auto part : std::deque(wait_to_notify_)) stop(part, why, later);
    for (auto& [id, part] : std::map(notifying_)) stop(part, why, later);
    for (auto& lane : lanes_) {
      if (lane->state_ == RdmaLane::State::checking) checked(lane, why, later);
      for (size_t i = 0; i < lane->posted_.size(); ++i) stop(RdmaPartPtr(lane->posted_[i].part), why, later);
      for (size_t i = 0; i < lane->unsettled_.size(); ++i) stop(RdmaPartPtr(lane->unsettled_[i].part), why, later);
      if (lane->state_ == RdmaLane::State::up) fail(*lane, why, later);
      if (lane->state_ == RdmaLane::State::fencing) settled(*lane, later);
    }
    changed_.notify();
  }
  // Destroying queue pairs may take the kernel a while.
  peer_.engine().repair().post([passive = std::move(passive)] {});
}

void RdmaEndpoint::wait_at_rest(Deadline deadline) {
  auto failing = [](auto& lane) { return lane->state_ == RdmaLane::State::failing; };
  auto any_failing = [&] {
    Turn turn(*this);
    return std::any_of(lanes_.begin(), lanes_.end(), failing);
  };
  for (uint64_t seen = changed_.count(); any_failing() && !deadline.expired(); seen = changed_.count())
    changed_.wait_past(seen, std::chrono::milliseconds(10));
}

void RdmaEndpoint::take_back() {
  std::vector<RdmaLanePtr> lanes;
  {
    Turn turn(*this);
    lanes = lanes_;
  }
  for (auto& lane : lanes) late(*lane, INT64_MAX);
}

}  // namespace torch_mooncake::transfer::rdma
