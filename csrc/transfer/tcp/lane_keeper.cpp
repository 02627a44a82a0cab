#include "transfer/tcp/lane_keeper.h"

#include <algorithm>

#include "common/log.h"
#include "transfer/engine_impl.h"

namespace torch_mooncake::transfer {
namespace {

constexpr int64_t kDialMs = 1000;
constexpr int64_t kFirstRetryMs = 100, kLastRetryMs = 500;

}  // namespace

// Those of the handshake (0, and perhaps 1) and the engine's own.
int LaneKeeper::wanted() const {
  auto lanes = peer_.session()->lanes();
  auto first = std::count_if(lanes.begin(), lanes.end(), [](auto& lane) { return lane->index() < 2; });
  return static_cast<int>(first) + peer_.engine().options().lanes;
}

Status LaneKeeper::open(Deadline deadline) {
  auto& session = *peer_.session();
  return session.is_initiator() ? session.open_lanes(wanted(), deadline) : Status();
}

void LaneKeeper::lane_closed(const rpc::Lane& lane) {
  if (lane.index() >= 2 && peer_.session()->is_initiator() && !repairing_.exchange(true)) repair(0);
}

void LaneKeeper::repair(int attempt) {
  auto peer = peer_.shared_from_this();
  peer_.engine().repair().post([this, peer, attempt] {
    auto& session = *peer->session();
    if (!session.alive()) return;
    Status status = session.open_lanes(wanted(), Deadline::after_ms(kDialMs));
    if (status) {
      repairing_ = false;
      // One may have died again while nobody was told.
      bool again = session.alive() && static_cast<int>(session.lanes().size()) < wanted();
      if (again && !repairing_.exchange(true)) repair(0);
      return;
    }
    if (attempt == 0)
      log::warning("transfer", peer->name() + ": a lane is lost and cannot be reopened yet: " + status.to_string());
    int64_t pause_ms = std::min(kFirstRetryMs << std::min(attempt, 8), kLastRetryMs);
    std::weak_ptr<PeerImpl> weak = peer;
    peer->engine().rpc().add_timer(Deadline::after_ms(pause_ms), [this, weak, attempt] {
      if (auto alive = weak.lock()) repair(attempt + 1);
    });
  });
}

}  // namespace torch_mooncake::transfer
