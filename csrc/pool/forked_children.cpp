#include "pool/forked_children.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <vector>

namespace torch_mooncake::pool {
namespace {

struct Child {
  uint64_t fork;
  int fd;  // readable (end of file) when the child has gone
};
struct State {
  std::mutex mutex;  // held across a fork
  uint64_t forks = 0;
  std::vector<Child> children;
  bool unknown = false;  // no pipe could be made for a child: it counts as there for ever
  int pipe[2] = {-1, -1};
};
State& state() {
  static auto* s = new State;  // never destroyed: handlers cannot be taken back
  return *s;
}

void before_fork() {
  State& s = state();
  s.mutex.lock();
  if (::pipe2(s.pipe, O_CLOEXEC | O_NONBLOCK) != 0) s.pipe[0] = s.pipe[1] = -1;
}
void in_parent() {
  State& s = state();
  ++s.forks;
  if (s.pipe[0] < 0) {
    s.unknown = true;
  } else {
    ::close(s.pipe[1]);
    s.children.push_back({s.forks, s.pipe[0]});
  }
  s.mutex.unlock();
}
void in_child() {
  State& s = state();
  for (const Child& c : s.children) ::close(c.fd);
  s.children.clear();
  s.unknown = false;
  if (s.pipe[0] >= 0) ::close(s.pipe[0]);
  s.mutex.unlock();
}

}  // namespace

uint64_t fork_epoch() {
  static const int installed = ::pthread_atfork(before_fork, in_parent, in_child);
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (installed != 0) s.unknown = true;
  return s.forks;
}

bool no_child_since(uint64_t epoch) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (s.unknown) return false;
  bool none = true;
  std::erase_if(s.children, [&](const Child& c) {
    pollfd p{c.fd, POLLIN, 0};
    if (::poll(&p, 1, 0) == 1) {
      ::close(c.fd);
      return true;
    }
    none = none && c.fork <= epoch;
    return false;
  });
  return none;
}

}  // namespace torch_mooncake::pool
