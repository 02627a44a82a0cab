#include "transfer/tcp/lane_keeper.h"

#include <algorithm>
#include <set>

#include "common/log.h"
#include "transfer/engine_impl.h"
#include "transfer/tcp/lane.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {

// A probe must not outlast the back-off by much: the kernel repeats a lost SYN after a second only.
constexpr int64_t kProbeMs = 300, kFirstDialMs = 2000;
constexpr int64_t kFirstRetryMs = 100, kLastRetryMs = 500, kLastRetryOfUnknownMs = 10'000;
constexpr int64_t kSettleMs = 250;  // what open() gives the other rails
constexpr int64_t kTickMs = 25, kStuckMs = 200, kMovedLaterMs = 100;

std::string name_of(const rpc::Rail& rail) {
  return rail.local.empty() ? "the Unix socket" : rail.local + " -> " + rail.remote;
}

}  // namespace

// ---- Which rails there should be

void LaneKeeper::plan() {
  auto& session = *peer_.session();
  auto& host = peer_.engine().host_rails();
  auto lanes = session.lanes();
  std::lock_guard lock(mutex_);
  planned_ = true;
  if (session.same_host()) {
    rails_.try_emplace(rpc::Rail{});
    return;
  }
  for (auto& lane : lanes)
    if (lane->index() < 2 && !lane->is_unix() && dialled_as_.local.empty()) dialled_as_ = lane->rail();
  ours_ = host.ends();
  peers_ = peer_.features().rails;
  std::map<rpc::Rail, RailPlan> wanted;
  for (auto& rail : plan_rails(ours_, peers_)) wanted.emplace(rail.key(), rail);
  for (auto it = rails_.begin(); it != rails_.end();) {
    bool keep = wanted.count(it->first) || (it->first == dialled_as_ && !it->second.plan);
    if (!keep && it->second.timer) peer_.engine().rpc().cancel_timer(it->second.timer);
    it = keep ? std::next(it) : rails_.erase(it);
  }
  for (auto& [key, rail] : wanted) rails_[key].plan = rail;
  // The way it was dialled may be none of the pairs: an address that is translated, a loopback.
  if (wanted.empty() || (!wanted.count(dialled_as_) && !host.excludes(dialled_as_.local)))
    rails_.try_emplace(dialled_as_);
}

size_t LaneKeeper::lanes_on(const rpc::Rail& rail) const {
  auto lanes = peer_.session()->lanes();
  return static_cast<size_t>(std::count_if(lanes.begin(), lanes.end(), [&](auto& lane) {
    return lane->index() >= 2 && lane->alive() && lane->rail() == rail;
  }));
}

Status LaneKeeper::open(Deadline deadline) {
  auto& session = *peer_.session();
  if (!session.is_initiator()) return {};
  plan();
  ensure_all(0);
  const size_t lanes = static_cast<size_t>(peer_.engine().options().lanes);
  const int64_t settled_ns = steady_ns() + kSettleMs * 1'000'000;
  std::unique_lock lock(mutex_);
  while (true) {
    size_t complete = 0, idle = 0;
    for (auto& [rail, state] : rails_) {
      complete += lanes_on(rail) >= lanes;
      idle += state.failures > 0;
    }
    if (complete == rails_.size()) return {};
    if (complete > 0 && (complete + idle == rails_.size() || steady_ns() > settled_ns)) return {};
    if (!session.alive()) return session.status();
    if (deadline.expired()) return {Code::deadline_exceeded, "opening lanes to " + peer_.name()};
    dialled_.wait_for(lock, std::chrono::milliseconds(std::min<int64_t>(20, std::max(1, deadline.remaining_ms()))));
  }
}

// ---- Dialling

void LaneKeeper::ensure_all(int64_t delay_ms) {
  std::vector<rpc::Rail> all;
  {
    std::lock_guard lock(mutex_);
    for (auto& [rail, state] : rails_) all.push_back(rail);
  }
  for (auto& rail : all) ensure(rail, delay_ms);
}

