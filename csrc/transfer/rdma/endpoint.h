// RDMA towards one peer: lanes (queue pairs that we have asked for), the pairs that the peer has asked for, and the
// slices of ops that go over the lanes. The target's CPU takes no part in reads and writes.
//
// The order of things that makes failures safe: a lane that fails is moved to the error state and flushed (or its queue
// pair destroyed), from when on nothing touches our memory; then the peer destroys its end, from when on nothing lands
// there; only then are its slices posted again, on other lanes. A notification's immediate is posted when all slices
// of its part are done, on whichever lane.
//
// Locks: `mutex_` guards everything here, in lanes and in parts. Calls out of the room (session, op, destruction of
// queue pairs) are collected in Later and made without it.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>

#include "rpc/session.h"
#include "transfer/rdma/lane.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {
class EngineImpl;
class PeerImpl;
class StreamEndpoint;
}  // namespace torch_mooncake::transfer

namespace torch_mooncake::transfer::rdma {

class PassivePair;

class RdmaEndpoint final : public TransportEndpoint {
 public:
  static constexpr size_t kNotifying = 32;  // immediates under way; a passive pair has kReceives for them
  static constexpr uint32_t kReceives = 64;
  static constexpr int kStopMs = 100;  // a stopped part waits so long for its posted slices before its lanes are failed

  explicit RdmaEndpoint(PeerImpl& peer) : peer_(peer) {}
  ~RdmaEndpoint() override;
  static void attach(EngineImpl& engine);
  uint8_t local_kinds() const override { return kind_bit(LocalKind::host) | kind_bit(LocalKind::cuda_on_nics); }
  std::string name() const override { return "rdma"; }
  bool available() const override;
  Explanation explain() const override;
  std::vector<LaneStats> lane_stats() const override;
  // Makes the lanes, the first time, and waits for one of them. Errors: why none could be made.
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  void session_over(const Status& why) override;
  // After the session: until no NIC touches our memory for this peer (at most about kFlushNs).
  void wait_at_rest(Deadline deadline);

  // --- By parts, lanes and passive pairs.
  void stop(const RdmaPartPtr& part, const Status& why);
  void completed(RdmaLane& lane, const Completion& completion);
  void port_down(RdmaLane& lane);
  bool late(RdmaLane& lane, int64_t now_ns);  // true: ask again
  void immediate(uint32_t id);

 private:
  class Later;
  struct Incoming {  // a notification of the peer's: delivered when both its halves are there
    bool immediate = false, flush = false;
    std::optional<std::string> text;
    rpc::Responder responder;
  };

  // Lanes.
  void make_lanes(uint32_t remote_nics, Later& later);
  Status wait_for_lane(std::unique_lock<std::mutex>& lock, Deadline deadline);
  void connect(const RdmaLanePtr& lane, Later& later);
  void make_queue_pair(const RdmaLanePtr& lane);
  void finish_connect(const RdmaLanePtr& lane, uint64_t connection, const std::vector<Gid>& gids,
                      Result<rpc::Message> answer);
  void checked(const RdmaLanePtr& lane, const Status& outcome, Later& later);
  void not_connected(const RdmaLanePtr& lane, const Status& why, Later& later);
  void fail(RdmaLane& lane, const Status& why, Later& later);
  void flushed(RdmaLane& lane, Later& later);
  void settled(RdmaLane& lane, Later& later);
  void reconnect_later(RdmaLane& lane, Later& later);
  void disconnect(RdmaLane& lane, Later& later);
  void lose_hope(const Status& why, Later& later);
  void without_rails(const RdmaPartPtr& part, Later& later);
  void go_by(StreamEndpoint& stream, const RdmaPartPtr& part, const Status& lost);
  void on_immediate(rpc::Message message);
  // Room for one more queue pair on that NIC, if need be that of the lane that has been idle for longest, of any peer.
  Result<std::unique_ptr<QueuePair>> queue_pair_on(const std::shared_ptr<Nic>& nic, uint32_t requests,
                                                   uint32_t receives);
  int64_t idle_since(const Nic& nic) const;  // INT64_MAX: none is idle
  RdmaLane* idle_lane(const Nic& nic) const;
  bool evict(const Nic& nic);
  void recall_evicted(Later& later);
  // Parts.
  void cut(RdmaPart& part, std::span<const Batch> batches) const;
  void make_ready(const RdmaPartPtr& part);
  void pump(Later& later);
  RdmaLane* best_lane() const;
  void slice_done(const RdmaPartPtr& part, uint32_t slice, Later& later);
  void moved(const RdmaPartPtr& part, Later& later);
  void begin_checks(const RdmaPartPtr& part, Later& later);
  void begin_notify(const RdmaPartPtr& part, Later& later);
  void stop(const RdmaPartPtr& part, const Status& why, Later& later);
  void flush_here(const RdmaPartPtr& part, Later& later);
  void end(const RdmaPartPtr& part, Later& later);
  void expire(const RdmaPartPtr& part);
  // The peer's requests.
  void on_connect(rpc::Message request, rpc::Responder responder);
  Result<std::string> accept(std::string_view body, Later& later);
  void on_keys(rpc::Message request, rpc::Responder responder);
  void on_disconnect(rpc::Message request, rpc::Responder responder);
  void on_notify(rpc::Message request, rpc::Responder responder);
  void deliver(uint32_t id, Later& later);

  PeerImpl& peer_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // of a lane's state
  bool over_ = false;
  std::vector<RdmaLanePtr> lanes_;
  uint32_t remote_nics_ = 1;
  Status hopeless_;    // why no rail has been up for a while: what comes now does not wait for one
  int64_t up_ns_ = 0;  // when the last rail but none went, or the first ones were asked for
  uint64_t next_connection_ = 1;
  std::deque<RdmaPartPtr> ready_;  // have something to post; each once
  uint32_t next_notify_ = 1;
  std::set<RdmaPartPtr> notifying_;  // at most kNotifying
  std::deque<RdmaPartPtr> wait_to_notify_;

  std::unordered_map<uint64_t, std::shared_ptr<PassivePair>> passive_;  // by the peer's number of the connection
  std::unordered_map<uint32_t, Incoming> incoming_;
  uint32_t delivered_below_ = 1;
  std::set<uint32_t> delivered_;  // at and above it
};

}  // namespace torch_mooncake::transfer::rdma
