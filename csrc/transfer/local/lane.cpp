#include "transfer/local/lane.h"

#include "transfer/peer.h"

namespace torch_mooncake::transfer {

LocalCopy::LocalCopy(OpImplPtr op, std::vector<CopyPiece> pieces, std::vector<RegionImplPtr> targets)
    : CopyPart(std::move(op), std::move(pieces), "local"), targets_(std::move(targets)) {}

Status LocalCopy::acquire() {
  for (size_t i = 0; i < targets_.size(); ++i) {
    if (targets_[i]->usage().acquire(op().peer().name())) continue;
    for (size_t taken = 0; taken < i; ++taken) targets_[taken]->usage().release(op().peer().name());
    return {Code::key_not_found, "remote " + targets_[i]->name() + " was deregistered"};
  }
  return {};
}

void LocalCopy::release() {
  for (auto& target : targets_) target->usage().release(op().peer().name());
}

Status LocalCopy::copy(std::span<const CopyPiece> pieces) {
  CopyPool::shared().copy(pieces);
  return {};
}

}  // namespace torch_mooncake::transfer
