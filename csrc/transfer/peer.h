// PeerImpl: one session seen by the transfer engine, and what the two sides have given each other.
//
// Grants are leaves that *we* gave: index -> region. Remote regions are what the peer gave us. Indices are never used
// twice in a session. Lives as long as its session or its last user.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

#include "common/random.h"
#include "transfer/grant.h"
#include "transfer/op.h"
#include "transfer/tcp/rails.h"
#include "transfer/transport.h"
#include "transfer/usage.h"

namespace torch_mooncake::transfer {

class EngineImpl;
class RemoteRegionImpl;

// Which side may do what, exchanged once after the handshake.
struct PeerFeatures {
  bool known = false;
  bool shm = false, tcp = false, rdma = false;  // the peer allows them
  bool peer_reads_our_vm = false;               // process_vm_readv, probed by the peer
  uint64_t session = 0;                         // the peer's number of this session, for when it is over
  std::vector<RailEnd> rails{};                 // the NICs it can be reached at, refreshed by kRails
};

class PeerImpl final : public Peer, public std::enable_shared_from_this<PeerImpl> {
 public:
  PeerImpl(EngineImpl& engine, rpc::SessionPtr session);
  ~PeerImpl() override;

  const rpc::Identity& identity() const override { return session_->peer(); }
  const rpc::SessionPtr& session() const override { return session_; }
  bool alive() const override { return session_->alive(); }
  bool same_host() const override { return session_->same_host(); }
  Result<RemoteRegionPtr> open(std::string_view descriptor, Deadline deadline) override;
  void close() override;

  // --- For the engine and the transports.
  EngineImpl& engine() const { return engine_; }  // valid on I/O threads, and while the engine's caller holds it
  std::shared_ptr<EngineImpl> lock_engine() const;
  const std::string& name() const { return name_; }  // "name (pid 42)": who is blamed
  Status ensure_features(Deadline deadline);         // asks the peer unless it has told us already
  PeerFeatures features() const;
  void learn_rails(std::vector<RailEnd> rails);
  bool we_read_peer_vm() const;  // probed once, when a Unix lane has proven the same host
  GrantTable& grants() { return grants_; }
  // The endpoint of type T, null if its transport is not allowed.
  template <typename T>
  T* endpoint() const {
    for (auto& e : endpoints_)
      if (auto* found = dynamic_cast<T*>(e.get())) return found;
    return nullptr;
  }
  std::string best_transport() const;  // for memory that is in no segment
  PeerExplanation explain() const;
  void add_lane_stats(std::vector<LaneStats>& out) const;
  // Sends an op's notification and calls done with the answer.
  void notify(const std::string& data, std::function<void(const Status&)> done);
  void forget_remote(const OpenedRegion& region);  // a RemoteRegion is gone: tell the owner
  void track(OpImpl* op, bool live);
  std::shared_ptr<Peer> make_handle();  // null: the last handle was just closed, and the session with it
  void drop_handle(bool close);

  void on_hello(rpc::Message request, rpc::Responder responder);
  void on_open(rpc::Message request, rpc::Responder responder);
  void on_revoke(rpc::Message request, rpc::Responder responder);
  void session_over(const Status& why);
  void stop_ops(const Status& why);
  // Tells the owner that no map of its memory is written or read by us any more. Before an orderly end.
  void release_all(Deadline deadline);

 private:
  // What the peer has given us, from its answer to our open until it hears that we have let go.
  struct Opened {
    std::weak_ptr<RemoteRegionImpl> remote{};   // null while its paths are made, and while they are unmade
    bool revoked = false;                       // while they are made: it is not to be used
    std::vector<std::function<void()>> gone{};  // told when nothing of it is mapped here any more
  };
  void release_later();
  // Nothing is opened from now on. `quiet` once nothing of the peer's is mapped and used here any more, opens that are
  // under way included; false: nothing is (and `quiet` was called).
  bool take_all_back(std::function<void()> quiet);
  std::string hello() const;
  void learn(std::string_view hello);
  Result<OpenedRegion> ask_to_open(Descriptor descriptor, Deadline deadline);
  Result<std::shared_ptr<RemoteRegionImpl>> make_remote(OpenedRegion opened, Deadline deadline);
  Status publish(const std::shared_ptr<RemoteRegionImpl>& remote);  // unless it was taken back meanwhile

