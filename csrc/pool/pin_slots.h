// Pins on one host, through shared memory: the client's side (PinPage) and the donor's scan.
//
// A pin is (extent, generation) in the client's own slot page. Client: write the slot, full fence, re-read the
// extent's generation word; equal means pinned, until unpin() or the client's death. Donor: change the word, full
// fence, scan the slots. One of the two always sees the other.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "common/api.h"
#include "memory/segment.h"
#include "pool/donor.h"

namespace torch_mooncake::pool {

// The client's side. Owns maps of the table and of its slot page. Safe from any thread. Nothing is unpinned by the
// destructor: whoever holds pins holds the page.
class TM_API PinPage {
 public:
  // `table` may be mapped read-only; `slots` is the segment that came with slots_for_client().
  static Result<std::shared_ptr<PinPage>> open(std::shared_ptr<Segment> table, std::shared_ptr<Segment> slots);
  // The slot, to be given to unpin(). key_not_found: the extent was superseded or reused (look up again);
  // busy: all 8191 slots are taken (copy instead).
  Result<uint32_t> pin(ExtentRef extent);
  void unpin(uint32_t slot);
  uint32_t pinned() const;
  // The generation word now, with acquire order, for validating a copy after the data was read.
  bool valid(ExtentRef extent) const;
  const Mapping& table() const { return *table_; }

 private:
  PinPage() = default;
  std::shared_ptr<Segment> table_segment_, slots_segment_;
  MappingPtr table_, slots_;
  mutable std::mutex mutex_;
  std::vector<uint32_t> free_;
  uint32_t used_ = 1;  // slots ever used, the header counted
};

// The donor's side: calls fn(extent, generation) for each slot in use of one page, after a full fence by the caller.
template <typename Fn>
void scan_slots(const std::byte* page, Fn&& fn) {
  auto* slots = reinterpret_cast<PinSlot*>(const_cast<std::byte*>(page));
  const uint64_t used = std::atomic_ref(slots[0].generation).load(std::memory_order_acquire);
  for (uint64_t i = 1; i < used && i < kPinSlots; ++i) {
    const uint64_t generation = std::atomic_ref(slots[i].generation).load(std::memory_order_acquire);
    if (generation != 0) fn(std::atomic_ref(slots[i].extent).load(std::memory_order_relaxed), generation);
  }
}

}  // namespace torch_mooncake::pool
