#include "transfer/move_part.h"

#include "transfer/engine_impl.h"

namespace torch_mooncake::transfer {

std::shared_ptr<void> hold_regions(const OpImplPtr& op, std::vector<RegionImplPtr> regions) {
  for (auto& region : regions) region->usage().acquire_always(op->peer().name());
  return std::shared_ptr<void>(nullptr, [op, regions = std::move(regions)](void*) {
    for (auto& region : regions) region->usage().release(op->peer().name());
  });
}

MovePart::MovePart(OpImplPtr op, std::string transport, RegionImplPtr region, std::vector<RegionImplPtr> locals)
    : op_(std::move(op)), transport_(std::move(transport)), region_(std::move(region)), locals_(std::move(locals)) {}

void MovePart::run(std::vector<HostPiece> pieces) {
  auto self = shared_from_this();
  uint64_t nbytes = 0;
  for (auto& piece : pieces) nbytes += piece.nbytes;
  auto& user = op_->peer().name();
  if (!region_->usage().acquire(user)) {
    op_->add(self);
    return op_->part_done(self, {Code::key_not_found, "remote " + region_->name() + " was deregistered"});
  }
  auto held = locals_;
  held.push_back(region_);
  auto hold = hold_regions(op_, std::move(held));
  region_->usage().release(user);
  std::shared_ptr<void> keep(nullptr, [self, hold](void*) mutable {
    hold.reset();
    self->op_->quiescent(*self);
  });
  MoveRequest request;
  request.direction = op_->direction();
  request.pieces = std::move(pieces);
  request.keep = std::move(keep);
  request.progress = [op = op_](uint64_t n) { op->add_bytes_done(n); };
  request.done = [self, nbytes](const Status& status) {
    auto& op = *self->op_;
    bool writes = op.direction() == Direction::write;
    if (status) op.peer().engine().metrics().bytes(self->transport_, writes ? nbytes : 0, writes ? 0 : nbytes);
    op.part_done(self, status);
  };
  move_ = region_->backing()->move(std::move(request));
  op_->peer().engine().track_move(move_);
  op_->add(self);
  move_->start();
}

void MovePart::stop(const Status& why) {
  if (!move_) return;
  move_->stop(why);
  std::weak_ptr<Move> weak = move_;
  op_->peer().engine().rpc().add_timer(Deadline::at_ns(steady_ns() + op_->grace_ns() / 2), [weak] {
    if (auto move = weak.lock()) move->abandon();
  });
}

}  // namespace torch_mooncake::transfer
