// Completion is truth: every byte is looked at when wait() returns, for every way, size and batch.
#include <algorithm>
#include <atomic>
#include <thread>

#include "transfer/support.h"

namespace transfer_test {

TEST_CASE("sizes: written and read bytes are there when wait() returns") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    constexpr size_t kSizes[] = {0, 1, 7, 8, 511, 512, 65535, 65536, 65537, 1 << 20, (5 << 20) + 3};
    constexpr size_t kMost = (5 << 20) + 64;
    Memory source(local_of(way), kMost), target(way, kMost);
    auto local = source.register_in(*pair.a);
    auto remote = pair.open(target.register_in(*pair.b));
    CHECK(remote->transport() == name_of(way));
    uint64_t seed = 1;
    for (size_t n : kSizes) {
      CAPTURE(n);
      fill(source.data, kMost, ++seed);
      std::memset(target.data, 0, kMost);
      auto op = must(pair.a->write({{local, 0, remote, 5, n}}, {.deadline = soon()}));
      REQUIRE_OK(op->wait());
      CHECK(op->state() == OpState::done);
      CHECK(op->bytes_done() == n);
      CHECK(op->remote_quiescent());
      CHECK(op->transport() == name_of(way));
      REQUIRE(mismatch(target.data + 5, n, seed) == n);
      REQUIRE(all_zero(target.data, 5));
      REQUIRE(all_zero(target.data + 5 + n, kMost - 5 - n));

      std::memset(source.data, 0, kMost);
      op = must(pair.a->read({{local, 9, remote, 5, n}}, {.deadline = soon()}));
      REQUIRE_OK(op->wait());
      REQUIRE(mismatch(source.data + 9, n, seed) == n);
      REQUIRE(all_zero(source.data, 9));
      REQUIRE(all_zero(source.data + 9 + n, kMost - 9 - n));
    }
  }
}

