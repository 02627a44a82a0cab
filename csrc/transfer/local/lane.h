// Copies between regions of one process. The owner's deregister() waits for a copy that is inside.
#pragma once

#include "transfer/copy_part.h"
#include "transfer/region_table.h"

namespace torch_mooncake::transfer {

class LocalCopy final : public CopyPart {
 public:
  LocalCopy(OpImplPtr op, std::vector<CopyPiece> pieces, std::vector<RegionImplPtr> targets);

 protected:
  Status acquire() override;
  void release() override;
  Status copy(std::span<const CopyPiece> pieces) override;
  Status validate() override { return {}; }

 private:
  const std::vector<RegionImplPtr> targets_;  // each once
};

}  // namespace torch_mooncake::transfer
