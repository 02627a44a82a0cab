// Control moves to another lane when its own dies: no message is lost, doubled, answered twice or out of order.
#include "rpc/helpers.h"

using namespace rpc_test;

TEST_CASE("peer process: serves loopback tcp" * doctest::skip()) { serve_as_peer("tcp://127.0.0.1:0"); }

namespace {

constexpr const char* kPeer = "peer process: serves loopback tcp";

// A session over TCP alone to a process that can be stopped.
struct FarPeer {
  PeerProcess peer{kPeer};
  std::unique_ptr<Endpoint> client;
  SessionPtr session;

  explicit FarPeer(int heartbeat_ms, int heartbeat_limit_ms = 5000) {
    auto options = named("client");
    options.host_id = "far";
    options.heartbeat_ms = heartbeat_ms;
    options.heartbeat_limit_ms = heartbeat_limit_ms;
    client = make_endpoint(options);
    session = client->connect(peer.address(), soon()).value();
    REQUIRE(session->open_lanes(3, soon()));
    REQUIRE(session->call_sync(kEcho, "", soon()));
  }
  void kill_control() {
    for (auto& lane : session->lanes())
      if (lane->index() == 0) lane->kill({Code::peer_lost, "killed by the test"});
    REQUIRE(eventually([&] { return session->lanes().size() == 2 || !session->alive(); }));
  }
};

// Two endpoints that believe to be on two hosts, so that all lanes are TCP.
struct TwoHosts {
  std::shared_ptr<Served> served = std::make_shared<Served>();
  std::unique_ptr<Endpoint> here, there;
  SessionPtr session;

  explicit TwoHosts(int lanes) {
    auto options = named("there");
    options.host_id = "there";
    there = make_endpoint(options, served);
    here = make_endpoint(named("here"));
    session = here->connect(*there->listen("tcp://127.0.0.1:0"), soon()).value();
    REQUIRE(session->open_lanes(lanes, soon()));
    REQUIRE(eventually([&] { return accepted() && accepted()->lanes().size() == static_cast<size_t>(lanes); }));
  }
  SessionPtr accepted() {
    auto all = there->sessions();
    return all.empty() ? nullptr : all.front();
  }
};

void kill_one(const SessionPtr& session, size_t which) {
  auto lanes = session->lanes();
  if (lanes.size() > 1) lanes[which % lanes.size()]->kill({Code::peer_lost, "killed by the test"});
}

}  // namespace

