// Segment: shared memory on a memfd, with no name anywhere, so that it is gone when its last holder is.
//
// The file has its full length (`capacity`) from the start and is sealed so (no shrinking, no growing, no more seals):
// no holder can make another's map fault, and an adopter learns the capacity from the fd. `size()` is how much of it
// has pages. Reading or writing a map between size and capacity does not crash while the host has memory, but it
// allocates pages nobody counted: a bug, so every user checks its bounds against size().
//
// Ownership: a Segment owns its fd; maps are shared_ptrs that keep the address range (not the Segment) alive.
// Threads: every method is safe from any thread (grow() calls exclude each other).
// Errors: growing past `capacity` or past what the host can give is pool_full, never SIGBUS (pages are allocated by
// fallocate before anybody may touch them).
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "common/api.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "common/status.h"
#include "memory/copy.h"

namespace torch_mooncake {

enum class Protection { read_only, read_write };

// A mapped range; unmapped when the last copy of the shared_ptr goes.
struct TM_API Mapping {
  std::byte* data = nullptr;
  size_t nbytes = 0;
  Mapping(std::byte* d, size_t n) : data(d), nbytes(n) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  // Call before writing much to the destinations that lie in this (shared, writable) map. The first write to a page
  // that another process has filled costs a fault for each page, 1.1 µs here, five times the copy; a read fault maps
  // 16 pages at once, for writing too. So this reads a byte of each 64 KiB that it has not seen before, on the shared
  // copy pool if they are many. Safe from any thread.
  void fault_in(std::span<const CopyPiece> writes);

 private:
  static constexpr size_t kGroup = 64 << 10;
  std::once_flag once_;
  std::unique_ptr<std::atomic<bool>[]> seen_;  // by group
};
using MappingPtr = std::shared_ptr<Mapping>;

class TM_API Segment {
 public:
  // A new segment. `capacity_bytes` of address space may be used in time; `initial_bytes` are allocated now.
  static Result<std::shared_ptr<Segment>> create(const std::string& debug_name, size_t initial_bytes,
                                                 size_t capacity_bytes);
  // A segment somebody else made, from its fd (taken over) and id. A file that its maker could still truncate
  // (unsealed) is refused with invalid_argument. size() follows the maker's grow() calls.
  static Result<std::shared_ptr<Segment>> adopt(UniqueFd fd, const Id128& id);

  const Id128& id() const { return id_; }  // random; equal ids mean the same memory
  int fd() const { return fd_.get(); }
  size_t size() const;  // bytes allocated now, whole pages
  size_t capacity() const { return capacity_; }
  // Gives pages to [size, new_size), rounded up to whole pages; smaller than size() does nothing.
  Status grow(size_t new_size);

  // Map all of it (capacity bytes of address space). The read-write map is made once and shared; so is the read-only.
  Result<MappingPtr> map(Protection protection);
  // A private copy-on-write map of [offset, offset + nbytes), page aligned; the caller's writes never reach the
  // segment. Never MAP_POPULATE.
  Result<MappingPtr> map_private(size_t offset, size_t nbytes);

 private:
  Segment() = default;
  UniqueFd fd_;
  Id128 id_{};
  size_t capacity_ = 0;
  std::weak_ptr<Mapping> read_only_, read_write_;
  Result<MappingPtr> map_range(Protection protection, bool is_private, size_t offset, size_t nbytes) const;
  mutable std::mutex mutex_;  // grow(), and the two weak pointers
  bool adopted_ = false;
  std::atomic<size_t> size_{0};  // ours; an adopted segment asks the kernel
};

}  // namespace torch_mooncake
