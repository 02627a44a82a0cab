// CUDA memory of another process of this host, mapped into this one (CUDA IPC). The owner shares the allocations that a
// region lies in, whole, as CUDA wants it; the region is found in them by its address. Each allocation is mapped once
// for one device of this process, until nobody uses any region in it. What names an allocation is its owner's process,
// its address and its id, which the driver never gives twice: memory that was freed and given out again is another one.
#pragma once

#include "transfer/cuda/memory.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class PeerImpl;

// The owner's answer to kCudaShare, and a descriptor for each allocation that is shared by one. Request: u32 grant, u32
// index of the first allocation wanted.
struct CudaShared {
  static constexpr uint32_t kMost = 32;  // in one answer

  struct Allocation {
    uint64_t id, base, nbytes;
    bool by_fd;
    std::string name;
  };
  Id128 process{};       // of the owner, random
  std::string device;    // CudaDriver::uuid
  uint64_t address = 0;  // of the region
  std::vector<Allocation> allocations;

  // Errors: key_not_found (the memory was freed, and perhaps given out again), those of CudaDriver::share().
  static Result<std::pair<CudaShared, std::vector<UniqueFd>>> of(const CudaMemory& memory, uint32_t first);
  std::string encode() const;
  static Result<CudaShared> decode(std::string_view body);
};

// Maps a region that the peer has opened for us, with what the peer tells until the deadline. unsupported, io: it
// cannot be mapped here, and why; others: the region or the session is gone.
Result<std::shared_ptr<CudaMemory>> map_cuda(PeerImpl& peer, std::shared_ptr<CudaDriver> driver,
                                             const OpenedRegion& region, Deadline deadline);

}  // namespace torch_mooncake::transfer
