// A region that is deregistered, or a session that is closed, while a peer is opening the region: who takes back wins.
// An open that is under way then ends with an error, and what it has mapped is given back before its owner hears that
// nobody has it.
#include <functional>
#include <future>
#include <thread>

#include "common/failpoint.h"
#include "transfer/child.h"

namespace transfer_test {
namespace {

constexpr size_t kBytes = 64 << 10;

// Holds threads of this process back at a failpoint. "transfer.open": all is mapped, and nobody has it yet.
struct HeldAt {
  static inline std::string point;
  static inline std::atomic<bool> inside{false}, go{false};
  explicit HeldAt(const char* name) {
    point = name;
    inside = go = false;
    set_failpoint_hook([](std::string_view passed) -> Status {
      if (passed != point) return {};
      inside = true;
      for (auto until = soon(); !go && !until.expired();) usleep(1000);
      return {};
    });
  }
  ~HeldAt() {
    go = true;
    set_failpoint_hook(nullptr);
  }
  static void wait() {
    REQUIRE(eventually([] { return inside.load(); }));
  }
};

// An open of the child's region "r", held where all is mapped.
struct HeldOpen {
  explicit HeldOpen(TwoProcesses& two) : held("transfer.open") {
    opened = std::async(std::launch::async, [&two, descriptor = two.child.make("r", kBytes, 1)] {
      return two.peer->open(descriptor, soon());
    });
    held.wait();
  }
  Result<RemoteRegionPtr> go_on() {
    held.go = true;
    return opened.get();
  }
  HeldAt held;
  std::future<Result<RemoteRegionPtr>> opened;
};

}  // namespace

TEST_CASE("a region deregistered while a peer maps it: the open fails, and the owner waits until all is given back") {
  for (Way way : {Way::segment, Way::cuda_ipc}) {
    CAPTURE(name_of(way));
    TwoProcesses two(way);
    HeldOpen open(two);
    auto busy = two.child.ask("deregister r 200");
    CHECK_MESSAGE(busy.rfind("BUSY", 0) == 0, busy);
    two.child.tell("deregister r 10000");
    auto remote = open.go_on();
    REQUIRE_FALSE(remote.is_ok());
    CHECK_MESSAGE(remote.status().code() == Code::key_not_found, remote.status().to_string());
    CHECK(remote.status().message().find("deregistered") != std::string::npos);
    CHECK(two.child.answer().rfind("OK", 0) == 0);
    if (way == Way::cuda_ipc) CHECK(FakeCuda::install().mappings_alive == 0);
    CHECK(two.child.ask("quarantined") == "0");
  }
}

TEST_CASE("a region deregistered while a peer opens it, with nothing mapped: the owner waits for nobody, no op works") {
  for (Way way : ways({Way::process_vm, Way::unix_socket, Way::tcp, Way::rdma})) {
    CAPTURE(name_of(way));
    TwoProcesses two(way);
    HeldOpen open(two);
    CHECK(two.child.ask("deregister r 5000").rfind("OK", 0) == 0);
    auto remote = open.go_on();
    if (!remote) {
      CHECK(remote.status().code() == Code::key_not_found);
      continue;
    }
    Memory memory(way, kBytes);
    fill(memory.data, kBytes, 2);
    auto local = memory.register_in(*two.engine);
    auto read = two.engine->read({{local, 0, *remote, 0, kBytes}}, {.deadline = soon()});
    CHECK_FALSE((read ? (*read)->wait() : read.status()).is_ok());
    auto write = two.engine->write({{local, 0, *remote, 0, kBytes}}, {.deadline = soon()});
    CHECK_FALSE((write ? (*write)->wait() : write.status()).is_ok());
    CHECK(two.child.holds("r", kBytes, 1));
  }
}

TEST_CASE("a peer closed while it opens a region: the open fails, and its owner gets the memory back") {
  for (Way way : {Way::segment, Way::cuda_ipc}) {
    CAPTURE(name_of(way));
    TwoProcesses two(way);
    HeldOpen open(two);
    two.peer->close();
    CHECK(eventually([&] { return two.child.ask("sessions") == "0"; }));
    auto busy = two.child.ask("deregister r 200");
    CHECK_MESSAGE(busy.rfind("BUSY", 0) == 0, busy);  // nobody has said that it is given back
    auto remote = open.go_on();
    REQUIRE_FALSE(remote.is_ok());
    CHECK_MESSAGE(remote.status().code() == Code::closed, remote.status().to_string());
    two.peer = must(two.engine->connect(two.child.address(), soon()));
    CHECK(two.child.ask("deregister r 10000").rfind("OK", 0) == 0);
    if (way == Way::cuda_ipc) CHECK(FakeCuda::install().mappings_alive == 0);
  }
}

TEST_CASE("regions that a peer maps cost their owner no descriptor each") {
  auto engine = must(Engine::create(options_for(Way::segment, "owner")));
  Child child(Way::segment);
  child.ask("connect p " + engine->addresses().front());
  auto open = [&](const RegionPtr& region) {
    auto name = std::to_string(region->id());
    CHECK(child.ask("open " + name + " p " + to_hex(region->descriptor())) == "shm");
  };
  Memory memory(Way::segment, kBytes);
  std::vector<RegionPtr> regions = {memory.register_in(*engine)};
  open(regions[0]);
  auto before = count_resources().fds;
  for (int i = 0; i < 40; ++i) {
    regions.push_back(memory.register_in(*engine));
    open(regions.back());
  }
  CHECK(count_resources().fds < before + 10);
  child.kill_and_reap();  // and its death is seen for each of them
  for (auto& region : regions) REQUIRE_OK(engine->deregister(region, soon()));
  engine->close();
}

TEST_CASE("slots that are made while the session ends are nobody's, and go") {
  constexpr size_t kMiB = 1 << 20;
  TwoProcesses two(Way::tcp);
  auto remote = two.remote("r", kMiB);
  Memory file(Way::file, kMiB);
  auto local = file.register_in(*two.engine);
  auto regions = two.engine->stats().regions;
  HeldAt held("transfer.stage_area");
  auto written = std::async(std::launch::async, [&] {
    auto op = two.engine->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()});
    return op ? (*op)->wait() : op.status();
  });
  held.wait();
  two.peer->close();
  CHECK(eventually([&] { return two.engine->stats().sessions == 0; }));
  held.go = true;
  CHECK(written.get().code() == Code::closed);
  CHECK(two.engine->stats().regions == regions);
  CHECK(two.engine->stats().quarantined_regions == 0);
}

}  // namespace transfer_test
