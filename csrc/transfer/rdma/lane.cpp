#include "transfer/rdma/lane.h"

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

void RdmaPart::stop(const Status& why) { endpoint_.stop(shared_from_this(), why); }

void RdmaLane::append(const RdmaPartPtr& part, uint32_t index) {
  WorkRequest request{};
  request.id = next_id_++;
  if (index == RdmaPart::kImmediate) {
    request.opcode = Opcode::write_with_immediate;
    request.immediate = part->notify_id_;
    part->immediate_on_ = connection_;
  } else {
    auto& slice = part->slices_[index];
    auto& regions = part->regions_[slice.regions];
    bool write = part->op().direction() == Direction::write;
    request.opcode = write ? Opcode::write : Opcode::read;
    request.inlined = write && regions.local->host() && slice.nbytes <= nic_->info().max_inline_nbytes;
    request.nbytes = slice.nbytes;
    request.local = slice.local;
    request.remote = slice.remote;
    request.local_key = regions.local->local_key(nic_->index(), slice.local_chunk);
    request.remote_key = regions.remote->keys[remote_nic_][slice.remote_chunk];
  }
  request.signalled = request.id % kSignalEvery == kSignalEvery - 1;
  batch_.push_back(request);
  posted_.push_back({part, index, request.nbytes});
  posted_nbytes_ += request.nbytes;
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

std::unique_ptr<QueuePair> RdmaLane::release_queue_pair() {
  if (queue_pair_) nic_->remove(queue_pair_->address().number);
  return std::move(queue_pair_);
}

// The endpoint lives as long as its peer does.
void RdmaLane::completed(const Completion& completion) {
  if (auto peer = peer_.lock()) endpoint_.completed(*this, completion);
}

void RdmaLane::port_down() {
  if (auto peer = peer_.lock()) endpoint_.port_down(*this);
}

bool RdmaLane::tick(int64_t now_ns) {
  auto peer = peer_.lock();
  return peer && endpoint_.flush_late(*this, now_ns);
}

}  // namespace torch_mooncake::transfer::rdma
