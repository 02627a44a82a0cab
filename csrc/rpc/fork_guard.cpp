#include "rpc/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace torch_mooncake::rpc {
namespace {

struct State {
  std::mutex mutex;
  std::set<int> fds;
};

State& state() {
  static State* s = [] {
    auto* made = new State;  // never destroyed: sockets may be closed at exit
    ::pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                     [] {
                       int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
                       for (int fd : state().fds) {
                         if (null >= 0) ::dup3(null, fd, O_CLOEXEC);
                       }
                       if (null >= 0) ::close(null);
                       state().fds.clear();
                       state().mutex.unlock();
                     });
    return made;
  }();
  return *s;
}

}  // namespace

void ForkGuard::add(int fd) {
  std::lock_guard lock(state().mutex);
  state().fds.insert(fd);
}

void ForkGuard::remove(int fd) {
  std::lock_guard lock(state().mutex);
  state().fds.erase(fd);
}

}  // namespace torch_mooncake::rpc
