#include "transfer/group.h"

#include "transfer/peer.h"

namespace torch_mooncake::transfer {

GroupOp::GroupOp(std::vector<OpImplPtr> members, OpOptions options, std::shared_ptr<Worker> callbacks)
    : members_(std::move(members)),
      callbacks_(std::move(callbacks)),
      keep_(std::move(options.keep)),
      on_end_(std::move(options.on_end)),
      left_(members_.size()) {}

void GroupOp::start() {
  auto self = shared_from_this();
  for (size_t i = 0; i < members_.size(); ++i) {
    if (Status status = members_[i]->start(); !status) members_[i]->refuse(status);
    if (!members_[i]->watch(self, i)) op_ended(i);
  }
}

// A member has ended. The first failure is the group's; the others are stopped for it, and not blamed.
void GroupOp::op_ended(uint64_t index) {
  auto& member = members_[index];
  Status status = member->status();
  bool stop_others = false, last;
  {
    std::lock_guard lock(mutex_);
    if (!status && failure_.is_ok()) failure_ = status;
    if (!status && (!stopping_ || status.code() != Code::cancelled))
      failed_peers_ += (failed_peers_.empty() ? "" : ", ") + member->peers();
    if (!status) stop_others = !std::exchange(stopping_, true);
    last = --left_ == 0;
  }
  if (stop_others)
    for (auto& other : members_)
      if (other != member) other->stop({Code::cancelled, "another target of the op failed: " + member->peers()});
  if (last) end();
}

void GroupOp::end() {
  auto state = state_of(failure_);
  std::vector<Watchers::Entry> watchers;
  {
    std::lock_guard lock(mutex_);
    state_.store(state, std::memory_order_release);
    watchers = watchers_.take();
  }
  callbacks_->post([keep = std::move(keep_), fn = std::move(on_end_), status = failure_] {
    if (fn) fn(status);
  });
  ended_.set();
  for (auto& watcher : watchers) watcher.tell();
}

Status GroupOp::status() const {
  std::lock_guard lock(mutex_);
  return state() == OpState::pending ? Status() : failure_;
}

Status GroupOp::wait(Deadline deadline) {
  int64_t spin_until_ns = Event::spin_end_ns();
  for (auto& member : members_) member->help(deadline, spin_until_ns);
  if (!ended_.wait(deadline, spin_until_ns))
    return {Code::deadline_exceeded,
            "an op of " + std::to_string(members_.size()) + " targets is not over yet when the wait's deadline passed"};
  return status();
}

void GroupOp::cancel() {
  for (auto& member : members_) member->cancel();
}

uint64_t GroupOp::nbytes() const {
  uint64_t n = 0;
  for (auto& member : members_) n += member->nbytes();
  return n;
}

uint64_t GroupOp::bytes_done() const {
  uint64_t n = 0;
  for (auto& member : members_) n += member->bytes_done();
  return n;
}

bool GroupOp::remote_quiescent() const {
  return std::all_of(members_.begin(), members_.end(), [](auto& m) { return m->remote_quiescent(); });
}

std::string GroupOp::transport() const {
  std::vector<std::string> names;
  for (auto& member : members_)
    if (auto name = member->transport(); std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  std::string out;
  for (auto& name : names) out += (out.empty() ? "" : "+") + name;
  return out;
}

std::string GroupOp::peers() const {
  std::lock_guard lock(mutex_);
  if (!failed_peers_.empty()) return failed_peers_;
  std::string out;
  for (auto& member : members_) out += (out.empty() ? "" : ", ") + member->peers();
  return out;
}

bool GroupOp::watch(std::shared_ptr<OpWatcher> watcher, uint64_t tag) {
  std::lock_guard lock(mutex_);
  if (state() != OpState::pending) return false;
  watchers_.add(std::move(watcher), tag);
  return true;
}

}  // namespace torch_mooncake::transfer
