// What one thread of the copy kernel does, as code that also runs on the CPU, where its arithmetic is tested.
//
// The work is one long list of accesses: access a of page `place` of region r is number
// (r * count + place) * accesses_per_page + a. Tiles of kCopyTile consecutive accesses go to the blocks in turn, so
// pages of any size fill the device, and consecutive threads have consecutive accesses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kv/cuda/divider.h"
#include "kv/pages.h"

namespace torch_mooncake::kv::cuda {

inline constexpr int kCopyThreads = 256;
inline constexpr int kCopyPerThread = 4;  // accesses of one thread in one tile, all loaded before the first is stored
inline constexpr int kCopyTile = kCopyThreads * kCopyPerThread;

struct CopyShape {
  const void* src_ids = nullptr;  // device memory; nullptr: the place itself
  const void* dst_ids = nullptr;
  bool src_wide = true;  // int64, else int32
  bool dst_wide = true;
  int64_t src_pages = 0;  // an id outside [0, pages) is skipped
  int64_t dst_pages = 0;
  int64_t src_page_stride = 0;
  int64_t dst_page_stride = 0;
  uint32_t items = 0;        // pages of all regions: below kDividerLimit
  uint32_t tail_nbytes = 0;  // of the last access of every run; 0: it is whole
  Divider count;             // pages a region
  Divider per_page;          // accesses a page: at most kDividerLimit - kCopyTile
  Divider per_run;           // accesses a run
  int num_dims = 0;
  struct Dim {
    Divider size;
    int64_t src_stride, dst_stride;
  } dims[kMaxCopyDims];
  // How far a block goes from one of its tiles to the next: set_grid().
  uint32_t step_items = 0;
  uint32_t step_accesses = 0;

  uint64_t accesses() const { return uint64_t{items} * per_page.divisor; }
  uint64_t tiles() const { return (accesses() + kCopyTile - 1) / kCopyTile; }
  void set_grid(uint32_t blocks) {
    uint64_t step = uint64_t{blocks} * kCopyTile;
    step_items = static_cast<uint32_t>(step / per_page.divisor);
    step_accesses = static_cast<uint32_t>(step % per_page.divisor);
  }
};

template <int kRegions>
struct CopyTable {
  static constexpr int kCapacity = kRegions;
  CopyRegion region[kRegions];
};

// Two of a size: the table travels as a kernel parameter (up to 32,764 bytes since CUDA 12.1), and a small one is
// quicker.
using SmallCopyTable = CopyTable<64>;
using LargeCopyTable = CopyTable<1920>;

template <int kNbytes>
struct alignas(kNbytes) Access {
  unsigned char bytes[kNbytes];
};

#ifdef __CUDACC__
template <int kNbytes>
struct AccessWord;
template <>
struct AccessWord<1> {
  using type = unsigned char;
};
template <>
struct AccessWord<2> {
  using type = unsigned short;
};
template <>
struct AccessWord<4> {
  using type = unsigned int;
};
template <>
struct AccessWord<8> {
  using type = uint2;
};
template <>
struct AccessWord<16> {
  using type = uint4;
};
#else
template <int kNbytes>
struct AccessWord {
  using type = Access<kNbytes>;
};
#endif

// What is read is not read again: it need not displace what the next kernel wants from the caches.
template <typename Word>
TM_HD Word load_once(const std::byte* from) {
#ifdef __CUDA_ARCH__
  return __ldcs(reinterpret_cast<const Word*>(from));
#else
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
#endif
}

template <typename Word>
TM_HD void store(std::byte* to, const Word& word) {
#ifdef __CUDA_ARCH__
  __stwb(reinterpret_cast<Word*>(to), word);
#else
  std::memcpy(to, &word, sizeof word);
#endif
}

TM_HD int64_t page_at(const void* ids, bool wide, uint32_t place) {
  if (ids == nullptr) return place;
  return wide ? static_cast<const int64_t*>(ids)[place] : static_cast<const int32_t*>(ids)[place];
}

// One access: nbytes is the word's size, less for the tail of a run, 0 for nothing to do.
struct CopyPlace {
  const std::byte* src;
  std::byte* dst;
  uint32_t nbytes;
};

template <int kNbytes, bool kStrided, typename Table>
TM_HD CopyPlace locate(const Table& table, const CopyShape& shape, uint32_t item, uint32_t access) {
  if (item >= shape.items) return {nullptr, nullptr, 0};
  const uint32_t region = shape.count.quotient(item), place = item - region * shape.count.divisor;
  const int64_t src_page = page_at(shape.src_ids, shape.src_wide, place);
  const int64_t dst_page = page_at(shape.dst_ids, shape.dst_wide, place);
  if (static_cast<uint64_t>(src_page) >= static_cast<uint64_t>(shape.src_pages) ||
      static_cast<uint64_t>(dst_page) >= static_cast<uint64_t>(shape.dst_pages))
    return {nullptr, nullptr, 0};
  int64_t src = src_page * shape.src_page_stride, dst = dst_page * shape.dst_page_stride;
  uint32_t in_run = access;
  if constexpr (kStrided) {
    uint32_t run = shape.per_run.quotient(access);
    in_run = access - run * shape.per_run.divisor;
    for (int d = shape.num_dims - 1; d >= 0; --d) {
      const CopyShape::Dim& dim = shape.dims[d];
      const uint32_t outer = dim.size.quotient(run), i = run - outer * dim.size.divisor;
      src += i * dim.src_stride;
      dst += i * dim.dst_stride;
      run = outer;
    }
  }
  const bool tail = shape.tail_nbytes != 0 && in_run + 1 == shape.per_run.divisor;
  const int64_t offset = int64_t{in_run} * kNbytes;
  const CopyRegion& at = table.region[region];
  return {at.src + (src + offset), at.dst + (dst + offset), tail ? shape.tail_nbytes : kNbytes};
}

template <int kNbytes, bool kStrided, typename Table>
TM_HD void copy_tiles(const Table& table, const CopyShape& shape, uint32_t block, uint32_t blocks, uint32_t thread) {
  using Word = typename AccessWord<kNbytes>::type;
  const uint32_t per_page = shape.per_page.divisor;
  const uint64_t tiles = (uint64_t{shape.items} * per_page + kCopyTile - 1) / kCopyTile;
  const uint64_t first = uint64_t{block} * kCopyTile;
  auto item = static_cast<uint32_t>(first / per_page);
  auto access = static_cast<uint32_t>(first % per_page);
  for (uint64_t tile = block; tile < tiles; tile += blocks) {
    CopyPlace places[kCopyPerThread];
    Word words[kCopyPerThread];
    TM_UNROLL
    for (int k = 0; k < kCopyPerThread; ++k) {
      const uint32_t at = access + k * kCopyThreads + thread;
      const uint32_t page = shape.per_page.quotient(at);
      places[k] = locate<kNbytes, kStrided>(table, shape, item + page, at - page * per_page);
    }
    TM_UNROLL
    for (int k = 0; k < kCopyPerThread; ++k)
      if (places[k].nbytes == kNbytes) words[k] = load_once<Word>(places[k].src);
    TM_UNROLL
    for (int k = 0; k < kCopyPerThread; ++k) {
      if (places[k].nbytes == kNbytes) {
        store(places[k].dst, words[k]);
      } else {
        for (uint32_t b = 0; b < places[k].nbytes; ++b) places[k].dst[b] = places[k].src[b];
      }
    }
    item += shape.step_items;
    access += shape.step_accesses;
    if (access >= per_page) {
      access -= per_page;
      ++item;
    }
  }
}

}  // namespace torch_mooncake::kv::cuda
