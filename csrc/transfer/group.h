// GroupOp: one op with slices of several peers. It has a member for each peer and one outcome: the first failure stops
// the other members, and the op ends when all of them are at rest. Every target gets the notification once, when its
// own bytes are visible.
#pragma once

#include "transfer/op.h"

namespace torch_mooncake::transfer {

class GroupOp final : public Op, public OpWatcher, public std::enable_shared_from_this<GroupOp> {
 public:
  // `keep` and `on_end` of the options belong to the group, the rest to every member.
  GroupOp(std::vector<OpImplPtr> members, OpOptions options, std::shared_ptr<Worker> callbacks);
  void start();  // once

  OpState state() const override { return state_.load(std::memory_order_acquire); }
  Status status() const override;
  Status wait(Deadline deadline) override;
  void cancel() override;
  uint64_t nbytes() const override;
  uint64_t bytes_done() const override;
  bool remote_quiescent() const override;
  std::string transport() const override;
  std::string peers() const override;
  bool watch(std::shared_ptr<OpWatcher> watcher, uint64_t tag) override;

  void op_ended(uint64_t member) override;  // by members

 private:
  void end();

  const std::vector<OpImplPtr> members_;
  const std::shared_ptr<Worker> callbacks_;
  std::shared_ptr<void> keep_;
  std::function<void(const Status&)> on_end_;
  mutable std::mutex mutex_;
  size_t left_;
  Status failure_;
  std::string failed_peers_;
  bool stopping_ = false;
  std::atomic<OpState> state_{OpState::pending};
  Watchers watchers_;
  Event ended_;
};

}  // namespace torch_mooncake::transfer
