// Calls, posts, answers, descriptors, deadlines, ordering; parameterised by what was dialled.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "rpc/helpers.h"

using namespace rpc_test;

namespace {

struct Pair {
  std::shared_ptr<Served> served = std::make_shared<Served>();
  std::unique_ptr<Endpoint> server = make_endpoint(named("server"), served);
  std::unique_ptr<Endpoint> client = make_endpoint(named("client"));
  SessionPtr session;
  explicit Pair(const std::string& listen) {
    auto address = server->listen(listen).value();
    auto connected = client->connect(address, soon());
    REQUIRE_MESSAGE(connected.is_ok(), connected.status().to_string());
    session = *connected;
  }
};

std::string abstract_name() { return "unix://@tm-test-" + to_hex(random_id()); }

std::vector<std::string> every_listen() { return {"tcp://127.0.0.1:0", "tcp://[::1]:0", abstract_name()}; }

}  // namespace

TEST_CASE("call: bytes there and back, of every size up to the limit; over the limit fails") {
  for (auto& listen : every_listen()) {
    CAPTURE(listen);
    Pair pair(listen);
    for (size_t n : {size_t{0}, size_t{1}, size_t{4095}, size_t{65536}, size_t{300'000}, kMaxBody}) {
      std::string body(n, '\0');
      random_bytes(body.data(), n);
      auto answer = pair.session->call_sync(kEcho, body, soon());
      REQUIRE_MESSAGE(answer.is_ok(), answer.status().to_string());
      REQUIRE(answer->body == body);
    }
    CHECK(pair.session->call_sync(kEcho, std::string(kMaxBody + 1, 'x'), soon()).status().code() ==
          Code::invalid_argument);
    CHECK(pair.session->alive());
  }
}

TEST_CASE("call: errors arrive as they were sent; a dropped responder and an unknown method are errors") {
  Pair pair("tcp://127.0.0.1:0");
  for (int code = 1; code <= static_cast<int>(Code::internal); ++code) {
    Status sent(static_cast<Code>(code), "because");
    auto got = pair.session->call_sync(kFail, std::string(1, static_cast<char>(code)) + "because", soon()).status();
    CHECK(got.code() == sent.code());
    CHECK(got.message() == "because");
    CHECK(got.retryable() == sent.retryable());
  }
  CHECK(pair.session->call_sync(kDrop, "", soon()).status().code() == Code::internal);
  auto unknown = pair.session->call_sync(9999, "", soon()).status();
  CHECK(unknown.code() == Code::unsupported);
  CHECK(unknown.message().find("9999") != std::string::npos);
  CHECK(pair.session->call_sync(kSlowWorker, "w", soon())->body == "w");
}

TEST_CASE("call: a deadline ends it on time, sync and async, and the late answer is ignored") {
  Pair pair("tcp://127.0.0.1:0");
  int64_t start = steady_ns();
  auto status = pair.session->call_sync(kNever, "", Deadline::after_ms(150)).status();
  int64_t took = steady_ns() - start;
  CHECK(status.code() == Code::deadline_exceeded);
  CHECK(took >= 150'000'000);
  CHECK(took < 2'150'000'000);
  std::atomic<int> ended{0};
  std::atomic<Code> code{Code::ok};
  pair.session->call(kNever, "", Deadline::after_ms(100), [&](Result<Message> r) {
    code = r.status().code();
    ++ended;
  });
  CHECK(eventually([&] { return ended == 1; }));
  CHECK(code == Code::deadline_exceeded);
  {
    std::lock_guard lock(pair.served->mutex);
    for (auto& responder : pair.served->unanswered) responder.ok("late");
    pair.served->unanswered.clear();
  }
  CHECK(pair.session->call_sync(kEcho, "still fine", soon())->body == "still fine");
  CHECK(ended == 1);
  CHECK(pair.session->call_sync(kEcho, "", Deadline::after_ms(-1)).status().code() == Code::deadline_exceeded);
}

TEST_CASE("posts and calls keep their order; posts from the acceptor's side work too") {
  for (auto& listen : every_listen()) {
    CAPTURE(listen);
    Pair pair(listen);
    for (int i = 0; i < 2000; ++i) {
      REQUIRE(pair.session->post(kPost, std::to_string(i) + std::string(i % 50 == 0 ? 100'000 : 0, ' ')).is_ok());
    }
    REQUIRE(pair.session->call_sync(kEcho, "", soon()).is_ok());
    std::lock_guard lock(pair.served->mutex);
    REQUIRE(pair.served->posts.size() == 2000);
    for (int i = 0; i < 2000; ++i) REQUIRE(std::stoi(pair.served->posts[static_cast<size_t>(i)]) == i);
    auto back = pair.server->sessions();
    REQUIRE(back.size() == 1);
    CHECK(back[0]->call_sync(kEcho, "from the other side", soon())->body == "from the other side");
    CHECK_FALSE(back[0]->is_initiator());
    CHECK(back[0]->peer().name == "client");
    CHECK(pair.session->peer().name == "server");
    CHECK(pair.session->peer().engine == pair.server->self().engine);
  }
}

TEST_CASE("many threads call at once over one session") {
  Pair pair("tcp://127.0.0.1:0");
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 300; ++i) {
        std::string body = std::to_string(t * 1000 + i) + std::string(static_cast<size_t>(i * 37 % 9000), 'x');
        auto answer = pair.session->call_sync(kEcho, body, soon());
        wrong += !answer.is_ok() || answer->body != body;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("same host: a TCP dial proves it by a Unix lane, which then carries control") {
  Pair pair("tcp://127.0.0.1:0");
  CHECK(pair.session->same_host());
  CHECK(pair.session->peer_pid() == ::getpid());
  auto lanes = pair.session->lanes();
  REQUIRE(lanes.size() == 2);
  for (auto& lane : lanes) CHECK(lane->is_unix() == (lane->index() == 0));
  // The accepting side comes to know the session and its lanes a moment later.
  REQUIRE(eventually([&] { return pair.server->sessions().size() == 1; }));
  auto back = pair.server->sessions()[0];
  CHECK(eventually([&] { return back->lanes().size() == 2; }));
  CHECK(back->same_host());
  CHECK(back->peer_pid() == ::getpid());
}

TEST_CASE("same host is never claimed for a different host id, whatever the address") {
  auto options = named("elsewhere");
  options.host_id = "another-host";
  auto server = make_endpoint(options);
  auto client = make_endpoint(named("client"));
  for (auto& listen : every_listen()) {
    auto session = client->connect(server->listen(listen).value(), soon()).value();
    CHECK_FALSE(session->same_host());
    CHECK(session->peer_pid() == 0);
    CHECK(session->call_sync(kEcho, "x", soon())->body == "x");
  }
}

TEST_CASE("file descriptors: many messages with and without, none mixed up; refused on TCP") {
  Pair pair(abstract_name());
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  REQUIRE(eventually([&] { return pair.server->sessions().size() == 1; }));  // with the fds of its end
  int resting = open_fds();
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 60; ++i) {
        std::vector<UniqueFd> fds;
        std::vector<ino_t> inodes;
        for (int k = 0; k < i % 4; ++k) {
          fds.emplace_back(::memfd_create("fd-test", MFD_CLOEXEC));
          struct stat info;
          ::fstat(fds.back().get(), &info);
          inodes.push_back(info.st_ino);
        }
        (void)pair.session->post(kPost, std::string(static_cast<size_t>(i * 997), 'p'));
        auto answer = pair.session->call_sync(kEcho, "fds", soon(), std::move(fds));
        if (!answer.is_ok() || answer->fds.size() != inodes.size()) {
          ++wrong;
          continue;
        }
        for (size_t k = 0; k < inodes.size(); ++k) {
          struct stat info;
          ::fstat(answer->fds[k].get(), &info);
          wrong += info.st_ino != inodes[k];
          wrong += (::fcntl(answer->fds[k].get(), F_GETFD) & FD_CLOEXEC) == 0;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(eventually([&] { return open_fds() == resting; }));

  auto options = named("elsewhere");
  options.host_id = "another-host";
  auto far = make_endpoint(options);
  auto session = pair.client->connect(far->listen("tcp://127.0.0.1:0").value(), soon()).value();
  std::vector<UniqueFd> one;
  one.emplace_back(::memfd_create("fd-test", MFD_CLOEXEC));
  CHECK(session->call_sync(kEcho, "", soon(), std::move(one)).status().code() == Code::unsupported);
}

TEST_CASE("reuse gives the live session, also to threads that dial at once; reuse=false a new one") {
  Pair pair("tcp://127.0.0.1:0");
  auto address = pair.server->self().addresses.front();
  if (address.rfind("tcp", 0) != 0) address = pair.server->self().addresses.back();
  CHECK(pair.client->connect(address, soon()).value() == pair.session);
  auto other = pair.client->connect(address, soon(), false).value();
  CHECK(other != pair.session);
  pair.session->close({Code::cancelled, "enough"});
  CHECK(pair.session->call_sync(kEcho, "", soon()).status().code() == Code::cancelled);
  std::vector<SessionPtr> got(8);
  std::vector<std::thread> threads;
  for (auto& slot : got) threads.emplace_back([&] { slot = pair.client->connect(address, soon()).value(); });
  for (auto& thread : threads) thread.join();
  for (auto& session : got) CHECK(session == got[0]);
  CHECK(got[0]->call_sync(kEcho, "again", soon())->body == "again");
}

TEST_CASE("the end of a session: pending calls fail once, callbacks run once, later ones at once") {
  for (bool by_peer : {true, false}) {
    Pair pair("tcp://127.0.0.1:0");
    std::atomic<int> closed{0}, failed{0}, lane_closed{0};
    pair.session->on_close([&](const Status& s) { closed += s.is_ok() ? 100 : 1; });
    pair.session->on_lane_close([&](Lane&, const Status&) { ++lane_closed; });
    for (int i = 0; i < 10; ++i) {
      pair.session->call(kNever, "", soon(), [&](Result<Message> r) { failed += r.is_ok() ? 100 : 1; });
    }
    REQUIRE(pair.session->call_sync(kEcho, "", soon()).is_ok());
    if (by_peer) {
      pair.server->close();
    } else {
      pair.session->close({Code::closed, "done"});
      pair.session->close({Code::closed, "twice"});
    }
    CHECK(eventually([&] { return closed == 1 && failed == 10; }));
    CHECK(lane_closed == 2);
    CHECK_FALSE(pair.session->alive());
    CHECK(pair.session->status().code() == (by_peer ? Code::peer_lost : Code::closed));
    CHECK(pair.session->lanes().empty());
    pair.session->on_close([&](const Status&) { ++closed; });
    CHECK(closed == 2);
    CHECK_FALSE(pair.session->post(kPost, "").is_ok());
    std::atomic<bool> later{false};
    pair.session->call(kEcho, "", soon(), [&](Result<Message> r) { later = !r.is_ok(); });
    CHECK(eventually([&] { return later.load(); }));
  }
}

TEST_CASE("use after close, and close from inside a callback") {
  auto server = make_endpoint(named("server"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  auto client = make_endpoint(named("client"));
  auto session = client->connect(address, soon()).value();
  client->close();
  client->close();
  CHECK(client->connect(address, soon()).status().code() == Code::closed);
  CHECK(client->listen("tcp://127.0.0.1:0").status().code() == Code::closed);
  CHECK(session->call_sync(kEcho, "", soon()).status().code() == Code::closed);
  CHECK(eventually([&] { return server->sessions().empty(); }));

  auto suicidal = Endpoint::create(named("suicidal")).value();
  auto* raw = suicidal.get();
  raw->handle(kEcho, RunOn::inline_io, [raw](auto&, Message, Responder) { raw->close(); });
  auto there = raw->listen("tcp://127.0.0.1:0").value();
  auto other = make_endpoint(named("other"));
  auto s = other->connect(there, soon()).value();
  CHECK_FALSE(s->call_sync(kEcho, "", soon()).is_ok());
  CHECK(eventually([&] { return !s->alive(); }));
}

TEST_CASE("receive_until does not spin when the caller has spun already") {
  auto server = make_endpoint(named("server"));
  auto client = make_endpoint(named("client"));
  auto session = client->connect(server->listen("tcp://127.0.0.1:0").value(), soon()).value();
  int asked = 0;
  auto count = [&] {
    ++asked;
    return false;
  };
  CHECK_FALSE(session->receive_until(count, soon(), steady_ns()));
  CHECK(asked <= 4);  // before and after a sleep, not as often as 50 µs allow
}
