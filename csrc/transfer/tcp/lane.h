// LaneScheduler: which chunk of which stream goes over which lane of one session. A lane gets a few frames at a time,
// so that what waits can still go elsewhere or be cancelled; streams of one priority take turns.
//
// A chunk goes to the lane with the earliest predicted finish: bytes that wait in it, here and in the kernel, by the
// rate at which its peer has acknowledged bytes lately. If that lane has enough for now, the chunk waits for it.
//
// While streams live, a watchdog looks at the lanes every 50 ms. One that has had bytes waiting and none acknowledged
// for kStuckNs is suspected: the peer is asked by control message. If it answers, it is alive and the lane is stuck:
// both ends are shut down, and what it carried is sent again elsewhere. If it does not (a stopped peer, a dead one),
// the lane is left to the heartbeats.
//
// Bulk avoids the lanes of the handshake (control messages, passing of fds) as long as there are others: a stuck lane
// may be killed, and that should not end the session.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "transfer/tcp/outgoing.h"

namespace torch_mooncake::transfer {

class PeerImpl;

class LaneScheduler {
 public:
  static constexpr uint32_t kLaneFrames = 4;
  static constexpr uint64_t kLaneBytes = 2 << 20;  // not yet with the kernel; one frame may exceed it
  static constexpr int64_t kStuckNs = 200'000'000;

  LaneScheduler(PeerImpl& peer, std::function<void()> started) : peer_(peer), started_(std::move(started)) {}
  bool busy() const;  // a stream has not ended
  // Short streams leave on this thread, as far as the lanes take them; long ones on an I/O thread, so that who starts
  // one does not go on pumping for it.
  void start(OutgoingPtr stream);
  void stop(const OutgoingPtr& stream);
  // Shuts the lanes down that hold frames of this stream.
  void kill_lanes_of(const OutgoingPtr& stream, const Status& why);
  void lane_closed(const rpc::Lane& lane);
  void session_over(const Status& why);
  // The lanes that bulk frames take now.
  std::vector<std::shared_ptr<rpc::Lane>> bulk_lanes() const;

  // How much a chunk should carry: about a millisecond of a lane, 256 KiB to the engine's slice_bytes.
  uint64_t chunk_bytes() const;
  // Bytes arrived at this rate over all lanes together: a side that only reads has no other measure.
  void learn_rate(double bytes_per_ns);
  // A lane's rate in bytes a second, by its index; 0: not measured yet.
  std::map<uint32_t, uint64_t> rates() const;

 private:
  using LanePtr = std::shared_ptr<rpc::Lane>;
  struct LaneState {
    uint32_t frames = 0;  // given to the lane, and not yet all with the kernel
    bool refuses = false;
    bool suspected = false;                  // the peer is being asked
    double rate = 0;                         // bytes acknowledged a nanosecond, while bytes waited
    uint64_t waiting = 0, acknowledged = 0;  // as last seen
    int64_t moved_ns = 0;                    // when bytes were last acknowledged, or none waited
    uint64_t sample_acknowledged = 0;
    int64_t sample_ns = 0;
  };
  void pump();
  bool send_next(const std::vector<LanePtr>& lanes);
  LanePtr pick(const std::vector<LanePtr>& lanes);
  LaneState& observe(const rpc::Lane& lane);
  OutgoingPtr take_ready();
  void taken(Outgoing& stream, uint32_t chunk, const rpc::Lane& lane);  // with the mutex: the kernel has the frame
  void sent(const OutgoingPtr& stream, uint32_t chunk, const LanePtr& lane, uint64_t payload, const Status& status);
  void make_ready(const OutgoingPtr& stream);
  void watch();
  void ask_about(const LanePtr& lane);

  PeerImpl& peer_;
  const std::function<void()> started_;  // after each start()
  mutable std::mutex mutex_;
  std::set<OutgoingPtr> live_;
  std::deque<OutgoingPtr> ready_[2];      // by priority; have work; each once
  int passed_over_ = 0;                   // foreground chunks since one of the background
  std::map<uint32_t, LaneState> states_;  // indices are never used again
  double lane_rate_ = 0;                  // the last that was measured of any lane, for those that are new
  bool pumping_ = false, pump_again_ = false, watching_ = false;
};

}  // namespace torch_mooncake::transfer
