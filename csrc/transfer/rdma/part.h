// RdmaPart: an op's share over RDMA, cut into slices that any lane may carry. Its fields belong to the endpoint, under
// the endpoint's mutex; those that prepare() fills belong to its thread until the part is in the inbox.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transfer/op.h"
#include "transfer/rdma/memory.h"

namespace torch_mooncake::transfer::rdma {

class RdmaEndpoint;
class RdmaPart;
using RdmaPartPtr = std::shared_ptr<RdmaPart>;

struct RdmaSlice {
  uint64_t local, remote;  // addresses
  uint32_t nbytes;
  uint32_t regions;  // index in RdmaPart::regions, or, of a check, in RdmaPart::checks
  uint32_t local_chunk, remote_chunk;
  bool check;  // it reads the remote region's generation into the slot of RdmaPart::checks
};

class RdmaPart final : public Part, public std::enable_shared_from_this<RdmaPart> {
 public:
  static constexpr uint32_t kImmediate = UINT32_MAX;    // instead of a slice's index: the notification's last immediate
  static constexpr uint32_t kCounted = UINT32_MAX - 1;  // one that stands behind all slices on its lane
  static constexpr int kAttempts = 8;                   // times that one part's slices may fail before it does

  // Valid until the op ends, which keeps the regions.
  struct Regions {
    const RegionKeys* local;
    const RdmaMemory* remote;
    RegionPtr ours;
    RemoteRegionPtr theirs;
  };
  struct Check {
    const RdmaMemory* remote;
    SlotPtr slot;
    uint32_t regions;  // with that remote one
  };
  struct Needs {  // of what comes next, from the lane that is to carry it; null: nothing of that kind
    const Regions* regions = nullptr;
    const WordTable::Slot* slot = nullptr;
  };
  struct Carrier {  // a connection that has carried some of it
    size_t lane;
    uint64_t connection;
  };

  RdmaPart(RdmaEndpoint& endpoint, OpImplPtr op) : endpoint_(endpoint), op_(std::move(op)) {}
  void stop(const Status& why) override;
  OpImpl& op() const { return *op_; }
  const OpImplPtr& op_ptr() const { return op_; }

 private:
  friend class RdmaEndpoint;
  friend class RdmaLane;
  friend class Inbox;

  bool is_write() const { return op_->direction() == Direction::write; }
  bool has_work() const { return immediate_due_ || !again_.empty() || next_ < slices_.size(); }
  uint32_t peek() const {  // what take() takes; has_work()
    return !again_.empty() ? again_.front() : next_ < slices_.size() ? static_cast<uint32_t>(next_) : kImmediate;
  }
  uint32_t take();
  bool all_done() const { return done_ == slices_.size(); }
  bool rides_on(uint64_t connection) const;

  RdmaEndpoint& endpoint_;  // the op keeps the peer, and the peer its endpoints
  const OpImplPtr op_;
  std::vector<RdmaSlice> slices_;
  std::vector<Regions> regions_;
  std::vector<Check> checks_;                      // of a read: posted when its data is there
  uint64_t nbytes_ = 0, counted_nbytes_ = 0;       // of it; those of them that the op has been told of
  bool flush_here_ = false, flush_there_ = false;  // device memory is written, which its owner flushes at the end
  bool flushing_ = false, checking_ = false;

  // A slice is waiting (at or above next_, or in again_), posted, unsettled (its lane has failed and the peer has not
  // yet said that its end is destroyed), held (by a notification that the peer may have delivered), or done.
  size_t next_ = 0, done_ = 0, posted_ = 0, unsettled_ = 0;
  std::deque<uint32_t> again_;
  std::vector<uint32_t> held_;
  bool ready_ = false;  // in the endpoint's queue
  RdmaPartPtr in_inbox_;
  RdmaPart* inbox_next_ = nullptr;

  // The notification: its id while it is under way. `counting_`: each lane that has carried slices carries an immediate
  // behind them; otherwise one, when all slices are done. `recalling_`: the peer is being asked to forget it.
  std::string notify_;
  uint64_t notify_id_ = 0;  // 0: not under way
  bool counting_ = false, recalling_ = false, answered_ = false, immediate_due_ = false;
  std::vector<Carrier> carriers_;  // with a notification
  uint64_t immediate_on_ = 0;      // the connection that the last immediate was posted on
  bool stopped_ = false, over_ = false;
  bool leaving_ = false, left_ = false;  // for TCP, as no rail is left: asked to, and handed over
  int failures_ = 0;
  Status outcome_;
};

}  // namespace torch_mooncake::transfer::rdma
