// Lanes over TCP: what the network may do to them (stand still, reset, half-close, refuse), small ops, IPv6.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/log.h"
#include "transfer/proxy.h"
#include "transfer/support.h"

namespace transfer_test {
namespace {

constexpr size_t kMiB = 1 << 20;

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Two engines, the second behind a proxy.
struct Proxied {
  log::Level before = log::level();
  EnginePtr a, b;
  std::unique_ptr<Proxy> proxy;
  PeerPtr peer;
  Proxied() {
    log::set_level(log::Level::off);  // lost lanes are reported
    a = must(Engine::create(options_for(Way::tcp, "a")));
    b = must(Engine::create(options_for(Way::tcp, "b")));
    proxy = std::make_unique<Proxy>(b->addresses().front());
    peer = must(a->connect(proxy->address(), soon()));
  }
  ~Proxied() {
    a->close();
    b->close();
    log::set_level(before);
  }
  RemoteRegionPtr open(const RegionPtr& region) { return must(peer->open(region->descriptor(), soon())); }
  size_t lanes() { return peer->session()->lanes().size(); }
};

}  // namespace

TEST_CASE("a lane that stands still while its peer lives: its slices go elsewhere; when it comes back nothing lands") {
  for (bool writes : {true, false}) {
    CAPTURE(writes);
    Proxied two;
    constexpr size_t kBytes = 96 * kMiB;
    Memory ours(Way::tcp, kBytes), theirs(Way::tcp, kBytes);
    auto &source = writes ? ours : theirs, &target = writes ? theirs : ours;
    fill(source.data, kBytes, 8);
    auto local = ours.register_in(*two.a);
    auto remote = two.open(theirs.register_in(*two.b));
    REQUIRE(two.proxy->count() == 3);
    REQUIRE(two.lanes() == 3);
    two.proxy->hold(1, true);
    std::vector<Slice> slices = {{local, 0, remote, 0, kBytes}};
    OpOptions options{.deadline = soon(60'000), .notify = "once"};
    auto op = must(writes ? two.a->write(slices, options) : two.a->read(slices, options));
    REQUIRE_OK(op->wait());
    REQUIRE(mismatch(target.data, kBytes, 8) == kBytes);
    CHECK((writes ? two.a : two.b)->stats().resent_slices > 0);
    CHECK(two.peer->alive());
    // The memory is somebody else's now. What the proxy still holds of the old lane must not land in it.
    std::memset(target.data, 0, kBytes);
    two.proxy->hold(1, false);
    CHECK(eventually([&] { return two.lanes() == 3; }));
    sleep_ms(200);
    CHECK(all_zero(target.data, kBytes));
    CHECK(must(two.b->next_notification(soon())).data == "once");
    CHECK(two.b->next_notification(Deadline::after_ms(50)).status().code() == Code::deadline_exceeded);
    REQUIRE_OK(must(writes ? two.a->write(slices, {}) : two.a->read(slices, {}))->wait());
    CHECK(mismatch(target.data, kBytes, 8) == kBytes);
  }
}

TEST_CASE("RST and half-close of lanes in the middle of ops: every byte right, the lanes come back") {
  for (bool resets : {true, false}) {
    for (bool writes : {true, false}) {
      CAPTURE(resets);
      CAPTURE(writes);
      Proxied two;
      constexpr size_t kBytes = 64 * kMiB + 5;
      Memory ours(Way::tcp, kBytes), theirs(Way::tcp, kBytes);
      auto &source = writes ? ours : theirs, &target = writes ? theirs : ours;
      fill(source.data, kBytes, 12);
      auto local = ours.register_in(*two.a);
      auto remote = two.open(theirs.register_in(*two.b));
      std::vector<Slice> slices = {{local, 0, remote, 0, kBytes}};
      for (size_t round = 0; round < 3; ++round) {
        size_t newest = two.proxy->count() - 1;
        std::memset(target.data, 0, kBytes);
        auto op = must(writes ? two.a->write(slices, {}) : two.a->read(slices, {}));
        sleep_ms(3);
        resets ? two.proxy->reset(newest) : two.proxy->half_close(newest);
        REQUIRE_OK(op->wait());
        REQUIRE(mismatch(target.data, kBytes, 12) == kBytes);
        REQUIRE(eventually([&] { return two.proxy->count() > newest + 1 && two.lanes() == 3; }));
      }
      CHECK(two.peer->alive());
    }
  }
}

TEST_CASE("a lost lane is dialled within 100 ms, then at least every half second, and works again") {
  Proxied two;
  Memory ours(Way::tcp, 4 * kMiB), theirs(Way::tcp, 4 * kMiB);
  fill(ours.data, 4 * kMiB, 3);
  auto local = ours.register_in(*two.a);
  auto remote = two.open(theirs.register_in(*two.b));
  two.proxy->set_backend("");  // accepts and closes
  size_t before = two.proxy->arrivals_ns().size();
  auto start = steady_ns();
  two.proxy->reset(1);
  two.proxy->reset(2);
  REQUIRE(eventually([&] { return two.proxy->arrivals_ns().size() >= before + 6; }));
  auto arrivals = two.proxy->arrivals_ns();
  CHECK(arrivals[before] - start < 2'100'000'000);  // promised: 0.1 s
  for (size_t i = before + 1; i < arrivals.size(); ++i)
    CHECK(arrivals[i] - arrivals[i - 1] < 2'500'000'000);  // promised: 0.5 s
  // Meanwhile ops go over what there is.
  REQUIRE_OK(must(two.a->write({{local, 0, remote, 0, 4 * kMiB}}, {}))->wait());
  CHECK(mismatch(theirs.data, 4 * kMiB, 3) == 4 * kMiB);
  two.proxy->set_backend(two.b->addresses().front());
  CHECK(eventually([&] { return two.lanes() == 3; }, 2500));
  REQUIRE_OK(must(two.a->write({{local, 0, remote, 0, 4 * kMiB}}, {}))->wait());
}

TEST_CASE("another engine on the same address gets no lane of the old session, and is another peer") {
  Proxied two;
  auto c = must(Engine::create(options_for(Way::tcp, "c")));
  Memory ours(Way::tcp, 4 * kMiB), theirs(Way::tcp, 4 * kMiB), other(Way::tcp, 4 * kMiB);
  fill(ours.data, 4 * kMiB, 3);
  auto local = ours.register_in(*two.a);
  auto remote = two.open(theirs.register_in(*two.b));
  auto foreign = other.register_in(*c);
  two.proxy->set_backend(c->addresses().front());
  size_t before = two.proxy->arrivals_ns().size();
  two.proxy->reset(1);
  two.proxy->reset(2);
  REQUIRE(eventually([&] { return two.proxy->arrivals_ns().size() >= before + 3; }));
  CHECK(two.lanes() == 1);  // only control is left, and carries the bytes
  REQUIRE_OK(must(two.a->write({{local, 0, remote, 0, 4 * kMiB}}, {}))->wait());
  CHECK(mismatch(theirs.data, 4 * kMiB, 3) == 4 * kMiB);
  CHECK(all_zero(other.data, 4 * kMiB));
  // The restart itself: the old session ends, its regions with it; the address is somebody new.
  two.proxy->reset(0);
  REQUIRE(eventually([&] { return !two.peer->alive(); }));
  CHECK(two.a->write({{local, 0, remote, 0, 1}}, {}).status().code() == Code::peer_lost);
  auto next = must(two.a->connect(two.proxy->address(), soon()));
  CHECK(next->identity().engine == c->id());
  auto opened = must(next->open(foreign->descriptor(), soon()));
  REQUIRE_OK(must(two.a->write({{local, 0, opened, 0, 4 * kMiB}}, {}))->wait());
  CHECK(mismatch(other.data, 4 * kMiB, 3) == 4 * kMiB);
  c->close();
}

TEST_CASE("small ops: around the size where they become streams, in several pieces, with a notification") {
  for (Way way : {Way::unix_socket, Way::tcp}) {
    CAPTURE(name_of(way));
    Pair pair(way);
    constexpr size_t kRoom = 256 << 10;
    Memory ours(way, kRoom), theirs(way, kRoom);
    auto local = ours.register_in(*pair.a);
    auto remote = pair.open(theirs.register_in(*pair.b));
    uint64_t seed = 40;
    for (size_t total : {1, 4096, 16383, 16384, 16385, 65536}) {
      for (size_t pieces : {1, 2, 63, 64, 65}) {
        if (pieces > total) continue;
        CAPTURE(total);
        CAPTURE(pieces);
        fill(ours.data, total, ++seed);
        std::memset(theirs.data, 0, kRoom);
        pair.hand_over();
        std::vector<Slice> slices;
        for (size_t i = 0, at = 0; i < pieces; ++i) {
          size_t n = i + 1 == pieces ? total - at : total / pieces;
          slices.push_back({local, at, remote, at + i, n});  // a byte between them: not adjacent
          at += n;
        }
        REQUIRE_OK(must(pair.a->write(slices, {.notify = "n" + std::to_string(seed)}))->wait());
        for (auto& s : slices)
          REQUIRE(mismatch(theirs.data + s.remote_offset, s.nbytes, seed, s.local_offset) == s.nbytes);
        CHECK(must(pair.b->next_notification(soon())).data == "n" + std::to_string(seed));
        std::memset(ours.data, 0, total);
        REQUIRE_OK(must(pair.a->read(slices, {}))->wait());
        REQUIRE(mismatch(ours.data, total, seed) == total);
      }
    }
    CHECK(pair.b->next_notification(Deadline::after_ms(20)).status().code() == Code::deadline_exceeded);
    auto lanes = pair.a->stats();
    CHECK(lanes.ops_failed == 0);
  }
}

TEST_CASE("many threads wait for small ops at once: each gets its own answer") {
  Pair pair(Way::tcp);
  constexpr size_t kThreads = 4, kOps = 300;
  Memory ours(Way::tcp, kThreads * 4096), theirs(Way::tcp, kThreads * 4096);
  auto local = ours.register_in(*pair.a);
  auto remote = pair.open(theirs.register_in(*pair.b));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < kOps; ++i) {
        fill(ours.data + t * 4096, 4096, t * 1000 + i);
        std::vector<Slice> slices = {{local, t * 4096, remote, t * 4096, 4096}};
        auto op = pair.a->write(slices, {});
        if (!op || !(*op)->wait()) ++wrong;
        std::memset(ours.data + t * 4096, 0, 4096);
        op = pair.a->read(slices, {});
        if (!op || !(*op)->wait() || mismatch(ours.data + t * 4096, 4096, t * 1000 + i) != 4096) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("IPv6: an engine on ::1, named in brackets") {
  auto options = options_for(Way::tcp, "six");
  options.listen = {"tcp://[::1]:0"};
  auto b = must(Engine::create(options));
  auto a = must(Engine::create(options_for(Way::tcp, "a")));
  auto address = b->addresses().front();
  CHECK(address.rfind("tcp://[::1]:", 0) == 0);
  auto peer = must(a->connect(address.substr(6), soon()));  // "[::1]:port"
  constexpr size_t kBytes = 3 * kMiB;
  Memory ours(Way::tcp, kBytes), theirs(Way::tcp, kBytes);
  fill(ours.data, kBytes, 4);
  auto local = ours.register_in(*a);
  auto remote = must(peer->open(theirs.register_in(*b)->descriptor(), soon()));
  REQUIRE_OK(must(a->write({{local, 0, remote, 0, kBytes}}, {}))->wait());
  CHECK(mismatch(theirs.data, kBytes, 4) == kBytes);
  for (auto& lane : peer->session()->lanes()) {
    CHECK(lane->rail() == rpc::Rail{"::1", "::1"});
    auto tuning = lane->tuning();
    bool reno = std::any_of(tuning.begin(), tuning.end(), [](auto& fact) {
      return fact == std::pair<std::string, std::string>("congestion control", "reno");
    });
    CHECK(reno);
  }
  a->close();
  b->close();
}

TEST_CASE("an open that is answered after its deadline leaves nothing at the owner") {
  Proxied two;
  Memory memory(Way::tcp, 4096);
  auto region = memory.register_in(*two.b);
  two.proxy->hold(0, true);
  auto late = two.peer->open(region->descriptor(), soon(300));
  REQUIRE_FALSE(late.is_ok());
  CHECK(late.status().code() == Code::deadline_exceeded);
  std::weak_ptr<Region> still = region;
  two.proxy->hold(0, false);
  must(two.peer->open(region->descriptor(), soon())).reset();  // answered after the first
  REQUIRE_OK(two.b->deregister(region, soon()));
  region.reset();
  CHECK(eventually([&] { return still.expired(); }));
}

// What its owner unmapped without deregistering it is that op's end, not the connection's, nor the other lanes'.
TEST_CASE("a source that is mapped no more: the op fails once, with a reason, and the others go on") {
  constexpr size_t kBytes = 8 * kMiB;
  for (Way way : {Way::tcp, Way::unix_socket})
    for (bool writes : {true, false})
      for (size_t from : {size_t{0}, 5 * kMiB + 4096}) {  // the whole of it, and the middle of a frame
        CAPTURE(static_cast<int>(way));
        CAPTURE(writes);
        CAPTURE(from);
        auto a = must(Engine::create(options_for(way, "a")));
        auto b = must(Engine::create(options_for(way, "b")));
        auto peer = must(a->connect(b->addresses().front(), soon()));
        Memory ours(way, kBytes), theirs(way, kBytes);
        auto& source = writes ? ours : theirs;
        auto local = ours.register_in(*a);
        auto remote = must(peer->open(theirs.register_in(*b)->descriptor(), soon()));
        std::vector<Slice> slices = {{local, 0, remote, 0, kBytes}};
        auto run = [&] {
          OpOptions options{.deadline = soon(60'000)};
          return must(writes ? a->write(slices, options) : a->read(slices, options))->wait();
        };
        REQUIRE(mprotect(source.data + from, kBytes - from, PROT_NONE) == 0);
        for (int i = 0; i < 3; ++i) {
          const Status outcome = run();
          CHECK(outcome.code() == Code::invalid_argument);
          CHECK_MESSAGE(outcome.message().find("not mapped") != std::string::npos, outcome.message());
        }
        CHECK(peer->alive());
        if (from == 0) CHECK((writes ? a : b)->stats().resent_slices == 0);
        REQUIRE(mprotect(source.data + from, kBytes - from, PROT_READ | PROT_WRITE) == 0);
        fill(source.data, kBytes, 3);
        REQUIRE_OK(run());
        CHECK(mismatch((writes ? theirs : ours).data, kBytes, 3) == kBytes);
        a->close();
        b->close();
      }
}

}  // namespace transfer_test
