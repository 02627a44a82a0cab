// ExtentTable: the table segment (header, generation counter, entries) and the records segment (key, meta, pieces of
// each entry). Both live as long as the keeper; what is written here is what the next worker finds.
//
// Publication order: record, entry fields, generation word, state word. An entry whose state is `free` means nothing,
// whatever else is in it; a record is immutable while its entry is not free, and carries its crc32c.
// Threads: one caller at a time; clients read generation and state words through shared memory.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "memory/segment.h"
#include "pool/allocator.h"
#include "pool/donor.h"
#include "pool/key_hash.h"

namespace torch_mooncake::pool {

struct TableHeader {
  static constexpr uint64_t kMagic = 0x31656c626174'6d74;  // "tmtable1"
  uint64_t magic;
  uint32_t layout, max_extents;
  uint64_t next_generation;  // starts at a random number; taken before use, so never used twice
  uint64_t hash_seed;
  uint32_t entries;  // ever used; beyond them all is free
  // Of SSD folders (hashes of their paths) that failed while this memory lived: what they hold may be superseded.
  static constexpr uint32_t kDeadSsds = 16;
  uint32_t dead_ssds;
  uint64_t dead_ssd[kDeadSsds];
};

// What is recorded of an extent, as views into the records segment.
struct Record {
  TxnId txn{};
  uint32_t part = 0, parts = 1;
  Kind kind = Kind::named;
  Placement placement;
  std::string_view key, label, meta;
  std::string_view parent{};  // key of what it comes after
};

class ExtentTable {
 public:
  static Result<std::unique_ptr<ExtentTable>> create(uint32_t max_extents);
  // Entries that are not whole are made free and counted in `dropped`; their extents are gone.
  static Result<std::unique_ptr<ExtentTable>> attach(std::shared_ptr<Segment> table, std::shared_ptr<Segment> records,
                                                     uint64_t data_bytes, uint32_t* dropped);

  // The index that add() will use.
  uint32_t next_index() const { return free_.empty() ? header_->entries : free_.back(); }
  // A free index with its record written; not published: state is still free. pool_full if either is out of room.
  Result<uint32_t> add(const Record& record);
  // Publishes: fields, generation (returned), state.
  Result<uint64_t> publish(uint32_t index, uint64_t nbytes, SessionId writer, ExtentState state);
  // Another record, with the same placement, for an extent that is PREPARED, which is free in between: who dies then
  // has lost it. On an error nothing has changed.
  Status rebind(uint32_t index, const Record& record);
  // State free, record gone, index reusable. Also for an added, unpublished one.
  void remove(uint32_t index);
  // A new generation word: from now on no reader validates against the old one. No fence behind it.
  void invalidate(uint32_t index);

  ExtentEntry& at(uint32_t index) { return entries_[index]; }
  const ExtentEntry& at(uint32_t index) const { return entries_[index]; }
  ExtentState state(uint32_t index) const;
  void set_state(uint32_t index, ExtentState state);  // release
  uint64_t generation(uint32_t index) const;
  Record record(uint32_t index) const;
  std::string_view key(uint32_t index) const;
  KeyHash key_hash(std::string_view key) const { return hash_key(key, header_->hash_seed); }

  uint32_t entries() const { return header_->entries; }
  uint32_t max_extents() const { return header_->max_extents; }
  uint32_t live() const { return header_->entries - static_cast<uint32_t>(free_.size()); }
  bool has_free_entry() const { return !free_.empty() || header_->entries < header_->max_extents; }
  const std::shared_ptr<Segment>& table_segment() const { return table_; }
  const std::shared_ptr<Segment>& records_segment() const { return records_; }
  // A value that no generation word has had or will have.
  uint64_t next_generation();
  std::vector<Quota> quotas() const;
  void set_quotas(const std::vector<Quota>& quotas);  // whole, whenever this process dies
  bool ssd_is_dead(uint64_t path_hash) const;
  void set_ssd_dead(uint64_t path_hash);
  Status check() const;

 private:
  ExtentTable() = default;
  Status write_record(uint32_t index, const Record& record);
  Status map();

  std::shared_ptr<Segment> table_, records_;
  MappingPtr table_map_, records_map_;
  TableHeader* header_ = nullptr;
  ExtentEntry* entries_ = nullptr;
  std::unique_ptr<Allocator> record_space_;
  std::vector<uint32_t> free_;
};

}  // namespace torch_mooncake::pool
