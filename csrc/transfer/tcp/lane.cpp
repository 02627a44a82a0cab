#include "transfer/tcp/lane.h"

#include "transfer/engine_impl.h"

namespace torch_mooncake::transfer {

void LaneScheduler::start(OutgoingPtr stream) {
  {
    std::lock_guard lock(mutex_);
    if (stream->stopped_) return;
    live_.insert(stream);
    make_ready(stream);
  }
  pump();
  started_();
}

bool LaneScheduler::busy() const {
  std::lock_guard lock(mutex_);
  return !live_.empty();
}

void LaneScheduler::make_ready(const OutgoingPtr& stream) {
  if (stream->ready_ || !stream->has_work()) return;
  stream->ready_ = true;
  ready_.push_back(stream);
}

void LaneScheduler::stop(const OutgoingPtr& stream) {
  {
    std::lock_guard lock(mutex_);
    stream->stopped_ = true;
    live_.erase(stream);
    if (std::exchange(stream->ready_, false)) std::erase(ready_, stream);  // it holds its op, and the op its peer
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

bool LaneScheduler::send_next(const std::vector<std::shared_ptr<rpc::Lane>>& lanes) {
  OutgoingPtr stream;
  std::shared_ptr<rpc::Lane> lane;
  uint32_t chunk = 0, attempt = 0;
  {
    std::lock_guard lock(mutex_);
    if (ready_.empty()) return false;
    for (auto& candidate : lanes) {
      if (refusing_.count(candidate->index()) || frames_[candidate->index()] >= kLaneFrames) continue;
      if (!lane || candidate->queued_bytes() < lane->queued_bytes() ||
          (candidate->queued_bytes() == lane->queued_bytes() && frames_[candidate->index()] < frames_[lane->index()]))
        lane = candidate;
    }
    if (!lane) return false;
    stream = std::move(ready_.front());
    ready_.pop_front();
    stream->ready_ = false;
    chunk = stream->take();
    auto& state = stream->chunks_[chunk];
    state.state = Outgoing::ChunkState::in_flight;
    state.lane = lane->index();
    attempt = state.attempt++;
    ++stream->in_flight_;
    ++frames_[lane->index()];
    make_ready(stream);
  }
  if (attempt > 0) peer_.engine().metrics().resent(1);
  rpc::BulkFrame frame;
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
  if (Status status = lane->send_bulk(std::move(frame)); !status) {
    // It is being shut down, perhaps by this very thread, later: lane_closed() will come and pump again.
    {
      std::lock_guard lock(mutex_);
      refusing_.insert(lane->index());
    }
    sent(stream, chunk, lane, payload, status);
  }
  return true;
}

void LaneScheduler::sent(const OutgoingPtr& stream, uint32_t chunk, const std::shared_ptr<rpc::Lane>& lane,
                         uint64_t payload, const Status& status) {
  stream->ungather(chunk);
  {
    std::lock_guard lock(mutex_);
    --frames_[lane->index()];
    --stream->in_flight_;
    auto& state = stream->chunks_[chunk];
    if (status && lane->alive()) {
      state.state = Outgoing::ChunkState::sent;
    } else {
      state.state = Outgoing::ChunkState::waiting;
      stream->again_.push_back(chunk);
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

void LaneScheduler::session_over(const Status& why) {
  std::vector<OutgoingPtr> streams;
  {
    std::lock_guard lock(mutex_);
    streams.assign(live_.begin(), live_.end());
  }
  for (auto& stream : streams) stream->broken(why);
}

}  // namespace torch_mooncake::transfer
