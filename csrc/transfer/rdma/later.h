// What an endpoint has decided under its mutex and does without it, and the holding of that mutex.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "transfer/engine_impl.h"
#include "transfer/rdma/endpoint.h"

namespace torch_mooncake::transfer::rdma {

// Calls that may come back to the endpoint, or block. Runs what was added, in order, when it goes.
class RdmaEndpoint::Later {
 public:
  explicit Later(EngineImpl& engine) : engine_(engine) {}
  Later(const Later&) = delete;
  Later& operator=(const Later&) = delete;
  ~Later() {
    for (auto& action : actions_) action();
  }
  void add(std::function<void()> action) { actions_.push_back(std::move(action)); }
  // What may be the last reference goes with this.
  void keep(RdmaPartPtr part) {
    if (part && (kept_.empty() || kept_.back() != part)) kept_.push_back(std::move(part));
  }
  // On the thread that also makes those of this NIC, before the next.
  void destroy(HeldPairPtr pair) {
    if (!pair) return;
    add([&engine = engine_, pair = std::move(pair)] {
      engine.repair(pair->nic()->index()).post([pair] { pair->destroy(); });
    });
  }

 private:
  EngineImpl& engine_;
  std::vector<RdmaPartPtr> kept_;
  std::vector<std::function<void()>> actions_;  // goes first
};

// The mutex is this thread's until the scope ends. Submitting threads do not wait for it: what they have put into the
// inbox meanwhile is taken up here. (One that finds the mutex taken has put its part in before; whoever holds it looks
// after it has let go: one of the two sees the other.) After some rounds of that another thread goes on.
class RdmaEndpoint::Turn {
 public:
  explicit Turn(const RdmaEndpoint& endpoint) : Turn(endpoint, std::defer_lock) { endpoint.mutex_.lock(); }
  // Of a mutex that this thread has already.
  Turn(const RdmaEndpoint& endpoint, std::adopt_lock_t) : Turn(endpoint, std::defer_lock) {}
  ~Turn() {
    for (int round = 0; round < kRounds; ++round) {
      endpoint_.take_in(later_);
      endpoint_.mutex_.unlock();
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (endpoint_.inbox_.empty()) return;
      if (round + 1 < kRounds && !endpoint_.mutex_.try_lock()) return;
    }
    // Others submit without end: what this thread has decided waits for them no longer.
    if (auto peer = endpoint_.peer_.weak_from_this().lock())
      peer->engine().repair().post([&endpoint = endpoint_, peer] { Turn turn(endpoint); });
  }
  Later& later() { return later_; }
  operator Later&() { return later_; }

 private:
  static constexpr int kRounds = 16;  // of looking into the inbox
  Turn(const RdmaEndpoint& endpoint, std::defer_lock_t)
      : endpoint_(const_cast<RdmaEndpoint&>(endpoint)), later_(endpoint.peer_.engine()) {}
  RdmaEndpoint& endpoint_;
  Later later_;  // goes after the body of the destructor
};

}  // namespace torch_mooncake::transfer::rdma
