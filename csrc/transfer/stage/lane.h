// StagePart: the staged share of an op, in chunks. StageChunk: one of them on its way, step by step:
//
//   read    [owner: region -> its slot]   inner op: owner's slot (or memory) -> our slot (or memory)   [our slot ->
//   region] write   [our region -> our slot]      inner op: our slot (or memory) -> owner's slot (or memory)   [owner:
//   slot -> region]
//
// The steps in brackets are there where that side's region is no host memory. A slot is given back when the chunk's
// last step has ended, whatever became of the op.
#pragma once

#include <mutex>
#include <set>

#include "transfer/op.h"
#include "transfer/region_table.h"
#include "transfer/stage/endpoint.h"

namespace torch_mooncake::transfer {

class StagePart;

struct StageChunk : std::enable_shared_from_this<StageChunk> {
  std::shared_ptr<StagePart> part;
  RegionPtr local;
  RemoteRegionPtr remote, area;           // area: the owner's, null if none is needed
  std::shared_ptr<StageArea> local_area;  // ours, likewise
  uint32_t local_slot = 0, peer_slot = 0;
  std::vector<Extent> extents;
  uint64_t nbytes = 0;
  int step = -1;
  // What the current step can be stopped by. Guarded by the part's mutex.
  OpImplPtr inner;
  MovePtr move;
  bool touching = false;  // the caller's memory

  void next(const Status& status);  // the current step is over
  void ask_owner();
  void run_inner();
  void move_local();
};
using StageChunkPtr = std::shared_ptr<StageChunk>;

class StagePart final : public Part, public std::enable_shared_from_this<StagePart> {
 public:
  StagePart(OpImplPtr op, StageEndpoint& endpoint, std::span<const Batch> batches);
  void run();
  void stop(const Status& why) override;

  // --- For the endpoint, with its mutex.
  bool needs_local_slot() const { return batch().local->kind() != MemoryKind::host; }
  bool needs_peer_slot() const;
  bool has_next() const;
  StageChunkPtr next_chunk();

  // --- For chunks.
  const OpImplPtr& op() const { return op_; }
  StageEndpoint& endpoint() const { return endpoint_; }
  // Leave to begin a step; false: the part has been stopped.
  bool begin_step(StageChunk& chunk, bool touching, OpImplPtr inner, MovePtr move);
  void step_over(StageChunk& chunk);
  // A write of the owner that is never answered: nobody will know when its last byte has landed.
  void never_quiescent();
  // `inner`: an inner write that failed; the owner's slot is free when nothing of it can land there any more.
  void chunk_over(StageChunk& chunk, const Status& status, OpImplPtr inner = nullptr);

 private:
  const Batch& batch() const { return batches_[batch_]; }
  void settle(std::unique_lock<std::mutex> lock);

  const OpImplPtr op_;
  StageEndpoint& endpoint_;
  const std::shared_ptr<PeerImpl> peer_;  // keeps the endpoint
  std::vector<Batch> batches_;

  mutable std::mutex mutex_;
  size_t batch_ = 0, extent_ = 0;  // the cursor
  uint64_t at_ = 0;
  std::set<StageChunkPtr> live_;
  uint32_t touching_ = 0;
  uint32_t landing_ = 0;  // inner writes that failed, and whose bytes may still land in the peer's region
  bool stopped_ = false, told_ = false;
  Status status_;
};

}  // namespace torch_mooncake::transfer
