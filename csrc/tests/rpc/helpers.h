// What the rpc tests share: endpoints, raw sockets, peers in processes of their own, counts of fds and threads.
#pragma once

#include <dirent.h>
#include <doctest/doctest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "common/log.h"
#include "common/random.h"
#include "rpc/endpoint.h"
#include "rpc/socket.h"

extern char** environ;

namespace rpc_test {

using namespace torch_mooncake;
using namespace torch_mooncake::rpc;

enum Methods : uint16_t { kEcho = 400, kFail, kDrop, kPost, kNever, kFds, kSlowWorker, kStopSelf };

inline Deadline soon(int64_t ms = 10'000) { return Deadline::after_ms(ms); }

// Polls until true, or ten seconds.
inline bool eventually(const std::function<bool()>& condition, int64_t ms = 10'000) {
  for (auto limit = soon(ms); !limit.expired(); ::usleep(2000)) {
    if (condition()) return true;
  }
  return condition();
}

inline int count_entries(const char* folder) {
  DIR* dir = ::opendir(folder);
  int n = 0;
  while (::readdir(dir)) ++n;
  ::closedir(dir);
  return n;
}
inline int open_fds() { return count_entries("/proc/self/fd"); }
inline int live_threads() { return count_entries("/proc/self/task"); }

struct Served {
  std::mutex mutex;
  std::vector<std::string> posts;
  std::vector<Responder> unanswered;
};

inline std::unique_ptr<Endpoint> make_endpoint(EndpointOptions options = {}, std::shared_ptr<Served> served = {},
                                               BulkHandler* bulk = nullptr) {
  if (!served) served = std::make_shared<Served>();
  auto endpoint = Endpoint::create(options).value();
  endpoint->handle(kEcho, RunOn::inline_io,
                   [](auto&, Message m, Responder r) { r.ok(std::move(m.body), std::move(m.fds)); });
  endpoint->handle(kFail, RunOn::inline_io, [](auto&, Message m, Responder r) {
    r.fail({static_cast<Code>(m.body[0]), m.body.substr(1)});
  });
  endpoint->handle(kDrop, RunOn::inline_io, [](auto&, Message, Responder) {});
  endpoint->handle(kNever, RunOn::inline_io, [served](auto&, Message, Responder r) {
    std::lock_guard lock(served->mutex);
    served->unanswered.push_back(std::move(r));
  });
  endpoint->handle(kPost, RunOn::inline_io, [served](auto&, Message m, Responder) {
    std::lock_guard lock(served->mutex);
    served->posts.push_back(std::move(m.body));
  });
  endpoint->handle(kSlowWorker, RunOn::worker, [](auto&, Message m, Responder r) {
    ::usleep(50'000);
    r.ok(std::move(m.body));
  });
  endpoint->handle(kStopSelf, RunOn::inline_io, [](auto&, Message, Responder) { ::raise(SIGSTOP); });
  if (bulk) endpoint->set_bulk_handler(bulk);
  return endpoint;
}

inline EndpointOptions named(const char* name) {
  EndpointOptions options;
  options.name = name;
  return options;
}

// This test program again, running one skipped test case as the peer; its answer is the address it serves.
class PeerProcess {
 public:
  explicit PeerProcess(const char* test_case) {
    int fds[2];
    REQUIRE(::pipe(fds) == 0);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, fds[1], 9);
    ::posix_spawn_file_actions_addclose(&actions, fds[0]);
    std::string filter = std::string("--test-case=") + test_case;
    const char* argv[] = {"/proc/self/exe", "--no-skip", filter.c_str(), "--no-intro", "--minimal", nullptr};
    REQUIRE(::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, const_cast<char**>(argv), environ) == 0);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(fds[1]);
    char c;
    while (::read(fds[0], &c, 1) == 1 && c != '\n') address_ += c;
    ::close(fds[0]);
    REQUIRE(!address_.empty());
  }
  ~PeerProcess() {
    send(SIGKILL);
    int status;
    ::waitpid(pid_, &status, 0);
  }
  // SIGSTOP: returns when every thread stands still; one of them may run on for a while after the signal.
  void send(int signal) {
    ::kill(pid_, signal);
    siginfo_t stopped;
    if (signal == SIGSTOP) ::waitid(P_PID, pid_, &stopped, WSTOPPED | WNOWAIT);
  }
  const std::string& address() const { return address_; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  std::string address_;
};

// The other side of it: serve until killed, or until the parent is gone.
inline void serve_as_peer(const std::string& listen, BulkHandler* bulk = nullptr) {
  auto endpoint = make_endpoint(named("peer"), {}, bulk);
  std::string line = endpoint->listen(listen).value() + "\n";
  if (::write(9, line.data(), line.size()) < 0) return;
  ::close(9);
  for (pid_t parent = ::getppid(); ::getppid() == parent;) ::usleep(100'000);
}

// A plain socket connected to a listener of ours.
inline UniqueFd raw_connect(const std::string& address) {
  std::atomic<bool> stop{false};
  auto fd = dial(*parse_address(address), soon(), stop);
  REQUIRE(fd.is_ok());
  return std::move(*fd);
}

// True once the other side has closed.
inline bool closed_by_peer(int fd, int64_t ms = 10'000) {
  char buffer[4096];
  return eventually(
      [&] {
        ssize_t n = ::recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
        return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
      },
      ms);
}

struct QuietLog {
  log::Level before = log::level();
  QuietLog() { log::set_level(log::Level::off); }
  ~QuietLog() { log::set_level(before); }
};

}  // namespace rpc_test
