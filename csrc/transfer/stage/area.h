// StageArea: host memory of one side through which bytes of regions that are no host memory (files, devices) travel: a
// few slots of one chunk each. The owner of such a region gives each session an area, the initiator decides what is in
// which slot; where the initiator's own memory is no host memory, it has one of its own.
//
// An area is a region as any other, in a shared segment, so that the slots are mapped, or filled and read over lanes,
// by whatever transport connects the two. Thread-safe where said.
#pragma once

#include <vector>

#include "transfer/engine_impl.h"

namespace torch_mooncake::transfer {

inline constexpr uint32_t kStageSlots = 8;
inline constexpr uint64_t kStageSlotBytes = 1 << 20;

struct StageArea {
  std::shared_ptr<Segment> segment;
  MappingPtr mapping;  // stays for a disk or device that is still at a slot when the session, and the region, are over
  RegionImplPtr region;
  static Result<std::shared_ptr<StageArea>> create(EngineImpl& engine);
};

// Which slots are free: the last that was given back first, its lines may still be in a cache.
class FreeSlots {
 public:
  FreeSlots() {
    for (uint32_t i = kStageSlots; i > 0; --i) free_.push_back(i - 1);
  }
  bool any() const { return !free_.empty(); }
  uint32_t take() {
    uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give(uint32_t slot) { free_.push_back(slot); }

 private:
  std::vector<uint32_t> free_;
};

}  // namespace torch_mooncake::transfer
