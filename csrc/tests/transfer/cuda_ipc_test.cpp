// CUDA memory of another process, mapped into this one, over a fake driver whose memory really is shared. (Deaths,
// cancellations and the rest of what all transports promise: faults_test.cpp.)
#include <functional>
#include <thread>

#include "rpc/endpoint.h"
#include "transfer/child.h"
#include "transfer/cuda/share.h"
#include "transfer/tcp/rails.h"
#include "transfer/wire.h"

namespace transfer_test {
namespace {

constexpr size_t kMiB = 1 << 20;

std::string told(Engine& engine, const PeerPtr& peer, const std::string& transport) {
  for (auto& path : engine.explain(peer).paths) {
    if (path.transport != transport) continue;
    std::string out = path.no_read;
    for (auto& [name, fact] : path.facts)
      if (auto* text = std::get_if<std::string>(&fact)) out += "; " + name + ": " + *text;
    return out;
  }
  return "";
}

// A child whose CUDA memory is opened here.
struct Ipc : TwoProcesses {
  FakeCuda& cuda = FakeCuda::install();
  Ipc() : TwoProcesses(Way::cuda_ipc) {}
  ~Ipc() {
    engine->close();
    cuda.hang = cuda.no_map = cuda.no_ids = false;
    cuda.copy_us = cuda.first_used = 0;
    cuda.device_count = 1;
    cuda.peer_access = true;
  }
  RemoteRegionPtr region(size_t nbytes, uint64_t seed, size_t parts = 1, size_t skip = 0) {
    child.ask("cuda r " + std::to_string(nbytes) + " " + std::to_string(seed) + " " + std::to_string(parts) + " " +
              std::to_string(skip));
    return child.open(*peer, "r");
  }
};

}  // namespace

TEST_CASE("cuda_ipc: a process that uses no CUDA has the memory staged, and opens no driver") {
  Child child(Way::cuda_ipc);
  auto engine = must(Engine::create(options_for(Way::file, "parent")));
  auto peer = must(engine->connect(child.address(), soon()));
  child.make("r", kMiB, 5);
  auto remote = child.open(*peer, "r");
  CHECK(remote->transport() == "staged");
  Memory memory(Way::process_vm, kMiB);
  auto local = memory.register_in(*engine);
  REQUIRE_OK(must(engine->read({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
  CHECK(mismatch(memory.data, kMiB, 5) == kMiB);
  CHECK(told(*engine, peer, "cuda_ipc").find("does not use CUDA") != std::string::npos);
  CHECK(transfer::CudaDriver::made() == nullptr);
  engine->close();
}

TEST_CASE("cuda_ipc: parts of an allocation, and allocations side by side; no byte beside the region is written") {
  Ipc ipc;
  for (size_t parts : {1, 3, 70}) {  // 70: more than one message holds
    CAPTURE(parts);
    constexpr size_t kBytes = 3 * kMiB + 4321;
    auto remote = ipc.region(kBytes, 4, parts, 12'345);
    CHECK(remote->transport() == "cuda_ipc");
    for (Way way : {Way::process_vm, Way::cuda}) {
      CAPTURE(name_of(way));
      Memory memory(way, kBytes);
      auto local = memory.register_in(*ipc.engine);
      auto op = must(ipc.engine->read({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}));
      REQUIRE_OK(op->wait());
      CHECK(op->transport() == "cuda_ipc");
      CHECK(op->remote_quiescent());
      REQUIRE(mismatch(memory.data, kBytes, 4) == kBytes);
      fill(memory.data, kBytes, 6);
      // In pieces that lie elsewhere here than there, across the seams.
      std::vector<Slice> slices;
      for (size_t at = 0; at < kBytes; at += 333'333)
        slices.push_back({local, at, remote, at, std::min<size_t>(333'333, kBytes - at)});
      std::reverse(slices.begin(), slices.end());
      REQUIRE_OK(must(ipc.engine->write(slices, {.deadline = soon(), .notify = "x"}))->wait());
      CHECK(ipc.child.holds("r", kBytes, 6));
      CHECK(ipc.child.ask("edges r") == "zero");
      fill(memory.data, kBytes, 4);
      REQUIRE_OK(must(ipc.engine->write({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}))->wait());
    }
    CHECK(ipc.cuda.mappings_alive > 0);
    remote.reset();
    CHECK(eventually([&] { return ipc.cuda.mappings_alive == 0; }));
  }
}

TEST_CASE("cuda_ipc: an allocation is mapped once, and unmapped with the last region in it") {
  Ipc ipc;
  auto first = ipc.region(kMiB, 1);
  ipc.child.ask("part p r 4096 65536");
  int made = ipc.cuda.mappings_made;
  auto second = ipc.child.open(*ipc.peer, "p");
  CHECK(ipc.cuda.mappings_made == made);
  CHECK(ipc.cuda.mappings_alive == 1);
  first.reset();
  CHECK(ipc.child.ask("deregister r 5000").rfind("OK", 0) == 0);
  CHECK(ipc.cuda.mappings_alive == 1);
  Memory memory(Way::process_vm, 65536);
  auto local = memory.register_in(*ipc.engine);
  REQUIRE_OK(must(ipc.engine->read({{local, 0, second, 0, 65536}}, {.deadline = soon()}))->wait());
  CHECK(mismatch(memory.data, 65536, 1, 4096) == 65536);
  // Its owner wants the memory back: unmapped before it hears that it may have it.
  CHECK(ipc.child.ask("deregister p 5000").rfind("OK", 0) == 0);
  CHECK(ipc.cuda.mappings_alive == 0);
  auto refused = ipc.engine->read({{local, 0, second, 0, 1}}, {.deadline = soon()});
  Status status = refused ? (*refused)->wait() : refused.status();
  CHECK(status.code() == Code::key_not_found);
  CHECK(status.message().find("deregistered") != std::string::npos);
}

TEST_CASE("cuda_ipc: deregister waits for the copies that are inside, and is busy while a device hangs") {
  for (Way way : {Way::process_vm, Way::cuda}) {
    CAPTURE(name_of(way));
    Ipc ipc;
    constexpr size_t kBytes = 8 * kMiB;
    auto remote = ipc.region(kBytes, 0);
    Memory memory(way, kBytes);
    fill(memory.data, kBytes, 3);
    auto local = memory.register_in(*ipc.engine);
    ipc.cuda.hang = true;
    auto op = must(ipc.engine->write({{local, 0, remote, 0, kBytes}}, {.deadline = Deadline::after_ms(300)}));
    auto busy = ipc.child.ask("deregister r 50");
    CHECK(busy.rfind("BUSY", 0) == 0);
    CHECK(busy.find("parent") != std::string::npos);
    auto start = steady_ns();
    CHECK(op->wait().code() == Code::deadline_exceeded);
    CHECK(steady_ns() - start < 2'500'000'000);  // promised: 0.55 s
    CHECK(ipc.child.ask("deregister r 50").rfind("BUSY", 0) == 0);
    CHECK(ipc.child.ask("quarantined") == "1");
    CHECK(ipc.cuda.mappings_alive == 1);
    ipc.cuda.hang = false;
    CHECK(ipc.child.ask("deregister r 10000").rfind("OK", 0) == 0);
    CHECK(ipc.cuda.mappings_alive == 0);
    CHECK(ipc.child.ask("quarantined") == "0");
    REQUIRE_OK(ipc.engine->deregister(local, soon()));
  }
}

TEST_CASE("cuda_ipc: the owner dies in the middle: peer_lost, nothing lands later, the mapping goes") {
  for (bool writes : {true, false}) {
    CAPTURE(writes);
    Ipc ipc;
    constexpr size_t kBytes = 256 * kMiB;
    auto remote = ipc.region(kBytes, 0, 2);
    Memory memory(Way::cuda, kBytes);
    auto local = memory.register_in(*ipc.engine);
    ipc.cuda.copy_us = 100'000;  // a step of 64 MiB
    std::vector<Slice> slices = {{local, 0, remote, 0, kBytes}};
    auto op =
        must(writes ? ipc.engine->write(slices, {.deadline = soon()}) : ipc.engine->read(slices, {.deadline = soon()}));
    usleep(50'000);
    ipc.child.kill_and_reap();
    Status status = op->wait();
    CHECK_MESSAGE(status.code() == Code::peer_lost, status.to_string());
    ipc.cuda.copy_us = 0;
    std::memset(memory.data, 9, kBytes);
    CHECK(eventually([&] { return ipc.cuda.mappings_alive == 0; }));
    usleep(100'000);
    CHECK(std::all_of(memory.data, memory.data + kBytes, [](std::byte b) { return b == std::byte{9}; }));
    REQUIRE_OK(ipc.engine->deregister(local, soon()));
  }
}

TEST_CASE("cuda_ipc: a writer that dies with the memory mapped gives it back; one whose device hangs keeps it") {
  auto& cuda = FakeCuda::install();
  auto options = options_for(Way::cuda_ipc, "owner");
  options.rpc.heartbeat_limit_ms = 1500;
  auto engine = must(Engine::create(options));
  Child child(Way::cuda_ipc);
  Memory target(Way::cuda_ipc, 4 * kMiB);
  auto region = target.register_in(*engine);
  child.ask("connect p " + engine->addresses().front());
  CHECK(child.ask("open w p " + to_hex(region->descriptor())) == "cuda_ipc");
  child.make("source", 4 * kMiB, 9);
  child.ask("fake hang 1");
  child.ask("write source w " + std::to_string(4 * kMiB) + " 300");
  CHECK(child.ask("wait").rfind("DEADLINE_EXCEEDED", 0) == 0);
  Status busy = engine->deregister(region, Deadline::after_ms(100));
  CHECK(busy.code() == Code::busy);
  CHECK(busy.message().find("child") != std::string::npos);
  // Stopped, and given up for silence: a timeout, which frees nothing.
  child.stop();
  CHECK(eventually([&] { return engine->stats().sessions == 0; }));
  CHECK(engine->deregister(region, Deadline::after_ms(100)).code() == Code::busy);
  CHECK(engine->stats().quarantined_regions == 1);
  child.kill_and_reap();
  REQUIRE_OK(engine->deregister(region, Deadline::after_ms(5000)));
  CHECK(engine->stats().quarantined_regions == 0);
  CHECK(cuda.mappings_alive == 0);
  engine->close();
}

TEST_CASE("cuda_ipc: memory that was freed and given out again is not taken for what was there before") {
  for (bool ids : {true, false}) {  // older drivers have no ids of mapped memory: then nothing is kept for reuse
    CAPTURE(ids);
    Ipc ipc;
    ipc.child.ask(std::string("fake no_ids ") + (ids ? "0" : "1"));
    auto old = ipc.region(kMiB, 1);
    Memory memory(Way::process_vm, kMiB);
    fill(memory.data, kMiB, 8);
    auto local = memory.register_in(*ipc.engine);
    ipc.child.ask("reuse r");
    // What was mapped before is the old memory still.
    REQUIRE_OK(must(ipc.engine->write({{local, 0, old, 0, kMiB}}, {.deadline = soon()}))->wait());
    CHECK(ipc.child.holds("r", kMiB, 0));
    if (ids) {  // the region that was made of it is not shared any more
      auto engine = must(Engine::create(options_for(Way::cuda_ipc, "third")));
      auto peer = must(engine->connect(ipc.child.address(), soon()));
      auto stale = peer->open(from_hex(ipc.child.ask("descriptor r")), soon());
      CHECK(stale.status().code() == Code::key_not_found);
      CHECK(stale.status().message().find("was freed") != std::string::npos);
      engine->close();
    }
    int made = ipc.cuda.mappings_made;
    ipc.child.ask("again r");
    auto fresh = ipc.child.open(*ipc.peer, "r");
    CHECK(ipc.cuda.mappings_made == made + 1);
    REQUIRE_OK(must(ipc.engine->write({{local, 0, fresh, 0, kMiB}}, {.deadline = soon()}))->wait());
    CHECK(ipc.child.holds("r", kMiB, 8));
  }
}

TEST_CASE("cuda_ipc: what cannot be shared or mapped is staged, right and in plain sight") {
  struct Case {
    const char* what;
    std::function<void(Ipc&)> spoil;
    const char* why;
  };
  const Case cases[] = {
      {"not shared", [](Ipc& i) { i.child.ask("fake no_share 1"); }, "cuIpcGetMemHandle: invalid argument"},
      {"not mapped", [](Ipc& i) { i.cuda.no_map = true; }, "invalid device context"},
      {"another container's devices", [](Ipc& i) { i.child.ask("fake hardware 65"); }, "CUDA_VISIBLE_DEVICES"},
      {"no peer access",
       [](Ipc& i) {
         i.cuda.device_count = 2;
         i.cuda.first_used = 1;
         i.cuda.peer_access = false;
       },
       "no device that it uses has peer access"}};
  for (auto& c : cases) {
    CAPTURE(c.what);
    Ipc ipc;
    c.spoil(ipc);
    auto remote = ipc.region(2 * kMiB, 7, 3);
    CHECK(remote->transport() == "staged");
    CHECK(ipc.cuda.mappings_alive == 0);
    CHECK(told(*ipc.engine, ipc.peer, "cuda_ipc").find(c.why) != std::string::npos);
    for (Way way : {Way::process_vm, Way::cuda}) {
      Memory memory(way, 2 * kMiB);
      auto local = memory.register_in(*ipc.engine);
      REQUIRE_OK(must(ipc.engine->read({{local, 0, remote, 0, 2 * kMiB}}, {.deadline = soon()}))->wait());
      CHECK(mismatch(memory.data, 2 * kMiB, 7) == 2 * kMiB);
    }
    // Nothing is mapped here, and its owner knows: it waits for nobody.
    ipc.cuda.no_map = false;
    ipc.peer->close();
    CHECK(ipc.child.ask("deregister r 5000").rfind("OK", 0) == 0);
  }
  // Memory that may be freed at any time is mapped by nobody.
  Ipc ipc;
  ipc.region(kMiB, 7);
  ipc.child.ask("weak w r");
  CHECK(ipc.child.open(*ipc.peer, "w")->transport() == "staged");
  CHECK(told(*ipc.engine, ipc.peer, "cuda_ipc").find("weak") != std::string::npos);
  // With peer access, another device of ours does the copies.
  ipc.cuda.device_count = 2;
  ipc.cuda.first_used = 1;
  auto remote = ipc.region(kMiB, 7);
  CHECK(remote->transport() == "cuda_ipc");
}

TEST_CASE("cuda_ipc: ops keep their place on a stream; an orderly end gives the memory back at once") {
  Ipc ipc;
  constexpr size_t kBytes = 2 * kMiB;
  auto remote = ipc.region(kBytes, 0);
  Memory memory(Way::cuda, kBytes);
  auto local = memory.register_in(*ipc.engine);
  void* stream = must(ipc.cuda.make_stream(0));
  OpOptions options{.deadline = soon()};
  options.stream = StreamOrder{0, reinterpret_cast<uintptr_t>(stream)};
  for (uint64_t seed : {1, 2, 3}) {
    ipc.cuda.queue(stream, [&, seed] {
      usleep(5000);
      fill(memory.data, kBytes, seed);
    });
    auto op = must(ipc.engine->write({{local, 0, remote, 0, kBytes}}, options));
    ipc.cuda.queue(stream, [&] { std::memset(memory.data, 0, kBytes); });
    REQUIRE_OK(op->wait());
    CHECK(ipc.child.holds("r", kBytes, seed));
  }
  ipc.peer->close();
  CHECK(ipc.cuda.mappings_alive == 0);
  CHECK(ipc.child.ask("deregister r 5000").rfind("OK", 0) == 0);
  ipc.cuda.destroy_stream(0, stream);
}

TEST_CASE("cuda_ipc: memory is unmapped by the thread that may wait for the device, before its owner hears of it") {
  Ipc ipc;
  int elsewhere = ipc.cuda.unmapped_elsewhere;
  for (int i = 0; i < 50; ++i) {
    auto name = "r" + std::to_string(i);
    ipc.child.ask("cuda " + name + " 65536 3 1 0");
    auto remote = ipc.child.open(*ipc.peer, name);
    Memory memory(i % 2 ? Way::cuda : Way::process_vm, 65536);
    auto local = memory.register_in(*ipc.engine);
    auto op = must(ipc.engine->read({{local, 0, remote, 0, 65536}}, {.deadline = soon()}));
    REQUIRE_OK(op->wait());
    op.reset();
    remote.reset();  // at once: threads of the device may still hold what is left of the op
    CHECK(ipc.child.ask("deregister " + name + " 10000").rfind("OK", 0) == 0);
    CHECK(ipc.cuda.mappings_alive == 0);
  }
  CHECK(ipc.cuda.unmapped_elsewhere == elsewhere);
}

TEST_CASE("cuda_ipc: regions opened at the same time are each mapped once, for both directions") {
  Ipc ipc;
  ipc.child.ask("fake no_ids 1");  // then no mapping is shared
  constexpr int kThreads = 4, kEach = 10;
  std::vector<std::string> descriptors;
  for (int i = 0; i < kThreads * kEach; ++i) {
    auto name = "r" + std::to_string(i);
    ipc.child.ask("cuda " + name + " 4096 3 1 0");
    descriptors.push_back(from_hex(ipc.child.ask("descriptor " + name)));
  }
  int made = ipc.cuda.mappings_made;
  std::vector<RemoteRegionPtr> remotes(descriptors.size());
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = t * kEach; i < (t + 1) * kEach; ++i) {
        auto remote = ipc.peer->open(descriptors[i], soon());
        if (remote) remotes[i] = *remote;
      }
    });
  for (auto& thread : threads) thread.join();
  for (auto& remote : remotes) CHECK((remote && remote->transport() == "cuda_ipc"));
  CHECK(ipc.cuda.mappings_made - made == kThreads * kEach);
}

TEST_CASE("cuda_ipc: an owner that waits for pinned memory serves others meanwhile; one that gets none says so") {
  auto engine = must(Engine::create(options_for(Way::cuda_by_tcp, "parent")));
  Child child(Way::cuda_by_tcp);
  auto peer = must(engine->connect(child.address(), soon()));
  child.make("r", kMiB, 5);
  auto remote = child.open(*peer, "r");
  CHECK(remote->transport() == "staged");
  Memory memory(Way::process_vm, kMiB);
  auto local = memory.register_in(*engine);
  child.ask("fake no_pins 1");
  Status none = must(engine->read({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait();
  CHECK_MESSAGE(none.code() == Code::io, none.to_string());
  CHECK(none.message().find("cuMemHostAlloc") != std::string::npos);
  child.ask("fake no_pins 0");
  child.ask("fake hang_pins 1");
  auto op = must(engine->read({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}));
  usleep(50'000);
  child.make("other", kMiB, 6);
  auto other = peer->open(from_hex(child.ask("descriptor other")), Deadline::after_ms(5000));
  CHECK_MESSAGE(other.is_ok(), other.status().to_string());
  CHECK_FALSE(op->ended());
  child.ask("fake hang_pins 0");
  REQUIRE_OK(op->wait());
  CHECK(mismatch(memory.data, kMiB, 5) == kMiB);
  engine->close();
}

// An owner that is no engine, and says of its memory what it likes.
TEST_CASE("cuda_ipc: an owner whose answer does not fit its region is not believed") {
  auto& cuda = FakeCuda::install();
  auto memory = cuda.allocate(64 << 10);
  auto address = reinterpret_cast<uint64_t>(memory.get());
  auto handle = must(cuda.share(must(cuda.find(address))));
  transfer::CudaShared shared;
  uint64_t nbytes = 0;
  auto owner = must(rpc::Endpoint::create({}));
  auto answer = [&](uint16_t method, std::function<std::string()> body) {
    owner->handle(method, rpc::RunOn::inline_io,
                  [body](auto&, rpc::Message, rpc::Responder responder) { responder.ok(body()); });
  };
  answer(transfer::kHello, [] {
    ByteWriter out;
    for (int allowed : {1, 0, 0, 0}) out.put(static_cast<uint8_t>(allowed));  // shm alone
    transfer::encode_ends(out.put(uint64_t{1}), {});
    return out.take();
  });
  std::atomic<uint32_t> grants{0};
  answer(transfer::kOpen,
         [&] { return ByteWriter().put(++grants).put(nbytes).put(uint8_t{1}).put(uint8_t{1}).take(); });
  answer(transfer::kCudaShare, [&] { return shared.encode(); });
  auto at = must(owner->listen("tcp://127.0.0.1:0"));
  auto engine = must(Engine::create(options_for(Way::cuda_ipc, "holder")));
  auto peer = must(engine->connect(at, soon()));
  REQUIRE(peer->same_host());
  auto open = [&](uint64_t bytes, uint64_t begin, std::vector<transfer::CudaShared::Allocation> allocations) {
    nbytes = bytes;
    shared.process = random_id();
    shared.device = cuda.uuid(0);
    shared.address = begin;
    shared.allocations = std::move(allocations);
    transfer::Descriptor descriptor;
    descriptor.engine = owner->self().engine;
    descriptor.kind = MemoryKind::cuda;
    descriptor.region = descriptor.generation = grants + 1;
    descriptor.nbytes = bytes;
    return peer->open(descriptor.encode(), soon()).status();
  };
  constexpr uint64_t kWhole = 64 << 10;
  REQUIRE_OK(open(kWhole, address, {{7, address, kWhole, false, handle.name}}));
  CHECK(open(0, address, {}).code() == Code::corrupt);
  CHECK(open(0, address, {{7, address, kWhole, false, handle.name}}).code() == Code::corrupt);
  CHECK(open(kWhole, address, {}).code() == Code::corrupt);
  CHECK(open(kWhole, ~uint64_t{0} - 10, {{7, ~uint64_t{0} - 10, kWhole, false, handle.name}}).code() == Code::corrupt);
  // More than there is: not mapped, and there is no other way to this owner.
  CHECK_FALSE(open(kWhole * 2, address, {{7, address, kWhole * 2, false, handle.name}}).is_ok());
  CHECK(eventually([&] { return cuda.mappings_alive == 0; }));
  engine->close();
  owner->close();
}

}  // namespace transfer_test
