#include "transfer/stage/lane.h"

#include "transfer/move_part.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {

constexpr size_t kMostExtents = 256;

enum class Step { owner, inner, local, none };

Step step_of(const StageChunk& chunk) {
  bool read = chunk.part->op()->direction() == Direction::read;
  Step steps[3];
  int n = 0;
  if (read ? chunk.area != nullptr : chunk.local_area != nullptr) steps[n++] = read ? Step::owner : Step::local;
  steps[n++] = Step::inner;
  if (read ? chunk.local_area != nullptr : chunk.area != nullptr) steps[n++] = read ? Step::local : Step::owner;
  return chunk.step < n ? steps[chunk.step] : Step::none;
}

}  // namespace

// ---- StageChunk

void StageChunk::next(const Status& status) {
  auto failed = status ? nullptr : inner;
  if (step >= 0) part->step_over(*this);
  if (!status) return part->chunk_over(*this, status, std::move(failed));
  ++step;
  switch (step_of(*this)) {
    case Step::owner:
      return ask_owner();
    case Step::inner:
      return run_inner();
    case Step::local:
      return move_local();
    case Step::none:
      return part->chunk_over(*this, {});
  }
}

void StageChunk::ask_owner() {
  if (!part->begin_step(*this, false, nullptr, nullptr)) return part->chunk_over(*this, {});
  StageRequest request{part->op()->direction(), peer_slot, static_cast<RemoteRegionImpl&>(*remote).grant(), {}};
  for (auto& extent : extents) request.pieces.push_back({extent.remote_offset, extent.nbytes});
  part->op()->peer().session()->call(kStage, request.encode(), Deadline::never(),
                                     [self = shared_from_this()](Result<rpc::Message> answer) {
                                       auto& op = *self->part->op();
                                       if (!answer && op.direction() == Direction::write && !op.peer().alive())
                                         self->part->never_quiescent();
                                       self->next(answer.status());
                                     });
}

void StageChunk::run_inner() {
  auto direction = part->op()->direction();
  Batch batch{local_area ? local_area->region : local, area ? area : remote, {}};
  uint64_t at = 0;
  for (auto& extent : extents) {
    uint64_t ours = local_area ? local_slot * kStageSlotBytes + at : extent.local_offset;
    uint64_t theirs = area ? peer_slot * kStageSlotBytes + at : extent.remote_offset;
    batch.extents.push_back({ours, theirs, extent.nbytes});
    at += extent.nbytes;
  }
  if (Status status = static_cast<RemoteRegionImpl&>(*batch.remote).reachable(direction, LocalKind::host); !status)
    return part->chunk_over(*this, status);
  std::vector<Batch> batches;
  batches.push_back(std::move(batch));
  auto op = std::make_shared<OpImpl>(part->op()->peer_ptr(), direction, std::move(batches),
                                     OpOptions{.deadline = Deadline::never()});
  op->set_inner([self = shared_from_this()](const Status& status) { self->next(status); });
  if (!part->begin_step(*this, !local_area, op, nullptr)) return part->chunk_over(*this, {});
  if (Status status = op->start(); !status) next(status);
}

// Between our slot and our file or device: out of the slot for a read, into it for a write.
void StageChunk::move_local() {
  auto region = std::static_pointer_cast<RegionImpl>(local);
  MoveRequest request;
  request.direction = part->op()->direction() == Direction::read ? Direction::write : Direction::read;
  request.patient = true;  // the slot is the chunk's until this step is over
  auto* slot = local_area->region->data() + local_slot * kStageSlotBytes;
  for (auto& extent : extents) {
    request.pieces.push_back({slot, extent.local_offset, extent.nbytes});
    slot += extent.nbytes;
  }
  request.done = [self = shared_from_this()](const Status& status) { self->next(status); };
  request.keep = hold_regions(part->op(), {region});
  auto move = region->backing()->move(std::move(request));
  part->op()->peer().engine().track_move(move);
  // A file is no memory: an op may end while the disk hangs, and the file stays in use until it answers.
  if (!part->begin_step(*this, region->kind() != MemoryKind::file, nullptr, move)) return part->chunk_over(*this, {});
  move->start();
}

// ---- StagePart

StagePart::StagePart(OpImplPtr op, StageEndpoint& endpoint, std::span<const Batch> batches)
    : op_(std::move(op)), endpoint_(endpoint), peer_(op_->peer_ptr()), batches_(batches.begin(), batches.end()) {
  std::erase_if(batches_, [](const Batch& batch) { return batch.extents.empty(); });
}

