// Words that NICs read and write: 16-byte slots in pages that are registered once, however many regions there are.
// A peer reads from ours the engine's id (to see that it has reached it) and a region's generation (to see that what it
// has read was still that region); such reads land in slots as well.
//
// A NIC that is gone has no keys of pages made since.
//
// Ownership: a slot keeps its table. Threads: safe from any; what NICs do to a slot is ordered by completions only.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "memory/segment.h"
#include "transfer/rdma/nic.h"

namespace torch_mooncake::transfer::rdma {

using Nics = std::vector<std::shared_ptr<Nic>>;

class WordTable : public std::enable_shared_from_this<WordTable> {
  struct Page {
    Page(std::byte* data, size_t nbytes) : memory(data, nbytes) {}
    Mapping memory;
    std::vector<std::unique_ptr<Registration>> by_nic;  // null: it was gone
    std::vector<uint32_t> free;
  };

 public:
  // Zero until written. Goes back to the table with its last reference; then no NIC may be about to touch it.
  class Slot {
   public:
    Slot(std::shared_ptr<WordTable> table, Page& page, uint32_t index)
        : table_(std::move(table)), page_(page), index_(index) {}
    ~Slot() { table_->give_back(page_, index_); }
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;

    uint64_t address() const;
    uint64_t get(int word) const;  // 0 or 1
    void set(int word, uint64_t value);
    bool has(uint32_t nic) const { return page_.by_nic[nic] != nullptr; }
    uint32_t local_key(uint32_t nic) const { return page_.by_nic[nic]->local_key(); }
    uint32_t remote_key(uint32_t nic) const { return has(nic) ? page_.by_nic[nic]->remote_key() : 0; }
    const Nics& nics() const { return table_->nics_; }

   private:
    const std::shared_ptr<WordTable> table_;
    Page& page_;
    const uint32_t index_;
  };

  explicit WordTable(const Nics& nics) : nics_(nics) {}
  ~WordTable();
  // Null where that would mean to register another page.
  std::shared_ptr<Slot> try_take();
  // Takes the time of that, if need be. Errors: those of registering it.
  Result<std::shared_ptr<Slot>> take();
  const Nics& nics() const { return nics_; }

 private:
  static constexpr uint32_t kSlots = 4096;  // of a page
  void give_back(Page& page, uint32_t index);

  const Nics nics_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Page>> pages_;
};
using SlotPtr = std::shared_ptr<WordTable::Slot>;

}  // namespace torch_mooncake::transfer::rdma
