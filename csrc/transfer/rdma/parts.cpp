// RdmaEndpoint: slices onto lanes, their completions, and the ends of parts.
#include <algorithm>

#include "common/log.h"
#include "transfer/engine_impl.h"
#include "transfer/rdma/endpoint.h"
#include "transfer/rdma/later.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr size_t kPassed = 16;  // parts that others overtake, as the lanes near their memory are full

}  // namespace

void RdmaEndpoint::make_ready(const RdmaPartPtr& part) {
  if (part->ready_ || part->stopped_ || part->leaving_ || !part->has_work()) return;
  part->ready_ = true;
  ready_.push_back(part);
}

void RdmaEndpoint::ready_or_leave(const RdmaPartPtr& part, Later& later) {
  make_ready(part);
  if (!hopeless_) without_rails(part, hopeless_, later);
}

RdmaPart::Needs RdmaEndpoint::needs_of_next(const RdmaPart& part) {
  const uint32_t index = part.peek();
  if (index == RdmaPart::kImmediate) return {};
  auto& slice = part.slices_[index];
  if (!slice.check) return {&part.regions_[slice.regions], nullptr};
  auto& check = part.checks_[slice.regions];
  return {&part.regions_[check.regions], check.slot.get()};
}

// Of those that are up and nearest to that memory, at both ends, the one with the least bytes under way. If it takes no
// more, the slice waits: those farther away are for when none near is up.
RdmaLane* RdmaEndpoint::best_lane(const RdmaPart::Needs& needs) const {
  RdmaLane* best = nullptr;
  int nearest = INT32_MAX;
  for (auto& lane : lanes_) {
    if (lane->state_ != RdmaLane::State::up) continue;
    const int rank = lane->rank(needs);
    if (rank < 0 || rank > nearest) continue;
    if (rank < nearest) best = nullptr;
    nearest = rank;
    if (lane->takes() && (!best || lane->posted_nbytes_ < best->posted_nbytes_)) best = lane.get();
  }
  return best;
}

// Gives the lanes what they take: slice by slice, then one doorbell each.
void RdmaEndpoint::pump(Later& later) {
  if (ready_.empty()) return;
  std::vector<RdmaPartPtr> passed;
  while (!ready_.empty()) {
    auto part = ready_.front();
    auto* lane = best_lane(needs_of_next(*part));
    if (lane == nullptr) {
      passed.push_back(std::move(part));
      ready_.pop_front();
      if (passed.size() == kPassed || !best_lane({})) break;
      continue;
    }
    const uint32_t slice = part->take();
    lane->append(part, slice);
    if (slice != RdmaPart::kImmediate) {
      ++part->posted_;
      if (!part->notify_.empty()) note_carrier(*part, *lane);
      if (part->has_work() && part->posted_ % RdmaLane::kSignalEvery != 0) continue;
    }
    ready_.pop_front();  // done, or another part's turn
    part->ready_ = false;
    part->has_work() ? make_ready(part) : try_to_count(part, later);
  }
  for (auto part = passed.rbegin(); part != passed.rend(); ++part) ready_.push_front(std::move(*part));
  recall_evicted(later);
  for (auto& lane : lanes_) {
    if (lane->batch_.empty()) continue;
    lane->used_ns_ = steady_ns();
    if (Status status = lane->post(); !status) fail(*lane, status, later);
  }
}

void RdmaEndpoint::completed(RdmaLane& lane, std::span<const Completion> completions) {
  Turn turn(*this);
  for (auto& completion : completions) completed(lane, completion, turn);
  pump(turn);
}

void RdmaEndpoint::completed(RdmaLane& lane, const Completion& completion, Later& later) {
  if (!lane.queue_pair_ || lane.queue_pair_->address().number != completion.queue_pair) return;
  bool good = completion.outcome == Outcome::done;
  while (!lane.posted_.empty() && lane.first_id() <= completion.id && completion.id < lane.next_id_) {
    bool last = lane.first_id() == completion.id;
    auto posted = lane.pop();
    auto& part = posted.part;
    later.keep(part);
    if (!part) {
      Status outcome;
      if (!good) outcome = {Code::io, completion.detail};
      checked(lane.shared_from_this(), outcome, later);
      continue;
    }
    if (!posted.moves()) {  // an immediate alone: the answer counts
      if (!good && last && completion.outcome != Outcome::flushed && ++part->failures_ > RdmaPart::kAttempts)
        stop(part, {Code::peer_lost, lane.rail() + ": " + completion.detail}, later);
      continue;
    }
    --part->posted_;
    if (good) {
      (part->is_write() ? lane.bytes_sent_ : lane.bytes_received_) += posted.nbytes;
      slice_done(part, posted.slice, later);
      continue;
    }
    ++part->unsettled_;
    lane.unsettled_.push_back(posted);
    if (last && completion.outcome == Outcome::remote_access)
      stop(part, {Code::key_not_found, "the remote region was deregistered, or its rights changed"}, later);
    else if (last && completion.outcome == Outcome::invalid_request)
      stop(part, {Code::invalid_argument, lane.rail() + " refuses a request: " + completion.detail}, later);
    else if (last && completion.outcome != Outcome::flushed && ++part->failures_ > RdmaPart::kAttempts)
      stop(part, {Code::peer_lost, lane.rail() + ": " + completion.detail}, later);
    if (part->stopped_ || part->answered_) end_at_rest(part, later);
  }
  if (!good && lane.state_ == RdmaLane::State::up)
    fail(lane, {Code::io, "a work request failed: " + completion.detail}, later);
  if (lane.state_ == RdmaLane::State::failing && lane.posted_.empty()) flushed(lane, later);
}

