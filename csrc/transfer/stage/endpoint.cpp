#include "transfer/stage/endpoint.h"

#include "transfer/stage/lane.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {

void StageEndpoint::attach(EngineImpl& engine) {
  auto forward = [](auto member) {
    return [member](PeerImpl& peer, rpc::Message request, rpc::Responder responder) {
      (peer.endpoint<StageEndpoint>()->*member)(std::move(request), std::move(responder));
    };
  };
  engine.handle(kStageOpen, forward(&StageEndpoint::on_stage_open));
  engine.handle(kStage, forward(&StageEndpoint::on_stage));
}

Result<RemoteMemoryPtr> StageEndpoint::open(const OpenedRegion& opened, Direction, Deadline deadline) {
  if ((opened.descriptor.kind == MemoryKind::host) != host_) return RemoteMemoryPtr();
  if (host_) return RemoteMemoryPtr(std::make_shared<StageMemory>(nullptr));
  std::string descriptor;
  {
    std::lock_guard lock(mutex_);
    descriptor = peer_area_;
  }
  if (descriptor.empty()) {
    TM_ASSIGN(auto answer, peer_.session()->call_sync(kStageOpen, {}, deadline));
    descriptor = std::move(answer.body);
    std::lock_guard lock(mutex_);
    peer_area_ = descriptor;
  }
  TM_ASSIGN(auto area, peer_.open(descriptor, deadline));
  return RemoteMemoryPtr(std::make_shared<StageMemory>(std::move(area)));
}

Explanation StageEndpoint::explain() const {
  Explanation out;
  out.transport = name();
  out.ordinary_memory = false;
  out.serves = host_ ? "files and devices of this process, to and from host memory of the peer"
                     : "files and devices of the peer, through slots in its memory";
  out.facts.emplace_back("slots", int64_t{kStageSlots});
  out.facts.emplace_back("bytes of a slot", static_cast<int64_t>(kStageSlotBytes));
  return out;
}

// ---- The initiator

void StageEndpoint::submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) {
  auto part = std::make_shared<StagePart>(op, *this, batches);
  auto needs_local = [](const Batch& batch) { return batch.local->kind() != MemoryKind::host; };
  if (std::any_of(batches.begin(), batches.end(), needs_local)) {
    if (auto area = made(&StageEndpoint::local_); !area) {
      op->add(part);
      op->quiescent(*part);
      return op->part_done(part, area.status());
    }
  }
  part->run();
}

void StageEndpoint::enqueue(std::shared_ptr<StagePart> part) {
  {
    std::lock_guard lock(mutex_);
    if (!over_) ready_.push_back(std::move(part));
  }
  if (part) return part->stop(peer_.session()->status());
  pump();
}

void StageEndpoint::chunk_over(StageChunk& chunk, std::shared_ptr<OpImpl> inner) {
  if (chunk.local_area) {
    std::lock_guard lock(mutex_);
    local_slots_.give(chunk.local_slot);
  }
  if (chunk.area && inner && inner->direction() == Direction::write)
    inner->when_quiescent([this, peer = peer_.shared_from_this(), slot = chunk.peer_slot] { give_peer_slot(slot); });
  else if (chunk.area)
    return give_peer_slot(chunk.peer_slot);
  pump();
}

void StageEndpoint::give_peer_slot(uint32_t slot) {
  {
    std::lock_guard lock(mutex_);
    peer_slots_.give(slot);
  }
  pump();
}

void StageEndpoint::pump() {
  for (;;) {
    StageChunkPtr chunk;
    {
      std::lock_guard lock(mutex_);
      while (!ready_.empty() && !ready_.front()->has_next()) ready_.pop_front();
      if (ready_.empty()) return;
      auto part = ready_.front();
      bool local = part->needs_local_slot(), peers = part->needs_peer_slot();
      if ((local && !local_slots_.any()) || (peers && !peer_slots_.any())) return;
      chunk = part->next_chunk();
      if (local) {
        chunk->local_area = local_;
        chunk->local_slot = local_slots_.take();
      }
      if (peers) chunk->peer_slot = peer_slots_.take();
      ready_.pop_front();
      ready_.push_back(std::move(part));
    }
    chunk->next({});
  }
}