  EngineImpl& engine_;
  const std::weak_ptr<Engine> engine_weak_;
  const rpc::SessionPtr session_;
  const std::string name_;
  const uint64_t number_ = random_u64();                       // of this session, as we tell it to the peer
  mutable std::atomic<int> we_read_peer_vm_{-1};               // -1: not probed yet
  std::vector<std::unique_ptr<TransportEndpoint>> endpoints_;  // in order of preference
  GrantTable grants_;

  mutable std::mutex mutex_;
  PeerFeatures features_;
  std::unordered_map<uint64_t, std::weak_ptr<RemoteRegionImpl>> by_generation_;  // generations never repeat
  std::unordered_map<uint32_t, Opened> by_grant_;
  std::unordered_map<OpImpl*, std::weak_ptr<OpImpl>> ops_;
  bool over_ = false;
  int handles_ = 0;
  bool handles_closed_ = false;
};
using PeerImplPtr = std::shared_ptr<PeerImpl>;

// What connect() gives: one user's share of a session that others may use as well.
class PeerHandle final : public Peer {
 public:
  explicit PeerHandle(PeerImplPtr impl) : impl_(std::move(impl)) {}
  ~PeerHandle() override;
  const rpc::Identity& identity() const override { return impl_->identity(); }
  const rpc::SessionPtr& session() const override { return impl_->session(); }
  bool alive() const override { return !closed_ && impl_->alive(); }
  bool same_host() const override { return impl_->same_host(); }
  Result<RemoteRegionPtr> open(std::string_view descriptor, Deadline deadline) override;
  void close() override;
  const PeerImplPtr& impl() const { return impl_; }

 private:
  const PeerImplPtr impl_;
  std::atomic<bool> closed_{false};
};

class RemoteRegionImpl final : public RemoteRegion, public std::enable_shared_from_this<RemoteRegionImpl> {
 public:
  struct Path {
    TransportEndpoint* endpoint = nullptr;
    RemoteMemoryPtr memory;
  };
  using Paths = std::array<std::array<Path, 2>, kLocalKinds>;  // by kind of the local memory, and direction
  RemoteRegionImpl(PeerImplPtr peer, OpenedRegion opened, Paths paths);
  ~RemoteRegionImpl() override;
  uint64_t nbytes() const override { return opened_.descriptor.nbytes; }
  const std::shared_ptr<Peer>& peer() const override { return peer_; }
  std::string transport() const override;
  std::shared_ptr<const std::byte> mapped() const override;
  std::shared_ptr<const std::byte> lease() override;

  const Descriptor& descriptor() const { return opened_.descriptor; }
  uint32_t grant() const { return opened_.grant; }
  const Path& path(Direction d, LocalKind local = LocalKind::host) const {
    return paths_[static_cast<int>(local)][static_cast<int>(d)];
  }
  // invalid_argument: the owner does not allow it; unsupported: no transport carries it.
  Status reachable(Direction d, LocalKind local) const;
  // Users of the owner's bytes in this process. Revoked when the owner calls the grant back.
  Usage& usage() { return usage_; }
  // `gone` once nothing here touches the owner's memory any more, nor ever will.
  void take_back(std::function<void()> gone);
  bool maps() const;  // the owner's memory is mapped here, for whatever it is
  std::string name() const;

 private:
  std::vector<RemoteMemoryPtr> mappings() const;  // each once
  static void let_go(std::vector<RemoteMemoryPtr> memories, std::function<void()> gone);
  const std::shared_ptr<Peer> peer_;
  const OpenedRegion opened_;
  Paths paths_;
  Usage usage_;
};

}  // namespace torch_mooncake::transfer
