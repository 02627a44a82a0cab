// CUDA without a device: the transport over the fake driver. data_test and faults_test run over it too.
#include <functional>
#include <thread>

#include "transfer/cuda/memory.h"
#include "transfer/cuda/queue.h"
#include "transfer/cuda/stream.h"
#include "transfer/peer.h"
#include "transfer/support.h"

namespace transfer_test {

TEST_CASE("cuda: a process that uses host memory and files only never opens the driver") {
  for (Way way : {Way::local, Way::unix_socket, Way::file}) {
    Pair pair(way);
    Memory source(local_of(way), 1 << 20), target(way, 1 << 20);
    auto remote = pair.open(target.register_in(*pair.b));
    REQUIRE_OK(must(pair.a->write({{source.register_in(*pair.a), 0, remote, 0, 1 << 20}}, {}))->wait());
    (void)pair.a->explain(pair.peer);
  }
  CHECK(transfer::CudaDriver::made() == nullptr);
}

TEST_CASE("cuda: a machine without a driver says so") {
  auto driver = transfer::open_libcuda();
  if (driver) {
    MESSAGE("this one has: " << (*driver)->describe());
    return;
  }
  CHECK(driver.status().code() == Code::unsupported);
  CHECK(driver.status().message().find("libcuda.so.1") != std::string::npos);
}

namespace {

struct Device {
  FakeCuda& cuda = FakeCuda::install();
  ~Device() {
    cuda.hang = false;
    cuda.copy_us = 0;
    cuda.fail_copies = 0;
    cuda.no_flags = false;
  }
};

}  // namespace

TEST_CASE("cuda: from every kind of local memory to every kind of remote memory, and back") {
  Device device;
  constexpr size_t kBytes = (5 << 20) + 12'345;
  for (Way from : {Way::process_vm, Way::cuda, Way::file})
    for (Way to : {Way::process_vm, Way::cuda, Way::file}) {
      CAPTURE(name_of(from));
      CAPTURE(name_of(to));
      Pair pair(Way::cuda);  // every transport is allowed
      Memory source(from, kBytes), target(to, kBytes);
      auto local = source.register_in(*pair.a);
      auto remote = pair.open(target.register_in(*pair.b));
      fill(source.data, kBytes, 31);
      auto op = must(pair.a->write({{local, 7, remote, 4099, kBytes - 8000}}, {.deadline = soon(), .notify = "x"}));
      REQUIRE_OK(op->wait());
      CHECK(must(pair.b->next_notification(soon())).data == "x");
      REQUIRE(mismatch(target.data + 4099, kBytes - 8000, 31, 7) == kBytes - 8000);
      REQUIRE(all_zero(target.data, 4099));
      std::memset(source.data, 0, kBytes);
      REQUIRE_OK(must(pair.a->read({{local, 7, remote, 4099, kBytes - 8000}}, {.deadline = soon()}))->wait());
      REQUIRE(mismatch(source.data + 7, kBytes - 8000, 31, 7) == kBytes - 8000);
      REQUIRE(all_zero(source.data, 7));
    }
}

TEST_CASE("cuda: what is not memory of one device is refused; parts of an expandable segment are taken") {
  Device device;
  auto engine = must(Engine::create({}));
  auto memory = device.cuda.allocate(1 << 20, 5);
  auto* data = static_cast<std::byte*>(memory.get());
  CHECK(engine->register_cuda(data, 1 << 20, {}).is_ok());
  CHECK(engine->register_cuda(data + 1000, 900'000, {}).is_ok());
  CHECK(engine->register_cuda(data, (1 << 20) + 1, {}).status().code() == Code::invalid_argument);
  CHECK(engine->register_cuda(&device, 8, {}).status().code() == Code::invalid_argument);
  CHECK(engine->register_cuda(data, 0, {}).status().code() == Code::invalid_argument);
}

TEST_CASE("cuda: a copy that fails is an error of the op, and the next op is not touched by it") {
  Device device;
  Pair pair(Way::cuda);
  for (Way local_way : {Way::process_vm, Way::cuda}) {
    Memory source(local_way, 8 << 20), target(Way::cuda, 8 << 20);
    auto local = source.register_in(*pair.a);
    auto remote = pair.open(target.register_in(*pair.b));
    std::vector<Slice> slices = {{local, 0, remote, 0, 8 << 20}};
    device.cuda.fail_copies = 1;
    auto op = must(pair.a->write(slices, {.deadline = soon()}));
    Status status = op->wait();
    CHECK(status.code() == Code::io);
    CHECK(status.message().find("illegal memory access") != std::string::npos);
    REQUIRE_OK(must(pair.a->write(slices, {.deadline = soon()}))->wait());
    REQUIRE_OK(must(pair.a->read(slices, {.deadline = soon()}))->wait());
  }
  CHECK(eventually([&] { return device.cuda.events_alive == 0; }));
}

TEST_CASE(
    "cuda: a device that hangs: ops end by their deadline, nothing lands later, memory is kept until it answers") {
  Device device;
  Pair pair(Way::cuda);
  constexpr size_t kBytes = 16 << 20;
  for (bool writes : {true, false})
    for (Way local_way : {Way::process_vm, Way::cuda}) {
      CAPTURE(writes);
      CAPTURE(name_of(local_way));
      Memory source(local_way, kBytes), target(Way::cuda, kBytes);
      fill(target.data, kBytes, 3);
      auto local = source.register_in(*pair.a);
      auto region = target.register_in(*pair.b);
      auto remote = pair.open(region);
      std::vector<Slice> slices = {{local, 0, remote, 0, kBytes}};
      device.cuda.hang = true;
      auto start = steady_ns();
      OpOptions options{.deadline = Deadline::after_ms(200)};
      auto op = must(writes ? pair.a->write(slices, options) : pair.a->read(slices, options));
      CHECK(op->wait().code() == Code::deadline_exceeded);
      CHECK(steady_ns() - start < 2'000'000'000);  // promised: 0.45 s
      std::memset(source.data, 9, kBytes);
      CHECK(pair.b->deregister(region, Deadline::after_ms(20)).code() == Code::busy);
      if (local_way == Way::cuda) CHECK(pair.a->deregister(local, Deadline::after_ms(20)).code() == Code::busy);
      device.cuda.hang = false;
      REQUIRE_OK(pair.b->deregister(region, soon()));
      REQUIRE_OK(pair.a->deregister(local, soon()));
      if (!writes && local_way == Way::process_vm)
        CHECK(std::all_of(source.data, source.data + kBytes, [](std::byte b) { return b == std::byte{9}; }));
    }
}

TEST_CASE("cuda: ops that were cancelled while they waited for a pinned block do not take the turns of others") {
  Device device;
  Pair pair(Way::cuda);
  constexpr size_t kBytes = transfer::CudaMove::kMostInFlight * transfer::CudaQueue::kBlockBytes;
  Memory source(Way::process_vm, kBytes), target(Way::cuda, kBytes);
  auto local = source.register_in(*pair.a);
  auto remote = pair.open(target.register_in(*pair.b));
  auto write = [&] { return must(pair.a->write({{local, 0, remote, 0, kBytes}}, {.deadline = soon()})); };
  device.cuda.hang = true;
  std::vector<OpPtr> holders, cancelled, others;
  for (size_t i = 0; i < transfer::CudaQueue::kMostBlocks / transfer::CudaMove::kMostInFlight; ++i)
    holders.push_back(write());
  for (size_t i = 0; i < 2 * transfer::CudaQueue::kMostBlocks; ++i) cancelled.push_back(write());
  for (int i = 0; i < 3; ++i) others.push_back(write());
  for (auto& op : cancelled) op->cancel();
  device.cuda.hang = false;
  for (auto& op : cancelled) CHECK(op->wait().code() == Code::cancelled);
  for (auto& op : holders) REQUIRE_OK(op->wait());
  for (auto& op : others) REQUIRE_OK(op->wait());
}

TEST_CASE("cuda: an op on a stream comes after what was queued before, and before what is queued later") {
  Device device;
  Pair pair(Way::cuda);
  for (Way target_way : {Way::cuda, Way::process_vm}) {
    constexpr size_t kBytes = 3 << 20;
    Memory source(Way::cuda, kBytes), target(target_way, kBytes);
    auto local = source.register_in(*pair.a);
    auto remote = pair.open(target.register_in(*pair.b));
    void* stream = must(device.cuda.make_stream(0));
    OpOptions options{.deadline = soon()};
    options.stream = StreamOrder{0, reinterpret_cast<uintptr_t>(stream)};
    std::atomic<size_t> seen{0};
    for (uint64_t seed = 1; seed < 20; ++seed) {
      device.cuda.queue(stream, [&] {  // makes the data
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        fill(source.data, kBytes, seed);
      });
      auto op = must(pair.a->write({{local, 0, remote, 0, kBytes}}, options));
      device.cuda.queue(stream, [&] {  // uses what has arrived, and what may be overwritten now
        if (mismatch(target.data, kBytes, seed) == kBytes) ++seen;
        std::memset(source.data, 0, kBytes);
      });
      REQUIRE_OK(op->wait());
      REQUIRE(eventually([&] { return seen == seed; }));
    }
    device.cuda.destroy_stream(0, stream);
  }
  CHECK(eventually([&] { return device.cuda.events_alive == 0; }));
}

TEST_CASE("cuda: a stream goes on whatever becomes of the op") {
  Device device;
  Pair pair(Way::cuda);
  Memory source(Way::cuda, 1 << 20), target(Way::cuda, 1 << 20);
  auto local = source.register_in(*pair.a);
  auto remote = pair.open(target.register_in(*pair.b));
  void* stream = must(device.cuda.make_stream(0));
  OpOptions options{.deadline = Deadline::after_ms(100)};
  options.stream = StreamOrder{0, reinterpret_cast<uintptr_t>(stream)};
  std::vector<Slice> slices = {{local, 0, remote, 0, 1 << 20}};
  std::atomic<int> passed{0};
  auto mark = [&] { device.cuda.queue(stream, [&] { ++passed; }); };

  // Its deadline passes before the work in front of it is done: it never begins.
  std::atomic<bool> go{false};
  device.cuda.queue(stream, [&] {
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  auto op = must(pair.a->write(slices, options));
  mark();
  CHECK(op->wait().code() == Code::deadline_exceeded);
  CHECK(op->bytes_done() == 0);
  CHECK(passed == 0);
  go = true;
  CHECK(eventually([&] { return passed == 1; }));

  // Cancelled; failed.
  go = false;
  options.deadline = soon();
  device.cuda.queue(stream, [&] {
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  op = must(pair.a->write(slices, options));
  mark();
  op->cancel();
  CHECK(op->wait().code() == Code::cancelled);
  go = true;
  CHECK(eventually([&] { return passed == 2; }));
  device.cuda.fail_copies = 1;
  op = must(pair.a->write(slices, options));
  mark();
  CHECK(op->wait().code() == Code::io);
  CHECK(eventually([&] { return passed == 3; }));

  // Errors of the call leave nothing on the stream.
  device.cuda.no_flags = true;
  CHECK(pair.a->write(slices, options).status().code() == Code::unsupported);
  mark();
  CHECK(eventually([&] { return passed == 4; }));
  device.cuda.no_flags = false;
  Pair other(Way::cuda);
  auto second = must(must(pair.a->connect(other.b->addresses().at(0), soon()))
                         ->open(target.register_in(*other.b)->descriptor(), soon()));
  CHECK(pair.a->write({slices[0], {local, 0, second, 0, 1 << 20}}, options).status().code() == Code::unsupported);
  REQUIRE_OK(pair.a->deregister(local, soon()));
  CHECK(!pair.a->write(slices, options).is_ok());
  mark();
  CHECK(eventually([&] { return passed == 5; }));
  CHECK(eventually([&] { return device.cuda.events_alive == 0; }));
  device.cuda.destroy_stream(0, stream);
}

TEST_CASE("cuda: an op that ends while the stream refuses it has let go of the flag that the next op takes") {
  Device device;
  Pair pair(Way::cuda);
  Memory source(Way::cuda, 1 << 20), target(Way::cuda, 1 << 20);
  auto local = source.register_in(*pair.a);
  auto remote = pair.open(target.register_in(*pair.b));
  void* stream = must(device.cuda.make_stream(0));
  auto op =
      std::make_shared<transfer::OpImpl>(std::static_pointer_cast<transfer::PeerImpl>(remote->peer()), Direction::write,
                                         std::vector<Batch>{{local, remote, {{0, 0, 1 << 20}}}}, OpOptions{});
  // Another thread cancels it, and is still in its end when this one gives up.
  std::atomic<bool> ending{false};
  op->when_quiescent([&] {
    ending = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  });
  std::thread canceller;
  device.cuda.at_wait_flag = [&] {
    canceller = std::thread([&] { op->cancel(); });
    while (!ending) std::this_thread::yield();
  };
  device.cuda.no_flags = true;
  CHECK(transfer::start_on_stream(op, StreamOrder{0, reinterpret_cast<uintptr_t>(stream)}).code() == Code::unsupported);
  auto* queue = must(transfer::CudaQueue::of(must(transfer::CudaDriver::get()), 0));
  auto* flag = must(queue->take_flag());
  canceller.join();
  CHECK(__atomic_load_n(flag, __ATOMIC_ACQUIRE) == 0);
  queue->give_flag(flag);
  device.cuda.no_flags = false;
  device.cuda.at_wait_flag = nullptr;
  device.cuda.destroy_stream(0, stream);
}

TEST_CASE("cuda: when the device has failed, an op's flag is not given to the next before the op has ended") {
  Device device;
  Pair pair(Way::cuda);
  Memory source(Way::cuda, 1 << 20), target(Way::cuda, 1 << 20);
  auto local = source.register_in(*pair.a);
  auto remote = pair.open(target.register_in(*pair.b));
  void* stream = must(device.cuda.make_stream(0));
  auto op =
      std::make_shared<transfer::OpImpl>(std::static_pointer_cast<transfer::PeerImpl>(remote->peer()), Direction::write,
                                         std::vector<Batch>{{local, remote, {{0, 0, 1 << 20}}}}, OpOptions{});
  std::atomic<bool> ending{false};
  op->when_quiescent([&] {  // the op takes its time to end
    ending = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  });
  device.cuda.at_wait_flag = [&] { device.cuda.broken = true; };
  REQUIRE_OK(transfer::start_on_stream(op, StreamOrder{0, reinterpret_cast<uintptr_t>(stream)}));
  REQUIRE(eventually([&] { return ending.load(); }));
  auto* queue = must(transfer::CudaQueue::of(must(transfer::CudaDriver::get()), 0));
  auto* flag = must(queue->take_flag());
  CHECK(op->wait(Deadline::never()).code() == Code::io);
  CHECK(__atomic_load_n(flag, __ATOMIC_ACQUIRE) == 0);
  queue->give_flag(flag);
  device.cuda.broken = false;
  device.cuda.at_wait_flag = nullptr;
  device.cuda.destroy_stream(0, stream);
}

TEST_CASE("cuda: an op that ended without its device is quiescent once that has answered; one refused is at once") {
  Device device;
  constexpr size_t kBytes = 1 << 20;
  for (Way from : {Way::process_vm, Way::cuda, Way::file}) {
    CAPTURE(name_of(from));
    Pair pair(Way::cuda);
    Memory source(from, kBytes), target(Way::cuda, kBytes);
    auto local = source.register_in(*pair.a), region = target.register_in(*pair.b);
    auto remote = pair.open(region);
    auto op = must(pair.a->write({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}));
    REQUIRE_OK(op->wait());
    device.cuda.hang = true;
    op = must(pair.a->write({{local, 0, remote, 0, kBytes}}, {.deadline = Deadline::after_ms(100)}));
    CHECK(op->wait().code() == Code::deadline_exceeded);
    CHECK_FALSE(op->remote_quiescent());
    device.cuda.hang = false;
    CHECK(eventually([&] { return op->remote_quiescent(); }));
    REQUIRE_OK(pair.b->deregister(region, soon()));
    op = must(pair.a->write({{local, 0, remote, 0, kBytes}}, {.deadline = soon()}));
    CHECK(op->wait().code() == Code::key_not_found);
    CHECK(op->remote_quiescent());
  }
}

}  // namespace transfer_test
