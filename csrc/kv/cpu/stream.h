// Copy of many pieces by one thread. Large totals go around the cache: non-temporal stores spare the read for
// ownership that an ordinary store of a cold line pays, and keep the memory system busy only when several 4 KiB pages
// are written in turn, so four streams advance together. AVX-512, AVX2 or SSE2 is chosen at run time.
#pragma once

#include <cstddef>
#include <span>

namespace torch_mooncake::kv {

struct Piece {
  void* dst;
  const void* src;
  size_t nbytes;
};

// Pieces must not overlap. Non-temporal stores are fenced before the function returns.
void copy_pieces(std::span<const Piece> pieces, bool non_temporal);

}  // namespace torch_mooncake::kv
