// RdmaLane: one queue pair of ours towards the peer, on one rail (our NIC, its NIC). It carries what this side starts;
// the peer's own ops use queue pairs that the peer has asked us for (PassivePair).
//
// A lane's fields belong to its endpoint, under the endpoint's mutex.
//
//   down -> connecting -> checking (a read of the peer's id is under way) -> up -> failing (in the error state, being
//   flushed) -> fencing (flushed; the peer destroys its end) -> down
//   up -> evicted (closed to make room; made again when there is something to carry)
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transfer/rdma/part.h"

namespace torch_mooncake::transfer {
class PeerImpl;
}

namespace torch_mooncake::transfer::rdma {

class RdmaLane final : public Nic::Client, public std::enable_shared_from_this<RdmaLane> {
 public:
  enum class State { down, connecting, checking, up, failing, fencing, evicted };
  static constexpr uint32_t kDepth = 128;              // work requests in a queue pair
  static constexpr uint32_t kSignalEvery = 16;         // one completion for so many
  static constexpr uint64_t kWindow = 8 << 20;         // bytes that wait in one lane; the rest may still go elsewhere
  static constexpr int64_t kFlushNs = 100'000'000;     // then the queue pair is destroyed, which flushes as well
  static constexpr int64_t kCheckNs = 10'000'000'000;  // for a NIC that completes nothing: others report by themselves

  RdmaLane(RdmaEndpoint& endpoint, std::weak_ptr<PeerImpl> peer, std::shared_ptr<Nic> nic, uint32_t remote_nic)
      : endpoint_(endpoint), peer_(std::move(peer)), nic_(std::move(nic)), remote_nic_(remote_nic) {}
  ~RdmaLane() override { drop_queue_pair(); }

  // Nic::Client, on the Nic's thread.
  void completed(const Completion& completion) override;
  void port_down() override;
  bool tick(int64_t now_ns) override;

 private:
  friend class RdmaEndpoint;
  struct Posted {
    RdmaPartPtr part;  // null: the check of a new connection
    uint32_t slice;
    uint32_t nbytes;
  };

  bool takes() const {
    return state_ == State::up && posted_.size() < kDepth && (posted_nbytes_ == 0 || posted_nbytes_ < kWindow);
  }
  // Adds a slice to those that post() will give to the NIC with one doorbell.
  void append(const RdmaPartPtr& part, uint32_t slice);
  Status post();
  Status post_check(uint64_t remote, uint32_t remote_key);
  // The oldest request is over: takes it out of the books.
  Posted pop();
  uint64_t first_id() const { return next_id_ - posted_.size(); }
  std::string rail() const;
  // Moves the queue pair out, for its destruction without the endpoint's mutex.
  std::unique_ptr<QueuePair> release_queue_pair();
  void drop_queue_pair() { release_queue_pair(); }

  RdmaEndpoint& endpoint_;
  const std::weak_ptr<PeerImpl> peer_;
  const std::shared_ptr<Nic> nic_;
  uint32_t remote_nic_;  // another one is tried while none has ever answered

  State state_ = State::down;
  uint64_t connection_ = 0;  // names the pair to the peer; new for each
  std::unique_ptr<QueuePair> queue_pair_;
  std::deque<Posted> posted_;       // in order; the first has first_id()
  std::vector<WorkRequest> batch_;  // appended and not yet posted: the last of posted_
  std::vector<Posted> unsettled_;
  uint64_t next_id_ = 0, posted_nbytes_ = 0, bytes_sent_ = 0, bytes_received_ = 0;
  int64_t flush_by_ns_ = 0;
  int64_t used_ns_ = 0;  // when it was last given something
  // Which pair of GIDs the connection uses, how many there are, and how many have been tried in vain since it was up.
  uint32_t gid_pair_ = 0, gid_pairs_ = 1, gid_pairs_tried_ = 0;
  Gid our_gid_, remote_gid_;
  bool was_up_ = false;
  SlotPtr landing_;   // of the check
  int failures_ = 0;  // to connect, since it was last up
  Status last_error_;
};
using RdmaLanePtr = std::shared_ptr<RdmaLane>;

}  // namespace torch_mooncake::transfer::rdma
