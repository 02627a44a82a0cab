// Collectives on device memory, over the fake CUDA driver with memory that the host cannot touch; and the gates that
// keep their place among streams.
#include "collectives/device.h"

#include <doctest/doctest.h>

#include "collectives/numbers.h"
#include "collectives/reduce.h"
#include "collectives/stream_gate.h"
#include "collectives/world.h"
#include "transfer/support.h"

using namespace torch_mooncake;
using namespace torch_mooncake::coll;
using transfer_test::eventually;
using transfer_test::FakeCuda;
using transfer_test::must;

namespace {

FakeCuda& fake() {
  auto& cuda = FakeCuda::install();
  cuda.guarded = true;
  return cuda;
}

struct FakeDevice final : Device {
  static constexpr uint64_t kStaged = 64 << 10;
  FakeCuda& cuda = fake();
  void* stream = must(make_own_stream(0));
  std::shared_ptr<void> scratch_memory;
  std::vector<std::byte> pinned_memory;
  int reductions = 0;

  ~FakeDevice() override { cuda.destroy_stream(0, stream); }
  uint64_t staged_bytes() const override { return kStaged; }
  Result<std::byte*> scratch(uint64_t nbytes) override {
    TM_TRY(wait(Deadline::never()));  // nothing here frees in the order of the stream
    scratch_memory = cuda.allocate(nbytes);
    return static_cast<std::byte*>(scratch_memory.get());
  }
  Result<std::byte*> pinned(uint64_t nbytes) override {
    pinned_memory.assign(nbytes, std::byte{0xee});
    return pinned_memory.data();
  }
  Status copy(void* to, const void* from, uint64_t nbytes) override { return cuda.copy(0, to, from, nbytes, stream); }
  Status reduce_many(void* out, std::span<const void* const> in, uint64_t count, DType dtype, ReduceOp op) override {
    ++reductions;
    std::vector<const void*> inputs(in.begin(), in.end());
    cuda.queue(stream, [this, out, inputs, count, dtype, op]() mutable {
      for (auto& input : inputs) input = cuda.host(static_cast<const char*>(input));
      coll::reduce_many(cuda.host(static_cast<char*>(out)), inputs, count, dtype, op);
    });
    return {};
  }
  Status wait(Deadline deadline) override { return wait_for_stream(0, stream, deadline); }
  std::shared_ptr<void> keep() override { return scratch_memory ? scratch_memory : std::make_shared<int>(); }
};

// Floats on the device, through a tensor's eyes: they are looked at by way of the driver.
struct Floats {
  std::shared_ptr<void> memory;
  uint64_t n;
  explicit Floats(uint64_t count) : memory(fake().allocate(std::max<uint64_t>(1, count) * 4)), n(count) {}
  explicit Floats(const std::vector<float>& values) : Floats(values.size()) {
    std::copy(values.begin(), values.end(), fake().host(static_cast<float*>(memory.get())));
  }
  void* data() const { return memory.get(); }
  Piece piece() const { return {memory.get(), n * 4}; }
  bool operator==(const std::vector<float>& values) const {
    return values.size() == n &&
           std::equal(values.begin(), values.end(), fake().host(static_cast<float*>(memory.get())));
  }
};

struct DeviceWorld : World {
  std::vector<FakeDevice> devices;
  explicit DeviceWorld(int n, std::vector<std::string> transports = {"local", "shm", "tcp"}, bool one_host = true)
      : World(n, std::move(transports), one_host), devices(n) {}
  std::vector<Status> on_device(const std::function<Status(const Call&)>& fn) {
    return collective([&](const Call& host) {
      Call call = host;
      call.device = &devices[call.group.rank()];
      return fn(call);
    });
  }
  void must_on_device(const char* what, const std::function<Status(const Call&)>& fn) {
    for (const auto& status : on_device(fn)) REQUIRE_MESSAGE(status.is_ok(), status.with(what).to_string());
  }
};

Status expect(bool right, const char* what) { return right ? Status() : Status(Code::corrupt, what); }

void check_all(DeviceWorld& world, uint64_t n) {
  CAPTURE(n);
  const int size = world.size();
  CAPTURE(size);
  const auto total = sum(size, n);
  world.must_on_device("all_reduce", [&](const Call& call) {
    Floats data(input(call.group.rank(), n));
    TM_TRY(all_reduce(call, data.data(), n, DType::f32, ReduceOp::sum));
    return expect(data == total, "all_reduce");
  });
  world.must([](const Call& call) { return barrier(call); });  // of the host, in the same sequence
  for (int root : {0, size - 1}) {
    world.must_on_device("broadcast", [&](const Call& call) {
      Floats data(input(call.group.rank(), n));
      TM_TRY(broadcast(call, data.data(), n * 4, root));
      return expect(data == input(root, n), "broadcast");
    });
    world.must_on_device("reduce", [&](const Call& call) {
      Floats data(input(call.group.rank(), n));
      TM_TRY(reduce(call, data.data(), n, DType::f32, ReduceOp::sum, root));
      return expect(data == (call.group.rank() == root ? total : input(call.group.rank(), n)), "reduce");
    });
    world.must_on_device("gather, scatter", [&](const Call& call) {
      const Floats in(input(call.group.rank(), n)), back(n);
      std::vector<Floats> out(size, Floats(0));
      std::vector<void*> pointers;
      for (auto& o : out) pointers.push_back((o = Floats(n)).data());
      TM_TRY(gather(call, in.data(), n * 4, pointers, root));
      for (int r = 0; r < size && call.group.rank() == root; ++r) TM_TRY(expect(out[r] == input(r, n), "gather"));
      std::vector<const void*> parts(pointers.begin(), pointers.end());
      TM_TRY(scatter(call, parts, back.data(), n * 4, root));
      return expect(back == input(call.group.rank(), n), "scatter");
    });
  }
  world.must_on_device("all_gather", [&](const Call& call) {  // sizes that differ by rank
    const Floats in(input(call.group.rank(), n + call.group.rank()));
    std::vector<Floats> out;
    std::vector<Piece> pieces;
    for (int r = 0; r < size; ++r) pieces.push_back(out.emplace_back(n + r).piece());
    TM_TRY(all_gather(call, {in.data(), in.n * 4}, pieces));
    for (int r = 0; r < size; ++r) TM_TRY(expect(out[r] == input(r, n + r), "all_gather"));
    return Status();
  });
  world.must_on_device("reduce_scatter", [&](const Call& call) {
    std::vector<Floats> in;
    std::vector<ConstPiece> pieces;
    for (int r = 0; r < size; ++r) {
      in.emplace_back(input(call.group.rank(), n + r * 5));
      pieces.push_back({in.back().data(), in.back().n * 4});
    }
    Floats out(n + call.group.rank() * 5);
    TM_TRY(reduce_scatter(call, pieces, out.piece(), DType::f32, ReduceOp::sum));
    return expect(out == sum(size, out.n), "reduce_scatter");
  });
  world.must_on_device("all_to_all", [&](const Call& call) {
    const int rank = call.group.rank();
    std::vector<Floats> in, out;
    std::vector<ConstPiece> ins;
    std::vector<Piece> outs;
    for (int r = 0; r < size; ++r) {
      in.emplace_back(input(rank * size + r, n * ((rank + r) % 3)));
      outs.push_back(out.emplace_back(n * ((rank + r) % 3)).piece());
      ins.push_back({in.back().data(), in.back().n * 4});
    }
    TM_TRY(all_to_all(call, ins, outs));
    for (int r = 0; r < size; ++r) TM_TRY(expect(out[r] == input(r * size + rank, out[r].n), "all_to_all"));
    return Status();
  });
}

struct Knobs {  // put back, whatever a test does
  ~Knobs() {
    auto& cuda = fake();
    cuda.hang = cuda.no_flags = cuda.broken = cuda.captures = false;
    cuda.fail_copies = cuda.copy_us = 0;
  }
};

}  // namespace

