// Peers that die, stop, or were never there; forks; crowds of connects; what is left afterwards; idleness.
#include <sys/resource.h>

#include "rpc/helpers.h"

using namespace rpc_test;

TEST_CASE("peer process: serves loopback tcp" * doctest::skip()) { serve_as_peer("tcp://127.0.0.1:0"); }

#if defined(__SANITIZE_THREAD__)
// Children of a process with threads are part of what is tested here.
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

namespace {
EndpointOptions quick(const char* name) {
  auto options = named(name);
  options.heartbeat_ms = 100;
  options.heartbeat_limit_ms = 1000;
  return options;
}
constexpr const char* kPeer = "peer process: serves loopback tcp";

double cpu_s() {
  rusage u;
  ::getrusage(RUSAGE_SELF, &u);
  return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}
}  // namespace

TEST_CASE("SIGKILL of the peer in the middle of a call: peer_lost in less than a second") {
  for (const char* host : {"", "far"}) {
    PeerProcess peer(kPeer);
    auto options = named("client");
    options.host_id = host;
    auto client = make_endpoint(options);
    auto session = client->connect(peer.address(), soon()).value();
    if (!*host) CHECK(session->peer_pid() == peer.pid());
    std::atomic<int64_t> killed_ns{0};
    std::thread killer([&] {
      ::usleep(100'000);
      killed_ns = steady_ns();
      peer.send(SIGKILL);
    });
    auto status = session->call_sync(kNever, "", soon()).status();
    int64_t took = steady_ns() - killed_ns;
    killer.join();
    CHECK(status.code() == Code::peer_lost);
    CHECK(status.retryable());
    CHECK(took < 1'000'000'000);
    CHECK_FALSE(session->alive());
    CHECK(client->connect(peer.address(), soon()).status().code() == Code::peer_lost);
  }
}

TEST_CASE("SIGSTOP of the peer: peer_lost after the heartbeat limit, also when nobody calls") {
  QuietLog quiet;
  PeerProcess peer(kPeer);
  auto client = make_endpoint(quick("client"));
  auto session = client->connect(peer.address(), soon()).value();
  ::usleep(1'500'000);  // idle for longer than the limit: a living peer stays
  CHECK(session->alive());
  int64_t start = steady_ns();
  peer.send(SIGSTOP);
  CHECK(eventually([&] { return !session->alive(); }));
  CHECK(steady_ns() - start < 4'000'000'000);
  CHECK(session->status().code() == Code::peer_lost);
  // Dialling a stopped process ends by its deadline.
  start = steady_ns();
  CHECK(client->connect(peer.address(), Deadline::after_ms(300)).status().code() == Code::deadline_exceeded);
  CHECK(steady_ns() - start < 2'500'000'000);
  peer.send(SIGCONT);
}

TEST_CASE("nobody there: refused is peer_lost naming the address; a black hole ends by the deadline") {
  auto client = make_endpoint(named("client"));
  std::string address;
  {
    auto gone = make_endpoint(named("gone"));
    address = gone->listen("tcp://127.0.0.1:0").value();
  }
  auto status = client->connect(address, soon()).status();
  CHECK(status.code() == Code::peer_lost);
  CHECK(status.retryable());
  CHECK(status.message().find(address) != std::string::npos);
  CHECK(client->connect("unix://@nobody-" + to_hex(random_id()), soon()).status().code() == Code::peer_lost);
  CHECK(client->connect("unix:///nowhere/at/all", soon()).status().code() == Code::peer_lost);

  // A listener that never accepts answers the SYN but not the handshake: the same silence as a black hole.
  UniqueFd deaf(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(::listen(deaf.get(), 1) == 0);
  auto deaf_address = local_address(deaf.get()).to_string();
  deaf_address.replace(6, deaf_address.find(':', 6) - 6, "127.0.0.1");
  for (auto& silent : {deaf_address, std::string("tcp://192.0.2.1:9")}) {
    CAPTURE(silent);
    int64_t start = steady_ns();
    auto result = client->connect(silent, Deadline::after_ms(300)).status();
    bool unreachable = result.code() == Code::peer_lost && silent != deaf_address;  // a host without any route
    CHECK((result.code() == Code::deadline_exceeded || unreachable));
    CHECK(steady_ns() - start < 2'500'000'000);
  }
  // close() ends a connect that waits.
  std::thread closer([&] {
    ::usleep(200'000);
    client->close();
  });
  CHECK(client->connect(deaf_address, soon(60'000)).status().code() == Code::closed);
  closer.join();
}

TEST_CASE("two sides connect to each other at once, many times: both sessions work") {
  auto a = make_endpoint(named("a")), b = make_endpoint(named("b"));
  auto to_a = a->listen("tcp://127.0.0.1:0").value(), to_b = b->listen("tcp://127.0.0.1:0").value();
  std::atomic<int> wrong{0};
  auto dialler = [&](Endpoint& from, const std::string& to) {
    for (int i = 0; i < 500; ++i) {
      auto session = from.connect(to, soon(), false);
      if (!session || !(*session)->call_sync(kEcho, "x", soon())) {
        ++wrong;
        continue;
      }
      (*session)->close({Code::closed, "done"});
    }
  };
  std::thread one([&] { dialler(*a, to_b); }), two([&] { dialler(*b, to_a); });
  one.join();
  two.join();
  CHECK(wrong == 0);
  CHECK(eventually([&] { return a->sessions().empty() && b->sessions().empty(); }));
}

TEST_CASE("1000 sessions and 100 endpoints come and go: fds and threads return to where they were") {
  auto server = make_endpoint(named("server"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  auto client = make_endpoint(named("client"));
  (void)client->connect(address, soon(), false).value();
  client->sessions().at(0)->close({Code::closed, ""});
  REQUIRE(eventually([&] { return client->sessions().empty() && server->sessions().empty(); }));
  int fds = open_fds(), threads = live_threads();
  for (int i = 0; i < 1000; ++i) {
    auto session = client->connect(address, soon(), false).value();
    if (i % 3 == 0) (void)session->call_sync(kEcho, "x", soon());
    session->close({Code::closed, ""});
  }
  for (int i = 0; i < 100; ++i) {
    auto passing = make_endpoint(named("passing"));
    (void)passing->listen("tcp://127.0.0.1:0").value();
    auto session = passing->connect(address, soon()).value();
    (void)session->call_sync(kSlowWorker, "x", Deadline::after_ms(1));
    int64_t start = steady_ns();
    passing->close();
    CHECK(steady_ns() - start < 4'000'000'000);
  }
  CHECK(eventually([&] { return open_fds() <= fds; }));              // the first count may have seen one being closed
  CHECK(eventually([&] { return live_threads() <= threads + 1; }));  // the server's worker thread began meanwhile
  CHECK(server->sessions().empty());
}

TEST_CASE("fork: in the child everything says `forked`, and the parent's sessions go on") {
  auto server = make_endpoint(named("server"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  auto client = make_endpoint(named("client"));
  auto session = client->connect(address, soon()).value();
  pid_t child = ::fork();
  if (child == 0) {
    int bad = 0;
    bad |= client->connect(address, soon()).status().code() != Code::forked;
    bad |= client->listen("tcp://127.0.0.1:0").status().code() != Code::forked;
    bad |= session->call_sync(kEcho, "", soon()).status().code() != Code::forked;
    bad |= session->post(kPost, "").code() != Code::forked;
    bad |= session->alive();
    bad |= session->status().code() != Code::forked;
    bad |= !session->lanes().empty();
    session->close({Code::closed, ""});
    session.reset();
    client->close();
    client.reset();
    server.reset();
    ::_exit(bad);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(session->call_sync(kEcho, "parent", soon())->body == "parent");
}

TEST_CASE("fork: a child that lives on does not hide its parent's death") {
  auto server = make_endpoint(named("server"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  int report[2];
  REQUIRE(::pipe(report) == 0);
  // A client process that forks a child of its own and is then killed.
  pid_t client_pid = ::fork();
  if (client_pid == 0) {
    auto client = make_endpoint(named("doomed"));
    auto session = client->connect(address, soon(), false);
    pid_t grandchild = session.is_ok() ? ::fork() : -1;
    if (grandchild == 0) {
      ::pause();
      ::_exit(0);
    }
    (void)!::write(report[1], &grandchild, sizeof grandchild);
    ::pause();
    ::_exit(0);
  }
  pid_t grandchild = -1;
  REQUIRE(::read(report[0], &grandchild, sizeof grandchild) == sizeof grandchild);
  REQUIRE(grandchild > 0);
  REQUIRE(eventually([&] { return server->sessions().size() == 1; }));
  auto session = server->sessions()[0];
  int64_t start = steady_ns();
  ::kill(client_pid, SIGKILL);
  CHECK(eventually([&] { return !session->alive(); }));
  CHECK(steady_ns() - start < 3'000'000'000);  // well before the heartbeat limit of 5 s
  ::kill(grandchild, SIGKILL);
  int status;
  ::waitpid(client_pid, &status, 0);
  ::close(report[0]);
  ::close(report[1]);
}

TEST_CASE("idle is idle: sessions with heartbeats use next to no CPU") {
  auto server = make_endpoint(named("server"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  auto client = make_endpoint(named("client"));
  auto session = client->connect(address, soon()).value();
  REQUIRE(session->call_sync(kEcho, "", soon()).is_ok());
  double before = cpu_s();
  ::sleep(2);
  CHECK(cpu_s() - before < 0.04);  // 2 %
  CHECK(session->alive());
}

TEST_CASE("a lane dies while a waiting caller receives and does not run: the I/O thread sleeps until it has gone") {
  QuietLog quiet;
  for (const char* host : {"", "far"}) {
    CAPTURE(host);
    auto server = make_endpoint(named("server"));
    auto address = server->listen("tcp://127.0.0.1:0").value();
    auto options = named("client");
    options.host_id = host;
    auto client = make_endpoint(options);
    auto session = client->connect(address, soon()).value();
    REQUIRE(session->call_sync(kEcho, "", soon()).is_ok());
    double spent = -1;
    (void)session->receive_until(
        [&] {
          if (spent >= 0) return true;
          for (auto& lane : session->lanes()) lane->kill({Code::peer_lost, "killed by the test"});
          double before = cpu_s();
          ::usleep(500'000);  // as if another process had the core
          spent = cpu_s() - before;
          return false;
        },
        soon(), steady_ns() + 50'000);
    CHECK(spent < 0.1);
    CHECK(eventually([&] { return !session->alive() && client->sessions().empty() && server->sessions().empty(); }));
  }
}

TEST_CASE("timers fire once, in order, and not after they were cancelled") {
  auto endpoint = make_endpoint(named("x"));
  std::mutex mutex;
  std::vector<int> fired;
  auto fire = [&](int n) {
    return [&, n] {
      std::lock_guard lock(mutex);
      fired.push_back(n);
    };
  };
  endpoint->add_timer(Deadline::after_ms(120), fire(3));
  endpoint->add_timer(Deadline::after_ms(40), fire(1));
  auto cancelled = endpoint->add_timer(Deadline::after_ms(60), fire(99));
  endpoint->add_timer(Deadline::after_ms(80), fire(2));
  endpoint->cancel_timer(cancelled);
  CHECK(eventually([&] {
    std::lock_guard lock(mutex);
    return fired.size() == 3;
  }));
  std::lock_guard lock(mutex);
  CHECK(fired == std::vector<int>{1, 2, 3});
}
