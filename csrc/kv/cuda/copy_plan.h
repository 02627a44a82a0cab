// The host's part of a copy on the GPU: how wide accesses can be, and the numbers that a thread finds its bytes by.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kv/cuda/copy_index.h"

namespace torch_mooncake::kv::cuda {

// The widest access, of 16 bytes at most, at which every run of every page starts, and of which runs are made: but for
// their last bytes, if they are long.
inline int access_nbytes(const PageCopy& copy) {
  constexpr int64_t kLongRun = 16;  // accesses; the bytes behind the last whole one go one by one
  uint64_t bits = 16;
  if (copy.src_pages > 1) bits |= static_cast<uint64_t>(copy.src_page_stride);
  if (copy.dst_pages > 1) bits |= static_cast<uint64_t>(copy.dst_page_stride);
  for (int d = 0; d < copy.page.num_dims; ++d)
    bits |= static_cast<uint64_t>(copy.page.dims[d].src_stride) | static_cast<uint64_t>(copy.page.dims[d].dst_stride);
  for (const CopyRegion& region : copy.regions)
    bits |= reinterpret_cast<uintptr_t>(region.src) | reinterpret_cast<uintptr_t>(region.dst);
  auto nbytes = static_cast<int64_t>(bits & -bits);
  while (copy.page.run_nbytes % nbytes != 0 && copy.page.run_nbytes / nbytes < kLongRun) nbytes /= 2;
  return static_cast<int>(nbytes);
}

// Whether the indices fit: fewer than 2^31 pages a launch, fewer than 2^31 accesses a page.
inline bool copy_fits(const PageCopy& copy, int nbytes) {
  const int64_t per_run = (copy.page.run_nbytes + nbytes - 1) / nbytes;
  int64_t runs = 1;
  for (int d = 0; d < copy.page.num_dims; ++d) {
    if (copy.page.dims[d].size >= kDividerLimit) return false;
    runs *= copy.page.dims[d].size;
    if (runs >= kDividerLimit) return false;
  }
  return copy.count() < kDividerLimit && per_run < kDividerLimit && runs * per_run <= kDividerLimit - kCopyTile;
}

// How many regions one launch takes.
inline int64_t regions_per_launch(const PageCopy& copy, int64_t capacity) {
  return std::min(capacity, std::max<int64_t>(1, (kDividerLimit - 1) / copy.count()));
}

// Of `regions` regions. Ids are left to the caller, who knows where they are on the device; then comes set_grid().
inline CopyShape plan_copy(const PageCopy& copy, int nbytes, int64_t regions) {
  CopyShape shape;
  shape.src_wide = copy.src_ids.wide;
  shape.dst_wide = copy.dst_ids.wide;
  shape.src_pages = copy.src_pages;
  shape.dst_pages = copy.dst_pages;
  shape.src_page_stride = copy.src_page_stride;
  shape.dst_page_stride = copy.dst_page_stride;
  shape.items = static_cast<uint32_t>(regions * copy.count());
  shape.tail_nbytes = static_cast<uint32_t>(copy.page.run_nbytes % nbytes);
  const int64_t per_run = (copy.page.run_nbytes + nbytes - 1) / nbytes;
  int64_t per_page = per_run;
  shape.num_dims = copy.page.num_dims;
  for (int d = 0; d < copy.page.num_dims; ++d) {
    const CopyDim& dim = copy.page.dims[d];
    shape.dims[d] = {Divider(static_cast<uint32_t>(dim.size)), dim.src_stride, dim.dst_stride};
    per_page *= dim.size;
  }
  shape.count = Divider(static_cast<uint32_t>(copy.count()));
  shape.per_run = Divider(static_cast<uint32_t>(per_run));
  shape.per_page = Divider(static_cast<uint32_t>(per_page));
  return shape;
}

}  // namespace torch_mooncake::kv::cuda
