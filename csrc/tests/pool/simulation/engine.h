// A transfer engine whose bytes travel in simulated time: each op is cut into chunks that are read and written at
// different moments, by the owner of the memory as over TCP, so torn reads and late writes can happen.
#pragma once

#include "pool/simulation/network.h"
#include "transfer/engine.h"

namespace torch_mooncake::pool::sim {

class SimEngine;

class SimRegion final : public Region {
 public:
  SimRegion(SimEngine& engine, std::byte* data, uint64_t nbytes, RegionOptions options, MappingPtr map, uint64_t id);
  MemoryKind kind() const override { return MemoryKind::host; }
  std::byte* data() const override { return data_; }
  uint64_t nbytes() const override { return nbytes_; }
  uint64_t id() const override { return id_; }
  bool shared() const override { return map_ != nullptr; }
  uint64_t generation() const override { return id_; }
  std::string descriptor() const override;
  bool writable() const { return options_.writable; }

 private:
  SimEngine& engine_;
  std::byte* const data_;
  const uint64_t nbytes_;
  const RegionOptions options_;
  const MappingPtr map_;
  const uint64_t id_;
};

class SimPeer final : public Peer, public std::enable_shared_from_this<SimPeer> {
 public:
  explicit SimPeer(std::shared_ptr<SimSession> session) : session_(std::move(session)), pointer_(session_) {}
  const rpc::Identity& identity() const override { return session_->peer(); }
  const rpc::SessionPtr& session() const override { return pointer_; }
  bool alive() const override { return session_->alive(); }
  bool same_host() const override { return session_->same_host(); }
  Result<RemoteRegionPtr> open(std::string_view descriptor, Deadline deadline) override;
  void close() override {}  // others may use the session
  const std::shared_ptr<SimSession>& simulated() const { return session_; }

 private:
  const std::shared_ptr<SimSession> session_;
  const rpc::SessionPtr pointer_;
};

class SimRemoteRegion final : public RemoteRegion {
 public:
  SimRemoteRegion(std::shared_ptr<SimPeer> peer, uint64_t id, uint64_t nbytes)
      : peer_(peer), simulated_(std::move(peer)), id_(id), nbytes_(nbytes) {}
  uint64_t nbytes() const override { return nbytes_; }
  const std::shared_ptr<Peer>& peer() const override { return peer_; }
  std::string transport() const override { return "simulated"; }
  std::shared_ptr<const std::byte> mapped() const override { return nullptr; }
  uint64_t id() const { return id_; }
  const std::shared_ptr<SimPeer>& simulated() const { return simulated_; }

 private:
  const std::shared_ptr<Peer> peer_;
  const std::shared_ptr<SimPeer> simulated_;
  const uint64_t id_, nbytes_;
};

class SimOp final : public Op, public std::enable_shared_from_this<SimOp> {
 public:
  SimOp(SimEngine& engine, Direction direction, OpOptions options);
  OpState state() const override { return state_; }
  Status status() const override { return status_; }
  Status wait(Deadline deadline) override;
  void cancel() override { stop({Code::cancelled, "cancelled"}); }
  uint64_t nbytes() const override { return nbytes_; }
  uint64_t bytes_done() const override { return done_; }
  bool remote_quiescent() const override { return quiescent_; }
  std::string transport() const override { return "simulated"; }
  std::string peers() const override { return ""; }
  bool watch(std::shared_ptr<OpWatcher> watcher, uint64_t tag) override;

  void begin(const std::vector<Batch>& batches);

 private:
  void add(const std::shared_ptr<SimRegion>& local, uint64_t local_offset, const SimRemoteRegion& remote,
           uint64_t remote_offset, uint64_t nbytes);
  void chunk_done(uint64_t nbytes);
  void stop(const Status& why);  // asks the owners; ends when they have answered, or after a while
  void end(OpState state, const Status& status);

  SimEngine& engine_;
  const Direction direction_;
  OpOptions options_;
  uint64_t nbytes_ = 0, done_ = 0;
  OpState state_ = OpState::pending;
  Status status_;
  bool quiescent_ = false, stopping_ = false;
  std::shared_ptr<bool> sink_ = std::make_shared<bool>(false);  // the owner has been told that it is over
  std::vector<std::shared_ptr<SimSession>> sessions_;
  std::vector<RegionPtr> keep_;
  std::vector<std::pair<std::shared_ptr<OpWatcher>, uint64_t>> watchers_;
  WaitList ended_;
};

class SimEngine final : public Engine {
 public:
  SimEngine(Process* process, std::string role, std::string token);
  ~SimEngine() override { close(); }
  const std::vector<std::string>& addresses() const override { return endpoint_.self().addresses; }
  const Id128& id() const override { return endpoint_.self().engine; }
  Result<RegionPtr> register_memory(void* data, uint64_t nbytes, RegionOptions options) override;
  Result<RegionPtr> register_segment(const std::shared_ptr<Segment>& segment, uint64_t offset, uint64_t nbytes,
                                     RegionOptions options) override;
  RegionPtr region_at(const void*, uint64_t) const override { return nullptr; }
  void forget_address(const RegionPtr&) override {}
  Result<RegionPtr> register_file(FileOptions, RegionOptions) override { return no(); }
  Result<RegionPtr> register_cuda(void*, uint64_t, RegionOptions) override { return no(); }
  Status deregister(const RegionPtr& region, Deadline deadline) override;
  Result<PeerPtr> connect(const std::string& address, Deadline deadline) override;
  Result<PeerPtr> self_peer(Deadline) override { return no(); }
  PeerPtr peer_of(const rpc::SessionPtr& session) override;
  std::string transport_for(const PeerPtr&) const override { return "simulated"; }
  PeerExplanation explain(const PeerPtr&) const override { return {}; }
  Result<OpPtr> transfer(Direction direction, std::vector<Batch> batches, OpOptions options) override;
  OpPtr transfer_now(Direction, const Batch&, const OpOptions&) override { return nullptr; }
  Result<Notification> next_notification(Deadline) override { return no(); }
  bool watch_notifications(std::shared_ptr<OpWatcher>, uint64_t) override { return false; }
  void on_notification(std::function<void(Notification)>) override {}
  rpc::Endpoint& rpc() override { return endpoint_; }
  Result<std::string> listen(const std::string& address) override { return endpoint_.listen(address); }
  EngineStats stats() const override { return {}; }
  void close() override { endpoint_.close(); }

  Process* process() const { return process_; }
  SimEndpoint& endpoint() { return endpoint_; }
  std::shared_ptr<SimRegion> region(uint64_t id) const;

 private:
  static Status no() { return {Code::unsupported, "not simulated"}; }
  Process* const process_;
  SimEndpoint endpoint_;
  std::map<uint64_t, std::shared_ptr<SimRegion>> regions_;
  uint64_t next_region_ = 1;
};

// Set by mutations.
struct EngineMutations {
  bool late_writes = false;  // the owner takes bytes of a session that it has declared over
  // May replace what a read of `nbytes` at `offset` of region `id` of that owner brings.
  std::function<void(Process* reader, const Id128& owner, uint64_t id, uint64_t offset, std::string& bytes)> read;
};
extern EngineMutations engine_mutations;
SimEngine* engine_of(const SimEndpoint* endpoint);

}  // namespace torch_mooncake::pool::sim
