#include "transfer/rdma/words.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr uint64_t kSlotBytes = 16;

}  // namespace

WordTable::~WordTable() = default;

Result<SlotPtr> WordTable::take() {
  std::lock_guard lock(mutex_);
  for (auto& page : pages_) {
    if (page->free.empty()) continue;
    const uint32_t index = page->free.back();
    page->free.pop_back();
    auto slot = std::make_shared<Slot>(shared_from_this(), *page, index);
    slot->set(0, 0);
    slot->set(1, 0);
    return slot;
  }
  constexpr size_t kBytes = kSlots * kSlotBytes;
  void* data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return Status::from_errno("memory for generation words", errno);
  auto page = std::make_unique<Page>(static_cast<std::byte*>(data), kBytes);
  for (auto& nic : nics_) {
    TM_ASSIGN(auto registration, nic->device().register_memory(data, kBytes, true, false));
    page->by_nic.push_back(std::move(registration));
  }
  for (uint32_t i = kSlots; i-- > 1;) page->free.push_back(i);
  pages_.push_back(std::move(page));
  return std::make_shared<Slot>(shared_from_this(), *pages_.back(), 0);
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

uint32_t WordTable::Slot::local_key(uint32_t nic) const { return page_.by_nic[nic]->local_key(); }
uint32_t WordTable::Slot::remote_key(uint32_t nic) const { return page_.by_nic[nic]->remote_key(); }

}  // namespace torch_mooncake::transfer::rdma
