// SpinGate: spins are tried three in a row, then left out for a while, for longer each time, and at most for so long.
#include "rpc/spin_gate.h"

#include "rpc/auth.h"
#include "rpc/frame.h"
#include "rpc/helpers.h"
#include "rpc/wire.h"

using namespace rpc_test;
using torch_mooncake::rpc::SpinGate;

TEST_CASE("spin gate: three that met nothing, then a pause that grows to its limit; one that met something ends it") {
  SpinGate gate;
  auto spins_until_shut = [&] {
    int spins = 0;
    for (; gate.open(); ++spins) gate.spun(false);
    return spins;
  };
  auto waits_until_open = [&] {
    int waits = 1;  // the one that found it shut
    for (; !gate.open(); ++waits) {
    }
    return waits;
  };
  int before = 0;
  for (int i = 0; i < 20; ++i) {
    CAPTURE(i);
    CHECK(spins_until_shut() == (i == 0 ? 3 : 2));  // waits_until_open() has had the first
    CHECK_FALSE(gate.is_open());
    int pause = waits_until_open();
    gate.spun(false);
    CHECK(pause >= before);
    CHECK(pause <= 128);
    before = pause;
  }
  CHECK(before == 128);
  gate.spun(true);
  CHECK(spins_until_shut() == 3);
  CHECK(waits_until_open() == 4);
}

TEST_CASE("hot calls: only those whose caller waits for the answer ask the peer to look out for the next") {
  auto options = named("server");
  options.heartbeat_ms = 0;
  auto server = make_endpoint(options);
  auto address = server->listen("tcp://127.0.0.1:0").value();
  auto fd = raw_connect(address);  // the peer, which reads what comes frame by frame
  const std::atomic<bool> never{false};
  Wire wire(fd.get(), soon(), never);
  Identity self;
  self.engine = random_id();
  InitiatorHandshake h(self.engine, "", address);
  REQUIRE(wire.send(FrameType::hello, h.hello()).is_ok());
  REQUIRE(wire.send(FrameType::proof, *h.on_challenge(*wire.expect(FrameType::challenge, Stage::unproven))).is_ok());
  REQUIRE(h.on_welcome(*wire.expect(FrameType::welcome, Stage::unproven)).is_ok());
  REQUIRE(wire.expect(FrameType::identity, Stage::proven).is_ok());
  ByteWriter identity;
  self.encode(identity);
  REQUIRE(wire.send(FrameType::ready, identity.take()).is_ok());
  REQUIRE(eventually([&] { return server->sessions().size() == 1; }));
  auto session = server->sessions()[0];
  auto ignore = [](Result<Message>) {};
  session->call(kEcho, "later", Deadline::never(), ignore);
  CHECK(wire.expect(FrameType::call, Stage::session).is_ok());
  session->call(kEcho, "soon", Deadline::never(), ignore, {}, true);
  CHECK(wire.expect(FrameType::hot_call, Stage::session).is_ok());
  CHECK(session->call_sync(kEcho, "now", soon(100)).status().code() == Code::deadline_exceeded);
  CHECK(wire.expect(FrameType::hot_call, Stage::session).is_ok());
}
