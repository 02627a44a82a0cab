// MovePart: a part that one move of a backing carries out: host memory of the caller to or from a file or device that
// this process reaches itself. And what such parts share: leave to touch both sides.
#pragma once

#include "transfer/op.h"
#include "transfer/peer.h"
#include "transfer/region_table.h"

namespace torch_mooncake::transfer {

// A region of an engine in this process, as a remote region.
struct RegionHere final : RemoteMemory {
  explicit RegionHere(RegionImplPtr r) : region(std::move(r)) {}
  const RegionImplPtr region;
  // Null: not of that kind, or of another process. key_not_found: it was deregistered.
  static Result<RemoteMemoryPtr> open(const OpenedRegion& opened, MemoryKind kind);
};

// The other side of such a part: a region of this process, or a peer's that is mapped here.
struct Reached {
  std::shared_ptr<Backing> backing;
  std::shared_ptr<void> owner;  // keeps `usage`
  Usage* usage = nullptr;
  std::string name;
  bool of_peer = false;  // then what was read is worth nothing if the session ended meanwhile

  static Reached here(const RegionImplPtr& region) {
    return {region->backing(), region, &region->usage(), region->name(), false};
  }
};

// The batches of one remote region, by the kind of their local memory.
using BatchesByKind = std::array<std::vector<const Batch*>, kMemoryKinds>;
BatchesByKind batches_of(const RemoteRegionImpl& remote, std::span<const Batch> batches);
std::vector<RegionImplPtr> locals_of(const std::vector<const Batch*>& batches);

// Leave to touch these regions of ours, until it is dropped: with the op, or long after its end if a disk hangs.
std::shared_ptr<void> hold_regions(const OpImplPtr& op, std::vector<RegionImplPtr> regions);
// The same, and the other side's. Errors: that is being taken back, or its session is over.
Result<std::shared_ptr<void>> hold_both(const OpImplPtr& op, std::vector<RegionImplPtr> locals, const Reached& remote);
// What becomes of a part that has moved its bytes.
Status validate(const OpImpl& op, const Reached& remote);

class MovePart final : public Part, public std::enable_shared_from_this<MovePart> {
 public:
  // Starts one for these batches, whose local regions are host memory.
  static void run(const OpImplPtr& op, std::string transport, Reached remote, const std::vector<const Batch*>& batches);
  void stop(const Status& why) override;

 private:
  MovePart(OpImplPtr op, std::string transport, Reached remote)
      : op_(std::move(op)), transport_(std::move(transport)), remote_(std::move(remote)) {}

  const OpImplPtr op_;
  const std::string transport_;
  Reached remote_;
  MovePtr move_;
};

}  // namespace torch_mooncake::transfer
