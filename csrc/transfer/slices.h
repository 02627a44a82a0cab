// Lists of slices as the transports want them: runs that are adjacent on both sides joined, empty ones left out.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "memory/copy.h"
#include "transfer/peer.h"

namespace torch_mooncake::transfer {

// The remote regions of a list, each once.
inline std::vector<RemoteRegionImpl*> remotes_of(std::span<const Slice> slices) {
  std::vector<RemoteRegionImpl*> out;
  for (auto& slice : slices) {
    auto* remote = static_cast<RemoteRegionImpl*>(slice.remote.get());
    if (out.empty() || out.back() != remote) out.push_back(remote);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

// `base(remote)`: where the remote region begins, in whatever address space the copy uses. A region may be given again
// and again for the same remote, so base() should be cheap.
template <typename Base>
std::vector<CopyPiece> copy_pieces_of(std::span<const Slice> slices, Direction direction, Base base) {
  std::vector<CopyPiece> out;
  out.reserve(slices.size());
  for (auto& slice : slices) {
    if (slice.nbytes == 0) continue;
    auto* ours = slice.local->data() + slice.local_offset;
    auto* theirs = base(static_cast<const RemoteRegionImpl&>(*slice.remote)) + slice.remote_offset;
    auto* dst = direction == Direction::read ? ours : theirs;
    auto* src = direction == Direction::read ? theirs : ours;
    if (!out.empty()) {
      auto& last = out.back();
      if (static_cast<std::byte*>(last.dst) + last.nbytes == dst &&
          static_cast<const std::byte*>(last.src) + last.nbytes == src) {
        last.nbytes += slice.nbytes;
        continue;
      }
    }
    out.push_back({dst, src, slice.nbytes});
  }
  return out;
}

// Copies pieces within this address space: one thread for little, the shared pool for more.
inline void copy_pieces(std::span<const CopyPiece> pieces) {
  uint64_t total = 0;
  for (auto& piece : pieces) total += piece.nbytes;
  if (total > (1 << 20)) return CopyPool::shared().copy(pieces);
  for (auto& piece : pieces) copy_bytes(piece.dst, piece.src, piece.nbytes);
}

}  // namespace torch_mooncake::transfer