void StagePart::run() {
  auto self = shared_from_this();
  op_->add(self);
  if (batches_.empty()) return settle(std::unique_lock(mutex_));
  endpoint_.enqueue(self);
}

bool StagePart::has_next() const {
  std::lock_guard lock(mutex_);
  return !stopped_ && batch_ < batches_.size();
}

bool StagePart::needs_peer_slot() const {
  auto& remote = static_cast<RemoteRegionImpl&>(*batch().remote);
  return remote.descriptor().kind != MemoryKind::host;
}

StageChunkPtr StagePart::next_chunk() {
  std::lock_guard lock(mutex_);
  auto chunk = std::make_shared<StageChunk>();
  chunk->part = shared_from_this();
  const Batch& from = batch();
  chunk->local = from.local;
  chunk->remote = from.remote;
  auto& path = static_cast<RemoteRegionImpl&>(*from.remote).path(op_->direction(), as_local(from.local->kind()));
  chunk->area = static_cast<StageMemory&>(*path.memory).area;
  while (extent_ < from.extents.size() && chunk->nbytes < kStageSlotBytes && chunk->extents.size() < kMostExtents) {
    auto& extent = from.extents[extent_];
    uint64_t n = std::min(extent.nbytes - at_, kStageSlotBytes - chunk->nbytes);
    chunk->extents.push_back({extent.local_offset + at_, extent.remote_offset + at_, n});
    chunk->nbytes += n;
    at_ += n;
    if (at_ < extent.nbytes) break;
    at_ = 0;
    ++extent_;
  }
  if (extent_ == from.extents.size()) {
    extent_ = 0;
    ++batch_;
  }
  live_.insert(chunk);
  return chunk;
}

bool StagePart::begin_step(StageChunk& chunk, bool touching, OpImplPtr inner, MovePtr move) {
  std::lock_guard lock(mutex_);
  if (stopped_) return false;
  chunk.inner = std::move(inner);
  chunk.move = std::move(move);
  chunk.touching = touching;
  touching_ += touching;
  return true;
}

void StagePart::step_over(StageChunk& chunk) {
  OpImplPtr inner;  // dropped after the lock
  MovePtr move;
  std::unique_lock lock(mutex_);
  touching_ -= std::exchange(chunk.touching, false);
  inner.swap(chunk.inner);
  move.swap(chunk.move);
  if (stopped_) settle(std::move(lock));
}

void StagePart::chunk_over(StageChunk& chunk, const Status& status, OpImplPtr inner) {
  auto self = shared_from_this();
  auto held = chunk.shared_from_this();
  if (!status) stop(status);
  if (inner && inner->direction() == Direction::write && !chunk.area) {
    {
      std::lock_guard lock(mutex_);
      ++landing_;
    }
    inner->when_quiescent([self] {
      std::unique_lock lock(self->mutex_);
      --self->landing_;
      self->settle(std::move(lock));
    });
  }
  endpoint_.chunk_over(chunk, std::move(inner));
  std::unique_lock lock(mutex_);
  live_.erase(held);
  touching_ -= std::exchange(chunk.touching, false);
  if (!stopped_) op_->add_bytes_done(chunk.nbytes);
  settle(std::move(lock));
}

void StagePart::never_quiescent() {
  std::lock_guard lock(mutex_);
  ++landing_;
}

void StagePart::stop(const Status& why) {
  std::vector<OpImplPtr> inner;
  std::vector<MovePtr> moves;
  {
    std::lock_guard lock(mutex_);
    if (stopped_ || told_) return;
    stopped_ = true;
    status_ = why;
    for (auto& chunk : live_) {
      if (chunk->inner) inner.push_back(chunk->inner);
      if (chunk->move) moves.push_back(chunk->move);
    }
  }
  for (auto& op : inner) op->stop(why);
  for (auto& move : moves) move->stop(why);
  settle(std::unique_lock(mutex_));
}

void StagePart::settle(std::unique_lock<std::mutex> lock) {
  bool rests = live_.empty() && (stopped_ || batch_ == batches_.size());
  bool tell = !told_ && (rests || (stopped_ && touching_ == 0));
  if (tell) told_ = true;
  bool settled = rests && landing_ == 0;
  Status status = status_;
  lock.unlock();
  if (settled) op_->quiescent(*this);
  if (tell) op_->part_done(shared_from_this(), status);
}

}  // namespace torch_mooncake::transfer
