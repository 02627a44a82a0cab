// Collectives on memory that the host does not touch: what they ask of the device that it is on, and their algorithms.
//
// How bytes travel. Up to staged_bytes() in all, the pieces are copied to pinned memory, go through the collective of
// the host, and are copied back. More goes by messages, from device to device: engines read it (CUDA IPC on one host,
// else staged by its owner), each rank reduces its slice on its device, in rank order as on the host. Either way it is
// one collective in the group's sequence, announced on the small board like any other.
//
// Threads, errors, order of calls: as in collectives.h. All ranks of a collective have their data on devices, or none;
// on one host a rank whose data is elsewhere is found out as one with other sizes, across hosts by the deadline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "collectives/collectives.h"

namespace torch_mooncake::coll {

// What is asked for is queued and done in order. Used by one collective at a time.
class Device {
 public:
  virtual ~Device() = default;
  virtual uint64_t staged_bytes() const = 0;  // equal on all ranks
  // Memory there and pinned memory of the host, 64-byte aligned, contents undefined; each one piece, which the next
  // call may replace.
  virtual Result<std::byte*> scratch(uint64_t nbytes) = 0;
  virtual Result<std::byte*> pinned(uint64_t nbytes) = 0;
  virtual Status copy(void* to, const void* from, uint64_t nbytes) = 0;
  // As coll::reduce_many(), on the device.
  virtual Status reduce_many(void* out, std::span<const void* const> in, uint64_t count, DType dtype, ReduceOp op) = 0;
  // Until all of that is done. io: it failed.
  virtual Status wait(Deadline deadline) = 0;
  // Owns all memory that the collective may touch; held until no engine can.
  virtual std::shared_ptr<void> keep() = 0;
};

// What collectives.h declares, for a call with a device; arguments have been checked.
namespace on_device {
Status broadcast(const Call& call, void* data, uint64_t nbytes, int root);
Status all_reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op);
Status reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op, int root);
Status all_gather(const Call& call, ConstPiece in, std::span<const Piece> out);
Status reduce_scatter(const Call& call, std::span<const ConstPiece> in, Piece out, DType dtype, ReduceOp op);
Status gather(const Call& call, const void* in, uint64_t nbytes, std::span<void* const> out, int root);
Status scatter(const Call& call, std::span<const void* const> in, void* out, uint64_t nbytes, int root);
Status all_to_all(const Call& call, std::span<const ConstPiece> in, std::span<const Piece> out);
}  // namespace on_device

}  // namespace torch_mooncake::coll