TEST_CASE("batches of scattered slices: every slice is there at the instant of completion") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    for (size_t batch : {1, 31, 32, 33, 63, 64, 65, 1000, 100'000}) {
      CAPTURE(batch);
      const size_t page = batch == 100'000 ? 192 : 1536;
      Memory source(local_of(way), batch * page), target(way, batch * page);
      auto local = source.register_in(*pair.a);
      auto region = target.register_in(*pair.b);
      auto remote = pair.open(region);
      fill(source.data, batch * page, batch);
      std::vector<size_t> to(batch);
      for (size_t i = 0; i < batch; ++i) to[i] = i;
      std::shuffle(to.begin(), to.end(), std::mt19937(7));
      std::vector<Slice> slices;
      for (size_t i = 0; i < batch; ++i) slices.push_back({local, i * page, remote, to[i] * page, page});
      auto op = must(pair.a->write(slices, {.deadline = soon(60'000)}));
      REQUIRE_OK(op->wait());
      for (size_t i = 0; i < batch; ++i)
        REQUIRE(std::memcmp(source.data + i * page, target.data + to[i] * page, page) == 0);

      std::memset(source.data, 0, batch * page);
      op = must(pair.a->read(slices, {.deadline = soon(60'000)}));
      REQUIRE_OK(op->wait());
      REQUIRE(mismatch(source.data, batch * page, batch) == batch * page);
      REQUIRE_OK(pair.b->deregister(region, soon()));
      REQUIRE_OK(pair.a->deregister(local, soon()));
    }
  }
}

TEST_CASE("many ops at once, both directions, from several threads") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    auto back = must(pair.b->connect(pair.a->addresses().front(), soon()));
    constexpr size_t kThreads = 4, kOps = 40, kBytes = 200'000;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        auto& from = t % 2 ? *pair.b : *pair.a;
        auto& to = t % 2 ? *pair.a : *pair.b;
        auto& peer = t % 2 ? back : pair.peer;
        Memory source(local_of(way), kBytes), target(way, kBytes);
        auto local = source.register_in(from);
        auto opened = peer->open(target.register_in(to)->descriptor(), soon());
        if (!opened) return void(++wrong);
        for (size_t i = 0; i < kOps; ++i) {
          fill(source.data, kBytes, t * 1000 + i);
          auto op = from.write({{local, 0, *opened, 0, kBytes}}, {.deadline = soon()});
          if (!op || !(*op)->wait() || mismatch(target.data, kBytes, t * 1000 + i) != kBytes) ++wrong;
          std::memset(source.data, 0, kBytes);
          op = from.read({{local, 0, *opened, 0, kBytes}}, {.deadline = soon()});
          if (!op || !(*op)->wait() || mismatch(source.data, kBytes, t * 1000 + i) != kBytes) ++wrong;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
  }
}

TEST_CASE("out of bounds, without rights, or with strange regions: a typed error, and nothing is written") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    Memory source(local_of(way), 4096), target(way, 4096), secret(way, 4096);
    fill(source.data, 4096, 3);
    auto local = source.register_in(*pair.a);
    auto remote = pair.open(target.register_in(*pair.b));
    auto refused = [&](std::vector<Slice> slices, Code code) {
      auto op = pair.a->write(std::move(slices), {.deadline = soon()});
      REQUIRE(!op.is_ok());
      CHECK(op.status().code() == code);
    };
    refused({{local, 0, remote, 0, 4097}}, Code::out_of_bounds);
    refused({{local, 0, remote, 4000, 97}}, Code::out_of_bounds);
    refused({{local, 4096, remote, 0, 1}}, Code::out_of_bounds);
    refused({{local, 0, remote, UINT64_MAX, 2}}, Code::out_of_bounds);
    refused({{local, 0, remote, 8, UINT64_MAX - 4}}, Code::out_of_bounds);
    refused({{local, 0, remote, 0, 64}, {local, 0, remote, 4096, 1}}, Code::out_of_bounds);
    refused({{nullptr, 0, remote, 0, 1}}, Code::invalid_argument);
    CHECK(all_zero(target.data, 4096));

    auto read_only = pair.open(target.register_in(*pair.b, {.writable = false}));
    refused({{local, 0, read_only, 0, 64}}, Code::invalid_argument);
    REQUIRE_OK(must(pair.a->read({{local, 0, read_only, 0, 64}}, {.deadline = soon()}))->wait());
    auto write_only = pair.open(secret.register_in(*pair.b, {.readable = false}));
    CHECK(pair.a->read({{local, 0, write_only, 0, 64}}, {}).status().code() == Code::invalid_argument);
    REQUIRE_OK(must(pair.a->write({{local, 0, write_only, 0, 64}}, {.deadline = soon()}))->wait());

    // A descriptor of another engine; a region of another engine; bytes that are none; one that is gone.
    CHECK(pair.peer->open(local->descriptor(), soon()).status().code() == Code::invalid_argument);
    auto foreign = target.register_in(*pair.b);
    refused({{foreign, 0, remote, 0, 1}}, Code::invalid_argument);
    CHECK(pair.peer->open("rubbish", soon()).status().code() == Code::invalid_argument);
    auto gone = secret.register_in(*pair.b, {.label = "passing"});
    REQUIRE_OK(pair.b->deregister(gone, soon()));
    auto status = pair.peer->open(gone->descriptor(), soon()).status();
    CHECK(status.code() == Code::key_not_found);
    CHECK(status.message().find("passing") != std::string::npos);
  }
}

TEST_CASE("a region deregistered after it was opened takes no more bytes") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    Memory source(local_of(way), 1 << 20), target(way, 1 << 20);
    fill(source.data, source.nbytes, 3);
    auto local = source.register_in(*pair.a);
    auto region = target.register_in(*pair.b);
    auto remote = pair.open(region);
    REQUIRE_OK(pair.b->deregister(region, soon()));
    for (size_t n : {size_t{100}, source.nbytes}) {
      auto op = must(pair.a->write({{local, 0, remote, 0, n}}, {.deadline = soon()}));
      CHECK(op->wait().code() == Code::key_not_found);
      CHECK(op->state() == OpState::failed);
      op = must(pair.a->read({{local, 0, remote, 0, n}}, {.deadline = soon()}));
      CHECK(op->wait().code() == Code::key_not_found);
    }
    CHECK(all_zero(target.data, target.nbytes));
    CHECK(pair.b->stats().quarantined_regions == 0);
  }
}

TEST_CASE("notifications come once, after the data, from empty ops too") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    constexpr size_t kBytes = 3 << 20;
    Memory source(local_of(way), kBytes), target(way, kBytes);
    auto local = source.register_in(*pair.a);
    auto remote = pair.open(target.register_in(*pair.b));
    for (size_t n : {kBytes, size_t{100}}) {
      fill(source.data, n, n);
      std::memset(target.data, 0, kBytes);
      auto op = must(pair.a->write({{local, 0, remote, 0, n}}, {.deadline = soon(), .notify = "data"}));
      auto note = must(pair.b->next_notification(soon()));
      CHECK(note.data == "data");
      CHECK(note.from_engine == pair.a->id());
      CHECK(note.from_name == "a");
      REQUIRE(mismatch(target.data, n, n) == n);
      REQUIRE_OK(op->wait());
    }
    REQUIRE_OK(must(pair.a->write({}, {.deadline = soon(), .notify = "empty", .peer = pair.peer}))->wait());
    REQUIRE_OK(must(pair.a->write({{local, 0, remote, 0, 0}}, {.deadline = soon(), .notify = "zero"}))->wait());
    REQUIRE_OK(must(pair.a->read({{local, 0, remote, 0, 64}}, {.deadline = soon(), .notify = "read"}))->wait());
    for (auto* expected : {"empty", "zero", "read"}) CHECK(must(pair.b->next_notification(soon())).data == expected);
    CHECK(pair.b->next_notification(Deadline::after_ms(20)).status().code() == Code::deadline_exceeded);
    CHECK(pair.b->stats().notifications == 5);
    REQUIRE_OK(must(pair.a->write({}, {}))->wait());
    CHECK(pair.a->write({}, {.notify = "whose?"}).status().code() == Code::invalid_argument);
    CHECK(pair.a->write({}, {.notify = std::string(65537, 'x'), .peer = pair.peer}).status().code() ==
          Code::invalid_argument);
  }
}

