#include "transfer/shm/lane.h"

#include "transfer/shm/memory.h"

namespace torch_mooncake::transfer {

SegmentCopy::SegmentCopy(OpImplPtr op, std::vector<CopyPiece> pieces, std::vector<RemoteRegionImpl*> remotes)
    : CopyPart(std::move(op), std::move(pieces), "shm"), remotes_(std::move(remotes)) {
  if (nbytes() <= kInlineBytes || this->op().direction() == Direction::read) return;
  for (auto* remote : remotes_)
    written_.push_back(static_cast<SegmentMemory&>(*remote->path(Direction::write).memory).mapping.get());
  std::sort(written_.begin(), written_.end());
  written_.erase(std::unique(written_.begin(), written_.end()), written_.end());
}

Status SegmentCopy::acquire() {
  for (size_t i = 0; i < remotes_.size(); ++i) {
    if (remotes_[i]->usage().acquire(op().peer().name())) continue;
    for (size_t taken = 0; taken < i; ++taken) remotes_[taken]->usage().release(op().peer().name());
    TM_TRY(validate());  // its session is over
    return {Code::key_not_found, "remote " + remotes_[i]->name() + " was deregistered"};
  }
  return {};
}

void SegmentCopy::release() {
  for (auto* remote : remotes_) remote->usage().release(op().peer().name());
}

Status SegmentCopy::copy(std::span<const CopyPiece> pieces) {
  for (auto* mapping : written_) mapping->fault_in(pieces);
  CopyPool::shared().copy(pieces);
  return {};
}

Status SegmentCopy::validate() {
  // The copy has fenced its stores, so they are visible to the peer before any message that follows.
  return op().peer().session()->status();
}

}  // namespace torch_mooncake::transfer
