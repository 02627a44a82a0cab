#include "transfer/cuda/memory.h"

#include <cstring>

namespace torch_mooncake::transfer {

Result<std::shared_ptr<CudaMemory>> CudaMemory::of(uint64_t address, uint64_t nbytes) {
  TM_ASSIGN(auto driver, CudaDriver::get());
  TM_ASSIGN(auto first, driver->find(address));
  // Expandable segments map many allocations side by side; all of them have to be there.
  std::vector<CudaAllocation> all{first};
  for (uint64_t at = first.base + first.nbytes; at < address + nbytes;) {
    auto next = driver->find(at);
    if (!next || next->device != first.device || next->nbytes == 0)
      return Status(Code::invalid_argument, std::to_string(nbytes) +
                                                " bytes at that address are not all memory of CUDA device " +
                                                std::to_string(first.device));
    at = next->base + next->nbytes;
    all.push_back(*next);
  }
  TM_ASSIGN(auto* queue, CudaQueue::of(driver, first.device));
  std::vector<CudaRun> whole{{0, nbytes, address}};
  return std::make_shared<CudaMemory>(std::move(driver), *queue, std::move(whole), std::move(all));
}

std::shared_ptr<void> CudaMemory::attached(const std::function<std::shared_ptr<void>()>& make) {
  std::lock_guard lock(attach_mutex_);
  if (!std::exchange(attach_tried_, true)) attached_ = make();
  return attached_;
}

void CudaMemory::detach() {
  std::lock_guard lock(attach_mutex_);
  if (!attached_) return;
  auto current = driver_->make_current(queue_.device());
  attached_.reset();
}

MovePtr CudaMemory::move(MoveRequest request) {
  return std::make_shared<CudaMove>(shared_from_this(), std::move(request));
}

CudaMove::CudaMove(std::shared_ptr<CudaMemory> memory, MoveRequest request)
    : memory_(std::move(memory)), request_(std::move(request)) {
  std::erase_if(request_.pieces, [](const HostPiece& piece) { return piece.nbytes == 0; });
}

void CudaMove::stop(const Status& why) {
  std::unique_lock lock(mutex_);
  if (stopped_ || told_) return;
  stopped_ = true;
  status_ = why;
  settle(std::move(lock));
}

void CudaMove::settle(std::unique_lock<std::mutex> lock) {
  std::function<void(const Status&)> done;
  std::function<void(uint64_t)> progress;
  std::shared_ptr<void> keep;
  bool last = (stopped_ || piece_ == request_.pieces.size()) && in_flight_ == 0;
  // Who is patient is told when the device is at rest, too: its owner then says that no byte can land any more.
  const bool early = stopped_ && touching_ == 0 && (!request_.patient || abandoned_);
  if (!told_ && (last || early)) {
    told_ = true;
    done = std::move(request_.done);
  }
  if (last) {
    progress = std::move(request_.progress);
    keep = std::move(request_.keep);
  }
  Status status = status_;
  lock.unlock();
  if (done) done(status);
}

void CudaMove::abandon() {
  std::unique_lock lock(mutex_);
  abandoned_ = true;
  if (stopped_) settle(std::move(lock));
}

bool CudaMove::fill(Block& block) {
  while (piece_ < request_.pieces.size() && block.nbytes < CudaQueue::kBlockBytes) {
    auto& piece = request_.pieces[piece_];
    uint64_t n = std::min(piece.nbytes - at_, CudaQueue::kBlockBytes - block.nbytes);
    block.parts.push_back({piece.host + at_, piece.offset + at_, n});
    block.nbytes += n;
    at_ += n;
    if (at_ < piece.nbytes) break;
    at_ = 0;
    ++piece_;
  }
  return block.nbytes > 0;
}

void CudaMove::pump() {
  for (;;) {
    auto block = std::make_shared<Block>();
    std::unique_lock lock(mutex_);
    if (stopped_ || piece_ == request_.pieces.size()) return settle(std::move(lock));
    if (in_flight_ == kMostInFlight) return;
    block->data = memory_->queue().take_block([self = shared_from_this()](const Status& status) {
      status ? self->pump() : self->stop(status.with(self->memory_->name()));
    });
    if (block->data == nullptr) return;  // the waiter comes back
    fill(*block);
    ++in_flight_;
    touching_ += request_.direction == Direction::write;
    lock.unlock();
    carry(block);
  }
}

void CudaMove::carry(const BlockPtr& block) {
  std::vector<CudaQueue::Copy> copies;
  bool write = request_.direction == Direction::write;
  auto* at = block->data;
  for (auto& part : block->parts) {
    if (write) std::memcpy(at, part.host, part.nbytes);
    memory_->each(part.offset, part.nbytes, [&](uint64_t address, uint64_t n) {
      auto* device = reinterpret_cast<void*>(address);
      copies.push_back(write ? CudaQueue::Copy{device, at, n} : CudaQueue::Copy{at, device, n});
      at += n;
    });
  }
  if (write) {
    std::unique_lock lock(mutex_);
    --touching_;
    if (stopped_) settle(std::move(lock));
  }
  memory_->queue().copy(copies, [self = shared_from_this(), block](const Status& s) { self->copied(block, s); });
}

void CudaMove::copied(const BlockPtr& block, const Status& status) {
  bool copies_out = false;
  {
    std::lock_guard lock(mutex_);
    if (!status && !stopped_) {
      stopped_ = true;
      status_ = status.with(memory_->name());
    }
    copies_out = !stopped_ && request_.direction == Direction::read;
    touching_ += copies_out;
  }
  if (copies_out) {
    auto* from = block->data;
    for (auto& part : block->parts) {
      std::memcpy(part.host, from, part.nbytes);
      from += part.nbytes;
    }
  }
  if (status && request_.progress) request_.progress(block->nbytes);
  memory_->queue().give_block(block->data);
  std::unique_lock lock(mutex_);
  touching_ -= copies_out;
  --in_flight_;
  settle(std::move(lock));
  pump();
}

}  // namespace torch_mooncake::transfer
