// RdmaPart: an op's share over RDMA, cut into slices that any lane may carry. Its fields belong to the endpoint, under
// the endpoint's mutex.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transfer/op.h"
#include "transfer/rdma/memory.h"

namespace torch_mooncake::transfer::rdma {

class RdmaEndpoint;

struct RdmaSlice {
  uint64_t local, remote;  // addresses
  uint32_t nbytes;
  uint32_t regions;  // index in RdmaPart::regions
  uint32_t local_chunk, remote_chunk;
  bool check;  // it reads the remote region's generation into the slot of RdmaPart::checks
};

class RdmaPart final : public Part, public std::enable_shared_from_this<RdmaPart> {
 public:
  static constexpr uint32_t kImmediate = UINT32_MAX;  // instead of a slice's index: the notification's immediate
  static constexpr int kAttempts = 8;                 // times that one part's slices may fail before it does

  // Valid until the op ends, which keeps the regions.
  struct Regions {
    const RegionKeys* local;
    const RdmaMemory* remote;
    RegionPtr ours;
    RemoteRegionPtr theirs;
  };

  RdmaPart(RdmaEndpoint& endpoint, OpImplPtr op) : endpoint_(endpoint), op_(std::move(op)) {}
  void stop(const Status& why) override;
  OpImpl& op() const { return *op_; }
  const OpImplPtr& op_ptr() const { return op_; }

 private:
  friend class RdmaEndpoint;
  friend class RdmaLane;

  bool has_work() const { return immediate_due_ || !again_.empty() || next_ < slices_.size(); }
  uint32_t take();  // the next slice to post; has_work()

  RdmaEndpoint& endpoint_;  // the op keeps the peer, and the peer its endpoints
  const OpImplPtr op_;
  std::vector<RdmaSlice> slices_;
  std::vector<Regions> regions_;
  std::vector<std::pair<const RdmaMemory*, SlotPtr>> checks_;  // of a read, once its data is there
  uint64_t nbytes_ = 0;
  bool flush_here_ = false, flush_there_ = false;  // device memory is written, which its owner flushes at the end
  bool flushing_ = false;
  std::string notify_;
  uint32_t notify_id_ = 0;

  // A slice is waiting (at or above next_, or in again_), posted, unsettled (its lane has failed and the peer has not
  // yet said that its end is destroyed), or done.
  size_t next_ = 0, done_ = 0, posted_ = 0, unsettled_ = 0;
  std::deque<uint32_t> again_;
  bool ready_ = false;  // in the endpoint's queue
  bool notifying_ = false, immediate_due_ = false;
  uint64_t immediate_on_ = 0;  // the connection that the immediate was posted on last
  bool stopped_ = false, over_ = false;
  bool leaving_ = false, left_ = false;  // for TCP, as no rail is left: asked to, and handed over
  int failures_ = 0;
  Status outcome_;
};
using RdmaPartPtr = std::shared_ptr<RdmaPart>;

}  // namespace torch_mooncake::transfer::rdma
