#include "transfer/cuda/lane.h"

#include "transfer/engine_impl.h"

namespace torch_mooncake::transfer {

CudaCopyPart::CudaCopyPart(OpImplPtr op, std::string transport, Reached remote)
    : op_(std::move(op)),
      transport_(std::move(transport)),
      remote_(std::move(remote)),
      queue_(static_cast<CudaMemory&>(*remote_.backing).queue()) {}

void CudaCopyPart::run(const OpImplPtr& op, std::string transport, Reached remote,
                       const std::vector<const Batch*>& batches) {
  std::shared_ptr<CudaCopyPart> part(new CudaCopyPart(op, std::move(transport), std::move(remote)));
  op->add(part);
  auto hold = hold_both(op, locals_of(batches), part->remote_);
  if (!hold) {
    op->quiescent(*part);
    return op->part_done(part, hold.status());
  }
  part->remote_.owner.reset();  // the hold has it
  {
    std::lock_guard lock(part->mutex_);  // the op may have been stopped already
    part->hold_ = std::move(*hold);
  }
  auto& theirs = static_cast<CudaMemory&>(*part->remote_.backing);
  bool read = op->direction() == Direction::read;
  for (auto* batch : batches)
    for (auto& e : batch->extents) {
      auto* ours = batch->local->data() + e.local_offset;
      theirs.each(e.remote_offset, e.nbytes, [&](uint64_t address, uint64_t n) {
        auto* there = reinterpret_cast<void*>(address);
        part->copies_.push_back(read ? CudaQueue::Copy{ours, there, n} : CudaQueue::Copy{there, ours, n});
        ours += n;
      });
      part->nbytes_ += e.nbytes;
    }
  part->step();
}

void CudaCopyPart::step() {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) next_ = copies_.size();
  }
  std::vector<CudaQueue::Copy> some;
  uint64_t nbytes = 0;
  while (next_ < copies_.size() && nbytes < kStepBytes) {
    auto& copy = copies_[next_];
    uint64_t n = std::min<uint64_t>(copy.nbytes - at_, kStepBytes - nbytes);
    some.push_back({static_cast<char*>(copy.dst) + at_, static_cast<const char*>(copy.src) + at_, n});
    nbytes += n;
    at_ += n;
    if (at_ < copy.nbytes) break;
    at_ = 0;
    ++next_;
  }
  if (some.empty()) return over({});
  queue_.copy(some, [self = shared_from_this(), nbytes](const Status& status) {
    if (!status) return self->over(status);
    self->op_->add_bytes_done(nbytes);
    self->step();
  });
}

// Nothing is queued any more.
void CudaCopyPart::over(const Status& status) {
  Status outcome = status ? validate(*op_, remote_) : status;
  std::shared_ptr<void> hold;
  bool told;
  {
    std::lock_guard lock(mutex_);
    if (stopped_) outcome = why_;
    hold = std::move(hold_);
    told = std::exchange(told_, true);
  }
  op_->quiescent(*this);  // also of an op that has ended without waiting for the device
  hold.reset();
  if (told) return;
  bool writes = op_->direction() == Direction::write;
  if (outcome) op_->peer().engine().metrics().bytes(transport_, writes ? nbytes_ : 0, writes ? 0 : nbytes_);
  op_->part_done(shared_from_this(), outcome);
}

void CudaCopyPart::stop(const Status& why) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_ || told_) return;
    stopped_ = true;
    why_ = why;
  }
  // What the device has been given ends within milliseconds. If it hangs, the op ends all the same, and the memory
  // stays in quarantine (hold_) until the device answers.
  std::weak_ptr<CudaCopyPart> weak = shared_from_this();
  op_->peer().engine().rpc().add_timer(Deadline::at_ns(steady_ns() + op_->grace_ns() / 2), [weak] {
    auto self = weak.lock();
    if (!self) return;
    {
      std::lock_guard lock(self->mutex_);
      if (std::exchange(self->told_, true)) return;
    }
    self->op_->part_done(self, self->why_);
  });
}

}  // namespace torch_mooncake::transfer
