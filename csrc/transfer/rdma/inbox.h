// Inbox: what many threads hand to whoever holds a lock, without waiting for it. Lock-free; take() gives what has been
// put in, the oldest first.
#pragma once

#include <atomic>
#include <utility>

#include "transfer/rdma/part.h"

namespace torch_mooncake::transfer::rdma {

class Inbox {
 public:
  ~Inbox() { (void)take(); }
  void put(RdmaPartPtr part) {
    auto* raw = part.get();
    raw->in_inbox_ = std::move(part);
    raw->inbox_next_ = top_.load(std::memory_order_relaxed);
    while (!top_.compare_exchange_weak(raw->inbox_next_, raw, std::memory_order_seq_cst)) {
    }
  }
  bool empty() const { return top_.load(std::memory_order_seq_cst) == nullptr; }
  std::vector<RdmaPartPtr> take() {
    std::vector<RdmaPartPtr> out;
    for (auto* raw = top_.exchange(nullptr, std::memory_order_seq_cst); raw != nullptr;) {
      auto* next = std::exchange(raw->inbox_next_, nullptr);
      out.push_back(std::move(raw->in_inbox_));
      raw = next;
    }
    return {std::make_move_iterator(out.rbegin()), std::make_move_iterator(out.rend())};
  }

 private:
  std::atomic<RdmaPart*> top_{nullptr};
};

}  // namespace torch_mooncake::transfer::rdma
