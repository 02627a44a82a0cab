// Reading another process' memory, always by the process that owns the destination.
#pragma once

#include "transfer/copy_part.h"
#include "transfer/peer.h"
#include "transfer/process_vm/memory.h"

namespace torch_mooncake::transfer {

// Copies pieces whose `src` are addresses in process `pid`; on the shared copy pool if there is much. Errors: peer_lost
// (no such process), io (the memory is not there, or may not be read).
Status vm_read(int pid, std::span<const CopyPiece> pieces);
// The generation word of the source still says `generation`; otherwise what was read may be other memory.
Status vm_check_generation(int pid, uint64_t word_address, uint64_t generation);

// A read: we own the destination.
class VmReadPart final : public CopyPart {
 public:
  VmReadPart(OpImplPtr op, std::vector<CopyPiece> pieces, std::vector<RemoteRegionImpl*> remotes);

 protected:
  Status acquire() override { return {}; }  // the owner does not know of us, and needs not: see validate()
  void release() override {}
  Status copy(std::span<const CopyPiece> pieces) override;
  Status validate() override;

 private:
  const std::vector<RemoteRegionImpl*> remotes_;  // each once; the op keeps them
};

}  // namespace torch_mooncake::transfer
