#include "pool/allocator.h"

#include <algorithm>
#include <bit>
#include <new>
#include <string>

namespace torch_mooncake::pool {
namespace {

constexpr uint32_t kSlabTag = 1u << 31;
constexpr uint32_t kFreeCell = 1u << 31;
constexpr uint32_t kNoCell = kFreeCell - 1;
constexpr size_t kClasses = 56;

// The cell for an object of n bytes, 0 < n < kSlabLimit.
uint32_t cell_bytes_for(uint64_t n) {
  if (n <= 512) return static_cast<uint32_t>((n + 63) / 64 * 64);
  const uint64_t step = (uint64_t{1} << (std::bit_width(n - 1) - 1)) / 8;
  return static_cast<uint32_t>((n + step - 1) / step * step);
}

size_t class_of(uint32_t cell_bytes) {
  if (cell_bytes <= 512) return cell_bytes / 64 - 1;
  const int k = std::bit_width(cell_bytes - 1) - 1;  // 2^k < cell <= 2^(k+1), k >= 9
  return 8 + static_cast<size_t>(k - 9) * 8 + (cell_bytes - (1u << k)) / ((1u << k) / 8) - 1;
}

uint32_t slab_pages_for(uint32_t cell_bytes) { return cell_bytes <= 2048 ? 16 : 64; }

uint64_t pages_of(uint64_t nbytes) { return (nbytes + kPageBytes - 1) / kPageBytes; }

Status corrupt(const std::string& what) { return {Code::corrupt, "allocator: " + what}; }

}  // namespace

Allocator::Allocator(Options options)
    : limit_pages_(options.limit_bytes / kPageBytes),
      size_bytes_(std::min(options.size_bytes, options.limit_bytes)),
      grow_step_(std::max<uint64_t>(options.grow_step_bytes, kPageBytes)),
      ceiling_pages_(limit_pages_),
      grow_(std::move(options.grow)),
      tags_(static_cast<Tag*>(std::calloc(limit_pages_ + 1, sizeof(Tag)))),
      partial_(kClasses) {
  if (!tags_) throw std::bad_alloc();
  if (limit_pages_ != 0) give_run(0, static_cast<uint32_t>(limit_pages_));
}

uint64_t Allocator::footprint(uint64_t nbytes) {
  if (nbytes == 0) return 0;
  return nbytes < kSlabLimit ? cell_bytes_for(nbytes) : pages_of(nbytes) * kPageBytes;
}

uint64_t Allocator::footprint(const Placement& placement) {
  uint64_t sum = 0;
  for (const Piece& piece : placement.pieces)
    sum += placement.slab == kNoSlab ? pages_of(piece.nbytes) * kPageBytes : cell_bytes_for(piece.nbytes);
  return sum;
}

Result<Placement> Allocator::allocate(uint64_t nbytes, uint32_t owner, uint32_t max_pieces) {
  if (nbytes == 0) return Placement{};
  if (nbytes < kSlabLimit) return allocate_cell(nbytes, owner);
  if (!fits(nbytes, max_pieces)) return {Code::pool_full, "no room"};
  const uint64_t need = pages_of(nbytes);
  // What is taken is remembered, so that it goes back if the segment cannot grow after all.
  Placement placement;
  uint64_t left = need;
  while (left != 0) {
    auto run = runs_.lower_bound({static_cast<uint32_t>(left), 0});
    if (run == runs_.end()) --run;
    const uint32_t pages = static_cast<uint32_t>(std::min<uint64_t>(left, run->first));
    auto first = take_from(run->second, run->first, pages, owner + 1);
    if (!first.is_ok()) {
      for (const Piece& piece : placement.pieces)
        give_run(static_cast<uint32_t>(piece.offset / kPageBytes), static_cast<uint32_t>(piece.nbytes / kPageBytes));
      return first.status().code() == Code::pool_full ? allocate(nbytes, owner, max_pieces)  // under the new ceiling
                                                      : Result<Placement>(first.status());
    }
    placement.pieces.push_back({0, uint64_t{*first} * kPageBytes, pages * kPageBytes});
    left -= pages;
  }
  placement.pieces.back().nbytes -= need * kPageBytes - nbytes;
  used_bytes_ += need * kPageBytes;
  return placement;
}

void Allocator::free(const Placement& placement) {
  if (placement.slab != kNoSlab) return free_cell(placement);
  for (const Piece& piece : placement.pieces) {
    const auto pages = static_cast<uint32_t>(pages_of(piece.nbytes));
    give_run(static_cast<uint32_t>(piece.offset / kPageBytes), pages);
    used_bytes_ -= pages * kPageBytes;
  }
}

bool Allocator::fits(uint64_t nbytes, uint32_t max_pieces) const {
  if (nbytes == 0) return true;
  if (nbytes < kSlabLimit) {
    const uint32_t cell = cell_bytes_for(nbytes);
    return !partial_[class_of(cell)].empty() || (!runs_.empty() && runs_.rbegin()->first * kPageBytes >= cell);
  }
  const uint64_t need = pages_of(nbytes);
  if (need > free_pages_) return false;
  uint64_t sum = 0;
  uint32_t pieces = 0;
  for (auto run = runs_.rbegin(); run != runs_.rend() && pieces < max_pieces; ++run, ++pieces) {
    sum += run->first;
    if (sum >= need) return true;
  }
  return false;
}

Result<uint32_t> Allocator::take_run(uint32_t pages, uint32_t tag) {
  auto run = runs_.lower_bound({pages, 0});
  if (run == runs_.end()) return {Code::pool_full, "no run"};
  return take_from(run->second, run->first, pages, tag);
}

Result<uint32_t> Allocator::take_from(uint32_t first, uint32_t run_pages, uint32_t pages, uint32_t tag) {
  TM_TRY(ensure(uint64_t{first} + pages));
  runs_.erase({run_pages, first});
  free_pages_ -= run_pages;
  set_run(first, pages, tag);
  if (pages < run_pages) {
    set_run(first + pages, run_pages - pages, 0);
    runs_.insert({run_pages - pages, first + pages});
    free_pages_ += run_pages - pages;
  }
  return first;
}

void Allocator::set_run(uint32_t first, uint32_t pages, uint32_t tag) {
  tags_[first] = {tag, pages};
  tags_[first + pages - 1] = {tag, pages};
}

void Allocator::give_run(uint32_t first, uint32_t pages) {
  free_pages_ += pages;
  uint32_t begin = first, end = first + pages;
  if (begin > 0 && tags_[begin - 1].owner == 0 && tags_[begin - 1].pages != 0) {
    const uint32_t left = tags_[begin - 1].pages;
    if (runs_.erase({left, begin - left}) != 0) begin -= left;
  }
  if (end < ceiling_pages_ && tags_[end].owner == 0 && tags_[end].pages != 0) {
    const uint32_t right = tags_[end].pages;
    if (runs_.erase({right, end}) != 0) end += right;
  }
  set_run(begin, end - begin, 0);
  runs_.insert({end - begin, begin});
}

Status Allocator::ensure(uint64_t end_page) {
  const uint64_t end = end_page * kPageBytes;
  if (end <= size_bytes_) return {};
  const uint64_t limit = limit_pages_ * kPageBytes;
  uint64_t target = std::min(limit, (end + grow_step_ - 1) / grow_step_ * grow_step_);
  Status grown = grow_(target);
  if (!grown && grown.code() == Code::pool_full && target != end) {
    target = end;  // the host may have enough for this one
    grown = grow_(target);
  }
  if (grown) {
    size_bytes_ = target;
    return {};
  }
  if (grown.code() == Code::pool_full) cut_to_size();
  return grown;
}

// The pages that the segment could not get are taken out of the free runs.
void Allocator::cut_to_size() {
  const auto size_pages = static_cast<uint32_t>(size_bytes_ / kPageBytes);
  if (ceiling_pages_ <= size_pages) return;
  const auto ceiling = static_cast<uint32_t>(ceiling_pages_);
  // Nothing was ever handed out above the size, so one free run ends at the ceiling and covers all of that.
  const uint32_t pages = tags_[ceiling - 1].pages, first = ceiling - pages;
  runs_.erase({pages, first});
  free_pages_ -= ceiling - size_pages;
  ceiling_pages_ = size_pages;
  if (first < size_pages) {
    set_run(first, size_pages - first, 0);
    runs_.insert({size_pages - first, first});
  }
}

void Allocator::lift_ceiling() {
  if (ceiling_pages_ == limit_pages_) return;
  const auto first = static_cast<uint32_t>(ceiling_pages_);
  ceiling_pages_ = limit_pages_;
  give_run(first, static_cast<uint32_t>(limit_pages_ - first));
}

std::set<uint64_t>& Allocator::partial(uint32_t cell_bytes) { return partial_[class_of(cell_bytes)]; }

Result<Placement> Allocator::allocate_cell(uint64_t nbytes, uint32_t owner) {
  const uint32_t cell_bytes = cell_bytes_for(nbytes);
  auto& open = partial(cell_bytes);
  if (open.empty()) {
    auto made = new_slab(cell_bytes);
    if (!made.is_ok()) return made.status();
  }
  const uint64_t key = *open.begin();  // the lowest, so that high slabs empty
  Slab& slab = slabs_[static_cast<uint32_t>(key)];
  const uint32_t cell = slab.free_head;
  slab.free_head = slab.cells[cell] & ~kFreeCell;
  slab.cells[cell] = owner + 1;
  if (++slab.used == slab.cells.size()) open.erase(key);
  used_bytes_ += cell_bytes;
  const uint64_t base = uint64_t{slab.first_page} * kPageBytes;
  return Placement{{{0, base + uint64_t{cell} * cell_bytes, nbytes}}, base};
}

Result<uint32_t> Allocator::new_slab(uint32_t cell_bytes) {
  const auto least = static_cast<uint32_t>(pages_of(cell_bytes));
  for (;;) {
    if (runs_.empty() || runs_.rbegin()->first < least) return {Code::pool_full, "no room"};
    const uint32_t pages = std::min(slab_pages_for(cell_bytes), runs_.rbegin()->first);
    auto first = take_run(pages, kSlabTag);
    if (!first.is_ok()) {
      if (first.status().code() != Code::pool_full) return first.status();
      continue;  // the ceiling came down: at most once, then there are no pages to grow for
    }
    uint32_t id = 0;
    insert_slab(*first, pages, cell_bytes, &id);
    return id;
  }
}

void Allocator::insert_slab(uint32_t first, uint32_t pages, uint32_t cell_bytes, uint32_t* id) {
  if (free_slabs_.empty()) {
    *id = static_cast<uint32_t>(slabs_.size());
    slabs_.emplace_back();
  } else {
    *id = free_slabs_.back();
    free_slabs_.pop_back();
  }
  Slab& slab = slabs_[*id];
  slab = Slab{first, pages, cell_bytes, 0, 0, {}};
  slab.cells.resize(pages * kPageBytes / cell_bytes);
  for (uint32_t i = 0; i < slab.cells.size(); ++i)
    slab.cells[i] = kFreeCell | (i + 1 < slab.cells.size() ? i + 1 : kNoCell);
  set_run(first, pages, kSlabTag | *id);
  partial(cell_bytes).insert(uint64_t{first} << 32 | *id);
}

void Allocator::free_cell(const Placement& placement) {
  const auto first = static_cast<uint32_t>(placement.slab / kPageBytes);
  const uint32_t id = tags_[first].owner & ~kSlabTag;
  Slab& slab = slabs_[id];
  const auto cell = static_cast<uint32_t>((placement.pieces[0].offset - placement.slab) / slab.cell_bytes);
  slab.cells[cell] = kFreeCell | slab.free_head;
  slab.free_head = cell;
  used_bytes_ -= slab.cell_bytes;
  auto& open = partial(slab.cell_bytes);
  const uint64_t key = uint64_t{first} << 32 | id;
  if (--slab.used != 0) {
    open.insert(key);
    return;
  }
  open.erase(key);
  give_run(first, slab.pages);
  slab = {};
  free_slabs_.push_back(id);
}

Status Allocator::rebuild(std::span<const Claim> claims) {
  runs_.clear();
  slabs_.clear();
  free_slabs_.clear();
  for (auto& open : partial_) open.clear();
  free_pages_ = used_bytes_ = 0;
  ceiling_pages_ = limit_pages_;
  tags_.reset(static_cast<Tag*>(std::calloc(limit_pages_ + 1, sizeof(Tag))));
  if (!tags_) throw std::bad_alloc();

  struct Range {
    uint64_t first, pages;
    uint32_t owner;
    const Placement* cell;
  };
  std::vector<Range> ranges;
  for (const Claim& claim : claims) {
    for (const Piece& piece : claim.placement->pieces) {
      if (claim.placement->slab == kNoSlab) {
        ranges.push_back({piece.offset / kPageBytes, pages_of(piece.nbytes), claim.owner, nullptr});
      } else {
        ranges.push_back({claim.placement->slab / kPageBytes, 0, claim.owner, claim.placement});
      }
    }
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::pair(a.first, a.cell ? a.cell->pieces[0].offset : 0) <
           std::pair(b.first, b.cell ? b.cell->pieces[0].offset : 0);
  });
  const uint64_t size_pages = size_bytes_ / kPageBytes;
  uint64_t at = 0;
  for (size_t i = 0; i < ranges.size();) {
    const uint64_t first = ranges[i].first;
    size_t next = i + 1;
    if (first < at) return corrupt("claims overlap at page " + std::to_string(first));
    if (first > at) give_run(static_cast<uint32_t>(at), static_cast<uint32_t>(first - at));
    if (!ranges[i].cell) {
      if (first + ranges[i].pages > size_pages) return corrupt("a claim lies beyond the segment's pages");
      set_run(static_cast<uint32_t>(first), static_cast<uint32_t>(ranges[i].pages), ranges[i].owner + 1);
      used_bytes_ += ranges[i].pages * kPageBytes;
      at = first + ranges[i].pages;
      i = next;
      continue;
    }
    // A slab: as long as its class says, or shorter where something else (or the end of the segment) begins.
    while (next < ranges.size() && ranges[next].first == first && ranges[next].cell) ++next;
    const uint32_t cell_bytes = cell_bytes_for(ranges[i].cell->pieces[0].nbytes);
    uint64_t pages = std::min<uint64_t>(slab_pages_for(cell_bytes), size_pages - std::min(first, size_pages));
    if (next < ranges.size()) pages = std::min(pages, ranges[next].first - first);
    const uint64_t last = ranges[next - 1].cell->pieces[0].offset + cell_bytes;
    if (last > (first + pages) * kPageBytes) return corrupt("a slab overlaps at page " + std::to_string(first));
    uint32_t id = 0;
    insert_slab(static_cast<uint32_t>(first), static_cast<uint32_t>(pages), cell_bytes, &id);
    Slab& slab = slabs_[id];
    std::fill(slab.cells.begin(), slab.cells.end(), 0);
    for (; i < next; ++i) {
      const Piece& piece = ranges[i].cell->pieces[0];
      const uint64_t offset = piece.offset - first * kPageBytes;
      if (cell_bytes_for(piece.nbytes) != cell_bytes || offset % cell_bytes != 0 || slab.cells[offset / cell_bytes])
        return corrupt("cells of a slab overlap at page " + std::to_string(first));
      slab.cells[offset / cell_bytes] = ranges[i].owner + 1;
      ++slab.used;
      used_bytes_ += cell_bytes;
    }
    slab.free_head = kNoCell;
    for (auto c = static_cast<uint32_t>(slab.cells.size()); c-- > 0;) {
      if (slab.cells[c] != 0) continue;
      slab.cells[c] = kFreeCell | slab.free_head;
      slab.free_head = c;
    }
    if (slab.used == slab.cells.size()) partial(cell_bytes).erase(first << 32 | id);
    at = first + pages;
  }
  if (at < limit_pages_) give_run(static_cast<uint32_t>(at), static_cast<uint32_t>(limit_pages_ - at));
  return {};
}

