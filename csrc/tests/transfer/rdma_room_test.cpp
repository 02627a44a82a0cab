// RDMA over a fake driver: too little room for queue pairs, connections that fail or take long, and no rail at all.
#include <future>

#include "transfer/rdma_rails.h"

namespace transfer_test {
namespace {

// One rail to each of several engines, from one NIC.
struct Star {
  std::shared_ptr<FakeDriver> here;
  EnginePtr source;
  Memory memory{Way::rdma, kMiB};
  RegionPtr local;
  struct Target {
    EnginePtr engine;
    std::unique_ptr<Memory> memory;
    RemoteRegionPtr remote;
  };
  std::vector<Target> targets;

  explicit Star(int nics = 1) : here(std::make_shared<FakeDriver>(nics)) {
    source = must(Engine::create(options_over(here, "source")));
    fill(memory.data, kMiB, 3);
    local = memory.register_in(*source);
  }
  void add_target() {
    auto driver = std::make_shared<FakeDriver>(static_cast<int>(here->count()));
    Target t{must(Engine::create(options_over(driver, "t" + std::to_string(targets.size())))),
             std::make_unique<Memory>(Way::rdma, kMiB), nullptr};
    auto peer = must(source->connect(t.engine->addresses().front(), soon()));
    t.remote = must(peer->open(t.memory->register_in(*t.engine)->descriptor(), soon()));
    targets.push_back(std::move(t));
  }
  OpPtr write(size_t i, int64_t ms = 20'000) {
    return must(source->write({{local, 0, targets[i].remote, 0, kMiB}}, {.deadline = soon(ms)}));
  }
  size_t rails_up() const {
    size_t up = 0;
    for (auto& lane : source->stats().lanes) up += lane.transport == "rdma" && lane.alive;
    return up;
  }
  ~Star() {
    source->close();
    for (auto& target : targets) target.engine->close();
  }
};

// By an engine's own mind, on a thread of its own; whether that was soon over.
template <typename F>
bool soon_over(std::future<F>& future) {
  return future.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
}

}  // namespace

TEST_CASE("a lane that is closed to make room, after hope was lost, is asked for by the next op") {
  Rails rails(1, kMiB);
  rails.here->device(0).set_port(false);
  rails.wait_for_rails(0);
  CHECK(rails.write(kMiB)->wait().code() == Code::peer_lost);
  rails.here->device(0).set_max_pairs(0);
  rails.here->device(0).set_port(true);
  // Its next attempt finds no room, and as nothing waits it is given up until something does.
  CHECK(eventually([&] { return rails.a->transport_for(rails.peer) == "rdma"; }));
  rails.here->device(0).set_max_pairs(2);
  REQUIRE_OK(rails.write(kMiB)->wait());
}

TEST_CASE("no room for a queue pair is waited for: that is no failure of the rail") {
  Rails rails(1, kMiB);
  rails.here->device(0).set_delay_us(100'000);
  rails.here->device(0).fail_request(0, fake_verbs::Outcome::retries_exceeded);
  rails.here->device(0).set_max_pairs(0);
  auto op = rails.write(kMiB);
  CHECK_FALSE(eventually([&] { return op->ended(); }, 4000));  // longer than a rail that is down is waited for
  rails.here->device(0).set_delay_us(0);
  rails.here->device(0).set_max_pairs(2);
  REQUIRE_OK(op->wait());
}

TEST_CASE("a lane that was closed long ago has all the time of a new one when it is made again") {
  Star star;
  star.add_target();
  star.here->device(0).set_max_pairs(1);
  star.add_target();  // in whose favour the first one's lane is closed
  REQUIRE_OK(star.write(1)->wait());
  usleep(3'200'000);  // longer than hope lasts
  star.here->device(0).set_max_pairs(2);
  star.here->device(0).fail_connects(1);
  REQUIRE_OK(star.write(0)->wait());
}

TEST_CASE("lanes that were closed come back with the next op, also when others could carry it") {
  Star star(2);
  star.add_target();
  CHECK(eventually([&] { return star.rails_up() == 2; }));
  star.here->device(1).set_max_pairs(1);
  star.add_target();
  CHECK(eventually([&] { return star.rails_up() == 3; }));
  star.here->device(1).set_max_pairs(2);
  for (size_t i : {0, 1}) REQUIRE_OK(star.write(i)->wait());
  CHECK(eventually([&] { return star.rails_up() == 4; }));
}

TEST_CASE("an attempt to connect that fails leaves nothing behind at the peer") {
  auto here = std::make_shared<FakeDriver>(1), there = std::make_shared<FakeDriver>(1);
  here->device(0).fail_connects(3);
  auto a = must(Engine::create(options_over(here, "a"))), b = must(Engine::create(options_over(there, "b")));
  Memory target(Way::rdma, kMiB);
  auto region = target.register_in(*b);
  auto peer = must(a->connect(b->addresses().front(), soon()));
  CHECK(eventually([&] { return peer->open(region->descriptor(), soon()).is_ok(); }));
  CHECK(eventually([&] { return there->device(0).pairs() == 1; }, 3000));
  a->close();
  b->close();
}

TEST_CASE("a connection that takes the kernel long, or is never answered, holds up nobody") {
  auto here = std::make_shared<FakeDriver>(2), there = std::make_shared<FakeDriver>(2);
  here->device(1).connecting.close();
  auto a = must(Engine::create(options_over(here, "a"))), b = must(Engine::create(options_over(there, "b")));
  Memory source(Way::rdma, kMiB), target(Way::rdma, kMiB);
  auto local = source.register_in(*a), region = target.register_in(*b);
  auto work = std::async(std::launch::async, [&] {
    auto peer = must(a->connect(b->addresses().front(), soon()));
    auto remote = must(peer->open(region->descriptor(), soon()));
    (void)a->stats();
    return must(a->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait();
  });
  CHECK(soon_over(work));
  here->device(1).connecting.open();
  REQUIRE_OK(work.get());
  a->close();
  b->close();
}

TEST_CASE("a queue pair that takes the kernel long to fail, or to destroy, holds up its own lane alone") {
  Rails rails(2, 4 * kMiB);
  auto& device = rails.here->device(0);
  for (auto* gate : {&device.failing, &device.destroying}) {
    gate->close();
    device.set_delay_us(1000);
    device.fail_request(0, fake_verbs::Outcome::failed);
    std::vector<OpPtr> first;
    while (gate->waiting() == 0) {  // how many requests the scheduler gives that rail is its choice
      first.push_back(rails.write(4 * kMiB));
      usleep(2000);
    }
    auto work = std::async(std::launch::async, [&] {
      (void)rails.a->stats();
      return rails.write(kMiB)->wait();
    });
    CHECK(soon_over(work));
    gate->open();
    REQUIRE_OK(work.get());
    for (auto& op : first) REQUIRE_OK(op->wait());
    rails.wait_for_rails(2);
  }
}

TEST_CASE("submitting waits for nobody, not even for a doorbell that hangs") {
  Rails rails(1, kMiB);
  fill(rails.source.data, kMiB, 9);
  auto& gate = rails.here->device(0).posting;
  gate.close();
  auto first = std::async(std::launch::async, [&] { return rails.write(kMiB); });
  CHECK(eventually([&] { return gate.waiting() == 1; }));
  std::vector<OpPtr> ops;
  auto more = std::async(std::launch::async, [&] {
    for (int i = 0; i < 100; ++i) ops.push_back(rails.write(kMiB));
  });
  CHECK(soon_over(more));
  gate.open();
  more.get();
  REQUIRE_OK(first.get()->wait());
  for (auto& op : ops) REQUIRE_OK(op->wait());
  CHECK(mismatch(rails.target.data, kMiB, 9) == kMiB);
}

TEST_CASE("many threads submit at once: every op ends, every byte arrives") {
  Rails rails(2, 8 * kMiB);
  fill(rails.source.data, 8 * kMiB, 11);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::vector<OpPtr> ops;
      for (uint64_t i = 0; i < 128; ++i) {
        const uint64_t at = t * kMiB + i * 8192;
        ops.push_back(must(rails.a->write({{rails.local, at, rails.remote, at, 8192}}, {.deadline = soon()})));
      }
      for (auto& op : ops) REQUIRE_OK(op->wait());
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(mismatch(rails.target.data, 8 * kMiB, 11) == 8 * kMiB);
}

TEST_CASE("pinning, when memory is first used, takes its time from nobody else") {
  Rails rails(1, kMiB, 8 << 20, "lazy=1");
  auto c = must(Engine::create(options_over(std::make_shared<FakeDriver>(1), "c")));
  Memory more(Way::rdma, kMiB), others(Way::rdma, kMiB);
  auto slow = more.register_in(*rails.a);
  auto theirs = others.register_in(*c);
  REQUIRE_OK(rails.write(kMiB)->wait());
  auto& gate = rails.here->device(0).registering;
  gate.close();
  OpOptions options{.deadline = Deadline::after_ms(300)};
  auto op = must(rails.a->write({{slow, 0, rails.remote, 0, kMiB}}, options));  // returns at once
  CHECK(op->wait().code() == Code::deadline_exceeded);
  // The table of regions is anybody's; the region itself stays until its pinning has ended.
  CHECK(rails.a->region_at(more.data, 16) == slow);
  CHECK(rails.a->deregister(slow, soon(200)).code() == Code::busy);
  REQUIRE_OK(rails.write(kMiB)->wait());
  // Others connect to it, and are connected to.
  auto back = std::async(std::launch::async, [&] {
    auto peer = must(rails.b->connect(c->addresses().front(), soon()));
    return peer->open(theirs->descriptor(), soon()).status();
  });
  CHECK(soon_over(back));
  gate.open();
  REQUIRE_OK(back.get());
  REQUIRE_OK(rails.a->deregister(slow, soon()));
  c->close();
}

TEST_CASE("a peer whose NIC does not answer connect in time: TCP is the way, and nobody's deadline has passed") {
  auto here = std::make_shared<FakeDriver>(1), there = std::make_shared<FakeDriver>(1);
  auto with_tcp = [](auto driver, const char* name) {
    auto options = options_over(driver, name);
    options.transports = {"rdma", "tcp"};
    return must(Engine::create(options));
  };
  auto a = with_tcp(here, "a"), b = with_tcp(there, "b");
  there->device(0).creating.close();
  Memory target(Way::rdma, kMiB);
  auto region = target.register_in(*b);
  auto opened = must(a->connect(b->addresses().front(), soon()))->open(region->descriptor(), soon());
  there->device(0).creating.open();
  REQUIRE_OK(opened.status());
  CHECK((*opened)->transport() != "rdma");
  a->close();
  b->close();
}

TEST_CASE("a region that its owner's NICs refuse when it is first opened is reached over TCP") {
  auto make = [](const char* name) {
    auto options = options_over(std::make_shared<FakeDriver>(1), name, "lazy=1");
    options.transports = {"rdma", "tcp"};
    return must(Engine::create(options));
  };
  auto a = make("a"), b = make("b");
  Memory source(Way::rdma, kMiB), target(Way::rdma, kMiB);
  auto local = source.register_in(*a), region = target.register_in(*b);
  fill(source.data, kMiB, 13);
  fake_verbs::FakeDevice::on_device = [&](const void* data) { return data == target.data; };
  auto opened = must(a->connect(b->addresses().front(), soon()))->open(region->descriptor(), soon());
  fake_verbs::FakeDevice::on_device = nullptr;
  auto remote = must(std::move(opened));
  CHECK(remote->transport() == "tcp");
  REQUIRE_OK(must(a->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
  CHECK(mismatch(target.data, kMiB, 13) == kMiB);
  a->close();
  b->close();
}

TEST_CASE("an op of several instalments goes on over TCP: what each has moved is counted once, and who moved it") {
  auto here = std::make_shared<FakeDriver>(2), there = std::make_shared<FakeDriver>(2);
  auto make = [](auto driver, const char* name) {
    auto options = options_over(driver, name);
    options.transports = {"rdma", "tcp"};
    options.foreground_rate = 400 << 20;
    return must(Engine::create(options));
  };
  auto a = make(here, "a"), b = make(there, "b");
  constexpr size_t kBytes = 32 * kMiB;
  Memory source(Way::rdma, kBytes), target(Way::rdma, kBytes);
  fill(target.data, kBytes, 4);
  auto local = source.register_in(*a);
  auto peer = must(a->connect(b->addresses().front(), soon()));
  auto remote = must(peer->open(target.register_in(*b)->descriptor(), soon()));
  for (size_t i : {0, 1}) here->device(i).set_delay_us(2000);
  auto op = must(a->read({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}));
  CHECK(eventually([&] { return op->bytes_done() > 4 * kMiB; }));
  for (size_t i : {0, 1}) here->device(i).set_port(false);
  REQUIRE_OK(op->wait());
  CHECK(op->bytes_done() == kBytes);
  CHECK(mismatch(source.data, kBytes, 4) == kBytes);
  CHECK(op->transport().find("rdma+") == 0);
  // One of which RDMA moves nothing says so.
  auto other = must(a->read({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}));
  REQUIRE_OK(other->wait());
  CHECK(other->transport().find("rdma") == std::string::npos);
  a->close();
  b->close();
}

}  // namespace transfer_test