void LaneKeeper::ensure(const rpc::Rail& rail, int64_t delay_ms) {
  size_t turn = 0;
  {
    std::lock_guard lock(mutex_);
    auto it = rails_.find(rail);
    if (it == rails_.end() || it->second.busy) return;
    if (lanes_on(rail) >= static_cast<size_t>(peer_.engine().options().lanes)) return;
    it->second.busy = true;
    turn = static_cast<size_t>(std::distance(rails_.begin(), it));
    if (delay_ms > 0) {
      std::weak_ptr<PeerImpl> weak = peer_.shared_from_this();
      it->second.timer = peer_.engine().rpc().add_timer(Deadline::after_ms(delay_ms), [this, weak, rail, turn] {
        auto peer = weak.lock();
        if (peer) peer->engine().repair(turn).post([this, peer, rail] { dial(rail); });
      });
      return;
    }
  }
  peer_.engine().repair(turn).post([this, peer = peer_.shared_from_this(), rail] { dial(rail); });
}

void LaneKeeper::dial(const rpc::Rail& rail) {
  auto& session = *peer_.session();
  rpc::LaneTarget target;
  int64_t limit_ms = kFirstDialMs;
  {
    std::lock_guard lock(mutex_);
    auto it = rails_.find(rail);
    if (it == rails_.end() || !session.alive()) return;
    it->second.timer = 0;
    if (it->second.plan) target = it->second.plan->target(it->second.bind_device);
    if (it->second.was_up) limit_ms = kProbeMs;
  }
  const auto wanted = static_cast<size_t>(peer_.engine().options().lanes);
  Status status;
  for (size_t tries = 0; status && tries < wanted && lanes_on(rail) < wanted; ++tries) {
    auto lane = session.open_lane(target, Deadline::after_ms(limit_ms));
    if (!lane && lane.status().code() == Code::invalid_argument && !target.device.empty()) {
      target.device.clear();  // not permitted: the source address alone then
      lane = session.open_lane(target, Deadline::after_ms(limit_ms));
    }
    status = lane.status();
    if (lane && !session.same_host() && !((*lane)->rail() == rail)) {  // addresses or routes have changed
      status = {Code::peer_lost, "the connection came up as " + (*lane)->describe()};
      (*lane)->kill(status);
    }
  }
  int64_t pause_ms = 0;
  bool first_failure = false;
  {
    std::lock_guard lock(mutex_);
    auto it = rails_.find(rail);
    if (it == rails_.end()) return;
    auto& state = it->second;
    state.busy = false;
    if (status) {
      state.was_up = true;
      state.failures = 0;
    } else {
      first_failure = state.failures == 0;
      // Where packets come back by another NIC than they went out, a socket bound to its device never sees them.
      if (!state.was_up) state.bind_device = !state.bind_device;
      pause_ms = kFirstRetryMs << std::min(state.failures++, 8);
      pause_ms = std::min(pause_ms, state.was_up || !state.plan ? kLastRetryMs - kProbeMs : kLastRetryOfUnknownMs);
    }
  }
  dialled_.notify_all();
  if (!session.alive()) return;
  if (first_failure)
    log::warning("transfer", peer_.name() + ": the rail " + name_of(rail) + " is down: " + status.to_string());
  ensure(rail, std::max<int64_t>(pause_ms, 20));  // after a success: in case one has died again meanwhile
}

// ---- What is lost

void LaneKeeper::lane_closed(const rpc::Lane& lane) {
  if (lane.index() >= 2 && peer_.session()->is_initiator()) ensure(lane.rail(), 0);
}

void LaneKeeper::take_out(rpc::Lane& lane, const Status& why) {
  lane.kill(why);
  // Where the link is cut, the other side does not see it die.
  (void)peer_.session()->post(kLaneLost, ByteWriter().put(lane.index()).take());
}

void LaneKeeper::lane_lost(uint32_t index) {
  for (auto& lane : peer_.session()->lanes())
    if (lane->index() == index) lane->kill({Code::peer_lost, peer_.name() + " found this lane dead"});
}

// Lanes over an end that was up and is not any more; but not the last ones: TCP itself outlasts a short outage.
void LaneKeeper::drop_vanished(const std::vector<RailEnd>& before, const std::vector<RailEnd>& now,
                               std::string rpc::Rail::*end) {
  std::set<std::string> gone;
  for (auto& old : before)
    if (old.up) gone.insert(old.address.host());
  for (auto& end_now : now)
    if (end_now.up) gone.erase(end_now.address.host());
  auto lanes = peer_.session()->lanes();
  bool others = std::any_of(lanes.begin(), lanes.end(), [&](auto& lane) {
    return lane->alive() && lane->index() >= 2 && !gone.count(lane->rail().*end);
  });
  if (!others) return;
  for (auto& lane : lanes)
    if (gone.count(lane->rail().*end)) lane->kill({Code::peer_lost, lane->describe() + ": the link is down"});
}

