// Engines of one process: found by their id, reached by memcpy. No message is needed but open.
#pragma once

#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class PeerImpl;

class LocalEndpoint final : public TransportEndpoint {
 public:
  explicit LocalEndpoint(PeerImpl& peer) : peer_(peer) {}
  std::string name() const override { return "local"; }
  bool available() const override;
  Explanation explain() const override;
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  bool copies_now(Direction) const override { return true; }
  Status copy_now(Direction direction, const Batch& batch) override;
  void session_over(const Status&) override {}  // a copy within the process needs no session

 private:
  PeerImpl& peer_;
};

}  // namespace torch_mooncake::transfer
