// LaneScheduler: which chunk of which stream goes over which lane of one session. A lane gets a few frames at a time,
// so that what waits can still go elsewhere or be cancelled; streams take turns.
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

  LaneScheduler(PeerImpl& peer, std::function<void()> started) : peer_(peer), started_(std::move(started)) {}
  bool busy() const;  // a stream has not ended
  void start(OutgoingPtr stream);
  void stop(const OutgoingPtr& stream);
  // Shuts the lanes down that hold frames of this stream.
  void kill_lanes_of(const OutgoingPtr& stream, const Status& why);
  void lane_closed(const rpc::Lane& lane);
  void session_over(const Status& why);
  // The lanes that bulk frames take now.
  std::vector<std::shared_ptr<rpc::Lane>> bulk_lanes() const;

 private:
  void pump();
  bool send_next(const std::vector<std::shared_ptr<rpc::Lane>>& lanes);
  void sent(const OutgoingPtr& stream, uint32_t chunk, const std::shared_ptr<rpc::Lane>& lane, uint64_t payload,
            const Status& status);
  void make_ready(const OutgoingPtr& stream);

  PeerImpl& peer_;
  const std::function<void()> started_;  // after each start()
  mutable std::mutex mutex_;
  std::set<OutgoingPtr> live_;
  std::deque<OutgoingPtr> ready_;        // have work; each once
  std::map<uint32_t, uint32_t> frames_;  // in flight, by lane
  std::set<uint32_t> refusing_;          // lanes that take no more; indices are never used again
  bool pumping_ = false, pump_again_ = false;
};

}  // namespace torch_mooncake::transfer
