// Paged-KV gather and scatter, free of torch. A pool holds fixed-size pages; `page_ids` selects some of them; `pages`
// is the dense list of the selected ones. All functions are thread-safe, own nothing and keep no pointer after they
// return. Every id and size is checked before the first byte is written: on error nothing has changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "common/api.h"
#include "common/status.h"

namespace torch_mooncake::kv {

// int32 or int64 page ids, as the caller has them.
struct PageIds {
  const void* data = nullptr;
  int64_t count = 0;
  bool wide = true;  // int64, else int32

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// One layer. Page p of the pool is [pool + p * pool_stride_nbytes, + page_nbytes), place i of the list is
// [pages + i * pages_stride_nbytes, + page_nbytes). The written side's places must not overlap, nor the two sides.
struct PageLayer {
  std::byte* pool;
  int64_t pool_stride_nbytes;
  std::byte* pages;
  int64_t pages_stride_nbytes;
};

// Runs fn(begin, end) over [0, n) in chunks of at least `grain`, on as many threads as the caller's runtime likes.
using ParallelBody = std::function<void(int64_t begin, int64_t end)>;
using ParallelFor = std::function<void(int64_t n, int64_t grain, const ParallelBody& fn)>;
TM_API void serial_for(int64_t n, int64_t grain, const ParallelBody& fn);

// out_of_bounds, naming position, value and range, for an id outside [0, num_pages); with `unique` also
// invalid_argument for an id that occurs twice.
TM_API Status check_page_ids(const PageIds& ids, int64_t num_pages, bool unique);

// pages[i] = pool[ids[i]] for every layer.
TM_API Status gather_pages(std::span<const PageLayer> layers, const PageIds& ids, int64_t num_pages,
                           int64_t page_nbytes, const ParallelFor& parallel_for = serial_for);

// pool[ids[i]] = pages[i] for every layer. An id may occur once: which of two pages would win is nobody's guess.
TM_API Status scatter_pages(std::span<const PageLayer> layers, const PageIds& ids, int64_t num_pages,
                            int64_t page_nbytes, const ParallelFor& parallel_for = serial_for);

}  // namespace torch_mooncake::kv
