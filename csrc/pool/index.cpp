#include "pool/index.h"

#include <algorithm>
#include <utility>

namespace torch_mooncake::pool {

Index::Index() : shards_(kShards) {}

IndexEntry Index::Ref::entry() const {
  IndexEntry entry{version(), kind(), parts(), expires_ns(), {}, replicas(), pin()};
  for (size_t i = 0; i < spots(); ++i) entry.spots.push_back(spot(i));
  return entry;
}

uint32_t Index::seek(const Shard& shard, const KeyHash& hash) {
  uint32_t i = place(hash, shard.capacity);
  while (shard.slots[i].used && shard.slots[i].hash != hash) i = i + 1 == shard.capacity ? 0 : i + 1;
  return i;
}

Index::Ref Index::ref(const Slot& slot) const {
  Ref found;
  found.slot_ = &slot;
  if (slot.more) found.more_ = &more_.find(slot.hash)->second;
  return found;
}

Index::Ref Index::find(const KeyHash& hash) const {
  const Shard& shard = shards_[hash[0] % kShards];
  if (shard.used == 0) return {};
  const Slot& slot = shard.slots[seek(shard, hash)];
  return !slot.used ? Ref{} : ref(slot);
}

void Index::resize(Shard& shard, uint32_t capacity) {
  Shard bigger{std::make_unique<Slot[]>(capacity), capacity, shard.used};
  for (uint32_t i = 0; i < shard.capacity; ++i)
    if (shard.slots[i].used) bigger.slots[seek(bigger, shard.slots[i].hash)] = shard.slots[i];
  shard = std::move(bigger);
}

Tier tier_of(const std::vector<Spot>& spots, uint32_t parts) {
  if (parts == 1)
    return std::any_of(spots.begin(), spots.end(), [](const Spot& s) { return s.tier == Tier::dram; }) ? Tier::dram
                                                                                                       : Tier::ssd;
  std::vector<bool> in_memory(parts);
  for (const Spot& s : spots)
    if (s.tier == Tier::dram && s.part < parts) in_memory[s.part] = true;
  return std::count(in_memory.begin(), in_memory.end(), false) == 0 ? Tier::dram : Tier::ssd;
}

void Index::set(const KeyHash& hash, const IndexEntry& entry) {
  Shard& shard = shards_[hash[0] % kShards];
  if (uint64_t{shard.used + 1} * 8 > uint64_t{shard.capacity} * 7)
    resize(shard, std::max<uint32_t>(8, shard.capacity + shard.capacity / 4));
  Slot& slot = shard.slots[seek(shard, hash)];
  if (!slot.used) {
    ++shard.used;
    ++size_;
  }
  const bool plain = entry.parts == 1 && entry.expires_ns == INT64_MAX && entry.replicas == 1 &&
                     entry.spots.size() == 1 && entry.spots[0].part == 0;
  if (plain) {
    if (slot.more) more_.erase(hash);
    slot.extent = entry.spots[0].extent.index;
    slot.generation = entry.spots[0].extent.generation;
    slot.donor = entry.spots[0].donor;
    slot.on_disk = entry.spots[0].tier == Tier::ssd;
  } else {
    more_[hash] = {entry.parts, entry.expires_ns, entry.spots, entry.replicas};
  }
  slot.used = 1;
  slot.hash = hash;
  slot.version = entry.version;
  slot.sealed = entry.kind == Kind::sealed;
  slot.pin = static_cast<uint32_t>(entry.pin);
  slot.more = !plain;
}

void Index::erase(const KeyHash& hash) {
  Shard& shard = shards_[hash[0] % kShards];
  if (shard.used == 0) return;
  uint32_t hole = seek(shard, hash);
  if (!shard.slots[hole].used) return;
  if (shard.slots[hole].more) more_.erase(hash);
  // Those behind it that may stand further in front move up, so that no search stops too early.
  for (uint32_t i = hole;;) {
    i = i + 1 == shard.capacity ? 0 : i + 1;
    const Slot& slot = shard.slots[i];
    if (!slot.used) break;
    const uint32_t home = place(slot.hash, shard.capacity);
    const bool between = hole < i ? hole < home && home <= i : hole < home || home <= i;
    if (between) continue;
    shard.slots[hole] = slot;
    hole = i;
  }
  shard.slots[hole] = {};
  --shard.used;
  --size_;
  if (shard.capacity > 8 && uint64_t{shard.used} * 4 < shard.capacity) resize(shard, shard.capacity / 2);
}

size_t Index::nbytes() const {
  size_t n = shards_.size() * sizeof(Shard);
  for (const Shard& shard : shards_) n += shard.capacity * sizeof(Slot);
  for (const auto& [hash, more] : more_) n += 96 + sizeof(More) + more.spots.capacity() * sizeof(Spot);
  return n;
}

}  // namespace torch_mooncake::pool
