// Files and devices at either side, by way of slots of host memory (area.h): the owner moves a chunk between its file
// or device and a slot when asked to; between slot and slot, or slot and memory, an inner op moves it over whatever
// else connects the two. Up to kStageSlots chunks are under way, so that disk, wire and copies overlap.
#pragma once

#include <deque>
#include <mutex>

#include "transfer/stage/area.h"
#include "transfer/stage/memory.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class PeerImpl;
class StagePart;
struct StageChunk;

class StageEndpoint final : public TransportEndpoint {
 public:
  // `host`: for remote host memory (and local files and devices), else for remote files and devices.
  StageEndpoint(PeerImpl& peer, bool host) : peer_(peer), host_(host) {}
  static void attach(EngineImpl& engine);
  uint8_t local_kinds() const override { return host_ ? kAllKinds & ~kind_bit(LocalKind::host) : kAllKinds; }
  std::string name() const override { return "staged"; }
  bool available() const override { return false; }  // host memory has better ways
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  Explanation explain() const override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  void session_over(const Status& why) override;

  // --- For parts: they take turns, chunk by chunk, as slots are free.
  void enqueue(std::shared_ptr<StagePart> part);
  void chunk_over(StageChunk& chunk, std::shared_ptr<OpImpl> inner);
  PeerImpl& peer() const { return peer_; }

 private:
  void on_stage_open(rpc::Message request, rpc::Responder responder);
  void on_stage(rpc::Message request, rpc::Responder responder);
  using Area = std::shared_ptr<StageArea>;
  Result<Area> made(Area StageEndpoint::*which);  // area_ or local_, made by the first that asks
  void give_peer_slot(uint32_t slot);
  void pump();

  PeerImpl& peer_;
  const bool host_;
  std::mutex area_mutex_;  // held while an area is made
  std::mutex mutex_;
  std::shared_ptr<StageArea> area_;   // for the peer: what it stages here
  std::shared_ptr<StageArea> local_;  // for ourselves: ops whose local memory is no host memory
  std::string peer_area_;             // descriptor of the area that the peer has given us
  FreeSlots local_slots_, peer_slots_;
  std::deque<std::shared_ptr<StagePart>> ready_;  // each once
  bool over_ = false;
};

}  // namespace torch_mooncake::transfer
