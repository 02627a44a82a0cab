#include "transfer/rdma/words.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr uint64_t kSlotBytes = 16;

}  // namespace

WordTable::~WordTable() = default;

SlotPtr WordTable::try_take() {
  std::lock_guard lock(mutex_);
  for (auto page = pages_.rbegin(); page != pages_.rend(); ++page) {
    if ((*page)->free.empty()) continue;
    const uint32_t index = (*page)->free.back();
    (*page)->free.pop_back();
    auto slot = std::make_shared<Slot>(shared_from_this(), **page, index);
    slot->set(0, 0);
    slot->set(1, 0);
    return slot;
  }
  return nullptr;
}

// Registered without the lock: who finds a free slot does not wait.
Result<SlotPtr> WordTable::take() {
  for (;;) {
    if (auto slot = try_take()) return slot;
    constexpr size_t kBytes = kSlots * kSlotBytes;
    void* data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return Status::from_errno("memory for generation words", errno);
    auto page = std::make_unique<Page>(static_cast<std::byte*>(data), kBytes);
    for (auto& nic : nics_) {
      page->by_nic.push_back(nullptr);
      if (!nic->up() && nic->gone()) continue;
      auto registration = nic->device().register_memory(data, kBytes, true, false);
      if (!registration && !nic->gone()) return registration.status().with(nic->info().name);
      if (registration) page->by_nic.back() = std::move(*registration);
    }
    for (uint32_t i = kSlots; i-- > 0;) page->free.push_back(i);
    std::lock_guard lock(mutex_);
    pages_.push_back(std::move(page));
  }
}

void WordTable::give_back(Page& page, uint32_t index) {
  std::lock_guard lock(mutex_);
  page.free.push_back(index);
}

uint64_t WordTable::Slot::address() const {
  return reinterpret_cast<uint64_t>(page_.memory.data) + index_ * kSlotBytes;
}

uint64_t WordTable::Slot::get(int word) const {
  return std::atomic_ref(reinterpret_cast<uint64_t*>(address())[word]).load(std::memory_order_acquire);
}

void WordTable::Slot::set(int word, uint64_t value) {
  std::atomic_ref(reinterpret_cast<uint64_t*>(address())[word]).store(value, std::memory_order_seq_cst);
}

}  // namespace torch_mooncake::transfer::rdma
