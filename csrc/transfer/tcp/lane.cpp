#include "transfer/tcp/lane.h"

#include <algorithm>

#include "common/log.h"
#include "transfer/engine_impl.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {

constexpr uint64_t kLeastChunk = 256 << 10;
constexpr double kChunkNs = 1e6;          // of one lane's time
constexpr int64_t kSampleNs = 1'000'000;  // a rate is measured over at least this
constexpr int64_t kWatchMs = 50;
constexpr int64_t kAskMs = 250;
constexpr int kAgeing = 8;
constexpr size_t kShortStream = 16;  // chunks

double blend(double old, double now) { return old == 0 ? now : 0.7 * old + 0.3 * now; }

}  // namespace

void LaneScheduler::start(OutgoingPtr stream) {
  bool begin_watch, is_short;
  {
    std::lock_guard lock(mutex_);
    if (stream->stopped_) return;
    live_.insert(stream);
    make_ready(stream);
    is_short = stream->chunks_.size() <= kShortStream;
    begin_watch = !std::exchange(watching_, true);
  }
  if (is_short)
    pump();
  else
    peer_.engine().rpc().add_timer(Deadline::at_ns(steady_ns()), [this, peer = peer_.shared_from_this()] { pump(); });
  if (begin_watch) watch();
  started_();
}

bool LaneScheduler::busy() const {
  std::lock_guard lock(mutex_);
  return !live_.empty();
}

void LaneScheduler::make_ready(const OutgoingPtr& stream) {
  if (stream->ready_ || !stream->has_work()) return;
  stream->ready_ = true;
  ready_[static_cast<int>(stream->priority_)].push_back(stream);
}

// The foreground first, with one chunk of the background in nine.
OutgoingPtr LaneScheduler::take_ready() {
  auto &foreground = ready_[0], &background = ready_[1];
  bool aged = !background.empty() && (foreground.empty() || ++passed_over_ > kAgeing);
  if (aged) passed_over_ = 0;
  auto& queue = aged ? background : foreground;
  auto stream = std::move(queue.front());
  queue.pop_front();
  stream->ready_ = false;
  return stream;
}

void LaneScheduler::stop(const OutgoingPtr& stream) {
  {
    std::lock_guard lock(mutex_);
    stream->stopped_ = true;
    live_.erase(stream);
    // It holds its op, and the op its peer.
    if (std::exchange(stream->ready_, false)) std::erase(ready_[static_cast<int>(stream->priority_)], stream);
    if (stream->in_flight_ > 0 || std::exchange(stream->told_, true)) return;
  }
  stream->at_rest();
}

std::vector<std::shared_ptr<rpc::Lane>> LaneScheduler::bulk_lanes() const {
  auto lanes = peer_.session()->lanes();
  bool local = std::any_of(lanes.begin(), lanes.end(), [](auto& lane) { return lane->is_unix(); });
  auto rank = [&](const rpc::Lane& lane) {
    if (!lane.alive()) return 0;
    if (lane.index() < 2) return lane.index() == 1 ? 2 : 1;
    return lane.is_unix() == local ? 4 : 3;
  };
  int best = 1;
  for (auto& lane : lanes) best = std::max(best, rank(*lane));
  std::erase_if(lanes, [&](auto& lane) { return rank(*lane) != best; });
  return lanes;
}

void LaneScheduler::pump() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(pumping_, true)) {
      pump_again_ = true;
      return;
    }
  }
  for (;;) {
    while (send_next(bulk_lanes())) {
    }
    std::lock_guard lock(mutex_);
    if (!std::exchange(pump_again_, false)) {
      pumping_ = false;
      return;
    }
  }
}

// What the lane's peer has taken since we last looked.
LaneScheduler::LaneState& LaneScheduler::observe(const rpc::Lane& lane) {
  auto& state = states_[lane.index()];
  auto seen = lane.progress();
  int64_t now = steady_ns();
  bool was_busy = state.waiting > 0;
  if (seen.acknowledged != state.acknowledged || seen.waiting == 0) state.moved_ns = now;
  if (!was_busy || state.sample_ns == 0) {
    state.sample_acknowledged = seen.acknowledged;
    state.sample_ns = now;
    state.moved_ns = now;
  } else if (now - state.sample_ns >= kSampleNs) {
    auto bytes = static_cast<double>(seen.acknowledged - std::min(seen.acknowledged, state.sample_acknowledged));
    if (bytes > 0) lane_rate_ = state.rate = blend(state.rate, bytes / static_cast<double>(now - state.sample_ns));
    state.sample_acknowledged = seen.acknowledged;
    state.sample_ns = now;
  }
  state.waiting = seen.waiting;
  state.acknowledged = seen.acknowledged;
  return state;
}

