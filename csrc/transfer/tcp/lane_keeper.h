// LaneKeeper: which lanes the session with one peer should have, and the dialling of those that it lost.
//
// The side that connected dials; the other side sees lanes appear, and uses what there is. A lost lane is dialled again
// within 100 ms, then after 100, 200, 400, 500, 500 … ms, as long as the session lives. A lane proves the session's
// key, so a peer that restarted on the same address (another incarnation) never gets one: its refusal ends the session.
//
// What the multi-rail code builds on: a lane knows its rail (rpc::Lane::rail()), Session::open_lane() puts one on a
// rail of choice, the scheduler (lane.h) sends over whatever lanes there are, by their measured rates, and kills those
// that stand still while others move (their slices are sent again elsewhere). A rail that is down is one without live
// lanes.
//
// Threads: any; dialling happens on the caller's thread in open(), and on the engine's repair thread.
#pragma once

#include <atomic>
#include <memory>

#include "rpc/session.h"

namespace torch_mooncake::transfer {

class PeerImpl;

class LaneKeeper {
 public:
  explicit LaneKeeper(PeerImpl& peer) : peer_(peer) {}
  // All that should be there, on the caller's thread. Nothing to do for the side that was connected to.
  Status open(Deadline deadline);
  // Lanes of the handshake (0, perhaps 1) are not reopened: with lane 0 the session ends.
  void lane_closed(const rpc::Lane& lane);

 private:
  int wanted() const;
  void repair(int attempt);

  PeerImpl& peer_;
  std::atomic<bool> repairing_{false};
};

}  // namespace torch_mooncake::transfer
