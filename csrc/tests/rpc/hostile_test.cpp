// Who may come in, and what becomes of those who may not: tokens, garbage, versions, silence, crowds.
#include <sys/stat.h>
#include <sys/un.h>

#include "rpc/auth.h"
#include "rpc/frame.h"
#include "rpc/helpers.h"
#include "rpc/wire.h"

using namespace rpc_test;

namespace {

EndpointOptions with_token(const char* name, const char* token) {
  auto options = named(name);
  options.token = token;
  return options;
}

std::vector<std::string> every_listen() {
  return {"tcp://127.0.0.1:0", "tcp://[::1]:0", "unix://@tm-hostile-" + to_hex(random_id()),
          "unix:///tmp/tm-hostile-" + to_hex(random_id())};
}

bool still_serves(const std::string& address, const char* token) {
  auto client = make_endpoint(with_token("friend", token));
  auto session = client->connect(address, soon());
  return session.is_ok() && (*session)->call_sync(kEcho, "hello", soon()).is_ok();
}

const std::atomic<bool> never{false};

}  // namespace

TEST_CASE("token: right works, wrong or missing on either side is auth on the client, and the server lives") {
  QuietLog quiet;
  for (auto& listen : every_listen()) {
    CAPTURE(listen);
    auto server = make_endpoint(with_token("server", "secret"));
    auto address = server->listen(listen).value();
    CHECK(still_serves(address, "secret"));
    for (const char* wrong : {"", "Secret", "secret2"}) {
      auto client = make_endpoint(with_token("stranger", wrong));
      int64_t start = steady_ns();
      auto status = client->connect(address, soon()).status();
      CHECK(status.code() == Code::auth);
      CHECK(status.message().find(address) != std::string::npos);
      CHECK(steady_ns() - start < 5'000'000'000);
    }
    CHECK(server->sessions().size() <= 1);
    CHECK(still_serves(address, "secret"));
    auto open = make_endpoint(named("no token"));
    auto client = make_endpoint(with_token("careful", "secret"));
    CHECK(client->connect(open->listen("tcp://127.0.0.1:0").value(), soon()).status().code() == Code::auth);
  }
}

TEST_CASE("a listener that other hosts can reach needs a token") {
  auto open = make_endpoint(named("open"));
  for (const char* address : {"tcp://0.0.0.0:0", "tcp://[::]:0"}) {
    auto status = open->listen(address).status();
    CHECK(status.code() == Code::auth);
    CHECK(status.message().find("token") != std::string::npos);
  }
  auto guarded = make_endpoint(with_token("guarded", "secret"));
  auto address = guarded->listen("tcp://0.0.0.0:0").value();
  CHECK(address.find("0.0.0.0") == std::string::npos);
  CHECK(still_serves(address, "secret"));
  auto loopback = "127.0.0.1" + address.substr(address.rfind(':'));
  CHECK(still_serves(loopback, "secret"));
}

TEST_CASE("garbage, HTTP, TLS, absurd lengths, half a frame: closed; nobody else notices") {
  QuietLog quiet;
  std::string hello(32, '\0');
  auto absurd = encode_header({FrameType::hello, 0, 0, 0x7fffffff, 0, 0});
  auto huge_payload = encode_header({FrameType::bulk, 0, 0, 0, uint64_t{1} << 62, 0});
  auto early_call = encode_header({FrameType::call, 0, kEcho, 4, 0, 1});
  std::vector<std::string> inputs = {
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11),
      std::string(100'000, '\xff'),
      std::string(absurd.data(), absurd.size()),
      std::string(huge_payload.data(), huge_payload.size()),
      std::string(early_call.data(), early_call.size()) + "body",
      "T",
      "TMK1",
  };
  auto server = make_endpoint(with_token("server", "secret"));
  auto friendly = make_endpoint(with_token("friend", "secret"));
  size_t sessions = 0;
  for (auto& listen : every_listen()) {
    CAPTURE(listen);
    auto address = server->listen(listen).value();
    auto session = friendly->connect(address, soon()).value();
    ++sessions;  // the accepting side has its fds a moment after the dialling one
    REQUIRE(eventually([&] { return server->sessions().size() == sessions; }));
    int resting = open_fds();
    std::vector<UniqueFd> strangers;
    for (auto& input : inputs) {
      strangers.push_back(raw_connect(address));
      (void)!::send(strangers.back().get(), input.data(), input.size(), MSG_NOSIGNAL);
      CHECK(session->call_sync(kEcho, "unaffected", soon()).is_ok());
    }
    for (auto& fd : strangers) CHECK(closed_by_peer(fd.get()));  // the incomplete ones after two seconds
    strangers.clear();
    CHECK(session->call_sync(kEcho, "unaffected", soon()).is_ok());
    CHECK(eventually([&] { return open_fds() == resting; }));
  }
}

TEST_CASE("connections that reset at once, before or inside the handshake, leave nothing behind") {
  QuietLog quiet;
  auto server = make_endpoint(named("server"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  int resting = open_fds();
  std::string hello = InitiatorHandshake(random_id(), "", address).hello();
  for (int i = 0; i < 500; ++i) {
    auto fd = raw_connect(address);
    Wire wire(fd.get(), soon(), never);
    if (i % 2) REQUIRE(wire.send(FrameType::hello, hello).is_ok());
    if (i % 4 == 3) (void)wire.expect(FrameType::challenge, Stage::unproven);
    linger reset{1, 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  }
  CHECK(still_serves(address, ""));
  CHECK(eventually([&] { return open_fds() <= resting; }));
}

TEST_CASE("every shortened or flipped handshake message is refused, and the server lives") {
  QuietLog quiet;
  auto server = make_endpoint(with_token("server", "secret"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  auto engine = random_id();
  for (int i = 0; i < 60; ++i) {
    auto fd = raw_connect(address);
    Wire wire(fd.get(), soon(3000), never);
    InitiatorHandshake handshake(engine, "secret", address);
    std::string hello = handshake.hello();
    if (i < 20) hello.resize(random_u64() % hello.size());
    REQUIRE(wire.send(FrameType::hello, hello).is_ok());
    auto challenge = wire.expect(FrameType::challenge, Stage::unproven);
    if (i < 20) {
      CHECK_FALSE(challenge.is_ok());
      continue;
    }
    REQUIRE(challenge.is_ok());
    std::string proof = *handshake.on_challenge(*challenge);
    proof[random_u64() % proof.size()] ^= static_cast<char>(1 << random_u64() % 8);
    REQUIRE(wire.send(FrameType::proof, proof).is_ok());
    CHECK(wire.expect(FrameType::welcome, Stage::unproven).status().code() == Code::auth);
  }
  CHECK(still_serves(address, "secret"));
}

TEST_CASE("a proof cannot be replayed") {
  QuietLog quiet;
  auto server = make_endpoint(with_token("server", "secret"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  InitiatorHandshake handshake(random_id(), "secret", address);
  std::string hello = handshake.hello(), proof;
  for (bool replay : {false, true}) {
    auto fd = raw_connect(address);
    Wire wire(fd.get(), soon(), never);
    REQUIRE(wire.send(FrameType::hello, hello).is_ok());
    auto challenge = wire.expect(FrameType::challenge, Stage::unproven).value();
    if (!replay) proof = *handshake.on_challenge(challenge);
    REQUIRE(wire.send(FrameType::proof, proof).is_ok());
    auto welcome = wire.expect(FrameType::welcome, Stage::unproven);
    CHECK(welcome.is_ok() == !replay);
    if (!replay) CHECK(handshake.on_welcome(*welcome).is_ok());
  }
}

TEST_CASE("versions that differ are told to both sides, with both numbers") {
  QuietLog quiet;
  auto server = make_endpoint(named("server"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  auto fd = raw_connect(address);
  Wire wire(fd.get(), soon(), never);
  InitiatorHandshake future(random_id(), "", address, {}, 77);
  REQUIRE(wire.send(FrameType::hello, future.hello()).is_ok());
  auto status = wire.expect(FrameType::challenge, Stage::unproven).status();
  CHECK(status.code() == Code::version_mismatch);
  CHECK(status.message().find("77") != std::string::npos);
  CHECK(status.message().find(std::to_string(kProtocolVersion)) != std::string::npos);

  AcceptorHandshake newer(
      random_id(), "", [](const Id128&) { return std::optional<Digest>(); }, 77);
  InitiatorHandshake ours(random_id(), "", "x");
  AcceptorHandshake same(random_id(), "", [](const Id128&) { return std::optional<Digest>(); });
  auto challenge = *same.on_hello(ours.hello());
  uint16_t version = 77;
  std::memcpy(challenge.data(), &version, sizeof version);
  CHECK(ours.on_challenge(challenge).status().code() == Code::version_mismatch);
  CHECK(newer.on_hello(InitiatorHandshake(random_id(), "", "x").hello()).status().code() == Code::version_mismatch);
}

TEST_CASE("a lane of an unknown session is refused; a lane with the wrong key is refused") {
  QuietLog quiet;
  auto server = make_endpoint(named("server"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  {
    auto fd = raw_connect(address);
    Wire wire(fd.get(), soon(), never);
    InitiatorHandshake lane(random_id(), std::string(32, 'k'), address, LaneClaim{random_id(), 2});
    REQUIRE(wire.send(FrameType::hello, lane.hello()).is_ok());
    CHECK(wire.expect(FrameType::challenge, Stage::unproven).status().code() == Code::peer_lost);
  }
  // A session id that exists: its digest is not its key.
  auto fd = raw_connect(address);
  Wire wire(fd.get(), soon(), never);
  InitiatorHandshake first(random_id(), "", address);
  REQUIRE(wire.send(FrameType::hello, first.hello()).is_ok());
  REQUIRE(
      wire.send(FrameType::proof, *first.on_challenge(*wire.expect(FrameType::challenge, Stage::unproven))).is_ok());
  REQUIRE(first.on_welcome(*wire.expect(FrameType::welcome, Stage::unproven)).is_ok());
  auto thief_fd = raw_connect(address);
  Wire thief_wire(thief_fd.get(), soon(), never);
  InitiatorHandshake thief(random_id(), "guess", address, LaneClaim{first.session().id, 0});
  REQUIRE(thief_wire.send(FrameType::hello, thief.hello()).is_ok());
  auto proof = *thief.on_challenge(*thief_wire.expect(FrameType::challenge, Stage::unproven));
  REQUIRE(thief_wire.send(FrameType::proof, proof).is_ok());
  CHECK(thief_wire.expect(FrameType::welcome, Stage::unproven).status().code() == Code::auth);
}

TEST_CASE("64 honest clients at once while silent and slow connections are held open") {
  QuietLog quiet;
  auto server = make_endpoint(with_token("server", "secret"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(raw_connect(address));
  std::atomic<bool> stop{false};
  std::thread slow([&] {  // a byte of a valid header now and then
    auto header = encode_header({FrameType::hello, 0, 0, 100, 0, 0});
    auto fd = raw_connect(address);
    for (size_t i = 0; i < header.size() && !stop; ++i, ::usleep(150'000)) {
      if (::send(fd.get(), &header[i], 1, MSG_NOSIGNAL) < 0) return;
    }
  });
  std::atomic<int> fine{0};
  std::vector<std::thread> clients;
  int64_t start = steady_ns();
  for (int i = 0; i < 64; ++i) clients.emplace_back([&] { fine += still_serves(address, "secret"); });
  for (auto& client : clients) client.join();
  CHECK(fine.load() == 64);
  CHECK(steady_ns() - start < 10'000'000'000);
  stop = true;
  slow.join();
  for (auto& fd : silent) CHECK(closed_by_peer(fd.get()));
}

TEST_CASE("after authentication: a frame out of place ends that session only") {
  QuietLog quiet;
  auto server = make_endpoint(named("server"));
  auto address = server->listen("tcp://127.0.0.1:0").value();
  auto fd = raw_connect(address);
  Wire wire(fd.get(), soon(), never);
  InitiatorHandshake h(random_id(), "", address);
  REQUIRE(wire.send(FrameType::hello, h.hello()).is_ok());
  REQUIRE(wire.send(FrameType::proof, *h.on_challenge(*wire.expect(FrameType::challenge, Stage::unproven))).is_ok());
  REQUIRE(h.on_welcome(*wire.expect(FrameType::welcome, Stage::unproven)).is_ok());
  REQUIRE(wire.expect(FrameType::identity, Stage::proven).is_ok());
  SUBCASE("an identity of somebody else") {
    Identity other;
    other.engine = random_id();
    ByteWriter w;
    other.encode(w);
    REQUIRE(wire.send(FrameType::ready, w.take()).is_ok());
    CHECK(closed_by_peer(fd.get()));
    CHECK(server->sessions().empty());
  }
  SUBCASE("an identity cut short") {
    REQUIRE(wire.send(FrameType::ready, "short").is_ok());
    CHECK(closed_by_peer(fd.get()));
  }
  CHECK(still_serves(address, ""));
}

TEST_CASE("addresses: IPv6 in brackets, with the scope of a link-local one; v4 over v6 is v4") {
  auto loop = parse_address("tcp://[::1]:7400");
  REQUIRE(loop.is_ok());
  CHECK(loop->host == "::1");
  CHECK(loop->port == 7400);
  CHECK(loop->to_string() == "tcp://[::1]:7400");
  CHECK(parse_address("[::1]:7400")->to_string() == "tcp://[::1]:7400");
  CHECK(parse_address("::1:7400").status().code() == Code::invalid_argument);
  for (const char* bad : {"[[]:0", "[]]:0", "a]:1", "tcp://[[::1]:1"})
    CHECK(parse_address(bad).status().code() == Code::invalid_argument);
  auto scoped = parse_address("tcp://[fe80::1%lo]:80");
  REQUIRE(scoped.is_ok());
  CHECK(scoped->host == "fe80::1%lo");
  auto resolved = resolve(*scoped, soon());
  REQUIRE(resolved.is_ok());
  CHECK(resolved->front().host() == "fe80::1%lo");
  CHECK(resolved->front().to_string() == "tcp://[fe80::1%lo]:80");
  CHECK(resolve(*parse_address("[::1]:5"), soon())->front().host() == "::1");
  CHECK(resolve(*parse_address("[::ffff:10.1.2.3]:5"), soon())->front().host() == "10.1.2.3");
  CHECK(resolve(*parse_address("10.1.2.3:5"), soon())->front().host() == "10.1.2.3");
}

TEST_CASE("a lane may be bound to a local address; one that is not ours is an error that says so") {
  auto options = named("client");
  options.host_id = "far";
  auto server = make_endpoint(named("server"));
  auto client = make_endpoint(options);
  auto session = client->connect(server->listen("tcp://127.0.0.1:0").value(), soon()).value();
  LaneTarget target{.from = "127.0.0.9"};
  auto lane = session->open_lane(target, soon());
  REQUIRE(lane.is_ok());
  CHECK((*lane)->rail() == Rail{"127.0.0.9", "127.0.0.1"});
  CHECK(session->lanes().size() == 2);
  CHECK(session->open_lane({.from = "192.0.2.7"}, soon()).status().code() == Code::invalid_argument);
  CHECK(session->open_lane({.from = "::1"}, soon()).status().code() == Code::invalid_argument);
  CHECK(session->open_lane({.device = "no-such-nic"}, soon()).status().code() == Code::invalid_argument);
  CHECK(session->lanes().size() == 2);
  auto progress = (*lane)->progress();
  CHECK(progress.waiting == 0);
  CHECK(progress.acknowledged == (*lane)->bytes_sent());
}

TEST_CASE("addresses: unknown schemes and malformed ones are named") {
  auto endpoint = make_endpoint(named("x"));
  auto code = [&](const char* address) {
    auto status = endpoint->connect(address, soon(2000)).status();
    CHECK(status.message().find(address) != std::string::npos);
    return status.code();
  };
  CHECK(code("rdma://10.0.0.1:1") == Code::unsupported);
  CHECK(code("http://x:80") == Code::unsupported);
  for (const char* bad :
       {"tcp://", "tcp://host", "tcp://host:", "tcp://host:99999", "tcp://host:12x", "tcp://:80", "tcp://[::1:80",
        "tcp://a:b:80", "unix://", "unix://@", "unix://relative", "plain", "tcp://127.0.0.1:0"}) {
    CAPTURE(bad);
    CHECK(code(bad) == Code::invalid_argument);
  }
  std::string long_path = "unix:///" + std::string(200, 'p');
  CHECK(code(long_path.c_str()) == Code::invalid_argument);
  CHECK(endpoint->listen("ipx://1").status().code() == Code::unsupported);
}

TEST_CASE("a stale socket file is replaced, a live one is not, and ours is removed at the end") {
  std::string path = "/tmp/tm-stale-" + to_hex(random_id()), address = "unix://" + path;
  {
    // A killed owner leaves its file behind.
    UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un un{};
    un.sun_family = AF_UNIX;
    std::memcpy(un.sun_path, path.data(), path.size());
    REQUIRE(::bind(dead.get(), reinterpret_cast<sockaddr*>(&un), sizeof un) == 0);
  }
  struct stat info;
  REQUIRE(::stat(path.c_str(), &info) == 0);
  auto client = make_endpoint(named("client"));
  CHECK(client->connect(address, soon()).status().code() == Code::peer_lost);
  auto server = make_endpoint(named("server"));
  REQUIRE(server->listen(address).is_ok());
  CHECK(still_serves(address, ""));
  auto rival = make_endpoint(named("rival"));
  CHECK(rival->listen(address).status().code() == Code::io);
  CHECK(still_serves(address, ""));
  server->close();
  CHECK(::stat(path.c_str(), &info) != 0);
}
