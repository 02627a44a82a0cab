// What ops share: several targets in one op, priorities and rates, sessions used by several handles, and who covers an
// address.
#include <algorithm>
#include <random>
#include <thread>

#include "common/failpoint.h"
#include "transfer/pacer.h"
#include "transfer/region_index.h"
#include "transfer/support.h"

namespace transfer_test {
using torch_mooncake::transfer::RegionIndex;
using torch_mooncake::transfer::TokenBucket;

TEST_CASE("region index: against a list, with nested, overlapping and repeated ranges") {
  struct Range {
    uint64_t begin, end, id;
  };
  std::mt19937 random(3);
  RegionIndex index;
  std::vector<Range> list;
  for (uint64_t id = 1; id <= 4000; ++id) {
    if (!list.empty() && random() % 3 == 0) {
      size_t at = random() % list.size();
      CHECK(index.erase(list[at].begin, list[at].id));
      CHECK(!index.erase(list[at].begin, list[at].id));
      list.erase(list.begin() + at);
    } else {
      uint64_t begin = random() % 1000, size = random() % (random() % 4 == 0 ? 1000 : 20);
      list.push_back({begin, begin + size, id});
      index.insert(begin, begin + size, id);
    }
    uint64_t begin = random() % 1000, end = begin + random() % 30;
    const Range* best = nullptr;
    for (auto& r : list)
      if (r.begin <= begin && r.end >= end &&
          (!best || r.begin > best->begin || (r.begin == best->begin && r.id > best->id)))
        best = &r;
    REQUIRE(index.find(begin, end) == (best ? best->id : 0));
  }
}

TEST_CASE("region_at: the innermost live region; never one that was deregistered") {
  Pair pair(Way::process_vm);
  Memory memory(Way::process_vm, 8192);
  CHECK(pair.a->region_at(memory.data, 1) == nullptr);
  auto outer = memory.register_in(*pair.a);
  auto again = memory.register_in(*pair.a);
  auto inner = must(pair.a->register_memory(memory.data + 1000, 100, {}));
  CHECK(pair.a->region_at(memory.data + 1000, 100) == inner);
  CHECK(pair.a->region_at(memory.data + 1000, 101) == again);
  CHECK(pair.a->region_at(memory.data, 8192) == again);
  CHECK(pair.a->region_at(memory.data, 8193) == nullptr);
  CHECK(pair.a->region_at(memory.data - 1, 2) == nullptr);
  REQUIRE_OK(pair.a->deregister(again, soon()));
  CHECK(pair.a->region_at(memory.data, 8192) == outer);
  pair.a->forget_address(outer);
  CHECK(pair.a->region_at(memory.data, 8192) == nullptr);
  CHECK(pair.a->stats().regions == 2);
  REQUIRE_OK(pair.a->deregister(outer, soon()));
  REQUIRE_OK(pair.a->deregister(inner, soon()));
  CHECK(pair.a->region_at(memory.data + 1000, 1) == nullptr);
}

// One engine with several targets.
struct Star {
  EnginePtr a;
  std::vector<EnginePtr> targets;
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<RegionPtr> regions;
  std::vector<RemoteRegionPtr> remotes;
  Star(Way way, int n, size_t nbytes) {
    a = must(Engine::create(options_for(way, "a")));
    for (int i = 0; i < n; ++i) {
      targets.push_back(must(Engine::create(options_for(way, "target" + std::to_string(i)))));
      memory.push_back(std::make_unique<Memory>(way, nbytes));
      regions.push_back(memory.back()->register_in(*targets.back()));
      auto peer = must(a->connect(targets.back()->addresses().front(), soon()));
      remotes.push_back(must(peer->open(regions.back()->descriptor(), soon())));
    }
  }
  ~Star() {
    a->close();
    for (auto& target : targets) target->close();
  }
};

TEST_CASE("one op to several targets: all bytes at its end, each target notified once; one failure is named") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    constexpr size_t kBytes = 1 << 20;
    Star star(way, 3, kBytes);
    Memory source(local_of(way), 3 * kBytes);
    fill(source.data, source.nbytes, 9);
    auto local = source.register_in(*star.a);
    std::vector<Slice> slices;  // interleaved over the targets
    for (size_t at = 0; at < kBytes; at += kBytes / 4)
      for (size_t t = 0; t < 3; ++t) slices.push_back({local, t * kBytes + at, star.remotes[t], at, kBytes / 4});
    std::atomic<int> ends{0};
    auto keep = std::make_shared<int>(1);
    std::weak_ptr<int> weak = keep;
    auto op = must(star.a->write(
        slices, {.deadline = soon(), .notify = "all", .keep = std::move(keep), .on_end = [&](auto&) { ++ends; }}));
    REQUIRE_OK(op->wait());
    CHECK(op->state() == OpState::done);
    CHECK(op->nbytes() == 3 * kBytes);
    CHECK(op->bytes_done() == 3 * kBytes);
    CHECK(op->remote_quiescent());
    CHECK(op->transport() == name_of(way));
    for (size_t t = 0; t < 3; ++t) {
      REQUIRE(mismatch(star.memory[t]->data, kBytes, 9, t * kBytes) == kBytes);
      CHECK(must(star.targets[t]->next_notification(soon())).data == "all");
      CHECK(star.targets[t]->stats().notifications == 1);
    }
    for (auto until = soon(5000); (ends == 0 || !weak.expired()) && !until.expired();) std::this_thread::yield();
    CHECK(ends == 1);
    CHECK(weak.expired());

