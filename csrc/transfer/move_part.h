// MovePart: a part that one move of a backing carries out: host memory of the caller to or from a file or device that
// this process reaches itself.
#pragma once

#include "transfer/op.h"
#include "transfer/region_table.h"

namespace torch_mooncake::transfer {

// Leave for a move to touch these regions, until it is dropped: with the op, or long after its end if a disk hangs.
std::shared_ptr<void> hold_regions(const OpImplPtr& op, std::vector<RegionImplPtr> regions);

class MovePart final : public Part, public std::enable_shared_from_this<MovePart> {
 public:
  // `region` stands on the backing; `locals` are the op's regions that the pieces lie in.
  MovePart(OpImplPtr op, std::string transport, RegionImplPtr region, std::vector<RegionImplPtr> locals);
  void run(std::vector<HostPiece> pieces);
  void stop(const Status& why) override;

 private:
  const OpImplPtr op_;
  const std::string transport_;
  const RegionImplPtr region_;
  const std::vector<RegionImplPtr> locals_;
  MovePtr move_;
};

}  // namespace torch_mooncake::transfer
