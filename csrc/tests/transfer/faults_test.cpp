// Two real processes: what happens when one dies, stops, loses lanes, or takes its memory back.
#include <atomic>
#include <thread>

#include "common/failpoint.h"
#include "common/random.h"
#include "transfer/child.h"

namespace transfer_test {
namespace {

constexpr size_t kMiB = 1 << 20;

double seconds_since(int64_t start_ns) { return static_cast<double>(steady_ns() - start_ns) / 1e9; }

}  // namespace

TEST_CASE("two processes: what was written is there, what is read was there") {
  for (Way way : kAllTwoProcessWays) {
    CAPTURE(name_of(way));
    TwoProcesses two(way);
    constexpr size_t kBytes = 40 * kMiB + 5;
    auto remote = two.remote("r", kBytes);
    CHECK(remote->transport() == name_of(way));
    Memory memory(local_of(way), kBytes);
    fill(memory.data, kBytes, 21);
    auto local = memory.register_in(*two.engine);
    for (size_t n : {size_t{1}, size_t{65537}, kBytes}) {
      two.child.ask("zero r");
      REQUIRE_OK(must(two.engine->write({{local, 0, remote, 0, n}}, {.deadline = soon()}))->wait());
      CHECK(two.child.holds("r", n, 21));
    }
    std::memset(memory.data, 0, kBytes);
    REQUIRE_OK(must(two.engine->read({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}))->wait());
    CHECK(mismatch(memory.data, kBytes, 21) == kBytes);
    CHECK(two.peer->same_host() == (way != Way::tcp && way != Way::file_by_tcp && way != Way::cuda_by_tcp));
  }
}

TEST_CASE("SIGKILL in the middle: peer_lost in less than a second, and the engine lives on") {
  for (Way way : kAllTwoProcessWays) {
    for (bool writes : {true, false}) {
      CAPTURE(name_of(way));
      CAPTURE(writes);
      TwoProcesses two(way);
      constexpr size_t kBytes = 64 * kMiB, kOps = 16;
      auto remote = two.remote("r", kBytes, 4);
      Memory memory(local_of(way), kBytes * kOps);
      auto local = memory.register_in(*two.engine);
      // Several, so that whatever the speed some of them are under way.
      std::vector<OpPtr> ops;
      for (size_t i = 0; i < kOps; ++i) {
        std::vector<Slice> slices = {{local, i * kBytes, remote, 0, kBytes}};
        ops.push_back(must(writes ? two.engine->write(slices, {.deadline = soon()})
                                  : two.engine->read(slices, {.deadline = soon()})));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      auto start = steady_ns();
      two.child.kill_and_reap();
      size_t lost = 0;
      for (auto& op : ops) {
        Status status = op->wait();
        if (!status.is_ok()) {
          CHECK_MESSAGE(status.code() == Code::peer_lost, status.to_string());
          CHECK(status.message().find("child") != std::string::npos);
          ++lost;
        }
      }
      CHECK(lost > 0);
      CHECK(seconds_since(start) < 2.0);  // promised: 1 s
      // Its memory may be gone (process_vm) a moment before its sockets are.
      for (auto until = soon(1000); two.peer->alive() && !until.expired();) std::this_thread::yield();
      CHECK(!two.peer->alive());
      CHECK(two.engine->write({{local, 0, remote, 0, 1}}, {}).status().code() == Code::peer_lost);
      REQUIRE_OK(two.engine->deregister(local, soon()));
      Child next(way);
      auto peer = must(two.engine->connect(next.address(), soon()));
      next.make("r", 4096);
      auto again = memory.register_in(*two.engine);
      REQUIRE_OK(must(two.engine->write({{again, 0, next.open(*peer, "r"), 0, 4096}}, {.deadline = soon()}))->wait());
    }
  }
}

TEST_CASE("SIGSTOP: a write and a read end by their deadline; after SIGCONT nothing lands any more") {
  for (Way way : {Way::unix_socket, Way::tcp, Way::file_by_shm, Way::file_by_tcp, Way::cuda_by_tcp}) {
    for (bool writes : {true, false}) {
      CAPTURE(name_of(way));
      CAPTURE(writes);
      TwoProcesses two(way);
      const size_t kBytes = (is_file(way) ? 16 : 64) * kMiB;
      auto remote = two.remote("r", kBytes, 6);
      Memory memory(local_of(way), kBytes);
      fill(memory.data, kBytes, 5);
      auto local = memory.register_in(*two.engine);
      two.child.stop();
      std::vector<Slice> slices = {{local, 0, remote, 0, kBytes}};
      OpOptions options{.deadline = Deadline::after_ms(400)};
      auto start = steady_ns();
      auto op = must(writes ? two.engine->write(slices, options) : two.engine->read(slices, options));
      Status status = op->wait();
      CHECK(status.code() == Code::deadline_exceeded);
      CHECK(op->state() == OpState::timeout);
      CHECK(seconds_since(start) >= 0.4);
      CHECK(seconds_since(start) < 2.65);  // promised: 0.65 s
      // Slots that nobody has been asked to write to the file or device are as good as nothing.
      if (way != Way::file_by_tcp && way != Way::cuda_by_tcp) CHECK(op->remote_quiescent() == !writes);
      // The memory is the caller's again.
      fill(memory.data, kBytes, 77);
      REQUIRE_OK(two.engine->deregister(local, Deadline::after_ms(2000)));
      two.child.signal(SIGCONT);
      if (writes) {
        for (auto until = soon(); !op->remote_quiescent() && !until.expired();) std::this_thread::yield();
        REQUIRE(op->remote_quiescent());
        auto before = two.child.ask("digest r");
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        CHECK(two.child.ask("digest r") == before);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
      }
      CHECK(mismatch(memory.data, kBytes, 77) == kBytes);
      // The peer is usable again.
      auto fresh = memory.register_in(*two.engine);
      REQUIRE_OK(must(two.engine->write({{fresh, 0, remote, 0, kBytes}}, {.deadline = soon()}))->wait());
      CHECK(two.child.holds("r", kBytes, 77));
    }
  }
}

TEST_CASE("small ops to a stopped peer end by their deadline, and are quiescent once it has answered") {
  for (Way way : {Way::unix_socket, Way::tcp}) {
    CAPTURE(name_of(way));
    TwoProcesses two(way);
    auto remote = two.remote("r", 4096, 6);
    Memory memory(way, 4096);
    fill(memory.data, 4096, 5);
    auto local = memory.register_in(*two.engine);
    two.child.stop();
    auto start = steady_ns();
    auto write = must(two.engine->write({{local, 0, remote, 0, 4096}}, {.deadline = Deadline::after_ms(300)}));
    auto read = must(two.engine->read({{local, 0, remote, 0, 4096}}, {.deadline = Deadline::after_ms(300)}));
    CHECK(write->wait().code() == Code::deadline_exceeded);
    CHECK(read->wait().code() == Code::deadline_exceeded);
    CHECK(steady_ns() - start < 2'550'000'000);  // promised: 0.55 s
    CHECK(!write->remote_quiescent());
    fill(memory.data, 4096, 77);  // it is ours again, also while the answer is on its way
    two.child.signal(SIGCONT);
    for (auto until = soon(); !write->remote_quiescent() && !until.expired();) std::this_thread::yield();
    CHECK(write->remote_quiescent());
    REQUIRE_OK(must(two.engine->read({{local, 0, remote, 0, 1}}, {}))->wait());
    CHECK(mismatch(memory.data + 1, 4095, 77, 1) == 4095);
    CHECK(two.child.holds("r", 4096, 5));  // as it was when the write was called
  }
}

TEST_CASE("rdma: a target that stands still takes part in no read and no write") {
  TwoProcesses two(Way::rdma);
  constexpr size_t kBytes = 24 * kMiB + 3;
  auto remote = two.remote("r", kBytes);
  Memory memory(Way::rdma, kBytes);
  fill(memory.data, kBytes, 8);
  auto local = memory.register_in(*two.engine);
  two.child.stop();
  REQUIRE_OK(must(two.engine->write({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}))->wait());
  std::memset(memory.data, 0, kBytes);
  REQUIRE_OK(must(two.engine->read({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}))->wait());
  CHECK(mismatch(memory.data, kBytes, 8) == kBytes);
  two.child.signal(SIGCONT);
  CHECK(two.child.holds("r", kBytes, 8));
}

TEST_CASE("SIGSTOP of the puller: the write ends by its deadline and is quiescent once the target says so") {
  TwoProcesses two(Way::process_vm, "transfer.pull=sleep:300");
  constexpr size_t kBytes = 64 * kMiB;
  auto remote = two.remote("r", kBytes);
  Memory memory(Way::process_vm, kBytes);
  fill(memory.data, kBytes, 5);
  auto local = memory.register_in(*two.engine);
  auto start = steady_ns();
  auto op = must(two.engine->write({{local, 0, remote, 0, kBytes}}, {.deadline = Deadline::after_ms(350)}));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  two.child.stop();
  CHECK(op->wait().code() == Code::deadline_exceeded);
  CHECK(seconds_since(start) < 2.6);
  CHECK(!op->remote_quiescent());
  two.child.signal(SIGCONT);
  for (auto until = soon(); !op->remote_quiescent() && !until.expired();) std::this_thread::yield();
  REQUIRE(op->remote_quiescent());
  auto before = two.child.ask("digest r");
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  CHECK(two.child.ask("digest r") == before);
}

TEST_CASE("a stopped writer inside a shared segment keeps the memory in quarantine until it is released or dead") {
  for (bool dies : {false, true}) {
    CAPTURE(dies);
    // The child writes into our segment and stops itself between two steps of the copy.
    auto options = options_for(Way::segment, "owner");
    options.rpc.heartbeat_limit_ms = 1500;
    auto engine = must(Engine::create(options));
    Child child(Way::segment, "transfer.copy=stop@2");
    constexpr size_t kBytes = 48 * kMiB;
    Memory target(Way::segment, kBytes);
    auto keep = std::make_shared<int>(0);
    std::weak_ptr<int> weak = keep;
    auto region = must(engine->register_segment(target.segment, 0, kBytes, {.keep = std::move(keep)}));
    child.ask("connect p " + engine->addresses().front());
    CHECK(child.ask("open w p " + to_hex(region->descriptor())) == "shm");
    child.make("source", kBytes, 9);
    child.ask("write source w " + std::to_string(kBytes) + " 60000");
    int state = 0;
    REQUIRE(waitpid(child.pid(), &state, WUNTRACED) == child.pid());
    REQUIRE(WIFSTOPPED(state));
    Status busy = engine->deregister(region, Deadline::after_ms(200));
    CHECK(busy.code() == Code::busy);
    CHECK(busy.message().find("child") != std::string::npos);
    CHECK(engine->stats().quarantined_regions == 1);
    CHECK(!weak.expired());
    // The session is given up for silence meanwhile; that is a timeout, and frees nothing.
    for (auto until = soon(10'000); engine->stats().sessions > 0 && !until.expired();)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(engine->stats().sessions == 0);
    CHECK(engine->deregister(region, Deadline::after_ms(100)).code() == Code::busy);
    CHECK(!weak.expired());
    if (dies) {
      child.kill_and_reap();
      REQUIRE_OK(engine->deregister(region, Deadline::after_ms(5000)));
      for (auto until = soon(5000); !weak.expired() && !until.expired();) std::this_thread::yield();
      CHECK(weak.expired());
      CHECK(engine->stats().quarantined_regions == 0);
    } else {
      child.signal(SIGCONT);
      // What the child writes now goes where nobody else's bytes are: the region is still in quarantine.
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      CHECK(engine->stats().quarantined_regions == 1);
      child.kill_and_reap();
      REQUIRE_OK(engine->deregister(region, Deadline::after_ms(5000)));
    }
    engine->close();
  }
}

TEST_CASE("deregister while a peer copies through its map waits for that copy, then succeeds") {
  auto engine = must(Engine::create(options_for(Way::segment, "owner")));
  Child child(Way::segment, "transfer.copy=sleep:400@2");
  constexpr size_t kBytes = 48 * kMiB;
  Memory target(Way::segment, kBytes);
  auto region = must(engine->register_segment(target.segment, 0, kBytes, {}));
  child.ask("connect p " + engine->addresses().front());
  child.ask("open w p " + to_hex(region->descriptor()));
  child.make("source", kBytes, 9);
  child.ask("write source w " + std::to_string(kBytes) + " 20000");
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  CHECK(engine->deregister(region, Deadline::after_ms(20)).code() == Code::busy);
  REQUIRE_OK(engine->deregister(region, soon()));
  CHECK(child.ask("wait").rfind("OK", 0) == 0);  // it was inside before we called it back
  CHECK(mismatch(target.data, kBytes, 9) == kBytes);
  CHECK(engine->stats().quarantined_regions == 0);
  child.ask("write source w 4096 20000");
  CHECK(child.ask("wait").find("deregistered") != std::string::npos);
  engine->close();
}

TEST_CASE("deregistering our own side of an op in flight is busy, and names the peer") {
  TwoProcesses two(Way::tcp);
  constexpr size_t kBytes = 64 * kMiB;
  auto remote = two.remote("r", kBytes, 6);
  Memory memory(Way::tcp, kBytes);
  auto local = memory.register_in(*two.engine);
  two.child.stop();
  auto op = must(two.engine->read({{local, 0, remote, 0, kBytes}}, {.deadline = Deadline::after_ms(700)}));
  Status busy = two.engine->deregister(local, Deadline::after_ms(50));
  CHECK(busy.code() == Code::busy);
  CHECK(busy.message().find("child") != std::string::npos);
  REQUIRE_OK(two.engine->deregister(local, Deadline::after_ms(4000)));
  CHECK(op->wait(soon(2000)).code() == Code::deadline_exceeded);
  two.child.signal(SIGCONT);
}

TEST_CASE("lanes killed in the middle of ops: slices are re-sent, every byte is right, notified once") {
  for (Way way : {Way::unix_socket, Way::tcp}) {
    for (bool writes : {true, false}) {
      CAPTURE(name_of(way));
      CAPTURE(writes);
      TwoProcesses two(way);
      constexpr size_t kBytes = 48 * kMiB + 17;
      auto remote = two.remote("r", kBytes, writes ? 0 : 31);
      Memory memory(local_of(way), kBytes);
      if (writes) fill(memory.data, kBytes, 31);
      auto local = memory.register_in(*two.engine);
      std::atomic<bool> stop{false};
      std::atomic<int> killed{0};
      std::thread killer([&] {
        while (!stop) {
          std::this_thread::sleep_for(std::chrono::milliseconds(4));
          for (auto& lane : two.peer->session()->lanes()) {
            if (lane->index() < 2 || stop) continue;
            lane->kill(Status(Code::peer_lost, "cut by the test"));
            ++killed;
            break;
          }
        }
      });
      for (int round = 0; round < 4; ++round) {
        std::vector<Slice> slices = {{local, 0, remote, 0, kBytes}};
        OpOptions options{.deadline = soon(60'000), .notify = "once"};
        auto op = must(writes ? two.engine->write(slices, options) : two.engine->read(slices, options));
        Status status = op->wait();
        CHECK_MESSAGE(status.is_ok(), status.to_string());
        if (writes) {
          CHECK(two.child.holds("r", kBytes, 31));
          two.child.ask("zero r");
        } else {
          CHECK(mismatch(memory.data, kBytes, 31) == kBytes);
          std::memset(memory.data, 0, kBytes);
        }
      }
      stop = true;
      killer.join();
      CHECK(killed > 0);
      CHECK(two.child.ask("notes") == "4");
      CHECK(two.peer->alive());
    }
  }
}

TEST_CASE("cancel: the op ends as cancelled, and once quiescent nothing lands") {
  for (Way way : kAllTwoProcessWays) {
    CAPTURE(name_of(way));
    // Whoever copies takes a nap between steps, so that the cancellation comes in the middle.
    TwoProcesses two(way, "transfer.pull=sleep:50");
    if (way == Way::segment) set_failpoints("transfer.copy=sleep:50");
    constexpr size_t kBytes = 64 * kMiB;
    auto remote = two.remote("r", kBytes);
    Memory memory(local_of(way), kBytes);
    fill(memory.data, kBytes, 3);
    auto local = memory.register_in(*two.engine);
    auto op = must(two.engine->write({{local, 0, remote, 0, kBytes}}, {.deadline = soon(), .notify = "never"}));
    if (way == Way::segment || way == Way::process_vm) std::this_thread::sleep_for(std::chrono::milliseconds(80));
    op->cancel();
    Status status = op->wait(soon(5000));
    CHECK_MESSAGE(status.code() == Code::cancelled, status.to_string());
    CHECK(op->state() == OpState::cancelled);
    op->cancel();
    for (auto until = soon(); !op->remote_quiescent() && !until.expired();) std::this_thread::yield();
    REQUIRE(op->remote_quiescent());
    set_failpoints("");
    two.child.ask("zero r");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(two.child.holds("r", kBytes, 0));
    CHECK(two.child.ask("notes") == "0");
    REQUIRE_OK(must(two.engine->write({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}))->wait());
    CHECK(two.child.holds("r", kBytes, 3));
  }
}

TEST_CASE("wait() with a deadline of its own gives up, the op goes on") {
  TwoProcesses two(Way::tcp);
  auto remote = two.remote("r", kMiB, 2);
  Memory memory(Way::tcp, kMiB);
  auto local = memory.register_in(*two.engine);
  two.child.stop();
  auto op = must(two.engine->read({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}));
  CHECK(op->wait(Deadline::after_ms(30)).code() == Code::deadline_exceeded);
  CHECK(op->state() == OpState::pending);
  two.child.signal(SIGCONT);
  REQUIRE_OK(op->wait());
  CHECK(mismatch(memory.data, kMiB, 2) == kMiB);
}

TEST_CASE("in a forked child an engine says forked, and goes without harm") {
  TwoProcesses two(Way::process_vm);
  auto remote = two.remote("r", 4096, 2);
  Memory memory(Way::process_vm, 4096);
  auto local = memory.register_in(*two.engine);
  REQUIRE_OK(must(two.engine->read({{local, 0, remote, 0, 4096}}, {.deadline = soon()}))->wait());
  pid_t pid = fork();
  if (pid == 0) {
    bool right = two.engine->write({{local, 0, remote, 0, 1}}, {}).status().code() == Code::forked &&
                 two.engine->register_memory(memory.data, 1, {}).status().code() == Code::forked &&
                 two.engine->connect(two.child.address(), soon()).status().code() == Code::forked;
    two.engine.reset();
    _exit(right ? 0 : 1);
  }
  int state = 0;
  REQUIRE(waitpid(pid, &state, 0) == pid);
  CHECK(WIFEXITED(state));
  CHECK(WEXITSTATUS(state) == 0);
  REQUIRE_OK(must(two.engine->write({{local, 0, remote, 0, 4096}}, {.deadline = soon()}))->wait());
}

}  // namespace transfer_test