    std::memset(source.data, 0, source.nbytes);
    REQUIRE_OK(must(star.a->read(slices, {.deadline = soon()}))->wait());
    REQUIRE(mismatch(source.data, source.nbytes, 9) == source.nbytes);

    REQUIRE_OK(star.targets[1]->deregister(star.regions[1], soon()));
    op = must(star.a->write(slices, {.deadline = soon()}));
    Status status = op->wait();
    CHECK(status.code() == Code::key_not_found);
    CHECK(op->peers() == "target1");
    CHECK(status.message().find("target1") != std::string::npos);
    CHECK(op->state() == OpState::failed);
  }
}

TEST_CASE("an op that has failed sends nothing of the parts that had not gone out, and is quiescent") {
  for (Way way : {Way::process_vm, Way::unix_socket, Way::tcp}) {
    CAPTURE(name_of(way));
    constexpr size_t kBytes = 1 << 20;
    bool failed_first = false;
    for (int round = 0; round < 32 && !failed_first; ++round) {  // the order of the targets is not ours to choose
      auto options = options_for(way, "a");
      options.transports.insert(options.transports.begin(), "local");
      auto a = must(Engine::create(options));
      EnginePtr near, far;
      auto make_near = [&] { near = must(Engine::create(options_for(Way::local, "near"))); };
      if (round % 2 == 0) make_near();
      far = must(Engine::create(options_for(way, "far")));
      if (round % 2 == 1) make_near();
      Memory source(way, 2 * kBytes), near_memory(way, kBytes), far_memory(way, kBytes);
      fill(source.data, source.nbytes, 3);
      auto local = source.register_in(*a);
      auto open = [&](const EnginePtr& engine, const RegionPtr& region) {
        return must(must(a->connect(engine->addresses().front(), soon()))->open(region->descriptor(), soon()));
      };
      auto gone = near_memory.register_in(*near);
      auto far_region = far_memory.register_in(*far);
      RemoteRegionPtr near_remote, far_remote;
      if (round % 2 == 0) near_remote = open(near, gone);
      far_remote = open(far, far_region);
      if (round % 2 == 1) near_remote = open(near, gone);
      REQUIRE(near_remote->transport() == std::string("local"));
      REQUIRE(far_remote->transport() == std::string(name_of(way)));
      REQUIRE_OK(near->deregister(gone, soon()));
      failed_first = near_remote->peer() < far_remote->peer();
      auto op = must(
          a->write({{local, 0, near_remote, 0, 4096}, {local, kBytes, far_remote, 0, kBytes}}, {.deadline = soon()}));
      CHECK(op->wait().code() == Code::key_not_found);
      if (failed_first) {
        CHECK(op->remote_quiescent());
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        CHECK(all_zero(far_memory.data, kBytes));
      }
      for (auto& engine : {a, near, far}) engine->close();
    }
    REQUIRE(failed_first);
  }
}

