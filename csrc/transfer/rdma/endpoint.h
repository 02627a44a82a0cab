// RDMA towards one peer: lanes (queue pairs that we have asked for), the pairs that the peer has asked for, and the
// slices of ops that go over the lanes. The target's CPU takes no part in reads and writes.
//
// The order of things that makes failures safe: a lane that fails is moved to the error state and flushed (or its queue
// pair destroyed), from when on nothing touches our memory; then the peer destroys its end, from when on nothing lands
// there; only then are its slices posted again, on other lanes. Not if the peer may have delivered the notification
// behind them meanwhile: it is asked first.
//
// Locks: `mutex_` guards everything here, in lanes and in parts. Nothing blocks under it: calls out of the room
// (session, op, connecting, failing and destroying queue pairs) are collected in Later and made without it. submit()
// does not wait for it at all: parts come through the inbox.
//
// Files: endpoint (opening, submitting), parts (slices and their ends), lanes (connecting, failing), passive (the
// peer's requests), notifications, scarcity (room for queue pairs, no rail).
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>

#include "rpc/session.h"
#include "transfer/rdma/inbox.h"
#include "transfer/rdma/lane.h"
#include "transfer/rdma/signal.h"
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
  static constexpr size_t kNotifying = 32;  // notifications under way; a passive pair has kReceives for them
  static constexpr uint32_t kReceives = 64;
  static constexpr int kStopMs = 100;  // a stopped part waits so long for its posted slices before its lanes are failed

  // An immediate says of which notification it is, and behind the slices of which lane, or of all.
  static constexpr int kIdBits = 26;
  static constexpr uint32_t kLast = 63, kCountedLanes = 62;
  static constexpr uint32_t immediate_of(uint64_t id, uint32_t lane) {
    return static_cast<uint32_t>(lane << kIdBits | (id & ((1u << kIdBits) - 1)));
  }

  explicit RdmaEndpoint(PeerImpl& peer) : peer_(peer) {}
  ~RdmaEndpoint() override;
  static void attach(EngineImpl& engine);
  uint8_t local_kinds() const override { return kind_bit(LocalKind::host) | kind_bit(LocalKind::cuda_on_nics); }
  std::string name() const override { return "rdma"; }
  bool available() const override;
  Explanation explain() const override;
  std::vector<LaneStats> lane_stats() const override;
  // Makes the lanes, the first time, and waits for one that reaches the region. Errors: why there is none.
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  void session_over(const Status& why) override;
  // After the session: until no NIC touches our memory for this peer (at most about kFlushNs).
  void wait_at_rest(Deadline deadline);
  // After the NICs' threads: destroys what they have not flushed, so that no NIC touches our memory any more.
  void take_back();

  // --- By parts, lanes and passive pairs.
  void stop(const RdmaPartPtr& part, const Status& why);
  void completed(RdmaLane& lane, std::span<const Completion> completions);
  void port_down(RdmaLane& lane);
  bool late(RdmaLane& lane, int64_t now_ns);  // true: ask again
  void immediate(uint32_t value);

 private:
  class Later;
  class Turn;
  struct Incoming {  // a notification of the peer's: delivered when its text and its immediates are there
    bool last = false, flush = false;
    uint64_t lanes = 0, wanted_lanes = 0;  // a bit each; none wanted: only the last one counts
    std::optional<std::string> text;
    rpc::Responder responder;
    bool complete() const { return text && (last || (wanted_lanes != 0 && (lanes & wanted_lanes) == wanted_lanes)); }
  };

  // Lanes.
  void make_lanes(uint32_t remote_nics, Later& later);
  Status wait_for_lane(const RdmaMemory& memory, Deadline deadline);
  void connect(const RdmaLanePtr& lane, Later& later);
  void make_queue_pair(const RdmaLanePtr& lane);
  void finish_connect(const RdmaLanePtr& lane, uint64_t connection, const std::vector<Gid>& gids,
                      const Result<rpc::Message>& answer);
  void checked(const RdmaLanePtr& lane, const Status& outcome, Later& later);
  void not_connected(const RdmaLanePtr& lane, const Status& why, Later& later);
  void fail(RdmaLane& lane, const Status& why, Later& later);
  void flushed(RdmaLane& lane, Later& later);
  void settled(RdmaLane& lane, Later& later);
  void reconnect_later(RdmaLane& lane, Later& later);
  void disconnect(RdmaLane& lane, Later& later);
  // Room for one more queue pair on that NIC, if need be that of the lane that has been idle for longest, of any peer.
  Result<std::unique_ptr<QueuePair>> queue_pair_on(const std::shared_ptr<Nic>& nic, uint32_t requests,
                                                   uint32_t receives);
  int64_t idle_since(const Nic& nic) const;  // INT64_MAX: none is idle
  RdmaLane* idle_lane(const Nic& nic) const;
  bool evict(const Nic& nic);
  void set_evicted(RdmaLane& lane);
  void recall_evicted(Later& later);
  void look_for_hope(Later& later);  // when what waits may have waited for long enough
  void lose_hope(Later& later);
  void without_rails(const RdmaPartPtr& part, const Status& why, Later& later);
  void go_by(StreamEndpoint& stream, const RdmaPartPtr& part, const Status& lost);

  // Parts.
  Status prepare(RdmaPart& part, std::span<const Batch> batches, bool may_wait);
  void cut(RdmaPart& part, std::span<const Batch> batches) const;
  void enqueue(RdmaPartPtr part);
  void take_in(Later& later);
  void make_ready(const RdmaPartPtr& part);
  void ready_or_leave(const RdmaPartPtr& part, Later& later);
  void pump(Later& later);
  static RdmaPart::Needs needs_of_next(const RdmaPart& part);
  RdmaLane* best_lane(const RdmaPart::Needs& needs) const;
  void completed(RdmaLane& lane, const Completion& completion, Later& later);
  void slice_done(const RdmaPartPtr& part, uint32_t slice, Later& later);
  void data_done(const RdmaPartPtr& part, Later& later);
  void moved(const RdmaPartPtr& part, Later& later);
  void stop(const RdmaPartPtr& part, const Status& why, Later& later);
  void flush_here(const RdmaPartPtr& part, Later& later);
  void end(const RdmaPartPtr& part, Later& later);
  void end_at_rest(const RdmaPartPtr& part, Later& later);
  void expire(const RdmaPartPtr& part);

  // Notifications.
  void note_carrier(RdmaPart& part, const RdmaLane& lane);
  void try_to_count(const RdmaPartPtr& part, Later& later);
  bool room_for_notification() const;
  void begin_notify(const RdmaPartPtr& part, Later& later);
  void send_text(const RdmaPartPtr& part, uint64_t lanes, Later& later);
  void answered(const RdmaPartPtr& part, uint64_t id, const Status& status);
  void recall(const RdmaPartPtr& part, Later& later);
  void recalled(const RdmaPartPtr& part, uint64_t id, const Result<rpc::Message>& answer);
  void notify_over(RdmaPart& part, Later& later);
  void begin_waiting_notifications(Later& later);
  void send_last_by_message(uint64_t id, Later& later);
  Incoming* incoming_at(uint64_t id);  // made if need be; null: no honest peer has so many
  void deliver(uint64_t id, Later& later);
  bool delivered(uint64_t id) const { return id < delivered_below_ || delivered_.count(id) > 0; }
  void set_delivered(uint64_t id);

  // The peer's requests.
  void on_connect(rpc::Message request, rpc::Responder responder);
  Result<std::string> accept(std::string_view body, Later& later);
  void on_keys(rpc::Message request, rpc::Responder responder);
  void on_disconnect(rpc::Message request, rpc::Responder responder);
  void on_notify(rpc::Message request, rpc::Responder responder);
  void on_forget(rpc::Message request, rpc::Responder responder);
  void on_immediate(rpc::Message message);

  PeerImpl& peer_;
  mutable std::mutex mutex_;
  Inbox inbox_;
  Signal changed_;  // a lane's state
  bool over_ = false;
  std::vector<RdmaLanePtr> lanes_;
  std::atomic<size_t> lane_count_{0};  // for who has not the mutex
  uint32_t remote_nics_ = 1;
  Status hopeless_;  // why no rail has been up for a while: what comes now does not wait for one
  uint64_t next_connection_ = 1;
  std::deque<RdmaPartPtr> ready_;  // have something to post; each once
  uint64_t next_notify_ = 1;
  std::map<uint64_t, RdmaPartPtr> notifying_;  // by id; at most kNotifying
  std::deque<RdmaPartPtr> wait_to_notify_;

  std::unordered_map<uint64_t, std::shared_ptr<PassivePair>> passive_;  // by the peer's number of the connection
  std::unordered_map<uint64_t, Incoming> incoming_;
  uint64_t delivered_below_ = 1;
  std::set<uint64_t> delivered_;  // at and above it; also what the peer has taken back
};

}  // namespace torch_mooncake::transfer::rdma