void RdmaEndpoint::slice_done(const RdmaPartPtr& part, uint32_t slice, Later& later) {
  if (part->over_) return;
  ++part->done_;
  if (!part->slices_[slice].check) {
    part->counted_nbytes_ += part->slices_[slice].nbytes;
    part->op().add_bytes_done(part->slices_[slice].nbytes);
  }
  if (part->stopped_ || part->answered_)
    end_at_rest(part, later);
  else if (part->all_done() && part->notify_id_ == 0 && !part->flushing_)
    moved(part, later);
}

// All bytes have arrived; those in device memory perhaps not yet for whoever works on the device. Its owner flushes:
// this side now, the peer before it delivers a notification, or when it is asked.
void RdmaEndpoint::moved(const RdmaPartPtr& part, Later& later) {
  // What has been read is the region's if its generation is still what it was: a NIC may have given the key of one that
  // is gone to another. As nothing orders reads on different rails, these are posted when all others are done.
  if (!part->is_write() && part->nbytes_ > 0 && !std::exchange(part->checking_, true)) {
    for (uint32_t i = 0; i < part->checks_.size(); ++i) {
      auto& check = part->checks_[i];
      part->slices_.push_back(
          {check.slot->address(), check.remote->generation_address, sizeof(uint64_t), i, 0, 0, true});
    }
    return ready_or_leave(part, later);
  }
  for (auto& check : part->checks_) {
    if (check.slot->get(0) == check.remote->generation) continue;
    part->outcome_ = {Code::key_not_found, "the remote region was deregistered while it was being read"};
    return end(part, later);
  }
  if (part->flush_here_) return flush_here(part, later);
  if (!part->notify_.empty()) return begin_notify(part, later);
  if (!part->flush_there_) return end(part, later);
  part->flushing_ = true;
  later.add([this, part, peer = peer_.shared_from_this()] {
    peer->session()->call(kRdmaFlush, {}, Deadline::never(), [this, part, peer](Result<rpc::Message> answer) {
      Turn turn(*this);
      if (part->over_ || part->stopped_) return;
      part->outcome_ = answer.status();
      end(part, turn);
    });
  });
}

void RdmaEndpoint::flush_here(const RdmaPartPtr& part, Later& later) {
  part->flushing_ = true;
  later.add([this, part, peer = peer_.shared_from_this()] {
    auto flushed = [this, part, peer, callbacks = peer->engine().callbacks()](const Status& status) mutable {
      {
        Turn turn(*this);
        if (!part->over_ && !part->stopped_) {
          part->flushing_ = part->flush_here_ = false;
          part->outcome_ = status;
          status ? moved(part, turn) : end(part, turn);
          pump(turn);  // for a notification
        }
      }
      callbacks->post([part = std::move(part), peer = std::move(peer)] {});  // perhaps the last references
    };
    peer->engine().flush_nic_writes(std::move(flushed));
  });
}

void RdmaEndpoint::stop(const RdmaPartPtr& part, const Status& why) {
  Turn turn(*this);
  stop(part, why, turn);
  pump(turn);  // for a notification that has waited for its end
}

void RdmaEndpoint::stop(const RdmaPartPtr& part, const Status& why, Later& later) {
  if (part->over_ || part->stopped_) return;
  part->stopped_ = true;
  part->outcome_ = why;
  part->immediate_due_ = false;
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
  Turn turn(*this);
  if (part->over_) return;
  for (auto& lane : lanes_)
    if (std::any_of(lane->posted_.begin(), lane->posted_.end(), [&](auto& p) { return p.part == part && p.moves(); }))
      fail(*lane, {Code::cancelled, "an op that was stopped is still in it"}, turn);
}

// Nothing touches the op's memory any more.
void RdmaEndpoint::end(const RdmaPartPtr& part, Later& later) {
  if (std::exchange(part->over_, true)) return;
  notify_over(*part, later);
  const bool write = part->is_write();
  const uint64_t moved = part->outcome_ ? part->nbytes_ : 0;
  if (moved > part->counted_nbytes_)  // the peer says that they are there, before completions of ours do
    part->op().add_bytes_done(moved - std::exchange(part->counted_nbytes_, moved));
  peer_.engine().metrics().bytes("rdma", write ? moved : 0, write ? 0 : moved);
  later.add([part, outcome = part->outcome_, settled = part->unsettled_ == 0] {
    if (settled) part->op().quiescent(*part);
    part->op().part_done(part, outcome);
  });
}

void RdmaEndpoint::end_at_rest(const RdmaPartPtr& part, Later& later) {
  if (part->posted_ == 0) end(part, later);
}

}  // namespace torch_mooncake::transfer::rdma
