// RdmaLane: one queue pair of ours towards the peer, on one rail (our NIC, its NIC). It carries what this side starts;
// the peer's own ops use queue pairs that the peer has asked us for (PassivePair).
//
// A lane's fields belong to its endpoint, under the endpoint's mutex.
//
//   down -> connecting -> up -> failing (in the error state, being flushed) -> fencing (flushed; the peer destroys its
//   end) -> down
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
  enum class State { down, connecting, up, failing, fencing };
  static constexpr uint32_t kDepth = 128;           // work requests in a queue pair
  static constexpr uint32_t kSignalEvery = 16;      // one completion for so many
  static constexpr uint64_t kWindow = 8 << 20;      // bytes that wait in one lane; the rest may still go elsewhere
  static constexpr int64_t kFlushNs = 100'000'000;  // then the queue pair is destroyed, which flushes as well

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
    RdmaPartPtr part;
    uint32_t slice;
    uint32_t nbytes;
  };

  bool takes() const {
    return state_ == State::up && posted_.size() < kDepth && (posted_nbytes_ == 0 || posted_nbytes_ < kWindow);
  }
  // Adds a slice to those that post() will give to the NIC with one doorbell.
  void append(const RdmaPartPtr& part, uint32_t slice);
  Status post();
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
  const uint32_t remote_nic_;

  State state_ = State::down;
  uint64_t connection_ = 0;  // names the pair to the peer; new for each
  std::unique_ptr<QueuePair> queue_pair_;
  std::deque<Posted> posted_;       // in order; the first has first_id()
  std::vector<WorkRequest> batch_;  // appended and not yet posted: the last of posted_
  std::vector<Posted> unsettled_;
  uint64_t next_id_ = 0, posted_nbytes_ = 0, bytes_sent_ = 0, bytes_received_ = 0;
  int64_t flush_by_ns_ = 0;
  int failures_ = 0;  // to connect, since it was last up
  Status last_error_;
};
using RdmaLanePtr = std::shared_ptr<RdmaLane>;

}  // namespace torch_mooncake::transfer::rdma
