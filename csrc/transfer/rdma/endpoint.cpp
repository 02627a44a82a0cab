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
  std::lock_guard lock(mutex_);
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
  std::lock_guard lock(mutex_);
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
  std::lock_guard lock(mutex_);
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
  std::string asked;
  if (record->empty()) {  // the owner registers it when it is asked
    ByteWriter request;
    request.put(opened.descriptor.region).put(opened.descriptor.generation);
    TM_ASSIGN(auto answer, peer_.session()->call_sync(kRdmaKeys, request.take(), deadline));
    asked = std::move(answer.body);
    record = &asked;
  }
  TM_ASSIGN(auto memory, parse_rdma_record(*record, opened.descriptor.nbytes));
  memory->generation = opened.descriptor.generation;
  {
    Later later;
    std::lock_guard lock(mutex_);
    if (lanes_.empty()) make_lanes(static_cast<uint32_t>(memory->nics.size()), later);
  }
  std::unique_lock lock(mutex_);
  Status found = wait_for_lane(lock, deadline);
  const bool other_way = peer_.endpoint<StreamEndpoint>() && peer_.features().tcp && !over_;
  if (!found && other_way && found.code() != Code::deadline_exceeded) {
    log::warning("transfer", found.with("memory of " + peer_.name() + " is reached over TCP").to_string());
    return RemoteMemoryPtr();
  }
  TM_TRY(found);
  return RemoteMemoryPtr(memory);
}

// ---- Parts

