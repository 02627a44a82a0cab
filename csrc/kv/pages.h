// Copies of pages, free of torch: gather, scatter, page to page, and the reordering of heads are all this one copy. A
// page is an array with strides; both sides of a copy see the same elements in the same logical order, each through
// strides of its own. All functions are thread-safe, own nothing and keep no pointer after they return. Every id and
// size is checked before the first byte is written: on error nothing has changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/api.h"
#include "common/status.h"
#include "kv/parallel.h"

namespace torch_mooncake::kv {

// int32 or int64 page ids, as the caller has them.
struct PageIds {
  const void* data = nullptr;  // nullptr with a count: 0, 1, 2, ...
  int64_t count = 0;
  bool wide = true;        // int64, else int32
  bool on_device = false;  // `data` is device memory: only the CUDA plug-in may look

  int64_t operator[](int64_t i) const {
    if (data == nullptr) return i;
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// One dimension inside a page; strides in bytes, of either sign.
struct CopyDim {
  int64_t size;
  int64_t src_stride;
  int64_t dst_stride;
};

inline constexpr int kMaxCopyDims = 5;

// The inside of a page, the same in all regions: `num_dims` dimensions, outermost first, of runs of `run_nbytes` that
// are contiguous on both sides. `make_pattern` brings it into its shortest form, outermost first in the order of dst.
struct PagePattern {
  int64_t run_nbytes = 0;  // 0: pages without bytes
  int num_dims = 0;        // 0: pages are contiguous on both sides, and run_nbytes long
  CopyDim dims[kMaxCopyDims] = {};

  int64_t page_nbytes() const {
    int64_t nbytes = run_nbytes;
    for (int d = 0; d < num_dims; ++d) nbytes *= dims[d].size;
    return nbytes;
  }
};

// Logical dimensions (outermost first, strides in bytes) of elements of `element_nbytes`. Dimensions of size 1 vanish,
// neighbours in memory merge. `invalid_argument` when more than kMaxCopyDims remain.
TM_API Result<PagePattern> make_pattern(std::span<const CopyDim> dims, int64_t element_nbytes);

// Where pages lie: one layer, or one piece of a resharding. Page p of the source starts at src + p * src_page_stride.
struct CopyRegion {
  const std::byte* src;
  std::byte* dst;
};

// page dst_ids[i] of every region's dst = page src_ids[i] of its src, for i in [0, src_ids.count).
struct PageCopy {
  PagePattern page;
  std::span<const CopyRegion> regions;
  PageIds src_ids;  // counts are equal
  PageIds dst_ids;
  int64_t src_pages = 0;  // ids are in [0, src_pages)
  int64_t dst_pages = 0;
  int64_t src_page_stride = 0;  // bytes
  int64_t dst_page_stride = 0;
  const char* src_ids_name = "page_ids";  // what errors call them
  const char* dst_ids_name = "page_ids";
  // src and dst are the same pages: then no id may be in both lists.
  bool in_place = false;

  int64_t count() const { return src_ids.count; }
  int64_t nbytes() const { return static_cast<int64_t>(regions.size()) * count() * page.page_nbytes(); }
};

// A dimension as one side has it; stride in bytes.
struct Extent {
  int64_t size;
  int64_t stride;
};

// False when no two elements share a byte. True when two do, or when dimensions interleave in a way that takes more
// than a look at the strides (each has to step over all smaller ones).
TM_API bool places_overlap(std::vector<Extent> dims, int64_t element_nbytes);

// `out_of_bounds`, naming position, value and range, for an id outside [0, num_pages); with `unique` also
// `invalid_argument` for an id that occurs twice. Ids without data are not looked at, only their count.
TM_API Status check_page_ids(const PageIds& ids, int64_t num_pages, bool unique, const std::string& name = "page_ids");

// What can be said of a copy without the ids: sizes, and that no two places written overlap (`invalid_argument`).
// Both devices check this first.
TM_API Status check_copy(const PageCopy& copy);

// The copy on the CPU. dst_ids may have an id once: which of two pages would win is nobody's guess.
TM_API Status copy_pages(const PageCopy& copy, const ParallelFor& parallel_for = serial_for);

}  // namespace torch_mooncake::kv
