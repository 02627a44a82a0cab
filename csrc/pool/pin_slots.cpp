#include "pool/pin_slots.h"

namespace torch_mooncake::pool {

Result<std::shared_ptr<PinPage>> PinPage::open(std::shared_ptr<Segment> table, std::shared_ptr<Segment> slots) {
  if (slots->capacity() < kPinSlots * sizeof(PinSlot) || table->capacity() < kTableHeaderBytes)
    return {Code::invalid_argument, "not a slot page, or not a table"};
  std::shared_ptr<PinPage> page(new PinPage);
  TM_ASSIGN(page->table_, table->map(Protection::read_only));
  TM_ASSIGN(page->slots_, slots->map(Protection::read_write));
  page->table_segment_ = std::move(table);
  page->slots_segment_ = std::move(slots);
  return page;
}

bool PinPage::valid(ExtentRef extent) const {
  if (kTableHeaderBytes + (uint64_t{extent.index} + 1) * sizeof(ExtentEntry) > table_->nbytes) return false;
  const ExtentEntry& entry = table_entry(table_->data, extent.index);
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read before stays before
  return std::atomic_ref(const_cast<uint64_t&>(entry.generation)).load(std::memory_order_acquire) == extent.generation;
}

Result<uint32_t> PinPage::pin(ExtentRef extent) {
  auto* slots = reinterpret_cast<PinSlot*>(slots_->data);
  uint32_t index;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      index = free_.back();
      free_.pop_back();
    } else if (used_ < kPinSlots) {
      index = used_++;
      std::atomic_ref(slots[0].generation).store(used_, std::memory_order_release);
    } else {
      return {Code::busy, "all " + std::to_string(kPinSlots - 1) + " pin slots are taken"};
    }
  }
  std::atomic_ref(slots[index].extent).store(extent.index, std::memory_order_relaxed);
  std::atomic_ref(slots[index].generation).store(extent.generation, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (valid(extent)) return index;
  unpin(index);
  return {Code::key_not_found, "extent " + std::to_string(extent.index) + " was superseded or reused"};
}

void PinPage::unpin(uint32_t slot) {
  auto* slots = reinterpret_cast<PinSlot*>(slots_->data);
  std::atomic_ref(slots[slot].generation).store(0, std::memory_order_release);
  std::lock_guard lock(mutex_);
  free_.push_back(slot);
}

uint32_t PinPage::pinned() const {
  std::lock_guard lock(mutex_);
  return used_ - 1 - static_cast<uint32_t>(free_.size());
}

}  // namespace torch_mooncake::pool
