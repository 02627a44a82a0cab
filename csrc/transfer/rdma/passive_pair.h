// A queue pair that the peer has asked for: the far end of one of its lanes. Our NIC serves it; all we hear of it are
// immediates.
#pragma once

#include <memory>

#include "transfer/peer.h"
#include "transfer/rdma/endpoint.h"

namespace torch_mooncake::transfer::rdma {

class PassivePair final : public Nic::Client {
 public:
  PassivePair(RdmaEndpoint& endpoint, std::weak_ptr<PeerImpl> peer, std::shared_ptr<Nic> nic,
              std::unique_ptr<QueuePair> queue_pair)
      : endpoint_(endpoint), peer_(std::move(peer)), nic_(std::move(nic)), queue_pair_(std::move(queue_pair)) {}
  ~PassivePair() override {
    nic_->remove(number());
    queue_pair_.reset();
    gone_->set();
  }

  QueuePair& queue_pair() { return *queue_pair_; }
  uint32_t number() const { return queue_pair_->address().number; }
  // Set when it is destroyed, whichever thread held it last.
  const std::shared_ptr<Event>& gone() const { return gone_; }

  void completed(std::span<const Completion> completions) override {
    auto peer = peer_.lock();
    if (!peer) return;
    for (auto& completion : completions) {
      if (!completion.received || completion.outcome != Outcome::done) continue;
      (void)queue_pair_->post_receives(1);  // fails only if the pair has: the peer hears of that itself
      endpoint_.immediate(completion.immediate);
    }
  }
  void port_down() override {}  // the peer's lane fails
  bool tick(int64_t) override { return false; }

 private:
  RdmaEndpoint& endpoint_;
  const std::weak_ptr<PeerImpl> peer_;
  const std::shared_ptr<Nic> nic_;
  std::unique_ptr<QueuePair> queue_pair_;
  const std::shared_ptr<Event> gone_ = std::make_shared<Event>();
};

}  // namespace torch_mooncake::transfer::rdma
