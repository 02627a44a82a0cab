// Device memory of this process, its own engine's (a session with itself) or another engine's: from host memory by way
// of pinned blocks, from device memory directly. Device memory of other processes is staged by its owner (stage/).
#pragma once

#include "transfer/cuda/queue.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class PeerImpl;

class CudaEndpoint final : public TransportEndpoint {
 public:
  explicit CudaEndpoint(PeerImpl& peer) : peer_(peer) {}
  const Capabilities& capabilities() const override;
  std::string name() const override { return "cuda"; }
  bool available() const override { return false; }  // reaches no host memory
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  Explanation explain() const override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  void session_over(const Status&) override {}  // the device needs no session

 private:
  void submit_copies(const std::shared_ptr<OpImpl>& op, const std::shared_ptr<RegionImpl>& region,
                     std::vector<CudaQueue::Copy> copies, std::vector<std::shared_ptr<RegionImpl>> locals);

  PeerImpl& peer_;
};

}  // namespace torch_mooncake::transfer
