// The keeper with real processes: who may start, who dies with whom, what outlives what, and what is left behind.
#include "pool/keeper_fixture.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

pid_t worker_pid(const Folder& folder) {
  LineClient c(folder.at("node.sock"));
  return std::atoi(c.ask("pid").c_str());
}

size_t open_fds(pid_t pid) {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) ++n;
  return n;
}

std::vector<std::string> shm_files() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator("/dev/shm")) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_CASE("one node a pool: the second starter is told who runs, the first is unharmed") {
  Folder folder;
  KeeperProcess first(folder.options());
  REQUIRE(first.ready());
  CHECK(first.line == "ready unix://" + folder.at("node.sock") + "\n");
  KeeperProcess second(folder.options());
  CHECK(second.line.starts_with("error BUSY"));
  CHECK(second.line.find("pid " + std::to_string(first.pid) + " at unix://" + folder.at("node.sock")) !=
        std::string::npos);
  CHECK(second.wait() == kNodeAlreadyRunning);
  LineClient c(folder.at("node.sock"));
  CHECK(c.ask("put a 100") == "ok");
  // Another pool in the same folder is another node.
  NodeOptions other = folder.options();
  other.pool = "q";
  KeeperProcess third(other);
  CHECK(third.ready());
}

TEST_CASE("many starters at once: one node") {
  Folder folder;
  std::vector<pid_t> pids;
  for (int i = 0; i < 8; ++i) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      log::set_level(log::Level::off);
      ::_exit(run_keeper(folder.options(), test_worker));
    }
    pids.push_back(pid);
  }
  int running = 0, told = 0;
  CHECK(eventually([&] {
    running = told = 0;
    for (pid_t& pid : pids) {
      if (pid < 0) {
        ++told;
        continue;
      }
      int status = 0;
      if (::waitpid(pid, &status, WNOHANG) == pid) {
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == kNodeAlreadyRunning);
        pid = -1;
        ++told;
      } else {
        ++running;
      }
    }
    return told == 7;
  }));
  CHECK(running == 1);
  for (pid_t pid : pids)
    if (pid > 0) {
      LineClient c(folder.at("node.sock"));
      CHECK(eventually([&] { return LineClient(folder.at("node.sock")).ask("keys") == "none"; }));
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
}

TEST_CASE("a killed worker is replaced, and the objects are still there") {
  Folder folder;
  KeeperProcess keeper(folder.options());
  REQUIRE(keeper.ready());
  std::string keys;
  for (int round = 0; round < 4; ++round) {
    LineClient c(folder.at("node.sock"));
    const pid_t worker = std::atoi(c.ask("pid").c_str());
    REQUIRE(worker > 0);
    const std::string key = "k" + std::to_string(round);
    CHECK(c.ask("put " + key + " 100000") == "ok");
    keys += key + " ";
    ::kill(worker, SIGKILL);
    CHECK(c.ask("keys") == "lost");  // EOF, at once
    // The socket stays open meanwhile: a new client only waits.
    LineClient next(folder.at("node.sock"));
    CHECK(next.ask("keys") == keys);
    CHECK(std::atoi(next.ask("pid").c_str()) != worker);
    CHECK(!alive(worker));
  }
}

TEST_CASE("a killed keeper takes the worker along; the next start replaces what is left") {
  Folder folder;
  const auto shm = shm_files();
  auto keeper = std::make_unique<KeeperProcess>(folder.options());
  REQUIRE(keeper->ready());
  const pid_t worker = worker_pid(folder);
  LineClient c(folder.at("node.sock"));
  CHECK(c.ask("put a 100") == "ok");
  ::kill(keeper->pid, SIGKILL);
  CHECK(keeper->wait() == -SIGKILL);
  CHECK(eventually([&] { return !alive(worker); }));
  CHECK(c.ask("keys") == "lost");
  CHECK(connect_to(folder.at("node.sock")) < 0);
  CHECK(fs::exists(folder.at("node.sock")));  // stale
  CHECK(shm_files() == shm);

  KeeperProcess next(folder.options());
  REQUIRE(next.ready());
  LineClient d(folder.at("node.sock"));
  CHECK(d.ask("keys") == "none");
}

TEST_CASE("SIGTERM ends the node and takes its socket along") {
  for (int signal : {SIGTERM, SIGINT}) {
    Folder folder;
    KeeperProcess keeper(folder.options());
    REQUIRE(keeper.ready());
    const pid_t worker = worker_pid(folder);
    ::kill(worker, SIGTERM);  // the keeper decides, not whoever signals the worker
    ::kill(worker, SIGINT);
    ::kill(keeper.pid, SIGHUP);
    CHECK(worker_pid(folder) == worker);
    ::kill(keeper.pid, signal);
    CHECK(keeper.wait() == kNodeOk);
    CHECK(!alive(worker));
    CHECK(!fs::exists(folder.at("node.sock")));
  }
}