void LaneKeeper::our_rails_changed() {
  auto& session = *peer_.session();
  if (!session.alive() || session.same_host()) return;
  auto now = peer_.engine().host_rails().ends();
  std::vector<RailEnd> before;
  {
    std::lock_guard lock(mutex_);
    before.swap(ours_);
    ours_ = now;
  }
  drop_vanished(before, now, &rpc::Rail::local);
  ByteWriter out;
  encode_ends(out, now);
  (void)session.post(kRails, out.take());
  peer_rails_changed();
}

void LaneKeeper::peer_rails_changed() {
  std::vector<RailEnd> before, now = peer_.features().rails;
  {
    std::lock_guard lock(mutex_);
    before.swap(peers_);
    peers_ = now;
    // Probed at once, whatever the back-off says.
    for (auto& [rail, state] : rails_) {
      if (state.timer == 0) continue;
      peer_.engine().rpc().cancel_timer(std::exchange(state.timer, 0));
      state.busy = false;
    }
  }
  drop_vanished(before, now, &rpc::Rail::remote);
  {
    std::lock_guard lock(mutex_);
    if (!planned_) return;  // we do not dial, or have not yet
  }
  plan();
  ensure_all(0);
}

// ---- What stands still

void LaneKeeper::watch() {
  if (peer_.session()->same_host() || watching_.exchange(true)) return;
  std::weak_ptr<PeerImpl> weak = peer_.shared_from_this();
  peer_.engine().rpc().add_timer(Deadline::after_ms(kTickMs), [this, weak] {
    if (auto peer = weak.lock()) tick();
  });
}

// Judged by what the peer's kernel acknowledges, so that a peer that is slow, or stopped, is none of our business.
bool LaneKeeper::stands_still(const Progress& lane, const rpc::LaneProgress& now, int64_t now_ns) const {
  if (!now.in_flight) return false;
  const int64_t rtt_ns = int64_t{now.rtt_us} * 1000;
  auto others = [&](auto&& holds) {
    return std::any_of(progress_.begin(), progress_.end(),
                       [&](auto& other) { return other.second.rail != lane.rail && holds(other.second); });
  };
  // The kernel sends again and hears nothing, while another rail's kernel does not have to.
  if (lane.timed_out_ns != 0 && now_ns - lane.timed_out_ns >= std::max(kTickMs * 1'000'000, rtt_ns) &&
      others([](auto& other) { return other.timed_out_ns == 0; }))
    return true;
  return now_ns - lane.moved_ns >= std::max(kStuckMs * 1'000'000, 4 * rtt_ns) &&
         others([&](auto& other) { return other.moved_ns - lane.moved_ns >= kMovedLaterMs * 1'000'000; });
}

void LaneKeeper::tick() {
  {
    std::lock_guard lock(tick_mutex_);
    const int64_t now = steady_ns();
    std::vector<std::pair<std::shared_ptr<rpc::Lane>, rpc::LaneProgress>> lanes;
    std::map<uint32_t, Progress> seen;
    for (auto& lane : peer_.session()->lanes()) {
      if (lane->is_unix() || !lane->alive()) continue;
      auto progress = lane->progress();
      auto& entry = seen[lane->index()] = {lane->rail(), progress.acknowledged, now, 0};
      if (auto old = progress_.find(lane->index()); old != progress_.end()) {
        if (old->second.acknowledged == progress.acknowledged && progress.in_flight)
          entry.moved_ns = old->second.moved_ns;
        if (progress.timeouts > 0) entry.timed_out_ns = old->second.timed_out_ns ? old->second.timed_out_ns : now;
      }
      lanes.emplace_back(std::move(lane), progress);
    }
    progress_ = std::move(seen);
    for (auto& [lane, progress] : lanes)
      if (stands_still(progress_[lane->index()], progress, now))
        take_out(*lane, {Code::peer_lost, lane->describe() + " stands still while other rails move"});
  }
  watching_ = false;
  if (scheduler_.busy()) watch();
}

}  // namespace torch_mooncake::transfer