void Allocator::for_each_run(const std::function<bool(uint32_t, uint32_t)>& fn) const {
  for (auto run = runs_.rbegin(); run != runs_.rend(); ++run)
    if (!fn(run->second, run->first)) return;
}

std::vector<uint32_t> Allocator::owners_at(uint64_t page) const {
  if (page >= ceiling_pages_) return {};
  const uint32_t tag = tags_[page].owner;
  if (tag == 0) return {};
  if (!(tag & kSlabTag)) return {tag - 1};
  std::vector<uint32_t> owners;
  for (uint32_t cell : slabs_[tag & ~kSlabTag].cells)
    if (!(cell & kFreeCell)) owners.push_back(cell - 1);
  return owners;
}

Status Allocator::check() const {
  uint64_t at = 0, free_pages = 0, used = 0;
  size_t runs = 0, slabs = 0;
  bool was_free = false;
  while (at < ceiling_pages_) {
    const Tag tag = tags_[at];
    const std::string where = " at page " + std::to_string(at);
    if (tag.pages == 0 || at + tag.pages > ceiling_pages_) return corrupt("bad run" + where);
    const Tag end = tags_[at + tag.pages - 1];
    if (end.pages != tag.pages || end.owner != tag.owner) return corrupt("run ends differ" + where);
    if (tag.owner == 0) {
      if (was_free) return corrupt("two free runs side by side" + where);
      if (!runs_.count({tag.pages, static_cast<uint32_t>(at)})) return corrupt("free run not listed" + where);
      free_pages += tag.pages;
      ++runs;
    } else if (tag.owner & kSlabTag) {
      const uint32_t id = tag.owner & ~kSlabTag;
      if (id >= slabs_.size()) return corrupt("no such slab" + where);
      const Slab& slab = slabs_[id];
      if (slab.first_page != at || slab.pages != tag.pages || slab.used == 0) return corrupt("bad slab" + where);
      const auto taken = static_cast<uint32_t>(
          std::count_if(slab.cells.begin(), slab.cells.end(), [](uint32_t c) { return !(c & kFreeCell); }));
      if (taken != slab.used) return corrupt("slab count" + where);
      uint32_t listed = 0;
      for (uint32_t c = slab.free_head; c != kNoCell && listed <= slab.cells.size(); c = slab.cells[c] & ~kFreeCell)
        ++listed;
      if (listed + taken != slab.cells.size()) return corrupt("slab free list" + where);
      const bool open = partial_[class_of(slab.cell_bytes)].count(at << 32 | id) != 0;
      if (open != (taken < slab.cells.size())) return corrupt("slab open list" + where);
      used += uint64_t{taken} * slab.cell_bytes;
      ++slabs;
    } else {
      used += tag.pages * kPageBytes;
    }
    if (tag.owner != 0 && (at + tag.pages) * kPageBytes > size_bytes_) return corrupt("beyond the segment" + where);
    was_free = tag.owner == 0;
    at += tag.pages;
  }
  if (runs != runs_.size()) return corrupt("free runs listed: " + std::to_string(runs_.size()));
  if (slabs + free_slabs_.size() != slabs_.size()) return corrupt("slabs lost");
  if (free_pages != free_pages_) return corrupt("free pages counted " + std::to_string(free_pages_));
  if (used != used_bytes_) return corrupt("used bytes counted " + std::to_string(used_bytes_));
  return {};
}

}  // namespace torch_mooncake::pool