TEST_CASE("control: every message arrives once and in order while lanes die on both sides") {
  QuietLog quiet;
  TwoHosts hosts(6);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> called{0}, wrong{0}, posted{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      while (!stop) {
        std::string body = std::to_string(t) + ":" + std::to_string(called++);
        auto answer = hosts.session->call_sync(kEcho, body, soon());
        if (!answer || answer->body != body) ++wrong;
      }
    });
  }
  threads.emplace_back([&] {
    while (!stop) {
      if (!hosts.session->post(kPost, std::to_string(posted++))) ++wrong;
      if (posted % 50 == 0) ::usleep(500);
    }
  });
  // The other direction, too.
  threads.emplace_back([&] {
    auto accepted = hosts.accepted();
    while (!stop) {
      auto answer = accepted->call_sync(kEcho, "back", soon());
      if (!answer || answer->body != "back") ++wrong;
    }
  });
  const SessionPtr other = hosts.accepted();
  for (int round = 0; round < 60; ++round) {
    kill_one(round % 2 == 0 ? hosts.session : other, 0);  // the oldest is the likeliest to carry control
    if (round % 5 == 4) kill_one(hosts.session, random_u64());
    ::usleep(10'000);
    // A machine that is slow to notice would be left without any lane: calls have to get through in between.
    const uint64_t before = called;
    CHECK(eventually([&] { return called >= before + 6; }));
    auto reopened = hosts.session->open_lanes(6, soon());
    INFO(round << " " << reopened.to_string());
    INFO("here " << hosts.session->status().to_string() << ", there " << other->status().to_string());
    CHECK(reopened.is_ok());
    if (!hosts.session->alive() || !other->alive()) break;  // the rest would be about nothing
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(hosts.session->alive());
  CHECK(called > 100);
  REQUIRE(eventually([&] {
    std::lock_guard lock(hosts.served->mutex);
    return hosts.served->posts.size() == posted;
  }));
  std::lock_guard lock(hosts.served->mutex);
  for (size_t i = 0; i < hosts.served->posts.size(); ++i) REQUIRE(hosts.served->posts[i] == std::to_string(i));
}

TEST_CASE("control: with its last lane the session ends, and every call with it") {
  QuietLog quiet;
  TwoHosts hosts(3);
  std::atomic<int> ended{0};
  for (int i = 0; i < 10; ++i) {
    hosts.session->call(kNever, "x", Deadline::never(), [&](Result<Message> answer) {
      if (answer.status().code() == Code::peer_lost) ++ended;
    });
  }
  for (auto& lane : hosts.session->lanes()) lane->kill({Code::peer_lost, "killed by the test"});
  CHECK(eventually([&] { return ended == 10; }));
  CHECK(eventually([&] { return !hosts.session->alive() && !hosts.accepted(); }));
}

TEST_CASE("control: it moves while calls wait for their answers") {
  QuietLog quiet;
  TwoHosts hosts(3);
  std::atomic<int> answered{0};
  hosts.session->call(kNever, "x", Deadline::never(), [&](Result<Message> answer) {
    if (answer && answer->body == "late") ++answered;
  });
  REQUIRE(eventually([&] {
    std::lock_guard lock(hosts.served->mutex);
    return hosts.served->unanswered.size() == 1;
  }));
  for (auto& lane : hosts.session->lanes())
    if (lane->index() == 0) lane->kill({Code::peer_lost, "killed by the test"});
  {
    std::lock_guard lock(hosts.served->mutex);
    hosts.served->unanswered.front().ok("late");  // perhaps while control has no lane
  }
  CHECK(eventually([&] { return answered == 1; }));
  CHECK(hosts.session->call_sync(kEcho, "y", soon()).is_ok());
  CHECK(hosts.session->lanes().size() == 2);
}

TEST_CASE("control: a peer that is stopped for a while keeps its lanes, and control moves when it goes on") {
  QuietLog quiet;
  for (int heartbeat_ms : {1000, 0}) {
    CAPTURE(heartbeat_ms);
    FarPeer far(heartbeat_ms);
    far.peer.send(SIGSTOP);
    far.kill_control();
    std::atomic<bool> answered{false};
    far.session->call(kEcho, "late", soon(),
                      [&](Result<Message> answer) { answered = answer && answer->body == "late"; });
    ::usleep(1'300'000);
    CHECK(far.session->alive());
    CHECK(far.session->lanes().size() == 2);
    far.peer.send(SIGCONT);
    CHECK(eventually([&] { return answered.load(); }));
    CHECK(far.session->call_sync(kEcho, "x", soon()).is_ok());
    CHECK(far.session->lanes().size() == 2);
  }
}

TEST_CASE("control: a peer that stays stopped while control moves is lost at the heartbeat limit") {
  QuietLog quiet;
  FarPeer far(100, 1000);
  int64_t start = steady_ns();
  far.peer.send(SIGSTOP);
  far.kill_control();
  CHECK(far.session->call_sync(kEcho, "x", soon()).status().code() == Code::peer_lost);
  CHECK(steady_ns() - start < 4'000'000'000);
  CHECK_FALSE(far.session->alive());
}

TEST_CASE(
    "control: messages dropped because too much was unacknowledged cost the move only until they are acknowledged") {
  QuietLog quiet;
  auto flood = [](FarPeer& far) {  // 80 MiB that the peer does not read
    far.peer.send(SIGSTOP);
    for (int i = 0; i < 80; ++i) REQUIRE(far.session->post(kPost, std::string(1 << 20, 'x')));
  };
  FarPeer far(1000);
  for (int round = 0; round < 2; ++round) {
    flood(far);
    far.peer.send(SIGCONT);
    for (int i = 0; i < 32; ++i) REQUIRE(far.session->call_sync(kEcho, "x", soon()));
  }
  far.kill_control();
  CHECK(far.session->call_sync(kEcho, "moved", soon()).is_ok());
  CHECK(far.session->lanes().size() == 2);
  // Not acknowledged, they cannot be sent again: the session ends, rather than leave them out.
  FarPeer lost(1000);
  flood(lost);
  lost.kill_control();
  CHECK(eventually([&] { return !lost.session->alive(); }));
}
