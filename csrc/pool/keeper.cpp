#include "pool/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "common/log.h"
#include "pool/node_options.h"
#include "rpc/socket.h"

namespace torch_mooncake::pool {
namespace {

constexpr int64_t kDrainSlackMs = 2'000;    // beyond the worker's own deadline, --drain-s
constexpr int64_t kFirstClientMs = 30'000;  // at least, before the first client comes, or comes back after a crash
constexpr int64_t kHealthyMs = 10'000;      // a worker that lived so long starts the back-off anew
constexpr int64_t kMaxBackoffMs = 5'000;
constexpr uint32_t kMaxUnreadyStarts = 3;  // then the memory is given up: it may be what kills the worker

struct Held {
  LinkMessage::SegmentName name;
  UniqueFd fd;
};

class Keeper {
 public:
  Keeper(NodeOptions options, const WorkerFunction& worker) : options_(std::move(options)), worker_(worker) {}

  ~Keeper() {
    for (const rpc::Listener& socket : sockets_) socket.remove_path();
  }
  Status open();
  int run();
  // For ready_fd, once: "ready …" or "error …", then EOF.
  void report(const std::string& line);
  bool already_running() const { return already_running_; }

 private:
  Status lock_folder();
  Status open_sockets();
  Status start_worker();
  [[noreturn]] void be_worker(UniqueFd link, pid_t keeper);
  void drain_link();
  void handle(LinkMessage message);
  void on_signal();
  void on_worker_exit(int status);
  void stop(const char* why);
  Deadline next_deadline() const;
  void on_time();

  NodeOptions options_;
  const WorkerFunction& worker_;
  std::string folder_;
  UniqueFd lock_, signals_;
  std::vector<rpc::Listener> sockets_;
  std::vector<Held> held_;
  bool already_running_ = false, reported_ = false;

  pid_t worker_pid_ = 0;
  std::optional<KeeperLink> link_;
  uint32_t starts_ = 0, unready_starts_ = 0;
  bool worker_ready_ = false;
  std::string worker_error_;
  int64_t started_ns_ = 0, backoff_ms_ = 0;
  Deadline restart_at_ = Deadline::never(), linger_until_ = Deadline::never(), kill_at_ = Deadline::never();
  bool stopping_ = false, had_client_ = false;
  int exit_code_ = kNodeOk;
  bool done_ = false;
};

void Keeper::report(const std::string& line) {
  if (options_.ready_fd < 0 || reported_) return;
  reported_ = true;
  std::string text = line;
  std::replace(text.begin(), text.end(), '\n', ' ');
  text += '\n';
  // Nobody there to read it any more is no reason to stop.
  if (::write(options_.ready_fd, text.data(), text.size()) < 0 && errno != EPIPE)
    log::warning("node", std::string("ready-fd: ") + std::strerror(errno));
  ::close(options_.ready_fd);
}

Status Keeper::open() {
  TM_ASSIGN(options_, resolve_options(std::move(options_)));
  TM_ASSIGN(folder_, prepare_folder(options_));
  TM_TRY(lock_folder());
  if (options_.token.empty()) {
    TM_ASSIGN(options_.token, load_or_make_token(folder_ + "/token"));
  }
  TM_TRY(open_sockets());
  // One fd a segment, one a client: take what we may have.
  rlimit files;
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &files) != 0) return Status::from_errno("setrlimit", errno);
  }
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) sigaddset(&set, signal);
  if (::sigprocmask(SIG_BLOCK, &set, nullptr) != 0) return Status::from_errno("sigprocmask", errno);
  signals_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return Status::from_errno("signalfd", errno);
  return start_worker();
}

// flock: the kernel drops it with us, so a file left by a killed node bars nobody.
Status Keeper::lock_folder() {
  const std::string path = folder_ + "/lock";
  lock_ = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock_.valid()) return Status::from_errno("lock file " + path, errno);
  const std::string socket = "unix://" + folder_ + "/node.sock";
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return Status::from_errno("lock file " + path, errno);
    already_running_ = true;
    char pid[32] = {};
    if (::pread(lock_.get(), pid, sizeof pid - 1, 0) < 0) pid[0] = 0;
    return {Code::busy, "pool \"" + options_.pool + "\" has a node on this host already: pid " +
                            std::to_string(std::atoi(pid)) + " at " + socket};
  }
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(lock_.get(), 0) != 0 || ::pwrite(lock_.get(), pid.data(), pid.size(), 0) < 0)
    return Status::from_errno("lock file " + path, errno);
  return {};
}

