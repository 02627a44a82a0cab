// Incoming: a stream of chunks that this side receives, each perhaps more than once. A write's at the target, a read's
// at the initiator.
//
// Of several arrivals of one chunk the latest owns it; the earlier ones sink the rest of theirs. A lane is *inside*
// from windows() to filled(): around one recv, never across a sleep. complete() comes once, when every chunk is applied
// and no lane is inside; after stop(), quiet() comes once instead, when no lane is inside and none can enter any more.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "rpc/session.h"
#include "transfer/grant.h"

namespace torch_mooncake::transfer {

class Incoming : public std::enable_shared_from_this<Incoming> {
 public:
  virtual ~Incoming() = default;
  // Where the payload of a frame goes, in order. No piece is empty.
  struct Target {
    std::byte* data;
    uint64_t nbytes;
    RegionImpl* region;  // entered around each recv that may write there; null at the initiator of a read
  };
  struct Frame {
    std::vector<Target> targets;
    std::vector<RegionImplPtr> regions;  // that the targets name
  };
  // A frame of this chunk arrives; null: sink it.
  std::unique_ptr<rpc::BulkReceive> begin(uint32_t chunk, Frame frame, bool over_unix);
  void expect(uint32_t chunks);  // now the number is known
  // Takes no more bytes. The first reason stays.
  void stop(const Status& why);

 protected:
  // Leave to write into the region until leave(); false stops the stream: its owner takes it back.
  virtual bool enter(RegionImpl& region) = 0;
  virtual void leave(RegionImpl& region) = 0;
  virtual void applied(uint64_t nbytes, bool over_unix) = 0;
  virtual void complete() = 0;
  virtual void quiet(const Status& why) = 0;

 private:
  class Receiver;
  struct Chunk {
    bool applied = false;
    Receiver* owner = nullptr;   // the latest arrival that is under way
    Receiver* inside = nullptr;  // whose recv may be writing now
  };
  void settle(std::unique_lock<std::mutex> lock);  // complete or quiet, if it is time

  std::mutex mutex_;
  std::condition_variable left_;
  std::unordered_map<uint32_t, Chunk> chunks_;  // those that have been seen
  uint32_t total_ = UINT32_MAX, applied_ = 0, inside_ = 0;
  bool stopped_ = false, over_ = false;
  Status why_;
};

}  // namespace torch_mooncake::transfer