TEST_CASE("a worker that does not drain is killed by the second signal") {
  Folder folder;
  KeeperProcess keeper(folder.options(), [](WorkerContext c) {
    (void)c.link->ready("unix://x");
    for (;;) ::pause();
    return 0;
  });
  REQUIRE(keeper.ready());
  ::kill(keeper.pid, SIGTERM);
  ::usleep(200'000);
  CHECK(alive(keeper.pid));
  ::kill(keeper.pid, SIGTERM);
  CHECK(keeper.wait(5'000) == kNodeOk);
}

TEST_CASE("linger: not before the first client, at once after the last") {
  Folder folder;
  NodeOptions options = folder.options();
  options.linger_s = 0;
  KeeperProcess keeper(options);
  REQUIRE(keeper.ready());
  ::usleep(300'000);
  CHECK(alive(keeper.pid));
  {
    LineClient a(folder.at("node.sock"));
    CHECK(a.ask("put a 10") == "ok");
    LineClient b(folder.at("node.sock"));
    CHECK(b.ask("keys") == "a ");
  }
  CHECK(keeper.wait() == kNodeOk);
  CHECK(!fs::exists(folder.at("node.sock")));
}

TEST_CASE("linger: a client that comes in time keeps the node") {
  Folder folder;
  NodeOptions options = folder.options();
  options.linger_s = 1;
  KeeperProcess keeper(options);
  REQUIRE(keeper.ready());
  CHECK(worker_pid(folder) > 0);
  LineClient c(folder.at("node.sock"));
  CHECK(c.ask("keys") == "none");
  ::usleep(1'500'000);
  CHECK(c.ask("keys") == "none");
  ::shutdown(c.fd, SHUT_RDWR);
  CHECK(keeper.wait() == kNodeOk);
}

TEST_CASE("a worker crash does not count as the last client leaving") {
  Folder folder;
  NodeOptions options = folder.options();
  options.linger_s = 0;
  KeeperProcess keeper(options);
  REQUIRE(keeper.ready());
  LineClient c(folder.at("node.sock"));
  ::kill(std::atoi(c.ask("pid").c_str()), SIGKILL);
  CHECK(c.ask("keys") == "lost");
  ::usleep(300'000);
  LineClient d(folder.at("node.sock"));
  CHECK(d.ask("put a 1") == "ok");
}

TEST_CASE("a worker that cannot start tells the starter why") {
  Folder folder;
  KeeperProcess keeper(folder.options(), [](WorkerContext c) {
    (void)c.link->failed({Code::unsupported, "no such\ntransport"});
    return 1;
  });
  CHECK(keeper.line == "error the worker ended with code 1: UNSUPPORTED: no such transport\n");
  CHECK(keeper.wait() == kNodeFailed);
  CHECK(!fs::exists(folder.at("node.sock")));
  KeeperProcess crash(folder.options(), [](WorkerContext) {
    ::raise(SIGKILL);
    return 0;
  });
  CHECK(crash.line == "error the worker died by signal 9\n");
}

TEST_CASE("memory that no worker can attach to is given up after three attempts") {
  Folder folder;
  KeeperProcess keeper(folder.options(), [](WorkerContext c) {
    if (c.starts > 1 && !c.held.empty()) ::raise(SIGKILL);
    return test_worker(std::move(c));
  });
  REQUIRE(keeper.ready());
  LineClient c(folder.at("node.sock"));
  CHECK(c.ask("put a 1") == "ok");
  ::kill(std::atoi(c.ask("pid").c_str()), SIGKILL);
  LineClient d(folder.at("node.sock"));
  CHECK(d.ask("keys") == "none");
}

TEST_CASE("garbage and idle connections on the socket disturb nobody, also while there is no worker") {
  Folder folder;
  KeeperProcess keeper(folder.options());
  REQUIRE(keeper.ready());
  const pid_t worker = worker_pid(folder);
  std::vector<std::unique_ptr<LineClient>> idle;
  for (int i = 0; i < 50; ++i) idle.push_back(std::make_unique<LineClient>(folder.at("node.sock")));
  ::kill(worker, SIGKILL);
  for (int i = 0; i < 50; ++i) {
    LineClient g(folder.at("node.sock"));
    const std::string garbage(100, static_cast<char>(i * 5));
    CHECK(::send(g.fd, garbage.data(), garbage.size(), MSG_NOSIGNAL) == 100);
  }
  LineClient c(folder.at("node.sock"));
  CHECK(c.ask("keys") == "none");
}

TEST_CASE("fds do not pile up over clients and restarts") {
  Folder folder;
  KeeperProcess keeper(folder.options());
  REQUIRE(keeper.ready());
  CHECK(worker_pid(folder) > 0);
  const size_t before = open_fds(keeper.pid);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 10; ++i) {
      LineClient c(folder.at("node.sock"));
      CHECK(c.ask("slots") == "ok");
    }
    ::kill(worker_pid(folder), SIGKILL);
    CHECK(worker_pid(folder) > 0);
  }
  CHECK(eventually([&] { return open_fds(keeper.pid) == before; }));
  {
    LineClient c(folder.at("node.sock"));
    CHECK(c.ask("slots") == "ok");
    CHECK(eventually([&] { return open_fds(keeper.pid) == before + 1; }));
  }
  CHECK(eventually([&] { return open_fds(keeper.pid) == before; }));
}

TEST_CASE("idle is idle, and small") {
  Folder folder;
  KeeperProcess keeper(folder.options());
  REQUIRE(keeper.ready());
  LineClient c(folder.at("node.sock"));
  const pid_t worker = std::atoi(c.ask("pid").c_str());
  const uint64_t before = cpu_ticks(keeper.pid) + cpu_ticks(worker);
  ::usleep(1'000'000);
  CHECK(cpu_ticks(keeper.pid) + cpu_ticks(worker) == before);
}
