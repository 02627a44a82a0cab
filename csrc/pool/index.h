// Index: from a key's hash to what the home knows of its current version. The directory's memory: 48 bytes a slot, at
// most 7/8 and at least 1/4 of them in use, for an entry with one extent that never expires; others have the rest of
// theirs in a side table.
//
// One open-addressed table a shard, so that growing moves some thousand entries at a time. Pure data, one caller.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "common/api.h"
#include "pool/key_hash.h"
#include "pool/types.h"

namespace torch_mooncake::pool {

struct HashOfHash {
  size_t operator()(const KeyHash& h) const { return static_cast<size_t>(h[1]); }
};

struct Spot {          // an extent on a donor
  uint32_t donor = 0;  // below 2^26
  uint32_t part = 0;
  ExtentRef extent;
  Tier tier = Tier::dram;
  bool operator==(const Spot& o) const {
    return donor == o.donor && extent.index == o.extent.index && extent.generation == o.extent.generation;
  }
};

struct IndexEntry {
  Version version;
  Kind kind = Kind::named;
  uint32_t parts = 1;
  int64_t expires_ns = INT64_MAX;
  std::vector<Spot> spots;
  uint32_t replicas = 1;  // as it was put
  Pin pin = Pin::none;
};

// Where an object is: in memory if each part has a copy there.
TM_API Tier tier_of(const std::vector<Spot>& spots, uint32_t parts);

class TM_API Index {
 private:
  struct Slot {
    KeyHash hash{};
    Version version;
    uint64_t generation = 0;
    uint32_t extent = 0;
    uint32_t donor : 26 = 0, pin : 2 = 0, used : 1 = 0, sealed : 1 = 0, on_disk : 1 = 0;
    uint32_t more : 1 = 0;  // the rest is in the side table
  };
  static_assert(sizeof(Slot) == 48);
  struct More {
    uint32_t parts = 1;
    int64_t expires_ns = INT64_MAX;
    std::vector<Spot> spots;
    uint32_t replicas = 1;
  };

 public:
  // An entry in place; good until the next change. False: there is none.
  class Ref {
   public:
    explicit operator bool() const { return slot_ != nullptr; }
    const Version& version() const { return slot_->version; }
    Kind kind() const { return slot_->sealed ? Kind::sealed : Kind::named; }
    uint32_t parts() const { return more_ ? more_->parts : 1; }
    int64_t expires_ns() const { return more_ ? more_->expires_ns : INT64_MAX; }
    uint32_t replicas() const { return more_ ? more_->replicas : 1; }
    Pin pin() const { return static_cast<Pin>(slot_->pin); }
    Tier tier() const {
      if (more_) return tier_of(more_->spots, more_->parts);
      return slot_->on_disk ? Tier::ssd : Tier::dram;
    }
    size_t spots() const { return more_ ? more_->spots.size() : 1; }
    Spot spot(size_t i) const {
      if (more_) return more_->spots[i];
      return {slot_->donor, 0, {slot_->extent, slot_->generation}, tier()};
    }
    IndexEntry entry() const;

   private:
    friend class Index;
    const Slot* slot_ = nullptr;
    const More* more_ = nullptr;
  };

  Index();
  Ref find(const KeyHash& hash) const;
  void prefetch(const KeyHash& hash) const {
    const Shard& shard = shards_[hash[0] % kShards];
    if (shard.capacity) __builtin_prefetch(&shard.slots[place(hash, shard.capacity)]);
  }
  void set(const KeyHash& hash, const IndexEntry& entry);
  void erase(const KeyHash& hash);
  size_t size() const { return size_; }
  size_t nbytes() const;  // of memory, without the allocator's own

  // fn(hash, Ref), of all entries; it changes nothing.
  template <typename Fn>
  void for_each(Fn fn) const {
    for (const Shard& shard : shards_)
      for (uint32_t i = 0; i < shard.capacity; ++i)
        if (shard.slots[i].used) fn(shard.slots[i].hash, ref(shard.slots[i]));
  }

 private:
  struct Shard {
    std::unique_ptr<Slot[]> slots;
    uint32_t capacity = 0, used = 0;
  };
  static uint32_t place(const KeyHash& hash, uint32_t capacity) {
    return static_cast<uint32_t>((static_cast<unsigned __int128>(hash[1]) * capacity) >> 64);
  }
  static uint32_t seek(const Shard& shard, const KeyHash& hash);  // its slot, or the empty one where it belongs
  static void resize(Shard& shard, uint32_t capacity);
  Ref ref(const Slot& slot) const;

  std::vector<Shard> shards_;
  std::unordered_map<KeyHash, More, HashOfHash> more_;
  size_t size_ = 0;
};

}  // namespace torch_mooncake::pool
