// Segments between two processes of one host: the owner hands out the fd over the Unix lane, the holder maps it once.
//
// A mapped grant ends by the holder's answer to a revoke, its close-grant or its death, never by time (grant.h).
#pragma once

#include "transfer/shm/memory.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class EngineImpl;
class PeerImpl;

class SegmentEndpoint final : public TransportEndpoint {
 public:
  explicit SegmentEndpoint(PeerImpl& peer) : peer_(peer) {}
  static void attach(EngineImpl& engine);
  std::string name() const override { return "shm"; }
  bool available() const override { return false; }  // only for regions in a segment
  Explanation explain() const override;
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  bool copies_now(Direction) const override { return true; }
  Status copy_now(Direction direction, const Batch& batch) override;
  void session_over(const Status&) override {}  // a copy that runs finds out when it validates

 private:
  PeerImpl& peer_;
};

// The kernel says that the process of this pidfd is dead.
bool process_is_dead(int pidfd);

}  // namespace torch_mooncake::transfer
