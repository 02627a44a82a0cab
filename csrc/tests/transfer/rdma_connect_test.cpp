// RDMA over a fake driver: settings, GIDs, and how connections are made, checked, closed to make room and given up.
#include "transfer/rdma/gid.h"
#include "transfer/rdma/options.h"
#include "transfer/rdma_rails.h"

namespace transfer_test {
namespace {

using namespace torch_mooncake::transfer::rdma;

Gid gid(const char* address, GidKind kind = GidKind::roce_v2, uint8_t index = 0, uint32_t interface = 0) {
  auto ip = must(IpAddress::parse(address));
  Gid out{.raw = ip.bytes, .kind = kind, .index = index, .interface = interface};
  if (ip.is_v6) return out;
  out.raw = {};
  out.raw[10] = out.raw[11] = 0xff;
  std::copy(ip.bytes.begin(), ip.bytes.begin() + 4, out.raw.begin() + 12);
  return out;
}

// The positions, as "ours-theirs ours-theirs".
std::string ranked(std::vector<Gid> ours, std::vector<Gid> theirs,
                   const std::function<Route(const IpAddress&, uint32_t)>& route) {
  std::string out;
  for (auto& pair : rank_pairs(ours, theirs, route))
    out += (out.empty() ? "" : " ") + std::to_string(pair.ours) + "-" + std::to_string(pair.theirs);
  return out;
}

}  // namespace

TEST_CASE("settings: what they mean, and what makes no sense") {
  auto all = must(RdmaOptions::parse(
      "sl=3,tc=106,pkey=0x8001,gid=5,mtu=1024,timeout=18,retries=2,relaxed=1,odp=1,lazy=1,mr=65536,qps=100"));
  CHECK(all.service_level == 3);
  CHECK(all.traffic_class == 106);
  CHECK(all.pkey == 0x8001);
  CHECK(all.gid_index == 5);
  CHECK(all.mtu == 1024);
  CHECK(all.timeout == 18);
  CHECK(all.retries == 2);
  CHECK(all.relaxed_ordering);
  CHECK(all.on_demand);
  CHECK(all.lazy);
  CHECK(all.max_mr_nbytes == 65536);
  CHECK(all.max_queue_pairs == 100);
  CHECK(must(RdmaOptions::parse("")).gid_index == -1);
  for (auto* bad : {"sl", "sl=", "sl=16", "sl=-1", "tc=256", "mtu=1000", "mtu=8192", "x=1", "timeout=0", "relaxed=2",
                    "mr=4095", "sl=1x", "=1", "sl=1,,"})
    CHECK_MESSAGE(RdmaOptions::parse(bad).status().code() == Code::invalid_argument, bad);
}

TEST_CASE("GIDs are paired by kind, family and route, the most promising first") {
  auto direct = [](const IpAddress&, uint32_t) { return Route::direct; };
  const Gid v4 = gid("10.0.0.1"), other_v4 = gid("10.0.0.2"), v6 = gid("fd00::1"), local = gid("fe80::1");
  const Gid old_v4 = gid("10.0.0.1", GidKind::roce_v1);
  CHECK(ranked({v4}, {v6}, direct) == "");
  CHECK(ranked({v4}, {old_v4}, direct) == "");
  CHECK(ranked({v6}, {local}, direct) == "");
  CHECK(ranked({old_v4, local, v4}, {old_v4, local, other_v4}, direct) == "2-2 1-1 0-0");
  // By the routing table: the first interface has no way there, the second one through a router, the third its own.
  auto by_interface = [](const IpAddress&, uint32_t interface) {
    return interface == 1 ? Route::none : interface == 2 ? Route::by_gateway : Route::direct;
  };
  CHECK(ranked({gid("10.0.0.1", GidKind::roce_v2, 0, 1), gid("10.0.0.3", GidKind::roce_v2, 1, 2),
                gid("10.0.0.5", GidKind::roce_v2, 2, 3)},
               {other_v4}, by_interface) == "2-0 1-0 0-0");
  CHECK(ranked({gid("fe80::1", GidKind::infiniband)}, {gid("fe80::2", GidKind::infiniband)}, direct) == "0-0");
  CHECK(v4.to_string() == "RoCE v2 10.0.0.1");
  CHECK(v6.to_string() == "RoCE v2 fd00::1");
}

TEST_CASE("the routing table is asked: loopback is at hand") {
  CHECK(find_route(must(IpAddress::parse("127.0.0.1")), 0) == Route::direct);
  CHECK(find_route(must(IpAddress::parse("127.0.0.1")), 0x7fff'fff0) == Route::none);  // no such interface
}

TEST_CASE("a pair of GIDs that does not get through is given up for one that does") {
  auto here = std::make_shared<FakeDriver>(1), there = std::make_shared<FakeDriver>(1);
  here->device(0).set_gids({gid("10.0.0.1"), gid("10.1.0.1"), gid("fd00::1")}, 2);
  there->device(0).set_gids({gid("10.0.0.2"), gid("fd00::2")}, 0);
  auto a = must(Engine::create(options_over(here, "a"))), b = must(Engine::create(options_over(there, "b")));
  Memory source(Way::rdma, kMiB), target(Way::rdma, kMiB);
  fill(source.data, kMiB, 1);
  auto local = source.register_in(*a);
  auto peer = must(a->connect(b->addresses().front(), soon()));
  auto remote = must(peer->open(target.register_in(*b)->descriptor(), soon()));
  REQUIRE_OK(must(a->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
  CHECK(mismatch(target.data, kMiB, 1) == kMiB);
  // Of no common kind: the error names them all.
  there->device(0).set_gids({gid("10.0.0.2", GidKind::roce_v1)}, 0);
  auto c = must(Engine::create(options_over(std::make_shared<FakeDriver>(1), "c")));
  auto refused = must(c->connect(b->addresses().front(), soon()))->open(target.register_in(*b)->descriptor(), soon());
  REQUIRE(!refused.is_ok());
  CHECK(refused.status().message().find("no two GIDs of one kind") != std::string::npos);
  CHECK(refused.status().message().find("RoCE v1 10.0.0.2") != std::string::npos);
  for (auto& engine : {a, b, c}) engine->close();
}

TEST_CASE("a key that the NIC has handed out again reads nothing that counts") {
  Rails rails(2, kMiB);
  REQUIRE_OK(rails.read(kMiB)->wait());
  fake_verbs::FakeRegistration::keys_live_on = true;
  REQUIRE_OK(rails.b->deregister(rails.region, soon()));
  Status status = rails.read(kMiB)->wait();
  fake_verbs::FakeRegistration::keys_live_on = false;
  CHECK(status.code() == Code::key_not_found);
  CHECK(status.message().find("while it was being read") != std::string::npos);
  CHECK(rails.a->stats().failovers == 0);
}

TEST_CASE("memory is registered when RDMA first wants it, if the user says so") {
  Rails rails(2, 4 * kMiB, 8 << 20, "lazy=1");
  fill(rails.source.data, 4 * kMiB, 2);
  const uint32_t before = fake_verbs::Fabric::instance().keys_used;
  auto idle = rails.target.register_in(*rails.b);
  CHECK(fake_verbs::Fabric::instance().keys_used == before);
  REQUIRE_OK(rails.write(4 * kMiB)->wait());  // that of this side, too
  CHECK(fake_verbs::Fabric::instance().keys_used == before + 2);
  CHECK(mismatch(rails.target.data, 4 * kMiB, 2) == 4 * kMiB);
  REQUIRE_OK(rails.b->deregister(idle, soon()));
  CHECK(rails.peer->open(idle->descriptor(), soon()).status().code() == Code::key_not_found);
}

TEST_CASE("queue pairs of idle peers make room for those that are needed") {
  auto here = std::make_shared<FakeDriver>(2);
  for (size_t i : {0, 1}) here->device(i).set_max_pairs(3);
  auto source = must(Engine::create(options_over(here, "source")));
  Memory memory(Way::rdma, kMiB);
  fill(memory.data, kMiB, 3);
  auto local = memory.register_in(*source);
  struct Target {
    EnginePtr engine;
    std::unique_ptr<Memory> memory;
    RemoteRegionPtr remote;
  };
  std::vector<Target> targets;
  for (int i = 0; i < 8; ++i) {
    Target t{must(Engine::create(options_over(std::make_shared<FakeDriver>(2), "t" + std::to_string(i)))),
             std::make_unique<Memory>(Way::rdma, kMiB), nullptr};
    auto peer = must(source->connect(t.engine->addresses().front(), soon()));
    t.remote = must(peer->open(t.memory->register_in(*t.engine)->descriptor(), soon()));
    targets.push_back(std::move(t));
  }
  for (int round = 0; round < 3; ++round) {
    std::vector<OpPtr> ops;
    for (auto& target : targets) {
      std::memset(target.memory->data, 0, kMiB);
      ops.push_back(must(source->write({{local, 0, target.remote, 0, kMiB}}, {.deadline = soon(), .notify = "x"})));
    }
    for (size_t i = 0; i < ops.size(); ++i) {
      REQUIRE_OK(ops[i]->wait());
      CHECK(mismatch(targets[i].memory->data, kMiB, 3) == kMiB);
    }
    for (size_t i : {0, 1}) CHECK(here->device(i).pairs() <= 3);
  }
  for (auto& target : targets) CHECK(target.engine->stats().notifications == 3);
  source->close();
  for (auto& target : targets) target.engine->close();
}

TEST_CASE("no rail for a while: what waits fails, and the next op finds the rails that have come back") {
  Rails rails(2, kMiB);
  for (size_t i : {0, 1}) rails.here->device(i).set_port(false);
  rails.wait_for_rails(0);
  auto start = steady_ns();
  Status status = rails.write(kMiB, {.deadline = soon(30'000)})->wait();
  CHECK_MESSAGE(status.code() == Code::peer_lost, status.to_string());
  CHECK(steady_ns() - start < 20'000'000'000);
  for (size_t i : {0, 1}) rails.here->device(i).set_port(true);
  rails.wait_for_rails(2);
  REQUIRE_OK(rails.write(kMiB)->wait());
}

TEST_CASE("no rail for a while, and TCP is allowed: the op ends well over it, every byte and the notification") {
  for (bool writes : {true, false}) {
    CAPTURE(writes);
    auto here = std::make_shared<FakeDriver>(2), there = std::make_shared<FakeDriver>(2);
    auto with_tcp = [](auto driver, const char* name) {
      auto options = options_over(driver, name);
      options.transports = {"rdma", "tcp"};
      return must(Engine::create(options));
    };
    auto a = with_tcp(here, "a"), b = with_tcp(there, "b");
    constexpr size_t kBytes = 64 * kMiB;
    Memory source(Way::rdma, kBytes), target(Way::rdma, kBytes);
    fill(writes ? source.data : target.data, kBytes, 4);
    auto local = source.register_in(*a);
    auto peer = must(a->connect(b->addresses().front(), soon()));
    auto remote = must(peer->open(target.register_in(*b)->descriptor(), soon()));
    CHECK(remote->transport() == "rdma");
    for (size_t i : {0, 1}) here->device(i).set_delay_us(500);
    OpOptions options{.deadline = soon(), .notify = "there"};
    std::vector<Slice> slices = {{local, 0, remote, 0, kBytes}};
    auto op = must(writes ? a->write(slices, options) : a->read(slices, options));
    usleep(20'000);
    for (size_t i : {0, 1}) here->device(i).set_port(false);
    REQUIRE_OK(op->wait());
    CHECK(op->bytes_done() == kBytes);
    CHECK(mismatch(writes ? target.data : source.data, kBytes, 4) == kBytes);
    CHECK(must(b->next_notification(soon())).data == "there");
    auto sent = writes ? a->stats().bytes_sent : a->stats().bytes_received;
    CHECK(sent["rdma"] + sent["tcp"] + sent["unix"] == kBytes);
    CHECK(sent["tcp"] + sent["unix"] > 0);
    // The next does not wait, and when the rails are back they are used again.
    REQUIRE_OK(must(a->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
    for (size_t i : {0, 1}) here->device(i).set_port(true);
    auto by_rdma = [&] {
      auto before = a->stats().bytes_sent["rdma"];
      REQUIRE_OK(must(a->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
      return a->stats().bytes_sent["rdma"] == before + kMiB;
    };
    CHECK(eventually(by_rdma));
    CHECK(b->stats().notifications == 1);
    a->close();
    b->close();
  }
}

TEST_CASE("both sides connect at once, many times") {
  for (int round = 0; round < 20; ++round) {
    Rails rails(2, kMiB);
    auto back = must(rails.b->connect(rails.a->addresses().front(), soon()));
    auto remote = must(back->open(rails.local->descriptor(), soon()));
    auto there = must(rails.b->write({{rails.region, 0, remote, 0, kMiB / 2}}, {.deadline = soon()}));
    auto here = must(rails.a->write({{rails.local, kMiB / 2, rails.remote, kMiB / 2, kMiB / 2}}, {.deadline = soon()}));
    REQUIRE_OK(there->wait());
    REQUIRE_OK(here->wait());
  }
}

}  // namespace transfer_test
