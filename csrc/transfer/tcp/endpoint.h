// Bulk over the session's lanes, TCP or Unix: the streams of both directions towards one peer.
//
// Streams are numbered by their initiator, writes and reads apart. The target of writes remembers which are finished
// (all below a low-water mark, and a few above), so that what a lane still brings of them goes to the sink.
#pragma once

#include <atomic>
#include <mutex>
#include <set>
#include <unordered_map>

#include "transfer/tcp/lane.h"
#include "transfer/tcp/lane_keeper.h"
#include "transfer/tcp/read.h"
#include "transfer/tcp/write.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class EngineImpl;

class StreamEndpoint final : public TransportEndpoint {
 public:
  explicit StreamEndpoint(PeerImpl& peer);
  static void attach(EngineImpl& engine);
  std::string name() const override;
  bool available() const override;
  Explanation explain() const override;
  std::vector<LaneStats> lane_stats() const override;
  Result<RemoteMemoryPtr> open(const OpenedRegion& region, Direction direction, Deadline deadline) override;
  void submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) override;
  void session_over(const Status& why) override;

  Status open_lanes(Deadline deadline) { return keeper_.open(deadline); }
  // A bulk frame begins.
  std::unique_ptr<rpc::BulkReceive> begin(std::string_view body, uint64_t payload_bytes, bool over_unix);
  void lane_closed(const rpc::Lane& lane);
  void our_rails_changed() { keeper_.our_rails_changed(); }
  LaneScheduler& lanes() { return lanes_; }
  void write_over(uint64_t id);   // by WriteTarget
  void read_over(uint64_t id);    // by ReadPart
  void source_over(uint64_t id);  // by ReadSource

 private:
  void on_write(rpc::Message request, rpc::Responder responder);
  void on_write_cancel(rpc::Message request, rpc::Responder responder);
  void on_read(rpc::Message request, rpc::Responder responder);
  void on_read_end(rpc::Message request, rpc::Responder responder);
  void on_rails(rpc::Message request, rpc::Responder responder);
  void on_lane_lost(rpc::Message request, rpc::Responder responder);
  void on_lane_stuck(rpc::Message request, rpc::Responder responder);
  std::shared_ptr<WriteTarget> write_target(uint64_t id, bool make);  // null: finished

  PeerImpl& peer_;
  LaneScheduler lanes_;
  LaneKeeper keeper_;
  std::atomic<uint64_t> next_write_{0}, next_read_{0};

  std::mutex mutex_;
  bool over_ = false;
  std::unordered_map<uint64_t, std::shared_ptr<WriteTarget>> writes_;  // coming in
  uint64_t writes_finished_below_ = 0;
  std::set<uint64_t> writes_finished_;                                 // at and above it
  std::unordered_map<uint64_t, std::shared_ptr<ReadPart>> reads_;      // coming in
  std::unordered_map<uint64_t, std::shared_ptr<ReadSource>> sources_;  // going out for the peer
};

}  // namespace torch_mooncake::transfer