Result<StageEndpoint::Area> StageEndpoint::made(Area StageEndpoint::*which) {
  std::lock_guard making(area_mutex_);
  {
    std::lock_guard lock(mutex_);
    if (this->*which) return this->*which;
  }
  TM_ASSIGN(auto area, StageArea::create(peer_.engine()));
  {
    std::lock_guard lock(mutex_);
    if (!over_) return this->*which = area;
  }
  (void)peer_.engine().deregister(area->region, Deadline::after_ms(0));  // session_over() has not seen it
  TM_TRY(peer_.session()->status());
  return Status(Code::closed, peer_.name() + " is being closed");
}

// ---- The owner

void StageEndpoint::on_stage_open(rpc::Message, rpc::Responder responder) {
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  peer_.engine().repair().post([this, peer = peer_.shared_from_this(), shared] {
    auto area = made(&StageEndpoint::area_);
    area ? shared->ok((*area)->region->descriptor()) : shared->fail(area.status());
    peer->engine().callbacks()->post([peer] {});  // perhaps the last reference
  });
}

void StageEndpoint::on_stage(rpc::Message message, rpc::Responder responder) {
  auto request = StageRequest::decode(message.body);
  if (!request) return responder.fail(request.status());
  std::shared_ptr<StageArea> area;
  {
    std::lock_guard lock(mutex_);
    area = area_;
  }
  if (!area || request->slot >= kStageSlots)
    return responder.fail({Code::invalid_argument, "a stage request for a slot that does not exist"});
  // Leave to touch the region, until the move is over.
  struct Hold {
    std::shared_ptr<PeerImpl> peer;
    std::shared_ptr<StageArea> area;
    std::vector<Window> windows;
    ~Hold() {
      for (auto& window : windows) peer->grants().release(window);
    }
  };
  auto hold = std::make_shared<Hold>();
  hold->peer = peer_.shared_from_this();
  hold->area = area;
  MoveRequest move;
  move.direction = request->direction;
  move.patient = true;
  auto* slot = area->region->data() + request->slot * kStageSlotBytes;
  uint64_t room = kStageSlotBytes;
  for (auto& piece : request->pieces) {
    Piece wanted{request->grant, piece.offset, piece.nbytes};
    if (piece.nbytes > room) return responder.fail({Code::invalid_argument, "a stage request for more than a slot"});
    if (hold->windows.empty()) {
      auto window = peer_.grants().window(wanted, request->direction, false);
      if (!window) return responder.fail(window.status());
      hold->windows.push_back(std::move(*window));
    } else if (Status status = peer_.grants().check(wanted, request->direction, false); !status) {
      return responder.fail(status);
    }
    move.pieces.push_back({slot, piece.offset, piece.nbytes});
    slot += piece.nbytes;
    room -= piece.nbytes;
  }
  if (hold->windows.empty()) return responder.ok();
  auto& region = *hold->windows.front().region;
  if (!region.backing()) return responder.fail({Code::invalid_argument, region.name() + " is host memory: no stage"});
  auto backing = region.backing();
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  move.done = [shared](const Status& status) { status ? shared->ok() : shared->fail(status); };
  move.keep = std::move(hold);
  backing->move(std::move(move))->start();
}

void StageEndpoint::session_over(const Status& why) {
  // Chunks end by their inner ops and calls, all of which fail now; parts that wait for slots wait in vain. Areas go
  // when nobody can touch them.
  std::deque<std::shared_ptr<StagePart>> waiting;
  std::shared_ptr<StageArea> areas[2];
  {
    std::lock_guard lock(mutex_);
    over_ = true;
    waiting.swap(ready_);
    areas[0] = std::move(area_);
    areas[1] = std::move(local_);
    peer_area_.clear();
  }
  for (auto& part : waiting) part->stop(why);
  for (auto& area : areas)
    if (area) (void)peer_.engine().deregister(area->region, Deadline::after_ms(0));
}

}  // namespace torch_mooncake::transfer
