// Files of this process, its own engine's (a session with itself) or another engine's: read and written by the thread
// that asks, or rather by the kernel on its behalf, to and from host memory and CUDA memory. Files of other processes
// are staged by their owner (stage/).
#pragma once

#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class PeerImpl;

class FileEndpoint final : public TransportEndpoint {
 public:
  explicit FileEndpoint(PeerImpl& peer) : peer_(peer) {}
  uint8_t local_kinds() const override { return kAllKinds & ~kind_bit(LocalKind::file); }
  std::string name() const override { return "file"; }
  bool available() const override { return false; }  // reaches no memory
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  Explanation explain() const override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  void session_over(const Status&) override {}  // the file needs no session

 private:
  PeerImpl& peer_;
};

}  // namespace torch_mooncake::transfer
