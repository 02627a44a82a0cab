// What an endpoint has decided under its mutex and does without it: calls that may come back to it, or block.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "transfer/rdma/endpoint.h"

namespace torch_mooncake::transfer::rdma {

// Runs what was added, in order, when it goes: declare it before the lock.
class RdmaEndpoint::Later {
 public:
  Later() = default;
  Later(const Later&) = delete;
  Later& operator=(const Later&) = delete;
  ~Later() {
    for (auto& action : actions_) action();
    for (auto& [nic, pair] : pairs_) pair.reset();
  }
  void add(std::function<void()> action) { actions_.push_back(std::move(action)); }
  void destroy(std::shared_ptr<Nic> nic, std::unique_ptr<QueuePair> pair) {
    if (pair) pairs_.emplace_back(std::move(nic), std::move(pair));
  }

 private:
  std::vector<std::function<void()>> actions_;
  std::vector<std::pair<std::shared_ptr<Nic>, std::unique_ptr<QueuePair>>> pairs_;
};

}  // namespace torch_mooncake::transfer::rdma