Status Keeper::open_sockets() {
  std::vector<std::string> where{"unix://" + folder_ + "/node.sock"};
  where.insert(where.end(), options_.listen.begin(), options_.listen.end());
  for (const std::string& text : where) {
    TM_ASSIGN(const rpc::Address address, rpc::parse_address(text));
    TM_ASSIGN(auto socket, rpc::open_listener(address, !options_.token.empty()));
    sockets_.push_back(std::move(socket));
  }
  return {};
}

Status Keeper::start_worker() {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
    return Status::from_errno("socketpair", errno);
  UniqueFd ours(pair[0]), theirs(pair[1]);
  const pid_t keeper = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return Status::from_errno("fork", errno);
  ++starts_;
  if (pid == 0) {
    ours.reset();
    be_worker(std::move(theirs), keeper);
  }
  worker_pid_ = pid;
  link_.emplace(std::move(ours));
  worker_ready_ = false;
  worker_error_.clear();
  started_ns_ = steady_ns();
  restart_at_ = Deadline::never();
  return {};
}

void Keeper::be_worker(UniqueFd link, pid_t keeper) {
  // Die with the keeper. The check closes the gap before prctl took effect.
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::getppid() != keeper) ::_exit(kNodeFailed);
  sigset_t set;
  sigemptyset(&set);
  // The keeper says when to stop: a signal to the whole group (Ctrl-C) must not stop us before it drains.
  for (int signal : {SIGTERM, SIGINT, SIGHUP}) ::signal(signal, SIG_IGN);
  ::sigprocmask(SIG_SETMASK, &set, nullptr);
  lock_.reset();
  signals_.reset();
  link_.reset();
  if (!reported_ && options_.ready_fd >= 0) ::close(options_.ready_fd);

  WorkerContext context;
  context.options = options_;
  context.options.ready_fd = -1;
  context.starts = starts_;
  context.link = std::make_unique<KeeperLink>(std::move(link));
  for (rpc::Listener& socket : sockets_) context.listeners.push_back({std::move(socket.fd), socket.dialable});
  for (Held& h : held_) {
    auto segment = Segment::adopt(std::move(h.fd), h.name.id);
    if (!segment.is_ok()) {
      log::error("node", "taking over a segment: " + segment.status().to_string());
      ::_exit(kNodeFailed);
    }
    context.held.push_back({h.name.role, h.name.tag, std::move(segment).value()});
  }
  // _exit: the keeper's objects in this process are not ours to destroy.
  ::_exit(worker_(std::move(context)));
}

void Keeper::drain_link() {
  while (link_) {
    auto message = link_->receive(false);
    if (message.is_ok()) {
      handle(std::move(message).value());
      continue;
    }
    if (message.status().code() == Code::busy) return;
    if (message.status().code() != Code::peer_lost) {
      log::error("node", message.status().to_string());
      return;
    }
    link_.reset();  // SIGCHLD follows
  }
}

void Keeper::handle(LinkMessage message) {
  using Type = LinkMessage::Type;
  switch (message.type) {
    case Type::ready:
      worker_ready_ = true;
      unready_starts_ = 0;
      report("ready " + message.text);
      if (options_.linger_s >= 0)
        linger_until_ = Deadline::after_ms(std::max(kFirstClientMs, static_cast<int64_t>(options_.linger_s * 1000)));
      break;
    case Type::failed:
      worker_error_ = message.text;
      break;
    case Type::clients:
      if (message.number != 0) {
        had_client_ = true;
        linger_until_ = Deadline::never();
      } else if (had_client_ && options_.linger_s >= 0) {
        linger_until_ = Deadline::after_s(options_.linger_s);
      }
      break;
    case Type::fresh:
      held_.clear();
      break;
    case Type::hold:
      for (size_t i = 0; i < message.segments.size(); ++i)
        held_.push_back({message.segments[i], std::move(message.fds[i])});
      break;
    case Type::release:
      for (const auto& gone : message.segments)
        std::erase_if(held_, [&](const Held& h) { return h.name.role == gone.role && h.name.tag == gone.tag; });
      break;
    case Type::leave:
      if (!stopping_) stop("asked to leave");
      break;
    case Type::stop:
      break;  // ours to say
  }
}

