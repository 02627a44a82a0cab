// What a transport is. One folder each, with the same nouns: `memory` says how a region is described and reached,
// `endpoint` is the transport's state towards one peer and answers that peer's messages, `lane` moves the bytes.
// docs/adding-a-transport.md is the recipe.
//
// Ownership: a PeerImpl owns one endpoint a transport; a RemoteRegion keeps the memory objects its paths need; an op
// keeps its parts. Threads: open() is called on a user's thread and may wait until its deadline; submit() too, and must
// not wait; everything else may come on any thread, I/O threads among them, and must not block.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "transfer/descriptor.h"
#include "transfer/engine.h"

namespace torch_mooncake::transfer {

class OpImpl;
class RegionImpl;

// Kinds of local memory as paths know them: those of MemoryKind, and CUDA memory that this engine's NICs reach as well.
// What takes CUDA memory takes that.
enum class LocalKind : uint8_t { host, file, cuda, cuda_on_nics };
inline constexpr int kLocalKinds = 4;
constexpr uint8_t kind_bit(LocalKind kind) { return static_cast<uint8_t>(1 << static_cast<int>(kind)); }
inline constexpr uint8_t kAllKinds = (1 << kLocalKinds) - 1;
constexpr LocalKind as_local(MemoryKind kind) { return static_cast<LocalKind>(kind); }

// How one transport reaches one remote region; whatever it needs to know. Dropped with the RemoteRegion.
class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;
  // Non-null if the bytes are in this process' address space.
  virtual std::shared_ptr<const std::byte> mapped() const { return nullptr; }
  // The owner's memory is mapped here, and the owner waits until it hears that it is no more.
  virtual bool maps() const { return mapped() != nullptr; }
  // Nothing is being copied, and nothing will be: gives back what the owner has to have back, then calls `gone`, here
  // or on another thread. Must not block.
  virtual void let_go(std::function<void()> gone) { gone(); }
};
using RemoteMemoryPtr = std::shared_ptr<RemoteMemory>;

// One transport's share of an op, from OpImpl::add() to its single call of OpImpl::part_done().
class Part {
 public:
  virtual ~Part() = default;
  // End early (deadline, cancel, another part's failure, close): from some moment soon, touch the op's memory no more,
  // then call part_done(why). May come more than once, and after part_done.
  virtual void stop(const Status& why) = 0;
  // A thread that would wait until `deadline` offers itself: run queued work on it now, or receive with it. It
  // spins until `spin_until_ns` and no longer: that is counted from the beginning of its wait.
  virtual void help(Deadline, int64_t spin_until_ns) { (void)spin_until_ns; }
};
using PartPtr = std::shared_ptr<Part>;

// A region that the owner has opened for us: what its answer said.
struct OpenedRegion {
  Descriptor descriptor;
  uint32_t grant = 0;  // index in the session
};

class TransportEndpoint {
 public:
  virtual ~TransportEndpoint() = default;
  // Kinds of local memory that it reads and writes, kind_bit()s. What it reaches at the other side, open() says.
  virtual uint8_t local_kinds() const { return kind_bit(LocalKind::host); }
  virtual std::string name() const = 0;  // what op->transport() says
  // Reaches the peer's ordinary memory (in no segment), by what is known now.
  virtual bool available() const = 0;
  // How to carry `direction` to that region, whose descriptor tells its kind. Null: not this way, the next allowed
  // transport is asked.
  virtual Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) = 0;
  // What explain() says of it, by what is known now. Must not wait.
  virtual Explanation explain() const = 0;
  // Its connections with their counters, for stats() and explain().
  virtual std::vector<LaneStats> lane_stats() const { return {}; }
  // Starts the batches as one or more parts: op->add(part) for each before it begins. Small ones may be over on return.
  // At most kMaxPieces extents, none empty, adjacent ones joined; at least one unless the whole op is empty. The lists
  // themselves go when submit() returns, their regions at the op's end.
  virtual void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) = 0;
  // A list of a few KiB between host memories, carried out on this thread at once (instant.h), where copies_now() says
  // so. The engine holds leave of the local region; the endpoint sees to the remote one.
  virtual bool copies_now(Direction) const { return false; }
  virtual Status copy_now(Direction, const Batch&) { return {Code::unsupported, name() + " cannot copy at once"}; }
  // The session has ended: end all parts, and everything done for the peer.
  virtual void session_over(const Status& why) = 0;
};

}  // namespace torch_mooncake::transfer
