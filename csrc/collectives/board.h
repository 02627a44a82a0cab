// Board: collectives of little data between the ranks of one host, without messages.
//
// Each rank has a segment of shared memory that only it writes: a few slots, used in turn, and two counters: of the
// last collective that it has shown (`posted`), and of the last that it is through with (`done`). In a collective a
// rank fills its slot, posts it, waits for the others' and reads theirs. A slot is used again when everybody is through
// with the collective that had it. Who waits spins for up to 50 µs (giving up the core in between where ranks outnumber
// cores), then sleeps in a futex on the counter, having said so in its own segment, so that the other one wakes it.
//
// A group has two. On the small one all its collectives are counted, and shown, those of much data without it: a rank
// that is in another one, or in one of other sizes, is found out by those who need it. Much data goes over the large
// one, piece by piece, each a turn of its own: the slots stay in the caches, where the cores share them.
//
// Threads: one collective at a time (as everywhere in a group); arrived() and missing() from any.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "collectives/choice.h"
#include "collectives/collectives.h"
#include "collectives/topology.h"
#include "common/fd.h"
#include "memory/segment.h"

namespace torch_mooncake::coll {

class Board {
 public:
  using Kind = Collective;
  static constexpr int kSmall = 0, kLarge = 1;
  static constexpr uint64_t kSlotBytes[] = {16 << 10, 256 << 10};

  static constexpr size_t kResident = 12;

  // Among the ranks of one host, which outlive it as part of the group.
  Board(Group& group, const Team& team, int which);
  ~Board();
  uint64_t slot_bytes() const { return kSlotBytes[which_]; }
  // "board", "messages" (not all can see all), or "not used yet".
  const char* state() const;
  // The segment of another rank of the group, or an invalid fd: it cannot give one. (I/O thread.)
  void arrived(int rank, const Id128& segment, UniqueFd fd);
  // The ranks (of the group) that have not come to the collective under way.
  std::vector<int> missing() const;

 private:
  friend class Turn;
  friend Result<bool> has_large_board(const Call& call, Kind kind);
  struct Head;
  struct Slot;
  uint64_t segment_bytes() const;
  Status check_alive() const;
  Status late() const;
  // When it is needed first the ranks show each other their segments, and agree whether all see all.
  Status open(const Call& call);
  Status offer(const Call& call, int rank, const Segment* segment);
  Status wait(const Call& call, int rank, const std::atomic<uint32_t>& counter, uint32_t at_least);
  void raise(std::atomic<uint32_t>& counter, uint32_t to);
  // `pages_` held: this board has pages, and is the one used last; others may lose theirs.
  void come_in();
  bool give_back();  // false: somebody uses it, or reads it still
  Head& head(int rank) const;
  Slot& slot(int rank, uint32_t turn) const;

  Group& group_;
  const Team& team_;
  const int which_;
  const int pid_;
  std::atomic<bool> opened_{false}, usable_{false};
  std::atomic<uint32_t> turn_{0};  // collectives so far; wraps around
  std::atomic<bool> waits_{false};
  bool opens_ = false;  // under mutex_
  mutable std::mutex mutex_;
  std::condition_variable came_;
  struct Seen {
    bool came = false;
    MappingPtr map;  // null: it gave none, or one that is no board
  };
  std::vector<Seen> seen_;  // by number in the team, ours too
  // Of a large board.
  struct Residents;
  static Residents& residents();
  std::byte* own_ = nullptr;  // our segment
  std::mutex pages_;          // held by a turn, and by who takes the pages
  bool resident_ = false;     // under pages_
  std::atomic<uint64_t> used_{0};
};

// One collective, or one piece of one on the large board: begin(); if it is on the board, fill mine(), post(), and read
// theirs(). It is over at the end of the scope.
class Turn {
 public:
  explicit Turn(const Call& call, int which = Board::kSmall) : call_(call), which_(which) {}
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // `nbytes`: what this rank shows; `most`: the most that any rank shows, which all of them know; `agreed`: what else
  // they must agree about (a hash of sizes). Waits until the slot can be used.
  Status begin(Board::Kind kind, uint64_t nbytes, uint64_t most, uint64_t agreed = 0);
  // false: `most` does not fit a slot, there is no board, or messages were asked for.
  bool on_board() const { return on_board_; }
  std::byte* mine();  // 64-byte aligned
  // Copies into mine(), and counts it as traffic.
  void put(uint64_t at, const void* data, uint64_t nbytes);
  void post();
  // What that rank shows. layout_mismatch if it is in another collective, or shows another number of bytes.
  Result<const std::byte*> theirs(int rank, uint64_t nbytes);
  // The same without looking at the data, before it comes by another way: of all ranks, or of the root only; the root's
  // own look is at all. Nothing without a board.
  Status meet(uint64_t nbytes);
  Status meet_at(int root, uint64_t root_nbytes, uint64_t leaf_nbytes);

 private:
  const Call& call_;
  const int which_;
  Board* board_ = nullptr;
  uint32_t turn_ = 0;
  Board::Kind kind_{};
  uint64_t most_ = 0, agreed_ = 0;
  bool on_board_ = false;
  std::unique_lock<std::mutex> pages_;  // of a large board: they stay while we are in it
};

// A hash of numbers: what ranks that must have the same list show of it.
class Agreed {
 public:
  void add(uint64_t number) { hash_ = (hash_ ^ number) * 0x100000001b3; }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

// A slot of the large board in as many pieces as there are other ranks: how long they are, and which of them is for
// `to`.
inline uint64_t room_of_piece(int n) {
  return Board::kSlotBytes[Board::kLarge] / static_cast<uint64_t>(n - 1) / 64 * 64;
}
inline uint64_t place_of(int of, int to) { return static_cast<uint64_t>(to < of ? to : to - 1); }

// Whether much data can go over the large board: what all ranks know.
Result<bool> has_large_board(const Call& call, Board::Kind kind);

}  // namespace torch_mooncake::coll