void Keeper::on_signal() {
  signalfd_siginfo info;
  while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
    if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT) {
      if (stopping_) {
        kill_at_ = Deadline::at_ns(0);
      } else {
        stop("signal");
      }
    }
    // SIGHUP: the terminal is gone, which is nothing to a node. SIGCHLD: seen below.
  }
  int status = 0;
  if (worker_pid_ != 0 && ::waitpid(worker_pid_, &status, WNOHANG) == worker_pid_) on_worker_exit(status);
}

void Keeper::on_worker_exit(int status) {
  drain_link();  // what it said before it died
  link_.reset();
  worker_pid_ = 0;
  linger_until_ = Deadline::never();
  had_client_ = false;
  const std::string how = WIFSIGNALED(status) ? "died by signal " + std::to_string(WTERMSIG(status))
                                              : "ended with code " + std::to_string(WEXITSTATUS(status));
  if (stopping_) {
    done_ = true;
    return;
  }
  const std::string why = how + (worker_error_.empty() ? "" : ": " + worker_error_);
  if (!worker_ready_ && starts_ == 1) {  // never came up: the starter should know, not a log
    log::error("node", "the worker " + why);
    report("error the worker " + why);
    exit_code_ = kNodeFailed;
    done_ = true;
    return;
  }
  if (!worker_ready_ && ++unready_starts_ >= kMaxUnreadyStarts && !held_.empty()) {
    log::error("node", "the worker cannot attach to the pool's memory: it is given up, the pool starts empty");
    held_.clear();
    unready_starts_ = 0;
  }
  if (worker_ready_ && steady_ns() - started_ns_ >= kHealthyMs * 1'000'000) backoff_ms_ = 0;
  restart_at_ = Deadline::after_ms(backoff_ms_);
  backoff_ms_ = std::clamp<int64_t>(backoff_ms_ * 2, 100, kMaxBackoffMs);
  log::error("node", "the worker " + why + "; the next one takes over");
}

void Keeper::stop(const char* why) {
  stopping_ = true;
  restart_at_ = linger_until_ = Deadline::never();
  if (worker_pid_ == 0) {
    done_ = true;
    return;
  }
  log::info("node", std::string("stopping: ") + why);
  kill_at_ = Deadline::after_ms(static_cast<int64_t>(options_.drain_s * 1000) + kDrainSlackMs);
  if (link_ && !link_->send({LinkMessage::Type::stop, 0, {}, {}, {}})) kill_at_ = Deadline::at_ns(0);
}

Deadline Keeper::next_deadline() const { return min(min(restart_at_, linger_until_), kill_at_); }

void Keeper::on_time() {
  if (kill_at_.expired() && worker_pid_ != 0) {
    kill_at_ = Deadline::never();
    log::warning("node", "the worker does not end by itself: killed");
    ::kill(worker_pid_, SIGKILL);
  }
  if (linger_until_.expired()) stop("no client");
  if (restart_at_.expired()) {
    if (Status started = start_worker(); !started) {
      log::error("node", started.to_string());
      restart_at_ = Deadline::after_ms(kMaxBackoffMs);
    }
  }
}

int Keeper::run() {
  while (!done_) {
    pollfd fds[2] = {{signals_.get(), POLLIN, 0}, {link_ ? link_->fd() : -1, POLLIN, 0}};
    if (::poll(fds, 2, next_deadline().remaining_ms()) < 0 && errno != EINTR) {
      log::error("node", std::string("poll: ") + std::strerror(errno));
      exit_code_ = kNodeFailed;
      stop("error");
    }
    if (fds[1].revents) drain_link();
    if (fds[0].revents) on_signal();
    on_time();
  }
  return exit_code_;
}

}  // namespace

int run_keeper(const NodeOptions& options, const WorkerFunction& worker) {
  Keeper keeper(options, worker);
  if (Status opened = keeper.open(); !opened) {
    log::error("node", opened.to_string());
    keeper.report("error " + opened.to_string());
    if (keeper.already_running()) return kNodeAlreadyRunning;
    return opened.code() == Code::invalid_argument ? kNodeUsage : kNodeFailed;
  }
  return keeper.run();
}

}  // namespace torch_mooncake::pool
