// Segment: shared memory on a memfd, with no name anywhere, so that it is gone when its last holder is.
//
// Ownership: a Segment owns its fd; maps are shared_ptrs that keep the address range (not the Segment) alive.
// Threads: grow() is for one thread at a time; everything else is safe from any thread.
// Errors: growing past `capacity` or past what the host can give is pool_full, never SIGBUS (pages are allocated by
// fallocate before anybody may touch them).
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "common/api.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "common/status.h"

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
};
using MappingPtr = std::shared_ptr<Mapping>;

class TM_API Segment {
 public:
  // A new segment. `capacity_bytes` of address space may be used in time; `initial_bytes` are allocated now.
  static Result<std::shared_ptr<Segment>> create(const std::string& debug_name, size_t initial_bytes,
                                                 size_t capacity_bytes);
  // A segment somebody else made, from its fd (taken over) and id.
  static Result<std::shared_ptr<Segment>> adopt(UniqueFd fd, const Id128& id);

  const Id128& id() const { return id_; }  // random; equal ids mean the same memory
  int fd() const { return fd_.get(); }
  size_t size() const;  // bytes allocated now
  size_t capacity() const { return capacity_; }
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
  struct Lock;
  std::shared_ptr<Lock> lock_;
};

}  // namespace torch_mooncake