// The lane where one more chunk would be over first; null if that one has enough for now.
LaneScheduler::LanePtr LaneScheduler::pick(const std::vector<LanePtr>& lanes) {
  LanePtr best;
  double earliest = 0;
  bool has_room = false;
  for (auto& lane : lanes) {
    auto& state = observe(*lane);
    if (state.refuses || state.suspected) continue;
    double rate = state.rate > 0 ? state.rate : std::max(lane_rate_, 1e-3);
    double finish = static_cast<double>(state.waiting + kLeastChunk) / rate;
    if (best && finish >= earliest) continue;
    best = lane;
    earliest = finish;
    has_room = state.frames == 0 || (state.frames < kLaneFrames && lane->queued_bytes() < kLaneBytes);
  }
  return has_room ? best : nullptr;
}

bool LaneScheduler::send_next(const std::vector<LanePtr>& lanes) {
  OutgoingPtr stream;
  LanePtr lane;
  uint32_t chunk = 0, attempt = 0;
  {
    std::lock_guard lock(mutex_);
    if (ready_[0].empty() && ready_[1].empty()) return false;
    lane = pick(lanes);
    if (!lane) return false;
    stream = take_ready();
    chunk = stream->take();
    auto& state = stream->chunks_[chunk];
    state.state = Outgoing::ChunkState::in_flight;
    state.lane = lane->index();
    attempt = state.attempt++;
    ++stream->in_flight_;
    ++states_[lane->index()].frames;
    state.counts = true;
    make_ready(stream);
  }
  if (attempt > 0) peer_.engine().metrics().resent(1);
  rpc::BulkFrame frame;
  frame.priority = stream->priority_;
  if (Status status = stream->gather(chunk, attempt, frame); !status) {
    sent(stream, chunk, lane, 0, status);
    stream->broken(status);
    return true;
  }
  uint64_t payload = 0;
  for (auto& piece : frame.payload) payload += piece.iov_len;
  frame.sent = [this, peer = peer_.shared_from_this(), stream, chunk, lane, payload](const Status& status) {
    sent(stream, chunk, lane, payload, status);
    pump();
  };
  frame.taken = [this, peer = peer_.shared_from_this(), stream, chunk, attempt, lane] {
    {
      std::lock_guard lock(mutex_);
      if (stream->chunks_[chunk].attempt == attempt + 1) taken(*stream, chunk, *lane);  // not sent again since
    }
    pump();
  };
  if (Status status = lane->send_bulk(std::move(frame)); !status) {
    // It is being shut down, perhaps by this very thread, later: lane_closed() will come and pump again.
    {
      std::lock_guard lock(mutex_);
      states_[lane->index()].refuses = true;
    }
    sent(stream, chunk, lane, payload, status);
  }
  return true;
}

void LaneScheduler::taken(Outgoing& stream, uint32_t chunk, const rpc::Lane& lane) {
  if (std::exchange(stream.chunks_[chunk].counts, false)) --states_[lane.index()].frames;
}

void LaneScheduler::sent(const OutgoingPtr& stream, uint32_t chunk, const LanePtr& lane, uint64_t payload,
                         const Status& status) {
  stream->ungather(chunk);
  const bool hopeless = status.code() == Code::invalid_argument;  // no other lane can send it either
  if (hopeless) stream->broken(status);
  {
    std::lock_guard lock(mutex_);
    taken(*stream, chunk, *lane);
    --stream->in_flight_;
    auto& state = stream->chunks_[chunk];
    if (status && lane->alive()) {
      state.state = Outgoing::ChunkState::sent;
    } else {
      state.state = Outgoing::ChunkState::waiting;
      if (!hopeless) stream->again_.push_back(chunk);
      make_ready(stream);
    }
    if (status) peer_.engine().metrics().bytes(lane->is_unix() ? "unix" : "tcp", payload, 0);
    if (!stream->stopped_ || stream->in_flight_ > 0 || std::exchange(stream->told_, true)) return;
  }
  stream->at_rest();
}

