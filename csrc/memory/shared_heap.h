// The process's heap of shareable memory: what tm.empty(shared=True) and staging buffers are made of. Every allocation
// lies in a Segment that the transfer engine finds again from a bare address, so that same-host peers can map it.
//
// Allocations of 1 MiB and more have a segment of their own, given back to the system by free(); smaller ones share
// 4 MiB slabs in whole pages, given back when the slab is empty. All are page aligned and zero-filled the first time
// (a reused slab page holds what it held). Peers that map a slab see its other tensors too: the trust domain is the
// pool. Errors: pool_full when the host has no memory.
//
// Threads: safe from any thread; locks are held across fork, so a forked child may go on using it. A child shares the
// pages with its parent (MAP_SHARED), as with torch's own shared tensors; each frees only its own view.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "common/api.h"
#include "common/status.h"
#include "memory/segment.h"

namespace torch_mooncake {

class TM_API SharedHeap {
 public:
  static SharedHeap& instance();  // never destroyed

  Result<void*> allocate(size_t nbytes);  // 0 bytes: one page
  // A pointer that allocate() gave and free() has not had yet; anything else aborts (a double free).
  void free(void* pointer);

  struct Place {
    std::shared_ptr<Segment> segment;
    size_t offset;
  };
  // Where [address, address + nbytes) lies, if wholly inside one live allocation.
  std::optional<Place> find(const void* address, size_t nbytes) const;

  struct Stats {
    size_t allocations, segments, bytes_allocated, bytes_held;
  };
  Stats stats() const;

 private:
  SharedHeap();
  struct Impl;
  Impl* impl_;
};

}  // namespace torch_mooncake
