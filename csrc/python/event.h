// An eventfd shared by an event loop of Python's and the ops it waits for. The descriptor stays open until the last
// op that may signal it has ended, so its number is never somebody else's.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <memory>

#include "common/fd.h"
#include "python/support.h"

namespace torch_mooncake::python {

class EventFd {
 public:
  EventFd() : fd_(std::make_shared<UniqueFd>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
    if (!fd_->valid()) raise(Status::from_errno("eventfd", errno));
  }
  int fileno() const { return fd_->get(); }
  // Forgets past signals.
  void clear() {
    uint64_t count;
    [[maybe_unused]] auto n = ::read(fd_->get(), &count, sizeof count);  // EAGAIN: nothing to forget
  }
  const std::shared_ptr<UniqueFd>& shared() const { return fd_; }
  static void signal(const UniqueFd& fd) {
    uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(fd.get(), &one, sizeof one);  // EAGAIN: the loop has signals enough
  }

 private:
  std::shared_ptr<UniqueFd> fd_;
};

}  // namespace torch_mooncake::python
