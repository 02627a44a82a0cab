// EngineImpl: regions, peers and threads of one engine. See engine.h for the promises.
//
// Threads it owns: those of the rpc endpoint; `mover` (long copies), `callbacks` (user code, last references), `repair`
// (reopens lanes), `pinner` (registers memory with NICs when it is first used). They are made on first use.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>

#include "transfer/held_grants.h"
#include "transfer/metrics.h"
#include "transfer/notification_queue.h"
#include "transfer/pacer.h"
#include "transfer/peer.h"
#include "transfer/rdma/memory.h"
#include "transfer/region_table.h"
#include "transfer/tcp/host_rails.h"
#include "transfer/worker.h"

namespace torch_mooncake::transfer {

class EngineImpl final : public Engine, public rpc::BulkHandler {
 public:
  static Result<std::shared_ptr<EngineImpl>> make(EngineOptions options);
  ~EngineImpl() override;

  const std::vector<std::string>& addresses() const override;
  const Id128& id() const override { return rpc_->self().engine; }
  Result<RegionPtr> register_memory(void* data, uint64_t nbytes, RegionOptions options) override;
  Result<RegionPtr> register_segment(const std::shared_ptr<Segment>& segment, uint64_t offset, uint64_t nbytes,
                                     RegionOptions options) override;
  RegionPtr region_at(const void* address, uint64_t nbytes) const override;
  void forget_address(const RegionPtr& region) override;
  Result<RegionPtr> register_file(FileOptions file, RegionOptions options) override;
  Result<RegionPtr> register_cuda(void* data, uint64_t nbytes, RegionOptions options) override;
  Status deregister(const RegionPtr& region, Deadline deadline) override;
  Result<PeerPtr> connect(const std::string& address, Deadline deadline) override;
  Result<PeerPtr> self_peer(Deadline deadline) override;
  PeerPtr peer_of(const rpc::SessionPtr& session) override { return peer(session); }
  std::string transport_for(const PeerPtr& peer) const override;
  PeerExplanation explain(const PeerPtr& peer) const override;
  Result<OpPtr> transfer(Direction direction, std::vector<Batch> batches, OpOptions options) override;
  OpPtr transfer_now(Direction direction, const Batch& batch, const OpOptions& options) override;
  Result<Notification> next_notification(Deadline deadline) override;
  bool watch_notifications(std::shared_ptr<OpWatcher> watcher, uint64_t tag) override;
  void on_notification(std::function<void(Notification)> fn) override { notes_->set_handler(std::move(fn)); }
  rpc::Endpoint& rpc() override { return *rpc_; }
  Result<std::string> listen(const std::string& address) override;
  EngineStats stats() const override;
  void close() override;

  // rpc::BulkHandler
  std::unique_ptr<rpc::BulkReceive> begin(rpc::Lane& lane, std::string_view body, uint64_t payload_bytes) override;

  // --- For peers and transports.
  const EngineOptions& options() const { return options_; }
  bool allows(std::string_view transport) const;
  RegionTable& regions() { return *regions_; }
  // A region of any kind: how transports make those that are no host memory.
  Result<RegionPtr> add_region(RegionTable::Place place, RegionOptions options);
  const std::shared_ptr<NotificationQueue>& notes() const { return notes_; }
  const std::shared_ptr<Worker>& callbacks() const { return callbacks_; }
  Pacer& pacer() { return *pacer_; }
  Worker& mover() { return mover_; }
  // Dials lanes. Rails take different threads, so that one that is silent does not hold up the others.
  Worker& repair(size_t rail = 0) { return repair_[rail % repair_.size()]; }
  // Registers memory with NICs, which takes the time that pinning takes.
  Worker& pinner() { return pinner_; }
  HostRails& host_rails() { return host_rails_; }
  const rdma::Nics& nics() const { return nics_; }  // empty unless "rdma" is allowed
  rdma::WordTable& words() { return *words_; }      // with NICs
  // The engine's id, where peers' NICs read it: they see that they have reached this engine and no other.
  const rdma::SlotPtr& nic_identity() const { return nic_identity_; }
  // Registers host memory with the NICs, if that was left for later. Takes the time that pinning takes.
  Status ensure_nic_keys(RegionImpl& region);
  // `done` when what NICs have written into devices until now is there for whoever works on them: at once, or on a
  // thread of its own, as drivers may block.
  void flush_nic_writes(std::function<void(const Status&)> done);
  PeerImplPtr peer(const rpc::SessionPtr& session);  // the session's peer, made if need be
  // Registers a method whose handler wants the peer.
  void handle(uint16_t method, std::function<void(PeerImpl&, rpc::Message, rpc::Responder)> fn);
  HeldGrants& held() { return held_; }
  std::vector<PeerImplPtr> peers() const;  // whose sessions are alive
  Metrics& metrics() { return metrics_; }
  // Bytes between our memory and our files or devices: close() waits for them, then gives them up.
  void track_move(const MovePtr& move);
  Status usable() const;  // closed or forked
  // The live engine of that id in this process.
  static std::shared_ptr<EngineImpl> find(const Id128& id);

 private:
  EngineImpl(EngineOptions options, NicFilter nics, std::unique_ptr<rpc::Endpoint> rpc);
  void rails_changed();
  Status open_nics(const NicFilter& filter);
  void attach();
  Status check(Direction direction, std::span<const Batch> batches) const;
  Result<OpPtr> transfer_to_many(Direction direction, std::vector<Batch> batches, OpOptions options);
  Status check_bounds(const Batch& batch, size_t first) const;
  void revoke_mapped(const RegionImplPtr& region);
  void end_moves(Deadline deadline);
  void stop_nics(const Status& why);

  const EngineOptions options_;
  const pid_t pid_ = getpid();
  std::shared_ptr<Worker> callbacks_;
  std::shared_ptr<NotificationQueue> notes_;
  std::unique_ptr<rpc::Endpoint> rpc_;
  rdma::Nics nics_;
  std::shared_ptr<rdma::WordTable> words_;
  rdma::SlotPtr nic_identity_;
  std::unique_ptr<rdma::NicRanks> nic_ranks_;
  bool lazy_nics_ = false;
  std::atomic<uint64_t> flush_devices_{0};  // a bit each: has regions that NICs write to, and wants flush_nic_writes()
  std::shared_ptr<RegionTable> regions_;    // shared with drains that may outlive us
  std::shared_ptr<Pacer> pacer_;
  Worker mover_{"tm-mover"}, pinner_{"tm-pinner"};
  std::array<Worker, 4> repair_{Worker("tm-repair-0"), Worker("tm-repair-1"), Worker("tm-repair-2"),
                                Worker("tm-repair-3")};

  mutable std::mutex mutex_;
  std::vector<std::string> addresses_;
  std::string self_address_;  // of an engine that listens for nobody else
  std::vector<std::weak_ptr<Move>> moves_;
  std::vector<std::weak_ptr<PeerImpl>> rdma_peers_;  // also those whose session is over: NICs may be at their ops yet
  HeldGrants held_{*this};
  Metrics metrics_;
  std::atomic<bool> closed_{false};
  HostRails host_rails_;  // last: its thread uses the others
};

}  // namespace torch_mooncake::transfer