TEST_CASE("one op over regions of both kinds: shared and private") {
  auto options = options_for(Way::segment, "x");
  auto a = must(Engine::create(options)), b = must(Engine::create(options));
  auto peer = must(a->connect(b->addresses().front(), soon()));
  Memory source(Way::segment, 4096), shared(Way::segment, 4096), plain(Way::process_vm, 4096);
  fill(source.data, 4096, 5);
  auto local = source.register_in(*a);
  auto to_shared = must(peer->open(shared.register_in(*b)->descriptor(), soon()));
  auto to_plain = must(peer->open(plain.register_in(*b)->descriptor(), soon()));
  CHECK(to_shared->transport() == "shm");
  CHECK(to_plain->transport() == "process_vm");
  CHECK(to_plain->mapped() == nullptr);
  REQUIRE(to_shared->mapped() != nullptr);
  auto op = must(
      a->write({{local, 0, to_plain, 0, 2048}, {local, 0, to_shared, 0, 4096}, {local, 2048, to_plain, 2048, 2048}},
               {.deadline = soon(), .notify = "both"}));
  CHECK(must(b->next_notification(soon())).data == "both");
  CHECK(mismatch(shared.data, 4096, 5) == 4096);
  CHECK(mismatch(plain.data, 4096, 5) == 4096);
  CHECK(std::memcmp(to_shared->mapped().get(), shared.data, 4096) == 0);
  REQUIRE_OK(op->wait());
  CHECK(op->transport().find("shm") != std::string::npos);
  CHECK(op->transport().find("process_vm") != std::string::npos);
}

TEST_CASE("overlapping and repeated registrations live side by side") {
  Pair pair(Way::process_vm);
  Memory memory(Way::process_vm, 8192), source(Way::process_vm, 8192);
  auto one = must(pair.b->register_memory(memory.data, 8192, {}));
  auto two = must(pair.b->register_memory(memory.data, 8192, {}));
  auto inner = must(pair.b->register_memory(memory.data + 1000, 100, {}));
  CHECK(one->id() != two->id());
  CHECK(one->generation() != two->generation());
  CHECK(pair.b->stats().regions == 3);
  auto local = source.register_in(*pair.a);
  auto to_inner = pair.open(inner), to_two = pair.open(two);
  REQUIRE_OK(pair.b->deregister(one, soon()));
  fill(source.data, 8192, 11);
  REQUIRE_OK(must(pair.a->write({{local, 0, to_inner, 0, 100}}, {.deadline = soon()}))->wait());
  CHECK(mismatch(memory.data + 1000, 100, 11) == 100);
  REQUIRE_OK(must(pair.a->write({{local, 0, to_two, 0, 8192}}, {.deadline = soon()}))->wait());
  CHECK(mismatch(memory.data, 8192, 11) == 8192);
}

TEST_CASE("the accepting side can write and read as well") {
  for (Way way : kTwoProcessWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    rpc::SessionPtr session;
    for (auto& s : pair.b->rpc().sessions()) session = s;
    REQUIRE(session);
    auto back = pair.b->peer_of(session);
    Memory source(local_of(way), 1 << 20), target(way, 1 << 20);
    fill(source.data, 1 << 20, 8);
    auto local = source.register_in(*pair.b);
    auto remote = must(back->open(target.register_in(*pair.a)->descriptor(), soon()));
    auto op = must(pair.b->write({{local, 0, remote, 0, 1 << 20}}, {.deadline = soon()}));
    REQUIRE_OK(op->wait());
    CHECK(op->transport() == name_of(way));
    CHECK(mismatch(target.data, 1 << 20, 8) == 1 << 20);
    std::memset(source.data, 0, 1 << 20);
    REQUIRE_OK(must(pair.b->read({{local, 0, remote, 0, 1 << 20}}, {.deadline = soon()}))->wait());
    CHECK(mismatch(source.data, 1 << 20, 8) == 1 << 20);
  }
}

