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

#include "transfer/rdma/held_pair.h"
#include "transfer/rdma/part.h"

namespace torch_mooncake::transfer {
class PeerImpl;
}

namespace torch_mooncake::transfer::rdma {

class RdmaLane final : public Nic::Client, public std::enable_shared_from_this<RdmaLane> {
 public:
  enum class State { down, connecting, checking, up, failing, fencing, evicted };
  static constexpr uint32_t kDepth = 128;              // work requests in a queue pair,
  static constexpr uint32_t kImmediates = 32;          // so many of which are for immediates alone
  static constexpr uint32_t kSignalEvery = 16;         // one completion for so many
  static constexpr uint64_t kWindow = 8 << 20;         // bytes that wait in one lane; the rest may still go elsewhere
  static constexpr int64_t kFlushNs = 100'000'000;     // then the queue pair is destroyed, which flushes as well
  static constexpr int64_t kCheckNs = 10'000'000'000;  // for a NIC that completes nothing: others report by themselves
  static constexpr int64_t kHopeNs = 3'000'000'000;    // it is given up when it has been away for so long

  RdmaLane(RdmaEndpoint& endpoint, std::weak_ptr<PeerImpl> peer, size_t index, std::shared_ptr<Nic> nic,
           uint32_t remote_nic)
      : endpoint_(endpoint), peer_(std::move(peer)), index_(index), nic_(std::move(nic)), remote_nic_(remote_nic) {}
  ~RdmaLane() override {
    if (auto pair = release_queue_pair()) pair->destroy();
  }

  // Nic::Client, on the Nic's thread.
  void completed(std::span<const Completion> completions) override;
  void port_down() override;
  bool tick(int64_t now_ns) override;

 private:
  friend class RdmaEndpoint;
  struct Posted {
    RdmaPartPtr part;  // null: the check of a new connection
    uint32_t slice;
    uint32_t nbytes;
    bool moves() const { return slice < RdmaPart::kCounted; }  // else an immediate alone
  };

  bool takes() const {
    return state_ == State::up && posted_.size() < kDepth - kImmediates &&
           (posted_nbytes_ == 0 || posted_nbytes_ < kWindow);
  }
  // How far its NICs are from those bytes, both ends together; -1: it does not reach them.
  int rank(const RdmaPart::Needs& needs) const {
    const uint32_t nic = nic_->index();
    if (needs.slot && !needs.slot->has(nic)) return -1;
    if (!needs.regions) return 0;
    auto* local = needs.regions->local;
    auto* remote = needs.regions->remote;
    if (!local->has(nic) || !remote->has(remote_nic_)) return -1;
    return static_cast<int>(local->distance(nic)) + static_cast<int>(remote->distances[remote_nic_]);
  }
  // Away for so long that what waits is not to wait for it. One that waits for room is not: it comes.
  bool given_up(int64_t now_ns) const {
    const bool away = state_ == State::down || state_ == State::connecting || state_ == State::checking;
    return away && !waits_for_room_ && now_ns - away_ns_ >= kHopeNs;
  }
  // Adds a slice to those that post() will give to the NIC with one doorbell.
  void append(const RdmaPartPtr& part, uint32_t slice);
  // An immediate behind all that it carries of that part: with the last of its slices, if that is not posted yet.
  void append_counted(const RdmaPartPtr& part);
  Status post();
  Status post_check(uint64_t remote, uint32_t remote_key);
  // The oldest request is over: takes it out of the books.
  Posted pop();
  uint64_t first_id() const { return next_id_ - posted_.size(); }
  std::string rail() const;
  // Moves the queue pair out, for its destruction without the endpoint's mutex.
  HeldPairPtr release_queue_pair();

  RdmaEndpoint& endpoint_;
  const std::weak_ptr<PeerImpl> peer_;
  const size_t index_;  // among the endpoint's
  const std::shared_ptr<Nic> nic_;
  uint32_t remote_nic_;  // another one is tried while none has ever answered

  State state_ = State::down;
  uint64_t connection_ = 0;  // names the pair to the peer; new for each
  bool asked_ = false;       // the peer may have made its end of that connection
  HeldPairPtr queue_pair_;
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
  SlotPtr landing_;              // of the check
  int failures_ = 0;             // to connect, since it was last up
  bool waits_for_room_ = false;  // there is no queue pair for it now, here or there
  int64_t away_ns_ = 0;          // since when it is not up
  Status last_error_;
};
using RdmaLanePtr = std::shared_ptr<RdmaLane>;

}  // namespace torch_mooncake::transfer::rdma
