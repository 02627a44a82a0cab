// Ordinary memory between two processes of one host, by process_vm_readv. A read is done here; a write asks the target
// to pull, so that nobody ever writes into another process' memory.
#pragma once

#include <mutex>
#include <unordered_map>

#include "transfer/grant.h"
#include "transfer/process_vm/memory.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class EngineImpl;
class PeerImpl;
class Pull;

class ProcessVmEndpoint final : public TransportEndpoint {
 public:
  explicit ProcessVmEndpoint(PeerImpl& peer) : peer_(peer) {}
  static void attach(EngineImpl& engine);
  std::string name() const override { return "process_vm"; }
  bool available() const override;
  Explanation explain() const override;
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  bool copies_now(Direction direction) const override { return direction == Direction::read; }
  Status copy_now(Direction direction, const Batch& batch) override;
  void session_over(const Status& why) override;

  void pull_over(uint64_t id);  // by Pull

 private:
  void submit_pull(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches);
  void on_pull(rpc::Message request, rpc::Responder responder);
  void on_pull_cancel(rpc::Message request, rpc::Responder responder);

  PeerImpl& peer_;
  std::atomic<uint64_t> next_pull_{1};
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Pull>> pulls_;  // that we carry out for the peer
};

}  // namespace torch_mooncake::transfer
