// Outgoing: a stream of chunks that this side sends. A write's at the initiator, a read's at the owner.
//
// The scheduler (lane.h) calls gather() for each chunk, perhaps again after a lane died, and ungather() when that frame
// touches its memory no more. After LaneScheduler::stop(), at_rest() comes once, when no frame is in flight.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "rpc/session.h"

namespace torch_mooncake::transfer {

class Outgoing : public std::enable_shared_from_this<Outgoing> {
 public:
  virtual ~Outgoing() = default;

 protected:
  explicit Outgoing(size_t chunks, rpc::Priority priority = rpc::Priority::foreground)
      : priority_(priority), chunks_(chunks) {}
  // Fills body and payload. An error breaks the stream.
  virtual Status gather(uint32_t chunk, uint32_t attempt, rpc::BulkFrame& frame) = 0;
  virtual void ungather(uint32_t chunk) = 0;
  // It cannot go on (gather failed, the session is over): the stream should stop itself.
  virtual void broken(const Status& why) = 0;
  virtual void at_rest() = 0;

 private:
  friend class LaneScheduler;
  struct ChunkState {
    enum { waiting, in_flight, sent } state = waiting;
    uint32_t lane = 0, attempt = 0;
    bool counts = false;  // among the frames that its lane has not given to the kernel yet
  };
  bool has_work() const { return !stopped_ && (next_ < chunks_.size() || !again_.empty()); }
  uint32_t take() {
    if (next_ < chunks_.size()) return next_++;
    auto chunk = again_.front();
    again_.pop_front();
    return chunk;
  }
  const rpc::Priority priority_;
  // All guarded by the scheduler's mutex.
  std::vector<ChunkState> chunks_;
  std::deque<uint32_t> again_;  // to be sent once more
  uint32_t next_ = 0, in_flight_ = 0;
  bool stopped_ = false, told_ = false, ready_ = false;
};
using OutgoingPtr = std::shared_ptr<Outgoing>;

}  // namespace torch_mooncake::transfer
