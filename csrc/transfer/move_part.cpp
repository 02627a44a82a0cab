#include "transfer/move_part.h"

#include "transfer/engine_impl.h"

namespace torch_mooncake::transfer {

Result<RemoteMemoryPtr> RegionHere::open(const OpenedRegion& opened, MemoryKind kind) {
  if (opened.descriptor.kind != kind) return RemoteMemoryPtr();
  auto owner = EngineImpl::find(opened.descriptor.engine);
  if (!owner) return RemoteMemoryPtr();
  auto region = owner->regions().find(opened.descriptor.region, opened.descriptor.generation);
  if (!region) return Status(Code::key_not_found, "the remote region is not registered any more");
  return RemoteMemoryPtr(std::make_shared<RegionHere>(std::move(region)));
}

BatchesByKind batches_of(const RemoteRegionImpl& remote, std::span<const Batch> batches) {
  BatchesByKind out;
  for (auto& batch : batches)
    if (batch.remote.get() == &remote) out[static_cast<int>(batch.local->kind())].push_back(&batch);
  return out;
}

std::vector<RegionImplPtr> locals_of(const std::vector<const Batch*>& batches) {
  std::vector<RegionImplPtr> out;
  for (auto* batch : batches) out.push_back(std::static_pointer_cast<RegionImpl>(batch->local));
  return out;
}

std::shared_ptr<void> hold_regions(const OpImplPtr& op, std::vector<RegionImplPtr> regions) {
  for (auto& region : regions) region->usage().acquire_always(op->peer().name());
  return std::shared_ptr<void>(nullptr, [op, regions = std::move(regions)](void*) {
    for (auto& region : regions) region->usage().release(op->peer().name());
  });
}

Result<std::shared_ptr<void>> hold_both(const OpImplPtr& op, std::vector<RegionImplPtr> locals, const Reached& remote) {
  if (!remote.usage->acquire(op->peer().name())) {
    TM_TRY(validate(*op, remote));
    return Status(Code::key_not_found, "remote " + remote.name + " was deregistered");
  }
  auto ours = hold_regions(op, std::move(locals));
  auto callbacks = op->peer().engine().callbacks();
  return std::shared_ptr<void>(nullptr, [op, ours, remote, callbacks](void*) mutable {
    ours.reset();
    remote.usage->release(op->peer().name());
    // Perhaps the last reference to a peer's region: letting go of one may wait.
    if (remote.of_peer) callbacks->post([owner = std::move(remote.owner)] {});
  });
}

Status validate(const OpImpl& op, const Reached& remote) {
  return remote.of_peer ? op.peer().session()->status() : Status();
}

void MovePart::run(const OpImplPtr& op, std::string transport, Reached remote,
                   const std::vector<const Batch*>& batches) {
  std::shared_ptr<MovePart> self(new MovePart(op, std::move(transport), std::move(remote)));
  uint64_t nbytes = 0;
  std::vector<HostPiece> pieces;
  for (auto* batch : batches)
    for (auto& e : batch->extents) {
      pieces.push_back({batch->local->data() + e.local_offset, e.remote_offset, e.nbytes});
      nbytes += e.nbytes;
    }
  auto hold = hold_both(op, locals_of(batches), self->remote_);
  if (!hold) {
    op->add(self);
    op->quiescent(*self);
    return op->part_done(self, hold.status());
  }
  self->remote_.owner.reset();  // the hold has it
  std::shared_ptr<void> keep(nullptr, [self, hold = std::move(*hold)](void*) mutable {
    hold.reset();
    self->op_->quiescent(*self);
  });
  MoveRequest request;
  request.direction = op->direction();
  request.pieces = std::move(pieces);
  request.keep = std::move(keep);
  request.progress = [op](uint64_t n) { op->add_bytes_done(n); };
  request.done = [self, nbytes](const Status& moved) {
    auto& op = *self->op_;
    Status status = moved ? validate(op, self->remote_) : moved;
    bool writes = op.direction() == Direction::write;
    if (status) op.peer().engine().metrics().bytes(self->transport_, writes ? nbytes : 0, writes ? 0 : nbytes);
    op.part_done(self, status);
  };
  self->move_ = self->remote_.backing->move(std::move(request));
  op->peer().engine().track_move(self->move_);
  op->add(self);
  self->move_->start();
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
