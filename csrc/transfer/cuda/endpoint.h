// Device memory that this process reaches itself: from host memory and files by way of pinned blocks, from device
// memory directly. Two of them stand at a peer, "cuda" for regions of engines in this process, and "cuda_ipc" for those
// of another process of this host, which are mapped (share.h) if both sides allow shm, and if this process uses CUDA
// already: no context is made for a peer's sake. What can be reached in neither way is staged by its owner (stage/).
//
// A mapped region counts as a use at its owner until we have unmapped it (its owner calls it back, we drop it, the
// session ends) or this process is dead, like a mapped segment (grant.h).
#pragma once

#include <map>
#include <mutex>

#include "transfer/cuda/memory.h"
#include "transfer/move_part.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class EngineImpl;
class PeerImpl;

class CudaEndpoint final : public TransportEndpoint {
 public:
  CudaEndpoint(PeerImpl& peer, bool ipc) : peer_(peer), ipc_(ipc) {}
  static void attach(EngineImpl& engine);
  uint8_t local_kinds() const override { return kAllKinds; }
  std::string name() const override { return ipc_ ? "cuda_ipc" : "cuda"; }
  bool available() const override { return false; }  // reaches no host memory
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  Explanation explain() const override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  void session_over(const Status&) override {}  // the device needs no session

 private:
  std::string why_no_ipc() const;  // empty: regions of this peer can be mapped
  Reached reach(RemoteRegionImpl& remote, const RemoteRegionImpl::Path& path) const;

  PeerImpl& peer_;
  const bool ipc_;
  mutable std::mutex mutex_;
  std::map<uint32_t, std::weak_ptr<RemoteMemory>> mapped_;  // by grant, each once for both directions
  std::string not_mapped_;                                  // why the last one that could not be mapped could not
};

}  // namespace torch_mooncake::transfer