// Slices end at the chunks of both sides. They are small enough that all lanes get some of a long list.
void RdmaEndpoint::cut(RdmaPart& part, std::span<const Batch> batches) const {
  uint64_t total = 0;
  for (auto& batch : batches)
    for (auto& extent : batch.extents) total += extent.nbytes;
  uint64_t share = total / (4 * std::max<size_t>(1, lanes_.size()));
  uint64_t most = std::clamp<uint64_t>(share, 64 << 10, peer_.engine().options().slice_bytes);
  part.nbytes_ = total;
  for (auto& batch : batches) {
    auto& region = static_cast<RegionImpl&>(*batch.local);
    auto& remote = static_cast<RemoteRegionImpl&>(*batch.remote);
    auto& path = remote.path(part.op().direction(), region.local_kind());  // that of host memory may be another's
    auto* memory = static_cast<const RdmaMemory*>(path.memory.get());
    auto* keys = region.nic_keys().get();  // the op keeps the region, and that its keys
    auto local_base = reinterpret_cast<uint64_t>(region.data());
    part.regions_.push_back({keys, memory, batch.local, batch.remote});
    const bool write = part.op().direction() == Direction::write;
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

void RdmaEndpoint::submit(const OpImplPtr& op, std::span<const Batch> batches) {
  auto part = std::make_shared<RdmaPart>(*this, op);
  Status registered;
  for (auto& batch : batches)
    if (auto& region = static_cast<RegionImpl&>(*batch.local); registered && !region.nic_keys())
      registered = peer_.engine().ensure_nic_keys(region);
  if (registered) {
    std::lock_guard lock(mutex_);
    cut(*part, batches);
  }
  part->notify_ = op->take_notify();
  op->add(part);
  if (!registered) return stop(part, registered);
  Later later;
  std::lock_guard lock(mutex_);
  if (part->stopped_) return;
  if (over_) return stop(part, peer_.session()->status(), later);
  if (part->slices_.empty()) {
    moved(part, later);
  } else {
    make_ready(part);
    if (!hopeless_) return without_rails(part, later);
  }
  pump(later);
}

void RdmaEndpoint::make_ready(const RdmaPartPtr& part) {
  if (part->ready_ || part->stopped_ || part->leaving_ || !part->has_work()) return;
  part->ready_ = true;
  ready_.push_back(part);
}

RdmaLane* RdmaEndpoint::best_lane() const {
  RdmaLane* best = nullptr;
  for (auto& lane : lanes_)
    if (lane->takes() && (!best || lane->posted_nbytes_ < best->posted_nbytes_)) best = lane.get();
  return best;
}

// Gives the lanes what they take: slice by slice to the one with the least bytes, then one doorbell each.
void RdmaEndpoint::pump(Later& later) {
  while (!ready_.empty()) {
    auto* lane = best_lane();
    if (lane == nullptr) {
      recall_evicted(later);
      break;
    }
    auto part = ready_.front();
    lane->append(part, part->take());
    ++part->posted_;
    if (part->has_work() && part->posted_ % RdmaLane::kSignalEvery != 0) continue;
    ready_.pop_front();  // done, or another part's turn
    part->ready_ = false;
    make_ready(part);
  }
  for (auto& lane : lanes_) {
    if (lane->batch_.empty()) continue;
    lane->used_ns_ = steady_ns();
    if (Status status = lane->post(); !status) fail(*lane, status, later);
  }
}

void RdmaEndpoint::completed(RdmaLane& lane, const Completion& completion) {
  Later later;
  std::lock_guard lock(mutex_);
  if (!lane.queue_pair_ || lane.queue_pair_->address().number != completion.queue_pair) return;
  bool good = completion.outcome == Outcome::done;
  while (!lane.posted_.empty() && lane.first_id() <= completion.id && completion.id < lane.next_id_) {
    bool last = lane.first_id() == completion.id;
    auto posted = lane.pop();
    if (!posted.part) {
      Status outcome;
      if (!good) outcome = {Code::io, completion.detail};
      checked(lane.shared_from_this(), outcome, later);
      continue;
    }
    --posted.part->posted_;
    if (good) {
      bool write = posted.part->op().direction() == Direction::write;
      (write ? lane.bytes_sent_ : lane.bytes_received_) += posted.nbytes;
      slice_done(posted.part, posted.slice, later);
      continue;
    }
    auto part = posted.part;
    ++part->unsettled_;
    lane.unsettled_.push_back(std::move(posted));
    if (last && completion.outcome == Outcome::remote_access)
      stop(part, {Code::key_not_found, "the remote region was deregistered, or its rights changed"}, later);
    else if (last && completion.outcome != Outcome::flushed && ++part->failures_ > RdmaPart::kAttempts)
      stop(part, {Code::peer_lost, lane.rail() + ": " + completion.detail}, later);
    if (part->stopped_ && part->posted_ == 0) end(part, later);
  }
  if (!good && lane.state_ == RdmaLane::State::up)
    fail(lane, {Code::io, "a work request failed: " + completion.detail}, later);
  if (lane.state_ == RdmaLane::State::failing && lane.posted_.empty()) flushed(lane, later);
  pump(later);
}

void RdmaEndpoint::slice_done(const RdmaPartPtr& part, uint32_t slice, Later& later) {
  if (part->over_) return;  // the immediate of a notification that has been answered
  if (slice != RdmaPart::kImmediate) {
    ++part->done_;
    if (!part->slices_[slice].check) part->op().add_bytes_done(part->slices_[slice].nbytes);
  }
  if (part->stopped_) {
    if (part->posted_ == 0) end(part, later);
  } else if (part->done_ == part->slices_.size() && !part->notifying_ && !part->flushing_) {
    moved(part, later);
  }
}

// All bytes have arrived; those in device memory perhaps not yet for whoever works on the device. Its owner flushes:
// this side now, the peer before it delivers a notification, or when it is asked.
void RdmaEndpoint::moved(const RdmaPartPtr& part, Later& later) {
  if (part->op().direction() == Direction::read && part->nbytes_ > 0) {
    if (part->checks_.empty()) return begin_checks(part, later);
    for (auto& [memory, slot] : part->checks_) {
      if (slot->get(0) == memory->generation) continue;
      part->outcome_ = {Code::key_not_found, "the remote region was deregistered while it was being read"};
      return end(part, later);
    }
  }
  if (part->flush_here_) return flush_here(part, later);
  if (!part->notify_.empty()) return begin_notify(part, later);
  if (!part->flush_there_) return end(part, later);
  part->flushing_ = true;
  later.add([this, part, peer = peer_.shared_from_this()] {
    peer->session()->call(kRdmaFlush, {}, Deadline::never(), [this, part, peer](Result<rpc::Message> answer) {
      Later soon;
      std::lock_guard lock(mutex_);
      if (part->over_ || part->stopped_) return;
      part->outcome_ = answer.status();
      end(part, soon);
    });
  });
}

// What has been read is the region's if its generation is still what it was: a NIC may have given the key of one that
// is gone to another. As nothing orders reads on different rails, these are posted when all others are done.
void RdmaEndpoint::begin_checks(const RdmaPartPtr& part, Later& later) {
  for (auto& regions : part->regions_) {
    auto* memory = regions.remote;
    if (std::any_of(part->checks_.begin(), part->checks_.end(), [&](auto& c) { return c.first == memory; })) continue;
    auto slot = peer_.engine().words().take();
    if (!slot) {
      part->outcome_ = slot.status();
      return end(part, later);
    }
    auto index = static_cast<uint32_t>(part->checks_.size());
    part->slices_.push_back({(*slot)->address(), memory->generation_address, sizeof(uint64_t), index, 0, 0, true});
    part->checks_.emplace_back(memory, std::move(*slot));
  }
  make_ready(part);
}

void RdmaEndpoint::flush_here(const RdmaPartPtr& part, Later& later) {
  part->flushing_ = true;
  later.add([this, part, peer = peer_.shared_from_this()] {
    auto flushed = [this, part, peer, callbacks = peer->engine().callbacks()](const Status& status) mutable {
      {
        Later soon;
        std::lock_guard lock(mutex_);
        if (!part->over_ && !part->stopped_) {
          part->flushing_ = part->flush_here_ = false;
          part->outcome_ = status;
          status ? moved(part, soon) : end(part, soon);
          pump(soon);  // for a notification
        }
      }
      callbacks->post([part = std::move(part), peer = std::move(peer)] {});  // perhaps the last references
    };
    peer->engine().flush_nic_writes(std::move(flushed));
  });
}

void RdmaEndpoint::stop(const RdmaPartPtr& part, const Status& why) {
  Later later;
  std::lock_guard lock(mutex_);
  stop(part, why, later);
}

void RdmaEndpoint::stop(const RdmaPartPtr& part, const Status& why, Later& later) {
  if (part->over_ || part->stopped_) return;
  part->stopped_ = true;
  part->outcome_ = why;
  if (std::exchange(part->ready_, false)) std::erase(ready_, part);
  std::erase(wait_to_notify_, part);
  if (part->left_) return;  // whoever hands it over ends it
  if (part->posted_ == 0) return end(part, later);
  // What is posted is soon over if the lanes are well. If they are not, they are flushed.
  std::weak_ptr<RdmaPart> weak = part;
  later.add([this, weak, peer = peer_.shared_from_this()] {
    peer->engine().rpc().add_timer(Deadline::after_ms(kStopMs), [this, weak, peer] {
      if (auto stopped = weak.lock()) expire(stopped);
    });
  });
}

void RdmaEndpoint::expire(const RdmaPartPtr& part) {
  Later later;
  std::lock_guard lock(mutex_);
  if (part->over_) return;
  for (auto& lane : lanes_)
    if (std::any_of(lane->posted_.begin(), lane->posted_.end(), [&](auto& p) { return p.part == part; }))
      fail(*lane, {Code::cancelled, "an op that was stopped is still in it"}, later);
}

// Nothing touches the op's memory any more.
void RdmaEndpoint::end(const RdmaPartPtr& part, Later& later) {
  if (std::exchange(part->over_, true)) return;
  if (std::exchange(part->notifying_, false)) {
    notifying_.erase(part);
    if (!wait_to_notify_.empty()) {
      auto next = std::move(wait_to_notify_.front());
      wait_to_notify_.pop_front();
      begin_notify(next, later);
    }
  }
  bool write = part->op().direction() == Direction::write;
  uint64_t moved = part->outcome_ ? part->nbytes_ : 0;
  peer_.engine().metrics().bytes("rdma", write ? moved : 0, write ? 0 : moved);
  if (part->unsettled_ == 0) part->op().quiescent(*part);
  later.add([part, outcome = part->outcome_] { part->op().part_done(part, outcome); });
}

void RdmaEndpoint::session_over(const Status& why) {
  std::unordered_map<uint64_t, std::shared_ptr<PassivePair>> passive;
  {
    Later later;
    std::lock_guard lock(mutex_);
    if (std::exchange(over_, true)) return;
    passive.swap(passive_);
    incoming_.clear();
    for (auto part : std::deque(ready_)) stop(part, why, later);
    for (auto part : std::deque(wait_to_notify_)) stop(part, why, later);
    for (auto& lane : lanes_) {
      if (lane->state_ == RdmaLane::State::checking) checked(lane, why, later);
      for (size_t i = 0; i < lane->posted_.size(); ++i) stop(RdmaPartPtr(lane->posted_[i].part), why, later);
      for (size_t i = 0; i < lane->unsettled_.size(); ++i) stop(RdmaPartPtr(lane->unsettled_[i].part), why, later);
      if (lane->state_ == RdmaLane::State::up) fail(*lane, why, later);
      if (lane->state_ == RdmaLane::State::fencing) settled(*lane, later);
    }
    changed_.notify_all();
  }
  // Destroying queue pairs may take the kernel a while.
  peer_.engine().repair().post([passive = std::move(passive)] {});
}

void RdmaEndpoint::wait_at_rest(Deadline deadline) {
  auto failing = [](auto& lane) { return lane->state_ == RdmaLane::State::failing; };
  std::unique_lock lock(mutex_);
  while (std::any_of(lanes_.begin(), lanes_.end(), failing) && !deadline.expired())
    changed_.wait_for(lock, std::chrono::milliseconds(10));
}

}  // namespace torch_mooncake::transfer::rdma
