// Completions: the ends that an event loop of Python's waits for. One eventfd tells the loop that there are some, a
// list says which, so a wake costs what has ended and not what is pending. Ops signal from engine threads, without the
// GIL. The descriptor stays open until the last op that may signal it has ended, so its number is never somebody
// else's.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <mutex>
#include <vector>

#include "common/fd.h"
#include "transfer/engine.h"

namespace torch_mooncake::python {

class Completions final : public OpWatcher {
 public:
  Completions() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  int fileno() const { return fd_.get(); }

  void op_ended(uint64_t tag) override {
    std::lock_guard lock(mutex_);
    ended_.push_back(tag);
    if (ended_.size() > 1) return;
    uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(fd_.get(), &one, sizeof one);  // cannot fail: the counter is 0 or 1
  }
  // The tags since the last call.
  std::vector<uint64_t> take() {
    std::lock_guard lock(mutex_);
    uint64_t count;
    [[maybe_unused]] auto n = ::read(fd_.get(), &count, sizeof count);  // EAGAIN: nothing has ended
    return std::exchange(ended_, {});
  }

 private:
  const UniqueFd fd_;
  std::mutex mutex_;
  std::vector<uint64_t> ended_;
};

}  // namespace torch_mooncake::python
