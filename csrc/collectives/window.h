// Window: one-sided access to memory that every rank of a group shows to the others. put() writes into another rank's
// memory without that rank's doing; signal() and wait_signal() tell it when.
//
// A put travels as one write of the engine's. A signal is an empty message, sent when every put to that rank that was
// made before it has ended: who has waited for a signal sees what was put before it. Signals of one rank are counted,
// none gets lost, each ends one wait.
//
// Ownership: the window keeps `keep` and the group; puts keep the window and their own `keep` until they have ended.
// Threads: everything is safe from any thread; open() and close() are collectives. Errors: a put that fails (peer_lost,
// deadline_exceeded, out_of_bounds before anything is sent) fails the signals that follow it; other ranks are not
// touched. After close() nothing lands in the memory any more, and everything fails with `closed`.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/collectives.h"

namespace torch_mooncake::coll {

class TM_API Window : public std::enable_shared_from_this<Window> {
 public:
  // Collective. Sizes may differ by rank; `nbytes` may be 0.
  static Result<std::shared_ptr<Window>> open(const Call& call, void* data, uint64_t nbytes,
                                              std::shared_ptr<void> keep = nullptr);
  ~Window();
  // Collective: waits for this rank's puts, then for all ranks, and takes the memory back.
  Status close(const Call& call);

  const GroupPtr& group() const { return group_; }
  uint64_t nbytes(int rank) const { return shown_[rank].nbytes; }
  // Has ended when the bytes are visible over there. `data` stays valid until then (held by `keep`, or by the caller).
  RequestPtr put(int to, uint64_t offset, const void* data, uint64_t nbytes, Deadline deadline,
                 std::shared_ptr<void> keep = nullptr);
  // To and from other ranks.
  RequestPtr signal(int to, Deadline deadline);
  RequestPtr wait_signal(int from, Deadline deadline);

 private:
  struct Shown {  // what a rank lets the others write to
    uint64_t nbytes = 0;
    std::string descriptor;
    RemoteRegionPtr remote;  // once somebody here has put there
    std::vector<RequestPtr> puts;
  };
  Window(GroupPtr group, uint64_t seq, std::byte* data) : group_(std::move(group)), seq_(seq), data_(data) {}
  Status show(const Call& call, uint64_t nbytes, std::shared_ptr<void> keep);
  Status usable(int rank) const;  // mutex_ held
  Result<RemoteRegionPtr> remote(int rank, Deadline deadline);
  std::vector<RequestPtr> puts_to(int rank);

  const GroupPtr group_;
  const uint64_t seq_;  // of the collective that opened it: the window's name on all ranks
  std::byte* const data_;
  RegionPtr region_;  // null: nothing is shown
  mutable std::mutex mutex_;
  std::vector<Shown> shown_;  // by rank
  bool closed_ = false;
};
using WindowPtr = std::shared_ptr<Window>;

}  // namespace torch_mooncake::coll
