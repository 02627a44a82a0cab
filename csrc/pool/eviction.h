// Turnover eviction: the victim has the smallest  last use + capacity * floor(log2(uses)),  time counted in bytes
// touched: each doubling of an extent's uses is worth one turnover of the pool. Kept as 16 LRU lists, one a class of
// uses, so the victim is the best of 16 heads: no heap, no scan. Uses of about 4 capacities of evicted keys are
// remembered (4 ghosts to a cache line, the oldest of them overwritten), of 2^20 keys at least and of as many as there
// were members at once.
//
// Whoever touches the pages of a prefix tail first gets parents that outlive their children: a parent's uses and last
// use are never below its child's.
//
// Soft members are victims only when there are no others. Members may be in groups (0: none), which share the order and
// have victims of their own.
//
// Members are small integers (extent indices). All calls O(1), also while their number grows: memory for all of them is
// set aside, and taken when it is used. Threads: one caller at a time.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "common/status.h"

namespace torch_mooncake::pool {

class Turnover {
 public:
  static constexpr uint32_t kClasses = 16;
  Turnover(uint64_t capacity_bytes, uint32_t max_members);

  // A new member, used once now, or more often if it was evicted lately (key_hash).
  void insert(uint32_t member, uint64_t key_hash, uint64_t nbytes, bool soft = false, uint8_t group = 0);
  // A member with a known past; call in order of last_use.
  void restore(uint32_t member, uint64_t nbytes, uint32_t uses, uint64_t last_use, bool soft = false,
               uint8_t group = 0);
  void touch(uint32_t member);
  // As if used now, but not counted; at least as often as `uses`.
  void refresh(uint32_t member, uint32_t uses);
  void remove(uint32_t member);                                               // deleted: nothing is remembered
  void evict(uint32_t member, uint64_t key_hash);                             // remove, and remember its uses
  std::optional<uint32_t> victim() const { return least(0, lists_.size()); }  // least valuable of those not parked
  std::optional<uint32_t> victim(uint8_t group) const;

  // A pinned member steps aside, keeps its age, and comes back where it was.
  void park(uint32_t member);
  void unpark(uint32_t member);  // several: latest last_use first

  bool contains(uint32_t member) const { return member < nodes_.size() && nodes_[member].list != kAbsent; }
  bool parked(uint32_t member) const { return nodes_[member].list == kParked; }
  bool soft(uint32_t member) const { return nodes_[member].soft; }
  uint8_t group(uint32_t member) const { return nodes_[member].group; }
  uint64_t last_use(uint32_t member) const { return nodes_[member].last_use; }
  uint32_t uses(uint32_t member) const { return nodes_[member].uses; }
  uint64_t nbytes() const { return nbytes_; }  // of all members, parked ones too
  uint64_t soft_nbytes() const { return soft_nbytes_; }
  size_t size() const { return size_; }
  Status check() const;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint16_t kAbsent = 0xffff, kParked = 0xfffe;
  static constexpr uint32_t kLists = 2 * kClasses;  // of a group
  struct Node {
    uint64_t last_use = 0, nbytes = 0;
    uint32_t prev = kNone, next = kNone, uses = 0;
    uint16_t list = kAbsent;
    bool soft = false;
    uint8_t group = 0;
  };
  struct List {
    uint32_t head = kNone, tail = kNone;
  };
  struct Ghost {
    uint32_t tag, uses;      // tag 0: empty
    uint64_t evicted_bytes;  // value of evicted_bytes_ when it went
  };
  struct FreeGhosts {
    void operator()(Ghost* g) const { std::free(g); }
  };

  static uint16_t list_of(const Node& node);  // by group; in each by class, those of soft members behind
  std::optional<uint32_t> least(size_t begin, size_t end) const;
  void append(uint32_t member, uint16_t list);
  void prepend(uint32_t member, uint16_t list);
  void unlink(uint32_t member);
  Ghost* bucket(uint64_t key_hash) { return &ghosts_[(key_hash & ghost_mask_) * 4]; }
  uint32_t take_ghost(uint64_t key_hash);
  void put_ghost(uint64_t key_hash, uint32_t uses);

  const uint64_t capacity_;
  uint64_t now_ = 0, nbytes_ = 0, soft_nbytes_ = 0, evicted_bytes_ = 0;
  size_t size_ = 0;
  std::vector<List> lists_{kLists};
  std::vector<Node> nodes_;
  std::unique_ptr<Ghost[], FreeGhosts> ghosts_;
  uint64_t ghost_mask_ = 0, ghost_mask_max_ = 0;
};

}  // namespace torch_mooncake::pool
