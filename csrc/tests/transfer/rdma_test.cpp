// RDMA over a fake driver on its worst behaviour: rails that fail, die, hang and come back, with every byte looked at.
// (What all transports promise is in data_test.cpp and faults_test.cpp; they run over the fake as well.)
#include <array>
#include <thread>

#include "transfer/rdma/endpoint.h"
#include "transfer/rdma/memory.h"
#include "transfer/rdma_rails.h"

namespace transfer_test {
namespace {

using fake_verbs::FakeDriver;
using torch_mooncake::transfer::rdma::Outcome;
using torch_mooncake::transfer::rdma::RdmaEndpoint;

#if defined(__SANITIZE_THREAD__)
constexpr int kSlower = 16;  // the fake NICs' copies
#else
constexpr int kSlower = 1;
#endif

}  // namespace

TEST_CASE("one op uses both rails") {
  Rails rails(2, 64 * kMiB);
  fill(rails.source.data, 64 * kMiB, 1);
  for (size_t i : {0, 1}) rails.here->device(i).set_delay_us(200);
  REQUIRE_OK(rails.write(64 * kMiB)->wait());
  CHECK(mismatch(rails.target.data, 64 * kMiB, 1) == 64 * kMiB);
  auto sent = rails.sent();
  REQUIRE(sent.size() == 2);
  CHECK(sent[0] + sent[1] == 64 * kMiB);
  for (uint64_t n : sent) CHECK(n >= 64 * kMiB / 8);  // half each, on a machine that does nothing else
  // A rail that is slower gets less, and the other more.
  rails.here->device(0).set_delay_us(20'000 * kSlower);
  REQUIRE_OK(rails.write(64 * kMiB)->wait());
  auto later = rails.sent();
  CHECK(later[1] - sent[1] > 2 * (later[0] - sent[0]));
}

TEST_CASE("ops straddle registrations of both sides") {
  constexpr size_t kBytes = kMiB + 12345;
  Rails rails(2, kBytes, 64 << 10);
  auto driver = std::make_shared<FakeDriver>(3, 80 << 10);  // other chunks, and a third NIC
  auto c = must(Engine::create(options_over(driver, "c")));
  Memory memory(Way::rdma, kBytes);
  auto remote =
      must(must(rails.a->connect(c->addresses().front(), soon()))->open(memory.register_in(*c)->descriptor(), soon()));
  fill(rails.source.data, kBytes, 2);
  for (size_t from : {0, 1, 65535, 65536, 70000}) {
    for (size_t to : {0, 81919, 81920, 12345}) {
      size_t n = kBytes - 90000;
      std::memset(memory.data, 0, kBytes);
      auto op = must(rails.a->write({{rails.local, from, remote, to, n}}, {.deadline = soon()}));
      REQUIRE_OK(op->wait());
      REQUIRE(std::memcmp(memory.data + to, rails.source.data + from, n) == 0);
      REQUIRE(all_zero(memory.data, to));
      REQUIRE(all_zero(memory.data + to + n, kBytes - to - n));
    }
  }
  c->close();
}

TEST_CASE("a request that fails takes its rail out; its slices go elsewhere, and the rail comes back") {
  Rails rails(2, 48 * kMiB);
  uint64_t seed = 10;
  for (auto outcome : {Outcome::failed, Outcome::retries_exceeded}) {
    for (int after : {0, 5, 40}) {
      for (bool writes : {true, false}) {
        CAPTURE(after);
        CAPTURE(writes);
        auto& from = writes ? rails.source : rails.target;
        auto& to = writes ? rails.target : rails.source;
        fill(from.data, from.nbytes, ++seed);
        auto before = rails.a->stats();
        rails.here->device(after % 2).fail_request(after, outcome);
        // How many requests of an op a rail gets is the scheduler's choice: until it has come to the one that fails.
        for (int ops = 0; ops < 50 && rails.a->stats().failovers == before.failovers; ++ops) {
          std::memset(to.data, 0, to.nbytes);
          REQUIRE_OK((writes ? rails.write(from.nbytes) : rails.read(from.nbytes))->wait());
          REQUIRE(mismatch(to.data, to.nbytes, seed) == to.nbytes);
        }
        CHECK(rails.a->stats().failovers == before.failovers + 1);
        CHECK(rails.a->stats().resent_slices > before.resent_slices);
        rails.wait_for_rails(2);
      }
    }
  }
}

TEST_CASE("a request that no rail can carry fails its op at once, and is not sent again") {
  Rails rails(1, kMiB);
  fill(rails.source.data, kMiB, 12);
  for (bool writes : {true, false}) {
    CAPTURE(writes);
    auto before = rails.a->stats();
    rails.here->device(0).fail_request(0, Outcome::invalid_request);
    auto op = writes ? rails.write(4096) : rails.read(4096);
    CHECK(op->wait().code() == Code::invalid_argument);
    CHECK(op->state() == OpState::failed);
    CHECK(op->status().message().find("refuses a request") != std::string::npos);
    CHECK(rails.a->stats().resent_slices == before.resent_slices);
    rails.wait_for_rails(1);
    REQUIRE_OK(rails.write(kMiB)->wait());
    CHECK(mismatch(rails.target.data, kMiB, 12) == kMiB);
  }
}

TEST_CASE("a port goes down in the middle, and up again") {
  Rails rails(2, 64 * kMiB);
  fill(rails.source.data, 64 * kMiB, 3);
  for (size_t i : {0, 1}) rails.here->device(i).set_delay_us(500);
  auto op = rails.write(64 * kMiB);
  usleep(20'000);
  rails.here->device(1).set_port(false);
  REQUIRE_OK(op->wait());
  CHECK(mismatch(rails.target.data, 64 * kMiB, 3) == 64 * kMiB);
  rails.wait_for_rails(1);
  rails.here->device(1).set_port(true);
  rails.wait_for_rails(2);
  auto before = rails.sent();
  REQUIRE_OK(rails.write(64 * kMiB)->wait());
  CHECK(rails.sent()[1] > before[1]);
}

TEST_CASE("a NIC that dies never completes anything: its requests are taken back all the same") {
  Rails rails(2, 32 * kMiB);
  fill(rails.source.data, 32 * kMiB, 4);
  rails.here->device(0).set_delay_us(500);
  auto op = rails.write(32 * kMiB);
  usleep(5000);
  rails.here->device(0).die();
  REQUIRE_OK(op->wait());
  CHECK(mismatch(rails.target.data, 32 * kMiB, 4) == 32 * kMiB);
  CHECK(rails.rails_up() == 1);
}

TEST_CASE("everything hangs: ops end by their deadline, and the memory is the caller's own again") {
  for (bool writes : {true, false}) {
    CAPTURE(writes);
    Rails rails(2, 16 * kMiB);
    for (size_t i : {0, 1}) rails.here->device(i).set_hanging(true);
    fill(rails.source.data, 16 * kMiB, 5);
    auto start = steady_ns();
    OpOptions options{.deadline = Deadline::after_ms(300)};
    auto op = writes ? rails.write(16 * kMiB, options) : rails.read(16 * kMiB, options);
    CHECK(op->wait().code() == Code::deadline_exceeded);
    CHECK(op->state() == OpState::timeout);
    CHECK(steady_ns() - start < 2'000'000'000);
    fill(rails.source.data, 16 * kMiB, 6);
    std::memset(rails.target.data, 0, 16 * kMiB);
    for (auto until = soon(); !op->remote_quiescent() && !until.expired();) usleep(1000);
    CHECK(op->remote_quiescent());
    for (size_t i : {0, 1}) rails.here->device(i).set_hanging(false);
    usleep(100'000);
    CHECK(mismatch(rails.source.data, 16 * kMiB, 6) == 16 * kMiB);
    CHECK(all_zero(rails.target.data, 16 * kMiB));
    rails.wait_for_rails(2);
    REQUIRE_OK(rails.write(16 * kMiB)->wait());
    CHECK(mismatch(rails.target.data, 16 * kMiB, 6) == 16 * kMiB);
  }
}

TEST_CASE("everything hangs, the session ends and then the engine: ops end, and let go of the memory") {
  for (bool writes : {true, false}) {
    CAPTURE(writes);
    Rails rails(2, kMiB);
    for (size_t i : {0, 1}) rails.here->device(i).set_hanging(true);
    auto op = writes ? rails.write(kMiB, {}) : rails.read(kMiB, {});
    rails.b->close();
    while (rails.a->stats().sessions > 0) std::this_thread::yield();
    rails.a->close();  // before what is posted is given up
    CHECK(op->wait(soon(5000)).code() == Code::peer_lost);
    REQUIRE(op->ended());
  }
}

TEST_CASE("cancel leaves other ops alone") {
  constexpr size_t kBytes = 64 * kMiB / kSlower;
  bool at_once = false;
  for (int attempt = 0; attempt < 10 && !at_once; ++attempt) {
    Rails rails(2, kBytes);
    fill(rails.source.data, kBytes, 7);
    for (size_t i : {0, 1}) rails.here->device(i).set_hanging(true);
    auto cancelled = rails.write(kBytes);
    auto other = rails.write(kBytes);
    usleep(10'000);
    auto before = std::chrono::steady_clock::now();
    cancelled->cancel();
    for (size_t i : {0, 1}) rails.here->device(i).set_hanging(false);
    CHECK(cancelled->wait().code() == Code::cancelled);
    at_once = std::chrono::steady_clock::now() - before < std::chrono::milliseconds(RdmaEndpoint::kStopMs);
    CHECK(cancelled->remote_quiescent());
    REQUIRE_OK(other->wait());
    CHECK(mismatch(rails.target.data, kBytes, 7) == kBytes);
    if (at_once) CHECK(rails.a->stats().failovers == 0);  // the rails were well: nothing had to be flushed
  }
  CHECK(at_once);  // on the slowest machine one of ten
}

TEST_CASE("deregister fences: when it returns no NIC writes any more") {
  Rails rails(2, 64 * kMiB);
  fill(rails.source.data, 64 * kMiB, 8);
  for (size_t i : {0, 1}) rails.here->device(i).set_delay_us(500);
  auto op = rails.write(64 * kMiB);
  usleep(10'000);
  REQUIRE_OK(rails.b->deregister(rails.region, soon()));
  std::memset(rails.target.data, 0, 64 * kMiB);
  CHECK(op->wait().code() == Code::key_not_found);
  CHECK(all_zero(rails.target.data, 64 * kMiB));
  // The rails recover, and other regions are as reachable as before.
  auto again = must(rails.peer->open(rails.target.register_in(*rails.b)->descriptor(), soon()));
  REQUIRE_OK(must(rails.a->write({{rails.local, 0, again, 0, kMiB}}, {.deadline = soon()}))->wait());
  CHECK(mismatch(rails.target.data, kMiB, 8) == kMiB);
}

TEST_CASE("notifications: more at once than a pair has receives for, through failures, each exactly once") {
  Rails rails(2, 8 * kMiB);
  constexpr int kNotes = 300;
  std::vector<OpPtr> ops;
  for (int i = 0; i < kNotes; ++i) {
    if (i % 50 == 25) rails.here->device(i % 2).fail_request(3, Outcome::retries_exceeded);
    auto nbytes = static_cast<uint64_t>(i) * 100, at = nbytes * (i - 1) / 2;  // no two overlap
    ops.push_back(must(rails.a->write({{rails.local, 0, rails.remote, at, nbytes}},
                                      {.deadline = soon(), .notify = std::to_string(i)})));
  }
  for (auto& op : ops) REQUIRE_OK(op->wait());
  std::vector<int> seen(kNotes);
  for (int i = 0; i < kNotes; ++i) ++seen[std::stoi(must(rails.b->next_notification(soon())).data)];
  for (int n : seen) REQUIRE(n == 1);
  usleep(20'000);
  CHECK(rails.b->stats().notifications == kNotes);
}

TEST_CASE("without a device there is no engine, and the error says why") {
  auto made = Engine::create(options_over(std::make_shared<FakeDriver>(0), "x"));
  REQUIRE(!made.is_ok());
  CHECK(made.status().code() == Code::unsupported);
  CHECK(made.status().message().find("no RDMA device") != std::string::npos);
}

TEST_CASE("a record of an rdma region that makes no sense is an error, never a guess") {
  using torch_mooncake::transfer::rdma::parse_rdma_record;
  auto record = [](uint64_t chunk, std::vector<uint32_t> keys) {
    ByteWriter out;
    out.put(uint64_t{4096}).put(chunk).put(uint64_t{64}).put(uint8_t{0}).put(uint32_t{1}).put(std::string_view("nic"));
    out.put(uint8_t{3});
    out.put(uint32_t{7});
    out.put(static_cast<uint32_t>(keys.size()));
    for (uint32_t key : keys) out.put(key);
    return out.take();
  };
  CHECK(parse_rdma_record(record(4096, {1, 2}), 8192).is_ok());
  CHECK(parse_rdma_record(record(4096, {}), 0).is_ok());
  auto of_nics = [](uint32_t nics) {
    ByteWriter out;
    out.put(uint64_t{4096}).put(uint64_t{4096}).put(uint64_t{64}).put(uint8_t{0}).put(nics);
    for (uint32_t i = 0; i < nics; ++i) {
      out.put(std::string_view("nic")).put(uint8_t{3}).put(uint32_t{7}).put(uint32_t{1}).put(uint32_t{9});
    }
    return out.take();
  };
  CHECK(parse_rdma_record(of_nics(256), 4096).is_ok());
  CHECK(!parse_rdma_record(of_nics(257), 4096).is_ok());
  for (auto& bad : {record(4096, {1}), record(4096, {1, 2, 3}), record(0, {1, 2}), record(1ull << 40, {1})})
    CHECK(!parse_rdma_record(bad, 8192).is_ok());
  auto whole = record(4096, {1, 2});
  for (size_t n = 0; n < whole.size(); ++n) CHECK(!parse_rdma_record(whole.substr(0, n), 8192).is_ok());
}

TEST_CASE("explain names the rails, or why there are none") {
  Rails rails(2, kMiB);
  auto said = rails.a->explain(rails.peer);
  CHECK(said.read == "rdma");
  REQUIRE(said.paths.front().lanes.size() == 2);
  CHECK(said.paths.front().lanes[0].rail == "fake0 -> NIC 0");
  for (size_t i : {0, 1}) rails.here->device(i).set_port(false);
  rails.wait_for_rails(0);
  said = rails.a->explain(rails.peer);
  CHECK(said.read == "");
  CHECK(said.paths.front().no_write.find("port is down") != std::string::npos);
}

}  // namespace transfer_test
