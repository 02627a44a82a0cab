// HeldPair: a lane's queue pair. One thread may be connecting or failing it, which may take the kernel a while, when
// another destroys it: destroy() returns when it is gone, whoever still holds this. post() is for the endpoint, under
// its mutex, as long as the lane has the pair.
#pragma once

#include <memory>
#include <mutex>

#include "transfer/rdma/nic.h"

namespace torch_mooncake::transfer::rdma {

class HeldPair {
 public:
  HeldPair(std::shared_ptr<Nic> nic, std::unique_ptr<QueuePair> pair)
      : nic_(std::move(nic)), posting_(*pair), address_(pair->address()), pair_(std::move(pair)) {}
  ~HeldPair() { destroy(); }

  const QueuePairAddress& address() const { return address_; }
  const std::shared_ptr<Nic>& nic() const { return nic_; }
  Status connect(const QueuePairAddress& remote, const Gid& our_gid, const Gid& remote_gid) {
    std::lock_guard lock(mutex_);
    if (!pair_) return {Code::closed, "its queue pair is destroyed"};
    return pair_->connect(remote, our_gid, remote_gid);
  }
  void fail() {
    std::lock_guard lock(mutex_);
    if (pair_) pair_->fail();
  }
  void destroy() {
    std::lock_guard lock(mutex_);
    pair_.reset();
  }
  Status post(std::span<const WorkRequest> requests) { return posting_.post(requests); }

 private:
  const std::shared_ptr<Nic> nic_;  // its device outlives the pair
  QueuePair& posting_;
  const QueuePairAddress address_;
  std::mutex mutex_;
  std::unique_ptr<QueuePair> pair_;
};
using HeldPairPtr = std::shared_ptr<HeldPair>;

}  // namespace torch_mooncake::transfer::rdma
