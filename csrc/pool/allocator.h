// Allocator: which bytes of a segment are whose. Knows offsets only, touches no memory of the segment.
//
// From kSlabLimit up an object gets whole pages, best fit (lowest address among equals), one run if there is one, else
// the fewest runs that make it up, at most `max_pieces`. Smaller ones get a cell of a slab (56 size classes, 8 to a
// doubling, 64-byte aligned). The segment grows by `grow` when an allocation reaches past what it has; if the host has
// no more memory, the allocator does with what there is until lift_ceiling().
//
// Cost: O(log runs) per call; 8 bytes of bookkeeping per page (touched only where used). Threads: one caller at a time.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "common/status.h"
#include "pool/types.h"

namespace torch_mooncake::pool {

inline constexpr uint64_t kNoSlab = UINT64_MAX;

// Where one object lies. Pieces cover nbytes exactly; behind the last one the page or cell is unused.
struct Placement {
  std::vector<Piece> pieces;
  uint64_t slab = kNoSlab;  // offset of the slab that the single piece is a cell of
};

class Allocator {
 public:
  // Gives pages to [0, new_size).
  using Grow = std::function<Status(uint64_t new_size)>;
  struct Options {
    uint64_t limit_bytes = 0;  // whole pages
    uint64_t size_bytes = 0;   // what the segment has now
    uint64_t grow_step_bytes = 64 << 20;
    Grow grow;
  };
  struct Claim {  // for rebuild()
    uint32_t owner;
    const Placement* placement;
  };

  explicit Allocator(Options options);

  // `owner` (< 2^31 - 1) is what owners_at() tells later. pool_full (not logged: the donor decides) if it does not fit.
  Result<Placement> allocate(uint64_t nbytes, uint32_t owner, uint32_t max_pieces = kMaxPieces);
  void free(const Placement& placement);
  bool fits(uint64_t nbytes, uint32_t max_pieces = kMaxPieces) const;
  // Forget everything and take over what a previous worker had handed out. corrupt: claims overlap or leave the limit.
  Status rebuild(std::span<const Claim> claims);
  // Growth failed once: try again at the next need.
  void lift_ceiling();

  // Bytes that an object of this size takes: its cell, or whole pages.
  static uint64_t footprint(uint64_t nbytes);
  static uint64_t footprint(const Placement& placement);
  uint64_t used_bytes() const { return used_bytes_; }               // sum of footprints
  uint64_t free_bytes() const { return free_pages_ * kPageBytes; }  // whole free pages, below limit and ceiling
  uint64_t size_bytes() const { return size_bytes_; }               // grown so far
  uint64_t limit_bytes() const { return limit_pages_ * kPageBytes; }
  uint64_t ceiling_bytes() const { return ceiling_pages_ * kPageBytes; }  // what can be had now: <= limit

  // Free runs, largest first, until fn returns false: fn(first page, pages).
  void for_each_run(const std::function<bool(uint32_t first, uint32_t pages)>& fn) const;
  // Whose the page is that begins or ends a run or slab there (one owner, or all of a slab); empty: free or outside.
  std::vector<uint32_t> owners_at(uint64_t page) const;

  Status check() const;

 private:
  struct Slab {
    uint32_t first_page = 0, pages = 0, cell_bytes = 0, used = 0, free_head = 0;
    std::vector<uint32_t> cells;  // owner + 1, or kFreeCell | next free cell
  };
  struct Tag {       // at the first and the last page of each run
    uint32_t owner;  // 0: free; kSlabTag | slab id; owner + 1
    uint32_t pages;
  };
  struct FreeTags {
    void operator()(Tag* tags) const { std::free(tags); }
  };

  Result<uint32_t> take_run(uint32_t pages, uint32_t tag);  // one run, best fit
  Result<uint32_t> take_from(uint32_t first, uint32_t run_pages, uint32_t pages, uint32_t tag);
  void set_run(uint32_t first, uint32_t pages, uint32_t tag);
  void give_run(uint32_t first, uint32_t pages);  // coalesces
  Status ensure(uint64_t end_page);
  void cut_to_size();
  Result<Placement> allocate_cell(uint64_t nbytes, uint32_t owner);
  Result<uint32_t> new_slab(uint32_t cell_bytes);
  void insert_slab(uint32_t first, uint32_t pages, uint32_t cell_bytes, uint32_t* id);
  void free_cell(const Placement& placement);
  std::set<uint64_t>& partial(uint32_t cell_bytes);

  uint64_t limit_pages_, size_bytes_, grow_step_;
  uint64_t ceiling_pages_;  // <= limit_pages_: pages above are not in runs_
  Grow grow_;
  std::unique_ptr<Tag[], FreeTags> tags_;
  std::set<std::pair<uint32_t, uint32_t>> runs_;  // (pages, first page)
  uint64_t free_pages_ = 0, used_bytes_ = 0;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> free_slabs_;
  std::vector<std::set<uint64_t>> partial_;  // per class: (first page << 32 | slab id) with free cells
};

}  // namespace torch_mooncake::pool