TEST_CASE("device: every collective, little and much, without a byte touched by the host") {
  for (int size : {1, 2, 3}) {
    DeviceWorld world(size);
    for (uint64_t n : {0, 1, 1023, 5'000, 70'001}) check_all(world, n);
    if (size > 1) CHECK(world.devices[0].reductions > 0);
  }
}

TEST_CASE("device: several rounds of slices, and of pieces along the chain") {
  DeviceWorld world(2);
  check_all(world, (9 << 20) + 17);
}

TEST_CASE("device: ranks on hosts of their own, whose memory is staged by its owner") {
  DeviceWorld world(3, {"tcp"}, false);
  for (uint64_t n : {1, 70'001}) check_all(world, n);
}

TEST_CASE("device: half precision is summed in fp32 and rounded once, in rank order, as on the host") {
  DeviceWorld world(3);
  for (uint64_t n : {100, 100'000}) {
    world.must_on_device("fp16", [&](const Call& call) {
      auto memory = fake().allocate(n * 2);
      auto* data = static_cast<uint16_t*>(memory.get());
      std::fill_n(fake().host(data), n, call.group.rank() == 1 ? 0x6800 : 0x3c00);  // 1 + 2048 + 1
      TM_TRY(all_reduce(call, data, n, DType::f16, ReduceOp::sum));
      const auto* shown = fake().host(data);
      return expect(std::all_of(shown, shown + n, [](uint16_t x) { return x == 0x6801; }), "fp16");
    });
  }
}

TEST_CASE("device: a rank whose data is on the host is found out") {
  for (uint64_t n : {100, 100'000}) {
    DeviceWorld world(2);
    world.timeout_ms = 2000;
    const auto statuses = world.collective([&](const Call& host) {
      Call call = host;
      Floats on_device(input(0, n));
      auto on_host = input(0, n);
      if (host.group.rank() == 0) call.device = &world.devices[0];
      Status status = all_reduce(call, call.device ? on_device.data() : on_host.data(), n, DType::f32, ReduceOp::sum);
      if (!status.is_ok()) call.group.give_up(status);
      return status;
    });
    // What is little goes by way of the host anyway, and is right.
    CHECK(statuses[0].is_ok() == (n == 100));
    CHECK(statuses[1].is_ok() == (n == 100));
    if (n > 100) CHECK(statuses[0].message().find("sizes") != std::string::npos);
  }
}

TEST_CASE("device: a copy that fails, a device that hangs: an error in time, on all ranks") {
  Knobs knobs;
  DeviceWorld world(2);
  auto one = [&](const Call& call) {
    Floats data(input(call.group.rank(), 1000));
    Status status = all_reduce(call, data.data(), 1000, DType::f32, ReduceOp::sum);
    if (!status.is_ok()) call.group.give_up(status);
    return status;
  };
  world.must_on_device("all_reduce", one);
  fake().fail_copies = 1;
  bool told = false;
  for (const auto& status : world.on_device(one)) {
    CHECK_FALSE(status.is_ok());
    told |= status.message().find("illegal memory access") != std::string::npos;
  }
  CHECK(told);

  DeviceWorld second(2);
  second.timeout_ms = 300;
  const int64_t begin = steady_ns();
  fake().hang = true;
  std::vector<std::shared_ptr<Floats>> kept;  // the hanging device may still write there
  std::mutex mutex;
  for (const auto& status : second.on_device([&](const Call& call) {
         auto data = std::make_shared<Floats>(input(call.group.rank(), 100'000));
         {
           std::lock_guard lock(mutex);
           kept.push_back(data);
         }
         return all_reduce(call, data->data(), 100'000, DType::f32, ReduceOp::sum);
       }))
    CHECK(status.code() == Code::deadline_exceeded);
  CHECK(steady_ns() - begin < 3'000'000'000);
  fake().hang = false;
  for (auto& device : second.devices) CHECK(device.wait(Deadline::after_ms(10'000)).is_ok());
}

TEST_CASE("device: messages from device to device, to the host, and none eagerly to a device") {
  World world(2);
  auto soon = [] { return Deadline::after_ms(10'000); };
  for (uint64_t n : {0, 1, 100, 100'000}) {
    CAPTURE(n);
    const Floats out(input(3, n)), in(n);
    auto receive = world.groups[1]->receive(0, Channel::p2p, 5, in.data(), n * 4, soon(), in.memory, Place::cuda);
    auto send = world.groups[0]->send(1, Channel::p2p, 5, out.data(), n * 4, soon(), out.memory, Place::cuda);
    REQUIRE(receive->wait(soon()).is_ok());
    REQUIRE(send->wait(soon()).is_ok());
    CHECK(in == input(3, n));
    std::vector<float> host(n);
    send = world.groups[0]->send(1, Channel::p2p, 5, out.data(), n * 4, soon(), out.memory, Place::cuda);
    receive = world.groups[1]->receive(0, Channel::p2p, 5, host.data(), n * 4, soon());
    REQUIRE(receive->wait(soon()).is_ok());
    CHECK(host == input(3, n));
    REQUIRE(send->wait(soon()).is_ok());
    send = world.groups[0]->send(1, Channel::p2p, 5, host.data(), n * 4, soon());
    receive = world.groups[1]->receive(0, Channel::p2p, 5, in.data(), n * 4, soon(), in.memory, Place::cuda);
    const Status status = receive->wait(soon());
    CHECK(status.code() == (n == 0 || n * 4 > kEagerBytes ? Code::ok : Code::unsupported));
    REQUIRE(send->wait(soon()).is_ok());
  }
}

// ---- gates

TEST_CASE("gate: nothing before the work on the stream, and the stream goes on behind it, also when it failed") {
  Knobs knobs;
  auto& cuda = fake();
  void* stream = must(make_own_stream(0));
  void* other = must(make_own_stream(0));
  std::atomic<bool> go{false};
  std::atomic<int> passed{0};
  for (int round = 0; round < 50; ++round) {
    go = false;
    passed = 0;
    cuda.queue(stream, [&] {
      while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    auto gate = must(StreamGate::after(0, stream));
    REQUIRE(gate->hold(stream).is_ok());
    REQUIRE(gate->hold(other).is_ok());
    cuda.queue(stream, [&] { ++passed; });
    cuda.queue(other, [&] { ++passed; });
    REQUIRE_FALSE(must(gate->reached()));
    CHECK(gate->wait(Deadline::after_ms(2), nullptr).code() == Code::deadline_exceeded);
    CHECK(gate->wait(Deadline::never(), [] { return Status(Code::cancelled, "aborted"); }).code() == Code::cancelled);
    CHECK(passed == 0);
    go = true;
    REQUIRE(gate->wait(Deadline::after_ms(10'000), nullptr).is_ok());
    CHECK(must(gate->reached()));
    CHECK(passed == 0);  // not before the operation has ended
    if (round % 2) {
      std::thread opener([&] { gate->open(); });
      gate->wait_if_held();
      opener.join();
    } else {
      gate.reset();
    }
    REQUIRE(eventually([&] { return passed == 2; }));
    if (gate) CHECK(gate->hold(stream).is_ok());  // nothing to wait for
  }
  CHECK(eventually([&] { return cuda.events_alive == 0; }));

  go = false;
  cuda.queue(stream, [&] {
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  auto gate = must(StreamGate::after(0, stream));
  std::atomic<bool> ready{false};
  gate->when_reached([&] { ready = true; });
  gate->wait_if_held();  // no stream waits for it
  CHECK_FALSE(must(gate->reached()));
  CHECK_FALSE(ready);
  go = true;
  CHECK(eventually([&] { return ready.load(); }));
  CHECK(must(gate->reached()));
  cuda.destroy_stream(0, stream);
  cuda.destroy_stream(0, other);
}

TEST_CASE("gate: work that failed, streams that cannot wait, streams that are captured") {
  Knobs knobs;
  auto& cuda = fake();
  void* stream = must(make_own_stream(0));
  auto memory = cuda.allocate(4096);
  cuda.fail_copies = 1;
  REQUIRE(cuda.copy(0, memory.get(), memory.get(), 64, stream).is_ok());
  auto gate = must(StreamGate::after(0, stream));
  const Status status = gate->wait(Deadline::after_ms(10'000), nullptr);
  CHECK(status.code() == Code::io);
  CHECK(status.message().find("before it") != std::string::npos);
  CHECK(gate->reached().status().code() == Code::io);
  cuda.no_flags = true;
  CHECK(gate->hold(stream).code() == Code::unsupported);
  cuda.no_flags = false;
  cuda.captures = true;
  CHECK(gate->hold(stream).code() == Code::unsupported);
  CHECK(StreamGate::after(0, stream).status().code() == Code::unsupported);
  cuda.captures = false;
  gate.reset();
  CHECK(eventually([&] { return cuda.events_alive == 0; }));
  cuda.destroy_stream(0, stream);
}