TEST_CASE("an op is quiescent when all its parts are") {
  constexpr size_t kBytes = 1 << 20;
  Pair pair(Way::process_vm);
  Memory source(Way::process_vm, 2 * kBytes), pulled(Way::process_vm, kBytes), mapped(Way::segment, kBytes);
  fill(source.data, source.nbytes, 4);
  auto local = source.register_in(*pair.a);
  auto slow = pair.open(pulled.register_in(*pair.b)), quick = pair.open(mapped.register_in(*pair.b));
  REQUIRE(quick->transport() == std::string("shm"));
  set_failpoints("transfer.pull=sleep:1500");
  auto op = must(pair.a->write({{local, 0, quick, 0, kBytes}, {local, kBytes, slow, 0, kBytes}},
                               {.deadline = Deadline::after_ms(300)}));
  CHECK(op->wait().code() == Code::deadline_exceeded);
  CHECK(!op->remote_quiescent());  // the target is about to read, and to write
  auto until = soon(10'000);
  while (!op->remote_quiescent() && !until.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  set_failpoints("");
  CHECK(op->remote_quiescent());
  CHECK(mismatch(mapped.data, kBytes, 4) == kBytes);
}

struct Bell final : OpWatcher {
  std::mutex mutex;
  std::vector<uint64_t> tags;
  void op_ended(uint64_t tag) override {
    std::lock_guard lock(mutex);
    tags.push_back(tag);
  }
  bool rings(size_t n) {
    for (auto until = soon(5000); !until.expired(); std::this_thread::yield()) {
      std::lock_guard lock(mutex);
      if (tags.size() >= n) return tags.size() == n;
    }
    return false;
  }
};

TEST_CASE("watchers: told of the end of an op once, of a notification, and of close") {
  for (Way way : {Way::local, Way::tcp}) {
    Pair pair(way);
    Memory source(way, 8 << 20), target(way, 8 << 20);
    auto local = source.register_in(*pair.a);
    auto remote = pair.open(target.register_in(*pair.b));
    auto bell = std::make_shared<Bell>();
    CHECK(pair.b->watch_notifications(bell, 7));
    auto op = must(pair.a->write({{local, 0, remote, 0, 8 << 20}}, {.deadline = soon(), .notify = "x"}));
    size_t expected = op->watch(bell, 5) ? 2 : 1;
    REQUIRE_OK(op->wait());
    CHECK(bell->rings(expected));
    CHECK(!op->watch(bell, 6));
    CHECK(!pair.b->watch_notifications(bell, 8));
    CHECK(must(pair.b->next_notification(soon())).data == "x");
    CHECK(pair.b->watch_notifications(bell, 9));
    pair.b->close();
    CHECK(bell->rings(expected + 1));
    CHECK(!pair.b->watch_notifications(bell, 10));
  }
}

TEST_CASE("priorities: a foreground op overtakes a background stream, which is not starved") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    constexpr size_t kBig = 64 << 20, kSmall = 4 << 20, kSmallAt = 4 * kBig;  // no two overlap
    Memory source(way, kBig), target(way, kSmallAt + 2 * kSmall);
    fill(source.data, kBig, 4);
    auto local = source.register_in(*pair.a);
    auto remote = pair.open(target.register_in(*pair.b));
    std::vector<OpPtr> background;
    for (int i = 0; i < 4; ++i)
      background.push_back(
          must(pair.a->write({{local, 0, remote, i * kBig, kBig}},
                             {.deadline = soon(120'000), .priority = Priority::background, .notify = "b"})));
    REQUIRE_OK(must(pair.a->write({{local, 0, remote, kSmallAt, kSmall}}, {.deadline = soon()}))->wait());
    CHECK(std::none_of(background.begin(), background.end(), [](auto& op) { return op->ended(); }));
    // Foreground ops without a pause: the background goes on all the same, by ageing.
    std::atomic<bool> over{false};
    std::thread busy([&] {
      while (!over) {
        auto first = pair.a->write({{local, 0, remote, kSmallAt, kSmall}}, {.deadline = soon()});
        auto second = pair.a->write({{local, 0, remote, kSmallAt + kSmall, kSmall}}, {.deadline = soon()});
        if (first) (void)(*first)->wait();
        if (second) (void)(*second)->wait();
      }
    });
    uint64_t before = background[0]->bytes_done();
    for (auto until = soon(10'000); background[0]->bytes_done() <= before && !background[0]->ended();) {
      if (until.expired()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(background[0]->bytes_done() > before);
    over = true;
    busy.join();
    for (auto& op : background) REQUIRE_OK(op->wait());
    for (int i = 0; i < 4; ++i) REQUIRE(mismatch(target.data + i * kBig, kBig, 4) == kBig);
    for (int i = 0; i < 4; ++i) CHECK(must(pair.b->next_notification(soon())).data == "b");
  }
}

TEST_CASE("a background op is cancelled, times out and is closed like any other") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    auto options = options_for(way, "a");
    options.background_rate = 1 << 20;  // so slow that it cannot be done
    auto a = must(Engine::create(options)), b = must(Engine::create(options_for(way, "b")));
    auto peer = must(a->connect(b->addresses().front(), soon()));
    Memory source(way, 64 << 20), target(way, 64 << 20);
    auto local = source.register_in(*a);
    auto remote = must(peer->open(target.register_in(*b)->descriptor(), soon()));
    auto start = [&](int64_t ms) {
      return must(a->read({{local, 0, remote, 0, 64 << 20}},
                          {.deadline = soon(ms), .priority = Priority::background, .notify = "never"}));
    };
    auto cancelled = start(20'000), late = start(300), closed = start(20'000);
    cancelled->cancel();
    CHECK(cancelled->wait(soon(3000)).code() == Code::cancelled);
    CHECK(cancelled->state() == OpState::cancelled);
    CHECK(late->wait(soon(3000)).code() == Code::deadline_exceeded);
    CHECK(late->state() == OpState::timeout);
    REQUIRE_OK(must(a->read({{local, 0, remote, 0, 1 << 20}}, {.deadline = soon()}))->wait());  // is not limited
    a->close();
    CHECK(closed->ended());
    CHECK(closed->wait().code() == Code::closed);
    CHECK(b->stats().notifications == 0);
    b->close();
  }
}

TEST_CASE("rate limits hold, for reads and writes, big ops and small ones") {
  TokenBucket bucket(1000);
  bucket.take(500, 1'000'000'000);
  CHECK(bucket.ready_ns(1'000'000'000) > 1'490'000'000);
  CHECK(bucket.ready_ns(1'500'000'002) == 1'500'000'002);
  CHECK(TokenBucket(0).ready_ns(5) == 5);
  for (Way way : {Way::segment, Way::tcp}) {
    CAPTURE(name_of(way));
    auto options = options_for(way, "a");
    options.foreground_rate = options.background_rate = 40 << 20;
    auto a = must(Engine::create(options)), b = must(Engine::create(options_for(way, "b")));
    auto peer = must(a->connect(b->addresses().front(), soon()));
    constexpr size_t kBytes = 10 << 20, kSmall = 100'000;
    Memory source(way, kBytes), target(way, kBytes);
    fill(source.data, kBytes, 2);
    auto local = source.register_in(*a);
    auto remote = must(peer->open(target.register_in(*b)->descriptor(), soon()));
    for (auto priority : {Priority::foreground, Priority::background}) {
      int64_t start = steady_ns();
      REQUIRE_OK(must(a->write({{local, 0, remote, 0, kBytes}}, {.deadline = soon(), .priority = priority}))->wait());
      for (size_t at = 0; at + kSmall <= kBytes; at += kSmall)
        REQUIRE_OK(
            must(a->read({{local, at, remote, at, kSmall}}, {.deadline = soon(), .priority = priority}))->wait());
      // 20 MiB at 40 MiB/s, the first 50 ms free.
      CHECK(steady_ns() - start >= 425'000'000);
      CHECK(steady_ns() - start < 4'000'000'000);
    }
    REQUIRE(mismatch(target.data, kBytes, 2) == kBytes);
    a->close();
    b->close();
  }
}

TEST_CASE("a session is shared by those who connected, and ends with its last handle") {
  auto a = must(Engine::create(options_for(Way::tcp, "a"))), b = must(Engine::create(options_for(Way::tcp, "b")));
  auto one = must(a->connect(b->addresses().front(), soon())), two = must(a->connect(b->addresses().front(), soon()));
  CHECK(one->session() == two->session());
  Memory source(Way::tcp, 4096), target(Way::tcp, 4096);
  auto local = source.register_in(*a);
  auto remote = must(two->open(target.register_in(*b)->descriptor(), soon()));
  one->close();
  one->close();
  CHECK(!one->alive());
  CHECK(one->open(local->descriptor(), soon()).status().code() == Code::closed);
  CHECK(two->alive());
  REQUIRE_OK(must(a->write({{local, 0, remote, 0, 4096}}, {.deadline = soon()}))->wait());
  two->close();
  CHECK(!two->alive());
  auto three = must(a->connect(b->addresses().front(), soon()));
  CHECK(three->alive());
  CHECK(three->session() != one->session());
  { auto dropped = must(a->connect(b->addresses().front(), soon())); }  // its handle goes with it
  auto session = three->session();
  CHECK(session->alive());
  three->close();
  CHECK(!session->alive());
  a->close();
  b->close();
}

}  // namespace transfer_test
