// Copy of many pieces by one thread. Large totals go around the cache: non-temporal stores spare the read for
// ownership that an ordinary store of a cold line pays, and keep the memory system busy only when several 4 KiB pages
// are written in turn, so four streams advance together. AVX-512, AVX2 or SSE2 is chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_mooncake::kv {

struct Piece {
  void* dst;
  const void* src;
  size_t nbytes;
};

// Pieces must not overlap. Non-temporal stores are fenced before the function returns.
void copy_pieces(std::span<const Piece> pieces, bool non_temporal);

// Rows of whole cache lines whose destinations are aligned to one, by non-temporal stores, unfenced. What lies `ahead`
// bytes further on at the source is fetched meanwhile: the rows that come next.
void stream_rows(std::byte* dst, int64_t dst_stride, const std::byte* src, int64_t src_stride, int64_t rows,
                 int64_t row_nbytes, int64_t ahead);
void fence();  // behind stream_rows

// Whether this machine has stream_rows.
bool can_stream_rows();

}  // namespace torch_mooncake::kv
