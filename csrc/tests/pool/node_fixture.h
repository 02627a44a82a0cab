// Shared by the tests of service and client: real nodes (keeper and worker) in processes of their own, clients in
// processes of their own, and short ways to put and get.
#pragma once

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "common/failpoint.h"
#include "common/log.h"
#include "pool/client.h"
#include "pool/keeper_fixture.h"

namespace torch_mooncake::pool::test {

struct Node {
  explicit Node(uint64_t memory_bytes, const std::string& host_id = "host-a", const std::string& leader = "",
                const std::string& failpoints = "", const std::string& ssd = "") {
    NodeOptions options = folder.options();
    if (!ssd.empty()) options.ssd = {{ssd, 128 << 20}};
    options.memory_bytes = memory_bytes;
    options.host_id = host_id;
    options.leader = leader;
    options.token = "secret";
    options.drain_s = 9;
    options.listen = {"tcp://127.0.0.1:0"};
    int pipe[2];
    REQUIRE(::pipe2(pipe, O_CLOEXEC) == 0);
    options.ready_fd = pipe[1];
    keeper = ::fork();
    REQUIRE(keeper >= 0);
    if (keeper == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(pipe[0]);
      if (!::getenv("TM_TEST_LOG")) log::set_level(log::Level::off);
      set_failpoints(failpoints);
      ::_exit(run_node(options));
    }
    ::close(pipe[1]);
    std::string line;
    char text[4096];
    for (ssize_t n; (n = ::read(pipe[0], text, sizeof text)) > 0;) line.append(text, static_cast<size_t>(n));
    ::close(pipe[0]);
    REQUIRE_MESSAGE(line.starts_with("ready "), line);
    std::istringstream in(line.substr(6));
    for (std::string address; in >> address;) (address.starts_with("unix") ? unix_address : tcp_address) = address;
  }
  ~Node() { stop(); }
  void stop() {
    if (keeper <= 0) return;
    ::kill(keeper, SIGKILL);
    ::waitpid(keeper, nullptr, 0);
    keeper = -1;
  }
  void leave() {  // and ends
    ::kill(keeper, SIGTERM);
    int status = 0;
    REQUIRE(eventually([&] { return ::waitpid(keeper, &status, WNOHANG) == keeper; }, 20'000));
    keeper = -1;
  }
  pid_t worker() const { return child_of(keeper); }
  void kill_worker() const {
    const pid_t old = worker();
    REQUIRE(old > 0);
    ::kill(old, SIGKILL);
    REQUIRE(eventually([&] { return !alive(old); }));
  }
  Folder folder;
  pid_t keeper = -1;
  std::string unix_address, tcp_address;
};

inline ClientPtr connect(const std::string& address, const std::string& host_id = "host-a") {
  ClientOptions options;
  options.node_address = address;
  options.host_id = host_id;
  options.token = "secret";
  auto client = Client::connect(options, Deadline::after_ms(10'000));
  // A member is up before it has joined its leader.
  for (int i = 0; i < 200 && client.status().code() == Code::pool_unavailable; ++i) {
    ::usleep(20'000);
    client = Client::connect(options, Deadline::after_ms(10'000));
  }
  REQUIRE_MESSAGE(client.is_ok(), client.status().to_string());
  return *client;
}
inline ClientPtr connect(const Node& node, const std::string& host_id = "host-a") {
  return connect(node.unix_address, host_id);
}

// A value of which every 8 bytes tell its number and their place.
inline std::string pattern(uint64_t number, size_t nbytes) {
  std::string out(nbytes, '\0');
  for (size_t i = 0; i < nbytes; i += 8) {
    const uint64_t word = number << 32 | (i / 8);
    std::memcpy(out.data() + i, &word, std::min<size_t>(8, nbytes - i));
  }
  return out;
}

inline Result<PutOutcome> try_put(Client& client, const std::string& key, const std::string& value,
                                  const PutOptions& options = {}, int64_t timeout_ms = 20'000,
                                  const std::string& meta = "m") {
  const iovec v{const_cast<char*>(value.data()), value.size()};
  return client.put(key, meta, std::span(&v, 1), options, Deadline::after_ms(timeout_ms));
}
inline PutOutcome put(Client& client, const std::string& key, const std::string& value,
                      const PutOptions& options = {}) {
  auto r = try_put(client, key, value, options);
  REQUIRE_MESSAGE(r.is_ok(), key << ": " << r.status().to_string());
  return *r;
}

// Locate and read, again if it was superseded in between.
inline Result<std::string> get(Client& client, const std::string& key, int64_t timeout_ms = 20'000) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  for (;;) {
    auto object = client.locate(key, {}, deadline);
    if (!object.is_ok()) return object.status();
    std::string out((*object)->info().nbytes, '\0');
    const iovec v{out.data(), out.size()};
    const Status s = client.read(*object, 0, std::span(&v, out.empty() ? 0 : 1), deadline);
    if (s.is_ok()) return out;
    if (s.code() != Code::key_not_found || deadline.expired()) return s;
  }
}

inline PoolStats::Node stats_of(Client& client, size_t node = 0) {
  auto s = client.stat(Deadline::after_ms(10'000));
  REQUIRE_MESSAGE(s.is_ok(), s.status().to_string());
  return s->nodes.at(node);
}

// A process of its own that runs `fn` and ends with what it returns.
struct Process {
  explicit Process(const std::function<int()>& fn, const std::string& failpoints = "") {
    pid = ::fork();
    REQUIRE(pid >= 0);
    if (pid != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    log::set_level(log::Level::off);
    set_failpoints(failpoints);
    ::_exit(fn());
  }
  ~Process() {
    if (pid <= 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  bool stopped() {  // waits for SIGSTOP of its own
    int status = 0;
    return eventually([&] { return ::waitpid(pid, &status, WNOHANG | WUNTRACED) == pid; }) && WIFSTOPPED(status);
  }
  int wait() {  // the exit code, or -signal
    int status = 0;
    REQUIRE(eventually([&] { return ::waitpid(pid, &status, WNOHANG) == pid; }, 60'000));
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  pid_t pid = -1;
};

}  // namespace torch_mooncake::pool::test
