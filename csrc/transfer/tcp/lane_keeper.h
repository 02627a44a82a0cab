// LaneKeeper: which lanes the session with one peer should have, the dialling of those that it lost, and the removal of
// those that stand still.
//
// Every rail (rails.h) has the engine's number of lanes, each bound to its NIC. The side that connected dials; the
// other side sees lanes appear, and uses what there is. A session that does not leave the host, or whose peer told no
// ends, has one rail: the way it was dialled. A lane proves the session's key, so a peer that restarted on the same
// address (another incarnation) never gets one.
//
// A rail is taken out at once when its lanes break, when a NIC loses its link or address (each side tells the other),
// or when its lanes stand still (nothing sent is acknowledged) while another rail moves. Its slices are sent again
// elsewhere (lane.h). Meanwhile it is probed: at once, after 100, 200, then every 500 ms (10 s if it never worked), as
// long as the session lives.
//
// Threads: any. Dialling happens on the engine's repair threads; open() waits for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "transfer/tcp/rails.h"

namespace torch_mooncake::transfer {

class PeerImpl;
class LaneScheduler;

class LaneKeeper {
 public:
  LaneKeeper(PeerImpl& peer, LaneScheduler& scheduler) : peer_(peer), scheduler_(scheduler) {}
  // Returns when one rail has its lanes and the others had a moment to get theirs. Nothing to do for the side that was
  // connected to.
  Status open(Deadline deadline);
  void lane_closed(const rpc::Lane& lane);
  // Our ends have changed: the peer is told.
  void our_rails_changed();
  // The peer's ends have changed.
  void peer_rails_changed();
  // The peer has found a lane dead that looks alive here.
  void lane_lost(uint32_t index);
  // Something is being sent: watches for lanes that stand still until nothing is.
  void watch();

 private:
  struct RailState {
    std::optional<RailPlan> plan;  // none: as the session was dialled
    bool was_up = false;
    bool busy = false;  // being dialled, or waiting for it
    bool bind_device = true;
    int failures = 0;
    uint64_t timer = 0;
  };
  struct Progress {
    rpc::Rail rail;
    uint64_t acknowledged = 0;
    int64_t moved_ns = 0;      // when it last did, or had nothing to do
    int64_t timed_out_ns = 0;  // when the kernel was first seen to repeat in vain, 0: it does not
  };
  void plan();
  size_t lanes_on(const rpc::Rail& rail) const;
  void ensure(const rpc::Rail& rail, int64_t delay_ms);
  void dial(const rpc::Rail& rail);
  void ensure_all(int64_t delay_ms);
  void drop_vanished(const std::vector<RailEnd>& before, const std::vector<RailEnd>& now, std::string rpc::Rail::*end);
  void tick();
  bool stands_still(const Progress& lane, const rpc::LaneProgress& now, int64_t now_ns) const;
  void take_out(rpc::Lane& lane, const Status& why);

  PeerImpl& peer_;
  LaneScheduler& scheduler_;
  std::atomic<bool> watching_{false};
  std::mutex tick_mutex_;
  std::map<uint32_t, Progress> progress_;  // by lane

  mutable std::mutex mutex_;
  std::condition_variable dialled_;
  std::map<rpc::Rail, RailState> rails_;
  std::vector<RailEnd> ours_, peers_;  // as last looked at
  rpc::Rail dialled_as_;               // the rail of the session's first TCP lane
  bool planned_ = false;
};

}  // namespace torch_mooncake::transfer
