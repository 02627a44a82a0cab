#include "transfer/rdma/lane.h"

#include <algorithm>

#include "transfer/rdma/endpoint.h"

namespace torch_mooncake::transfer::rdma {

uint32_t RdmaPart::take() {
  if (!again_.empty()) {
    uint32_t slice = again_.front();
    again_.pop_front();
    return slice;
  }
  if (next_ < slices_.size()) return static_cast<uint32_t>(next_++);
  immediate_due_ = false;
  return kImmediate;
}

bool RdmaPart::rides_on(uint64_t connection) const {
  if (notify_id_ == 0) return false;
  if (immediate_on_ == connection) return true;
  return counting_ && std::any_of(carriers_.begin(), carriers_.end(),
                                  [&](auto& carrier) { return carrier.connection == connection; });
}

void RdmaPart::stop(const Status& why) { endpoint_.stop(shared_from_this(), why); }

void RdmaLane::append(const RdmaPartPtr& part, uint32_t index) {
  WorkRequest request{};
  uint32_t nbytes = 0;  // of payload
  request.id = next_id_++;
  if (index == RdmaPart::kImmediate) {
    request.opcode = Opcode::write_with_immediate;
    request.immediate = RdmaEndpoint::immediate_of(part->notify_id_, RdmaEndpoint::kLast);
    part->immediate_on_ = connection_;
  } else {
    auto& slice = part->slices_[index];
    const bool write = part->is_write();
    request.opcode = write ? Opcode::write : Opcode::read;
    request.nbytes = slice.nbytes;
    request.local = slice.local;
    request.remote = slice.remote;
    if (slice.check) {
      auto& check = part->checks_[slice.regions];
      request.local_key = check.slot->local_key(nic_->index());
      request.remote_key = check.remote->generation_keys[remote_nic_];
    } else {
      nbytes = slice.nbytes;
      auto& regions = part->regions_[slice.regions];
      request.inlined = write && regions.local->host() && slice.nbytes <= nic_->info().max_inline_nbytes;
      request.local_key = regions.local->local_key(nic_->index(), slice.local_chunk);
      request.remote_key = regions.remote->keys[remote_nic_][slice.remote_chunk];
    }
  }
  request.signalled = request.id % kSignalEvery == kSignalEvery - 1;
  batch_.push_back(request);
  posted_.push_back({part, index, nbytes});
  posted_nbytes_ += nbytes;
}

void RdmaLane::append_counted(const RdmaPartPtr& part) {
  const uint32_t immediate = RdmaEndpoint::immediate_of(part->notify_id_, static_cast<uint32_t>(index_));
  if (!batch_.empty() && posted_.back().part == part && batch_.back().opcode == Opcode::write) {
    batch_.back().opcode = Opcode::write_with_immediate;
    batch_.back().immediate = immediate;
    return;
  }
  WorkRequest request{};
  request.id = next_id_++;
  request.opcode = Opcode::write_with_immediate;
  request.immediate = immediate;
  batch_.push_back(request);
  posted_.push_back({part, RdmaPart::kCounted, 0});
}

// Reads the id of whoever is there.
Status RdmaLane::post_check(uint64_t remote, uint32_t remote_key) {
  WorkRequest request{};
  request.id = next_id_++;
  request.opcode = Opcode::read;
  request.nbytes = sizeof(Id128);
  request.local = landing_->address();
  request.local_key = landing_->local_key(nic_->index());
  request.remote = remote;
  request.remote_key = remote_key;
  for (int i : {0, 1}) landing_->set(i, 0);
  batch_.push_back(request);
  posted_.push_back({nullptr, 0, 0});
  return post();
}

Status RdmaLane::post() {
  batch_.back().signalled = true;  // so that the end of everything posted is heard of
  Status status = queue_pair_->post(batch_);
  batch_.clear();
  return status;
}

RdmaLane::Posted RdmaLane::pop() {
  auto out = std::move(posted_.front());
  posted_.pop_front();
  posted_nbytes_ -= out.nbytes;
  return out;
}

HeldPairPtr RdmaLane::release_queue_pair() {
  if (queue_pair_) nic_->remove(queue_pair_->address().number);
  return std::move(queue_pair_);
}

// The endpoint lives as long as its peer does.
void RdmaLane::completed(std::span<const Completion> completions) {
  if (auto peer = peer_.lock()) endpoint_.completed(*this, completions);
}

void RdmaLane::port_down() {
  if (auto peer = peer_.lock()) endpoint_.port_down(*this);
}

bool RdmaLane::tick(int64_t now_ns) {
  auto peer = peer_.lock();
  return peer && endpoint_.late(*this, now_ns);
}

}  // namespace torch_mooncake::transfer::rdma
