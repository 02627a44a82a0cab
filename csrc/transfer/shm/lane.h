// Copies within a mapped segment of another process. The remote region's usage counts the copy: an owner that calls the
// grant back gets its answer when the copy is over.
#pragma once

#include "transfer/copy_part.h"
#include "transfer/peer.h"

namespace torch_mooncake::transfer {

class SegmentCopy final : public CopyPart {
 public:
  SegmentCopy(OpImplPtr op, std::vector<CopyPiece> pieces, std::vector<RemoteRegionImpl*> remotes);

 protected:
  Status acquire() override;
  void release() override;
  Status copy(std::span<const CopyPiece> pieces) override;
  Status validate() override;

 private:
  const std::vector<RemoteRegionImpl*> remotes_;  // each once; the op keeps them
  std::vector<Mapping*> written_;                 // by much
};

}  // namespace torch_mooncake::transfer
