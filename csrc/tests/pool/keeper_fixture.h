// Shared by the keeper's tests: a folder of its own, a keeper in a forked process, and a small worker: a real donor
// behind a line protocol on the node's socket ("put KEY NBYTES", "keys", "pid").
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "common/clock.h"
#include "common/log.h"
#include "common/random.h"
#include "pool/keeper.h"

namespace torch_mooncake::pool {

namespace fs = std::filesystem;

struct Folder {
  Folder() {
    char name[] = "/tmp/tmkXXXXXX";
    path = ::mkdtemp(name);
  }
  ~Folder() { fs::remove_all(path); }
  NodeOptions options() const {
    NodeOptions o;
    o.runtime_dir = path;
    o.pool = "p";
    o.memory_bytes = 8 << 20;
    o.linger_s = -1;
    return o;
  }
  std::string at(const std::string& name) const { return path + "/p/" + name; }
  std::string path;
};

// Waits for a condition that must come true within seconds.
template <typename Fn>
bool eventually(Fn&& fn, int64_t ms = 10'000) {
  const Deadline end = Deadline::after_ms(ms);
  while (!fn()) {
    if (end.expired()) return false;
    ::usleep(5'000);
  }
  return true;
}

// A file below /proc, which may vanish while it is read (a stream would throw): empty then.
inline std::string proc_file(pid_t pid, const std::string& name) {
  std::string text;
  const int fd = ::open(("/proc/" + std::to_string(pid) + "/" + name).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  char part[4096];
  for (ssize_t n; (n = ::read(fd, part, sizeof part)) > 0;) text.append(part, static_cast<size_t>(n));
  ::close(fd);
  return text;
}

// As in /proc/PID/stat: R, S, T (stopped: not yet when kill() returns), Z…; 0: there is none.
inline char state_of(pid_t pid) {
  const std::string text = proc_file(pid, "stat");
  const size_t end = text.rfind(')');
  return end != std::string::npos && text.size() > end + 2 ? text[end + 2] : 0;
}

inline bool alive(pid_t pid) {  // a zombie is not
  const char state = state_of(pid);
  return state != 0 && state != 'Z';
}

// The first child of a process, 0 if it has none.
inline pid_t child_of(pid_t pid) {
  return std::atoi(proc_file(pid, "task/" + std::to_string(pid) + "/children").c_str());
}

inline uint64_t cpu_ticks(pid_t pid) {
  const std::string text = proc_file(pid, "stat");
  REQUIRE(text.rfind(')') != std::string::npos);
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string skip;
  for (int i = 0; i < 11; ++i) fields >> skip;
  uint64_t user = 0, system = 0;
  fields >> user >> system;
  return user + system;
}

inline int connect_to(const std::string& path) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  ::close(fd);
  return -1;
}

struct LineClient {
  explicit LineClient(const std::string& path) : fd(connect_to(path)) {}
  ~LineClient() {
    if (fd >= 0) ::close(fd);
  }
  std::string ask(const std::string& line) {
    const std::string text = line + "\n";
    if (fd < 0 || ::send(fd, text.data(), text.size(), MSG_NOSIGNAL) < 0) return "lost";
    char answer[4096];
    const ssize_t n = ::recv(fd, answer, sizeof answer, 0);
    return n > 0 ? std::string(answer, static_cast<size_t>(n)) : "lost";
  }
  int fd;
};

inline std::string answer_line(Donor& donor, const std::string& line) {
  std::istringstream in(line);
  std::string verb, key;
  uint64_t nbytes = 0;
  in >> verb >> key >> nbytes;
  if (verb == "pid") return std::to_string(::getpid());
  if (verb == "keys") {
    std::string all;
    for (const std::string& k : donor.keys("", 1000)) all += k + " ";
    return all.empty() ? "none" : all;
  }
  if (verb == "slots") return donor.open_slots(nbytes).is_ok() ? "ok" : "failed";
  ReserveRequest request;
  request.txn = random_id();
  request.key = key;
  request.nbytes = nbytes;
  auto r = donor.reserve(request);
  if (!r.is_ok()) return r.status().to_string();
  const Status s = donor.commit(r->extent, {1, 1}, {});
  return s ? "ok" : s.to_string();
}

inline int test_worker(WorkerContext context) {
  KeeperLink& link = *context.link;
  std::unique_ptr<Donor> donor;
  if (context.held.empty()) {
    donor = Donor::create({context.options.memory_bytes, 1 << 20, 1000}).value();
    if (!link.fresh() || !link.hold(donor->held())) return 1;
  } else {
    auto attached = Donor::attach({}, std::move(context.held));
    if (!attached.is_ok()) {
      (void)link.failed(attached.status());
      return 1;
    }
    donor = std::move(attached).value();
  }
  donor->on_held_changed([&](const HeldSegment& s, bool added) { (void)(added ? link.hold({s}) : link.release(s)); });
  std::map<int, SessionId> clients;
  if (!link.ready(context.listeners[0].address)) return 1;
  for (;;) {
    std::vector<pollfd> fds{{link.fd(), POLLIN, 0}, {context.listeners[0].fd.get(), POLLIN, 0}};
    for (const auto& [fd, id] : clients) fds.push_back({fd, POLLIN, 0});
    if (::poll(fds.data(), fds.size(), -1) < 0) return 1;
    if (fds[0].revents) {
      auto m = link.receive(true);
      return m.is_ok() && m->type == LinkMessage::Type::stop ? 0 : 1;
    }
    if (fds[1].revents) {
      const int fd = ::accept4(context.listeners[0].fd.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (fd >= 0) clients[fd] = random_u64();
      (void)link.clients(static_cast<uint32_t>(clients.size()));
    }
    for (size_t i = 2; i < fds.size(); ++i) {
      if (!fds[i].revents) continue;
      char line[4096];
      const ssize_t n = ::recv(fds[i].fd, line, sizeof line, 0);
      const SessionId session = clients.at(fds[i].fd);
      if (n > 0) {
        std::string text(line, static_cast<size_t>(n));
        if (text.starts_with("slots")) text = "slots x " + std::to_string(session);
        const std::string answer = answer_line(*donor, text);
        (void)::send(fds[i].fd, answer.data(), answer.size(), MSG_NOSIGNAL);
      } else {
        donor->end_session(session);
        ::close(fds[i].fd);
        clients.erase(fds[i].fd);
        (void)link.clients(static_cast<uint32_t>(clients.size()));
      }
    }
  }
}

// A keeper in a process of its own; killed, if it still runs, at the end.
struct KeeperProcess {
  explicit KeeperProcess(NodeOptions options, const WorkerFunction& worker = test_worker) {
    int pipe[2];
    REQUIRE(::pipe2(pipe, O_CLOEXEC) == 0);
    options.ready_fd = pipe[1];
    pid = ::fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      ::close(pipe[0]);
      log::set_level(log::Level::off);
      ::_exit(run_keeper(options, worker));
    }
    ::close(pipe[1]);
    char text[4096];
    for (ssize_t n; (n = ::read(pipe[0], text, sizeof text)) > 0;) line.append(text, static_cast<size_t>(n));
    ::close(pipe[0]);
  }
  ~KeeperProcess() {
    if (pid > 0) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  bool ready() const { return line.starts_with("ready "); }
  // The exit code, or -signal; -1000 if it does not end in time.
  int wait(int64_t ms = 15'000) {
    int status = 0;
    if (!eventually([&] { return ::waitpid(pid, &status, WNOHANG) == pid; }, ms)) return -1000;
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  pid_t pid = -1;
  std::string line;
};

}  // namespace torch_mooncake::pool