TEST_CASE("transports: unknown names and unreachable peers are errors, nothing falls back") {
  EngineOptions options;
  options.transports = {"local", "quantum"};
  auto made = Engine::create(options);
  REQUIRE(!made.is_ok());
  CHECK(made.status().code() == Code::unsupported);
  CHECK(made.status().message().find("quantum") != std::string::npos);
  // Both allow shared memory only, but no Unix socket proves the same host.
  auto only_shm = options_for(Way::segment, "x");
  only_shm.rpc.same_host_listener = false;
  auto a = must(Engine::create(only_shm)), b = must(Engine::create(only_shm));
  auto peer = must(a->connect(b->addresses().front(), soon()));
  CHECK(a->transport_for(peer) == "");
  Memory memory(Way::process_vm, 64);
  auto opened = peer->open(memory.register_in(*b)->descriptor(), soon());
  REQUIRE(!opened.is_ok());
  CHECK(opened.status().code() == Code::unsupported);
  CHECK(must(Engine::create(options_for(Way::tcp, "c")))->connect("bogus://x", soon()).status().code() ==
        Code::unsupported);
  for (Way way : kWays) {
    Pair pair(way);
    if (way != Way::segment && way != Way::file && way != Way::cuda)
      CHECK(pair.a->transport_for(pair.peer) == name_of(way));
  }
}

TEST_CASE("the references of an op are dropped at its end, and on_end comes once") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    Memory source(local_of(way), 1 << 20), target(way, 1 << 20);
    auto local = source.register_in(*pair.a);
    auto remote = pair.open(target.register_in(*pair.b));
    for (size_t n : {size_t{64}, size_t{1} << 20}) {
      auto keep = std::make_shared<int>(1);
      std::weak_ptr<int> weak = keep;
      std::atomic<int> ends{0};
      std::atomic<Code> code{Code::internal};
      auto op = must(pair.a->write({{local, 0, remote, 0, n}},
                                   {.deadline = soon(), .keep = std::move(keep), .on_end = [&](const Status& s) {
                                      code = s.code();
                                      ++ends;
                                    }}));
      REQUIRE_OK(op->wait());
      for (auto until = soon(5000); (ends == 0 || !weak.expired()) && !until.expired();) std::this_thread::yield();
      CHECK(ends == 1);
      CHECK(code == Code::ok);
      CHECK(weak.expired());
    }
    auto keep = std::make_shared<int>(1);
    std::weak_ptr<int> weak = keep;
    auto region = target.register_in(*pair.b, {.keep = std::move(keep)});
    CHECK(!weak.expired());
    REQUIRE_OK(pair.b->deregister(region, soon()));
    CHECK(weak.expired());
  }
}

TEST_CASE("close: pending and later calls fail with closed, and everything returns to rest") {
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    {  // what stays for the life of the process is made: a device's stream and its thread
      Pair warm(way);
      Memory source(local_of(way), 64), target(way, 64);
      auto remote = warm.open(target.register_in(*warm.b));
      REQUIRE_OK(must(warm.a->write({{source.register_in(*warm.a), 0, remote, 0, 64}}, {.deadline = soon()}))->wait());
    }
    auto before = count_resources();
    for (int round = 0; round < 3; ++round) {
      Memory source(local_of(way), 64 << 20), target(way, 64 << 20);
      OpPtr op;
      RegionPtr local;
      RemoteRegionPtr remote;
      EnginePtr a;
      {
        Pair pair(way);
        a = pair.a;
        local = source.register_in(*pair.a);
        remote = pair.open(target.register_in(*pair.b));
        op = must(pair.a->write({{local, 0, remote, 0, 64 << 20}}, {.deadline = soon()}));
      }
      CHECK(op->ended());
      Status status = op->wait();
      bool done_or_closed = status.is_ok() || status.code() == Code::closed;
      CHECK(done_or_closed);
      CHECK(a->write({{local, 0, remote, 0, 1}}, {}).status().code() == Code::closed);
      CHECK(a->register_memory(source.data, 1, {}).status().code() == Code::closed);
      CHECK(a->connect("tcp://127.0.0.1:1", soon()).status().code() == Code::closed);
      CHECK(a->next_notification(soon()).status().code() == Code::closed);
    }
    Counts after = count_resources();
    for (auto until = soon(5000); (after.fds > before.fds || after.threads > before.threads) && !until.expired();)
      after = count_resources();
    CHECK(after.fds <= before.fds);
    CHECK(after.threads <= before.threads);
  }
}

}  // namespace transfer_test
