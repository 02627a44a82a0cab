// Lists of slices as the transports want them. They arrive without empty extents and with adjacent ones joined, region
// by region; what lies side by side in two regions is joined here.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "memory/copy.h"
#include "transfer/peer.h"

namespace torch_mooncake::transfer {

// The remote regions of a list, each once.
inline std::vector<RemoteRegionImpl*> remotes_of(std::span<const Batch> batches) {
  std::vector<RemoteRegionImpl*> out;
  for (auto& batch : batches) out.push_back(static_cast<RemoteRegionImpl*>(batch.remote.get()));
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

inline size_t count_extents(std::span<const Batch> batches) {
  size_t n = 0;
  for (auto& batch : batches) n += batch.extents.size();
  return n;
}

// `base(remote)`: where the remote region begins, in whatever address space the copy uses. Asked once a batch.
template <typename Base>
std::vector<CopyPiece> copy_pieces_of(std::span<const Batch> batches, Direction direction, Base base) {
  std::vector<CopyPiece> out;
  out.reserve(count_extents(batches));
  for (auto& batch : batches) {
    std::byte* local = batch.local->data();
    std::byte* remote = base(static_cast<const RemoteRegionImpl&>(*batch.remote));
    for (auto& extent : batch.extents) {
      auto *ours = local + extent.local_offset, *theirs = remote + extent.remote_offset;
      auto* dst = direction == Direction::read ? ours : theirs;
      auto* src = direction == Direction::read ? theirs : ours;
      if (!out.empty()) {
        auto& last = out.back();
        if (static_cast<std::byte*>(last.dst) + last.nbytes == dst &&
            static_cast<const std::byte*>(last.src) + last.nbytes == src) {
          last.nbytes += extent.nbytes;
          continue;
        }
      }
      out.push_back({dst, src, extent.nbytes});
    }
  }
  return out;
}

}  // namespace torch_mooncake::transfer