void LaneScheduler::kill_lanes_of(const OutgoingPtr& stream, const Status& why) {
  std::set<uint32_t> stuck;
  {
    std::lock_guard lock(mutex_);
    for (auto& state : stream->chunks_)
      if (state.state == Outgoing::ChunkState::in_flight) stuck.insert(state.lane);
  }
  for (auto& lane : peer_.session()->lanes())
    if (stuck.count(lane->index())) lane->kill(why);
}

// What the kernel had taken may never have arrived: send it again. The target knows what it has.
void LaneScheduler::lane_closed(const rpc::Lane& lane) {
  {
    std::lock_guard lock(mutex_);
    if (auto it = states_.find(lane.index()); it != states_.end() && it->second.frames == 0) states_.erase(it);
    for (auto& stream : live_) {
      for (uint32_t chunk = 0; chunk < stream->chunks_.size(); ++chunk) {
        auto& state = stream->chunks_[chunk];
        if (state.state != Outgoing::ChunkState::sent || state.lane != lane.index()) continue;
        state.state = Outgoing::ChunkState::waiting;
        stream->again_.push_back(chunk);
      }
      make_ready(stream);
    }
  }
  pump();
}

// ---- Rates and the watchdog

uint64_t LaneScheduler::chunk_bytes() const {
  uint64_t most = std::max(peer_.engine().options().slice_bytes, kLeastChunk);
  std::lock_guard lock(mutex_);
  if (lane_rate_ == 0) return std::min<uint64_t>(most, 1 << 20);
  return std::clamp((static_cast<uint64_t>(lane_rate_ * kChunkNs) + 4095) & ~uint64_t{4095}, kLeastChunk, most);
}

void LaneScheduler::learn_rate(double bytes_per_ns) {
  auto lanes = static_cast<double>(std::max<size_t>(1, bulk_lanes().size()));
  std::lock_guard lock(mutex_);
  lane_rate_ = blend(lane_rate_, bytes_per_ns / lanes);
}

std::map<uint32_t, uint64_t> LaneScheduler::rates() const {
  std::lock_guard lock(mutex_);
  std::map<uint32_t, uint64_t> out;
  for (auto& [index, state] : states_) out[index] = static_cast<uint64_t>(state.rate * 1e9);
  return out;
}

void LaneScheduler::watch() {
  std::vector<LanePtr> stuck;
  auto lanes = bulk_lanes();
  {
    std::lock_guard lock(mutex_);
    if (live_.empty()) {
      watching_ = false;
      return;
    }
    for (auto& lane : lanes) {
      auto& state = observe(*lane);
      if (lane->index() == 0 || state.suspected || state.waiting == 0) continue;
      if (steady_ns() - state.moved_ns < kStuckNs) continue;
      state.suspected = true;
      stuck.push_back(lane);
    }
  }
  for (auto& lane : stuck) ask_about(lane);
  std::weak_ptr<PeerImpl> weak = peer_.shared_from_this();
  peer_.engine().rpc().add_timer(Deadline::after_ms(kWatchMs), [this, weak] {
    if (auto peer = weak.lock()) watch();
  });
}

void LaneScheduler::ask_about(const LanePtr& lane) {
  auto done = [this, peer = peer_.shared_from_this(), lane](Result<rpc::Message> answer) {
    bool stands_still = false;
    {
      std::lock_guard lock(mutex_);
      auto& state = observe(*lane);
      state.suspected = false;
      bool moved = steady_ns() - state.moved_ns < kStuckNs || state.waiting == 0;
      if (answer && !moved) stands_still = true;
    }
    if (!stands_still) return pump();
    Status why{Code::peer_lost, lane->describe() + " stood still while " + peer->name() + " was alive"};
    log::warning("transfer", why.message());
    lane->kill(why);
  };
  peer_.session()->call(kLaneStuck, ByteWriter().put(lane->index()).take(), Deadline::after_ms(kAskMs),
                        std::move(done));
}

void LaneScheduler::session_over(const Status& why) {
  std::vector<OutgoingPtr> streams;
  {
    std::lock_guard lock(mutex_);
    streams.assign(live_.begin(), live_.end());
  }
  for (auto& stream : streams) stream->broken(why);
}

}  // namespace torch_mooncake::transfer
