// RDMA over a fake driver: which NICs carry what. NICs that are gone, those that are near, and records that name fewer.
#include <thread>

#include "transfer/descriptor.h"
#include "transfer/rdma/memory.h"
#include "transfer/rdma_rails.h"

namespace transfer_test {

TEST_CASE("a NIC that is taken away costs no time, and what is registered later does without it") {
  for (bool ours : {true, false}) {
    CAPTURE(ours);
    Rails rails(2, 4 * kMiB);
    auto& driver = ours ? rails.here : rails.there;
    driver->device(0).take_away();
    if (ours) CHECK(eventually([&] { return rails.rails_up() == 1; }));
    const int armings = driver->device(0).armings();
    auto& engine = ours ? rails.a : rails.b;
    Memory memory(Way::rdma, 4 * kMiB);
    auto region = must(engine->register_memory(memory.data, 4 * kMiB, {}));
    auto remote = ours ? rails.remote : must(rails.peer->open(region->descriptor(), soon()));
    auto& local = ours ? region : rails.local;
    auto &from = ours ? memory : rails.source, &to = ours ? rails.target : memory;
    fill(from.data, 4 * kMiB, 5);
    for (int i = 0; i < 8; ++i)
      REQUIRE_OK(must(rails.a->write({{local, 0, remote, 0, 4 * kMiB}}, {.deadline = soon()}))->wait());
    CHECK(mismatch(to.data, 4 * kMiB, 5) == 4 * kMiB);
    usleep(200'000);
    CHECK(driver->device(0).armings() - armings < 100);  // it is left alone
  }
}

TEST_CASE("a region whose record names fewer NICs than there are rails is reached by those") {
  Rails rails(2, kMiB);
  Memory memory(Way::rdma, kMiB);
  auto descriptor = must(transfer::Descriptor::decode(memory.register_in(*rails.b)->descriptor()));
  for (auto& access : descriptor.access) {
    if (access.kind != transfer::AccessKind::rdma) continue;
    auto parsed = must(transfer::rdma::parse_rdma_record(access.body, kMiB));
    ByteWriter out;
    out.put(parsed->address).put(parsed->chunk_nbytes).put(parsed->generation_address).put(uint8_t{0}).put(uint32_t{1});
    out.put(std::string_view(parsed->nics[0])).put(uint8_t{3}).put(parsed->generation_keys[0]);
    out.put(static_cast<uint32_t>(parsed->keys[0].size()));
    for (uint32_t key : parsed->keys[0]) out.put(key);
    access.body = out.take();
  }
  auto remote = must(rails.peer->open(descriptor.encode(), soon()));
  fill(rails.source.data, kMiB, 6);
  auto before = rails.sent();
  for (int i = 0; i < 8; ++i) {
    REQUIRE_OK(must(rails.a->write({{rails.local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
    REQUIRE_OK(must(rails.a->read({{rails.local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
  }
  CHECK(mismatch(memory.data, kMiB, 6) == kMiB);
  CHECK(rails.sent()[1] == before[1]);
}

TEST_CASE("the NICs near the memory carry it; the others, when none of those is up") {
  auto here = std::make_shared<FakeDriver>(4), there = std::make_shared<FakeDriver>(4);
  for (size_t i = 0; i < 4; ++i) {
    here->device(i).set_numa_node(i < 2 ? 0 : 1);
    there->device(i).set_numa_node(i < 2 ? 0 : 1);
  }
  constexpr size_t kBytes = 16 * kMiB;
  Memory near_0(Way::rdma, kBytes), near_1(Way::rdma, kBytes), target_0(Way::rdma, kBytes), target_1(Way::rdma, kBytes);
  here->node_of = [&](const void* data) { return data == near_1.data ? 1 : 0; };
  there->node_of = [&](const void* data) { return data == target_1.data ? 1 : 0; };
  auto a = must(Engine::create(options_over(here, "a"))), b = must(Engine::create(options_over(there, "b")));
  auto peer = must(a->connect(b->addresses().front(), soon()));
  auto remote_0 = must(peer->open(target_0.register_in(*b)->descriptor(), soon()));
  auto remote_1 = must(peer->open(target_1.register_in(*b)->descriptor(), soon()));
  auto local_0 = near_0.register_in(*a), local_1 = near_1.register_in(*a);
  auto up = [&] {
    size_t n = 0;
    for (auto& lane : a->stats().lanes) n += lane.alive && lane.transport == "rdma";
    return n;
  };
  REQUIRE(eventually([&] { return up() == 4; }));
  auto moved = [&](const RegionPtr& local, const RemoteRegionPtr& remote) {  // by which devices
    std::vector<uint64_t> before;
    for (size_t i = 0; i < 4; ++i) before.push_back(here->device(i).nbytes_moved());
    REQUIRE_OK(must(a->write({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}))->wait());
    std::string out;
    for (size_t i = 0; i < 4; ++i)
      if (here->device(i).nbytes_moved() > before[i]) out += std::to_string(i);
    return out;
  };
  CHECK(moved(local_0, remote_0) == "01");
  CHECK(moved(local_1, remote_1) == "23");
  CHECK(moved(local_1, remote_0) == "0123");  // no rail is near both
  for (size_t i : {2, 3}) here->device(i).set_port(false);
  REQUIRE(eventually([&] { return up() == 2; }));
  CHECK(moved(local_1, remote_1) == "01");
  // One op with memory of both: each goes its way.
  for (size_t i : {2, 3}) here->device(i).set_port(true);
  REQUIRE(eventually([&] { return up() == 4; }));
  fill(near_0.data, kBytes, 1);
  fill(near_1.data, kBytes, 2);
  auto both =
      must(a->write({{local_0, 0, remote_0, 0, kBytes}, {local_1, 0, remote_1, 0, kBytes}}, {.deadline = soon()}));
  REQUIRE_OK(both->wait());
  CHECK(mismatch(target_0.data, kBytes, 1) == kBytes);
  CHECK(mismatch(target_1.data, kBytes, 2) == kBytes);
  a->close();
  b->close();
}

TEST_CASE("where bytes lie is asked of the kernel") {
  struct Real : transfer::rdma::Driver {
    Result<std::vector<std::shared_ptr<transfer::rdma::Device>>> open_devices(
        const NicFilter&, const transfer::rdma::RdmaOptions&) override {
      return Status(Code::unsupported, "none");
    }
  } real;
  CHECK(real.numa_nodes() >= 0);
  Memory memory(Way::rdma, kMiB);
  CHECK(real.numa_node_of(memory.data, kMiB) == -1);  // nobody has touched it
  std::memset(memory.data, 1, kMiB);
  CHECK(real.numa_node_of(memory.data, kMiB) >= (real.numa_nodes() > 0 ? 0 : -1));
  CHECK(real.numa_node_of(memory.data, 0) >= -1);
}

}  // namespace transfer_test
