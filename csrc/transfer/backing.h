// Backing: what a region that is no host memory stands on (a file, an allocation of a GPU). And Move: bytes on their
// way between it and host memory of this process, the one thing that every kind of region can do.
//
// Ownership: a region keeps its backing; a move in progress keeps itself, its backing and MoveRequest::keep. Threads:
// all methods may be called from any thread and never wait; callbacks come on threads of the backing (or inside
// start() and stop()) and must not block.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "transfer/descriptor.h"

namespace torch_mooncake::transfer {

class RegionImpl;

struct HostPiece {
  std::byte* host;
  uint64_t offset;  // in the region
  uint64_t nbytes;
};

struct MoveRequest {
  Direction direction;  // read: out of the backing
  std::vector<HostPiece> pieces;
  // The host memory stays until done, however long that takes: it needs no buffer of its own against a disk that hangs.
  bool patient = false;
  std::function<void(uint64_t nbytes)> progress{};  // so many more have arrived
  std::function<void(const Status&)> done;          // once: the host memory is touched no more
  std::shared_ptr<void> keep{};  // dropped when the backing is touched no more either: with done, or later
};

class Move {
 public:
  virtual ~Move() = default;
  virtual void start() = 0;
  // End early: done(why) comes as soon as nothing touches the host memory.
  virtual void stop(const Status& why) = 0;
  // After stop(), if done has not come because the hardware hangs in a write: let it come now. The host memory is read
  // on (never written) until `keep` is dropped.
  virtual void abandon() = 0;
};
using MovePtr = std::shared_ptr<Move>;

class Backing {
 public:
  virtual ~Backing() = default;
  virtual std::vector<AccessRecord> access_records(const RegionImpl& region) const = 0;
  virtual MovePtr move(MoveRequest request) = 0;
  // "file /data/x", for errors.
  virtual std::string name() const = 0;
};

}  // namespace torch_mooncake::transfer
