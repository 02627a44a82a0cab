// GPUDirect RDMA over fakes of both drivers: NICs that reach device memory themselves, where what they write may have
// to be flushed before it is there.
#include "transfer/fake_cuda.h"
#include "transfer/support.h"

namespace transfer_test {
namespace {

using fake_verbs::FakeDevice;
using fake_verbs::FakeDriver;

constexpr size_t kMiB = 1 << 20;

struct Gpu {
  Gpu() {
    FakeDevice::takes_write = [this](void* to, const void* from, size_t n) { return cuda.nic_writes(to, from, n); };
    FakeDevice::on_device = [this](const void* data) { return cuda.find(reinterpret_cast<uint64_t>(data)).is_ok(); };
  }
  ~Gpu() {
    FakeDevice::takes_write = nullptr;
    FakeDevice::on_device = nullptr;
    FakeDevice::peer_memory = false;
    cuda.no_dmabuf = cuda.fail_flushes = cuda.hang_flushes = false;
    cuda.ordered = true;
  }
  FakeCuda& cuda = FakeCuda::install();
};

struct Two {
  explicit Two(uint64_t max_mr_nbytes = 8 << 20, const std::vector<std::string>& transports = {"rdma"}, bool up = true)
      : a(must(Engine::create(options("a", max_mr_nbytes, transports, up)))),
        b(must(Engine::create(options("b", max_mr_nbytes, transports, up)))),
        peer(must(a->connect(b->addresses().front(), soon()))) {}
  ~Two() {
    a->close();
    b->close();
  }
  static EngineOptions options(const std::string& name, uint64_t max_mr_nbytes,
                               const std::vector<std::string>& transports, bool up) {
    auto driver = std::make_shared<FakeDriver>(2, max_mr_nbytes);
    for (size_t i = 0; i < driver->count(); ++i) driver->device(i).set_port(up);
    auto out = options_over(std::move(driver), name);
    out.transports = transports;
    out.rpc.same_host_listener = true;
    return out;
  }
  RemoteRegionPtr open(const RegionPtr& region) { return must(peer->open(region->descriptor(), soon())); }
  EnginePtr a, b;
  PeerPtr peer;
};

RegionPtr on_device(Engine& engine, const std::shared_ptr<void>& memory, size_t nbytes, size_t offset = 0) {
  RegionOptions options;
  options.keep = memory;
  return must(engine.register_cuda(static_cast<char*>(memory.get()) + offset, nbytes, options));
}

void check_moves(Two& two, const RegionPtr& local, std::byte* here, const RegionPtr& target, std::byte* there, size_t n,
                 const std::string& transport) {
  auto remote = two.open(target);
  fill(here, n, 5);
  for (bool notified : {false, true}) {
    std::memset(there, 0, n);
    OpOptions options{.deadline = soon()};
    if (notified) options.notify = "there";
    auto op = must(two.a->write({{local, 0, remote, 0, n}}, std::move(options)));
    if (notified) {
      auto note = two.b->next_notification(soon());
      REQUIRE_OK(note.status());
      CHECK(mismatch(there, n, 5) == n);  // the notification is behind the data
    }
    REQUIRE_OK(op->wait());
    CHECK(mismatch(there, n, 5) == n);
    CHECK(op->transport() == transport);
  }
  fill(there, n, 6);
  auto op = must(two.a->read({{local, 0, remote, 0, n}}, {.deadline = soon()}));
  REQUIRE_OK(op->wait());
  CHECK(mismatch(here, n, 6) == n);
  CHECK(op->transport() == transport);
}

}  // namespace

TEST_CASE("between host and devices, in all directions, in order or flushed") {
  Gpu gpu;
  constexpr size_t kBytes = 5 * kMiB + 1234;
  for (bool ordered : {true, false}) {
    gpu.cuda.ordered = ordered;
    Two two(2 * kMiB);  // several registrations
    auto device_a = gpu.cuda.allocate(kBytes + 512), device_b = gpu.cuda.allocate(kBytes + 512);
    Memory host_a(Way::rdma, kBytes), host_b(Way::rdma, kBytes);
    struct Side {
      RegionPtr region;
      std::byte* data;
    };
    const size_t skip = 512;  // as torch cuts its tensors from larger blocks
    Side here[] = {{host_a.register_in(*two.a), host_a.data},
                   {on_device(*two.a, device_a, kBytes, skip), static_cast<std::byte*>(device_a.get()) + skip}};
    Side there[] = {{host_b.register_in(*two.b), host_b.data},
                    {on_device(*two.b, device_b, kBytes, skip), static_cast<std::byte*>(device_b.get()) + skip}};
    const int made = gpu.cuda.dmabufs_made, flushed = gpu.cuda.flushes;
    CHECK(made > 0);
    for (auto& from : here)
      for (auto& to : there) check_moves(two, from.region, from.data, to.region, to.data, kBytes, "rdma");
    CHECK((gpu.cuda.flushes > flushed) == !ordered);
  }
}

TEST_CASE("small writes from a device are not copied by the CPU") {
  Gpu gpu;
  Two two;
  auto device = gpu.cuda.allocate(4096);
  Memory host(Way::rdma, 4096);
  check_moves(two, on_device(*two.a, device, 8), static_cast<std::byte*>(device.get()), host.register_in(*two.b),
              host.data, 8, "rdma");
}

TEST_CASE("no dmabuf: by address, else through host memory, which says so") {
  Gpu gpu;
  gpu.cuda.no_dmabuf = true;
  for (bool peer_memory : {true, false}) {
    FakeDevice::peer_memory = peer_memory;
    Two two;
    auto device_a = gpu.cuda.allocate(kMiB), device_b = gpu.cuda.allocate(kMiB);
    Memory host(Way::rdma, kMiB);
    auto* data_a = static_cast<std::byte*>(device_a.get());
    auto* data_b = static_cast<std::byte*>(device_b.get());
    auto local = on_device(*two.a, device_a, kMiB), target = on_device(*two.b, device_b, kMiB);
    auto staged = must(two.a->write({{local, 0, two.open(target), 0, kMiB}}, {.deadline = soon()}));
    REQUIRE_OK(staged->wait());
    CHECK((staged->transport() == "rdma") == peer_memory);
    check_moves(two, local, data_a, target, data_b, kMiB, staged->transport());
    check_moves(two, local, data_a, host.register_in(*two.b), host.data, kMiB, peer_memory ? "rdma" : "staged");
  }
}

TEST_CASE("where shm serves host memory, the NICs serve devices, or nobody asks them") {
  Gpu gpu;
  for (bool up : {true, false}) {
    Two two(8 << 20, {"shm", "rdma"}, up);
    auto device = gpu.cuda.allocate(kMiB);
    Memory host_a(Way::process_vm, kMiB), host_b(Way::process_vm, kMiB);
    auto target = host_b.register_in(*two.b);
    check_moves(two, host_a.register_in(*two.a), host_a.data, target, host_b.data, kMiB, "process_vm");
    auto local = on_device(*two.a, device, kMiB);
    check_moves(two, local, static_cast<std::byte*>(device.get()), target, host_b.data, kMiB, up ? "rdma" : "staged");
  }
}

TEST_CASE("within a process no NIC is asked") {
  Gpu gpu;
  Two two(8 << 20, {"local", "rdma"});
  auto device_a = gpu.cuda.allocate(kMiB), device_b = gpu.cuda.allocate(kMiB);
  check_moves(two, on_device(*two.a, device_a, kMiB), static_cast<std::byte*>(device_a.get()),
              on_device(*two.b, device_b, kMiB), static_cast<std::byte*>(device_b.get()), kMiB, "cuda");
}

TEST_CASE("a device that cannot be flushed is not registered with NICs; notifications of others go on") {
  Gpu gpu;
  gpu.cuda.ordered = false;
  gpu.cuda.fail_flushes = true;
  Two two;
  auto device = gpu.cuda.allocate(kMiB);
  Memory host_a(Way::rdma, kMiB), host_b(Way::rdma, kMiB);
  auto* data = static_cast<std::byte*>(device.get());
  auto local = host_a.register_in(*two.a);
  check_moves(two, local, host_a.data, on_device(*two.b, device, kMiB), data, kMiB, "cuda");
  check_moves(two, local, host_a.data, host_b.register_in(*two.b), host_b.data, kMiB, "rdma");
}

TEST_CASE("a flush that fails is the op's error; no notification comes") {
  Gpu gpu;
  gpu.cuda.ordered = false;
  Two two;
  auto device = gpu.cuda.allocate(kMiB);
  Memory host(Way::rdma, kMiB);
  auto local = host.register_in(*two.a);
  auto target = on_device(*two.b, device, kMiB);
  auto remote = two.open(target);
  gpu.cuda.fail_flushes = true;
  auto quiet = must(two.a->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}));
  CHECK(quiet->wait().code() == Code::io);
  OpOptions options{.deadline = soon()};
  options.notify = "there";
  auto loud = must(two.a->write({{local, 0, remote, 0, kMiB}}, std::move(options)));
  CHECK(loud->wait().code() == Code::io);
  CHECK_FALSE(two.b->next_notification(Deadline::after_ms(50)).is_ok());
  gpu.cuda.fail_flushes = false;
  REQUIRE_OK(must(two.a->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
}

TEST_CASE("a read into a device that is flushed, with a notification") {
  Gpu gpu;
  gpu.cuda.ordered = false;
  Two two;
  auto device = gpu.cuda.allocate(kMiB);
  Memory host(Way::rdma, kMiB);
  auto remote = two.open(host.register_in(*two.b));
  OpOptions options{.deadline = soon()};
  options.notify = "read";
  auto op = must(two.a->read({{on_device(*two.a, device, kMiB), 0, remote, 0, kMiB}}, std::move(options)));
  REQUIRE_OK(op->wait());
  CHECK(std::memcmp(device.get(), host.data, kMiB) == 0);
  auto note = two.b->next_notification(soon());
  REQUIRE_OK(note.status());
  CHECK(note->data == "read");
}

TEST_CASE("a flush that does not return: reads and writes end at their deadline, or when they are cancelled") {
  Gpu gpu;
  gpu.cuda.ordered = false;
  Two two;
  auto device = gpu.cuda.allocate(kMiB), other = gpu.cuda.allocate(kMiB);
  Memory host(Way::rdma, kMiB);
  auto local = on_device(*two.a, device, kMiB);
  auto from = two.open(host.register_in(*two.b)), to = two.open(on_device(*two.b, other, kMiB));
  Memory source(Way::rdma, kMiB);
  auto here = source.register_in(*two.a);
  gpu.cuda.hang_flushes = true;
  auto read = must(two.a->read({{local, 0, from, 0, kMiB}}, {.deadline = Deadline::after_ms(200)}));
  auto write = must(two.a->write({{here, 0, to, 0, kMiB}}, {.deadline = Deadline::after_ms(200)}));
  auto cancelled = must(two.a->read({{local, 0, from, 0, kMiB}}, {.deadline = soon()}));
  CHECK(read->wait(soon()).code() == Code::deadline_exceeded);
  CHECK(write->wait(soon()).code() == Code::deadline_exceeded);
  cancelled->cancel();
  CHECK(cancelled->wait(soon()).code() == Code::cancelled);
  gpu.cuda.hang_flushes = false;
  REQUIRE_OK(must(two.a->read({{local, 0, from, 0, kMiB}}, {.deadline = soon()}))->wait());
  CHECK(std::memcmp(device.get(), host.data, kMiB) == 0);
}

TEST_CASE("deregistered device memory: its NICs are fenced before it is free") {
  Gpu gpu;
  Two two;
  auto device = gpu.cuda.allocate(kMiB);
  const auto address = reinterpret_cast<uint64_t>(device.get());
  std::atomic<int> freed{0};
  std::atomic<uint32_t> reachable{0};  // keys of NICs, at that time
  std::shared_ptr<void> watched(device.get(), [&, device](void*) {
    auto& fabric = fake_verbs::Fabric::instance();
    for (uint32_t i = 0; i <= fabric.keys_used; ++i)
      if (fabric.keys[i].valid && fabric.keys[i].address >= address && fabric.keys[i].address < address + kMiB)
        ++reachable;
    ++freed;
  });
  Memory host(Way::rdma, kMiB);
  auto local = host.register_in(*two.a);
  auto target = on_device(*two.b, watched, kMiB);
  watched.reset();
  auto remote = two.open(target);
  REQUIRE_OK(must(two.a->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
  REQUIRE_OK(two.b->deregister(target, soon()));
  target.reset();
  CHECK(eventually([&] { return freed == 1; }));
  CHECK(reachable == 0);
  CHECK(must(two.a->write({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait().code() == Code::key_not_found);
}

}  // namespace transfer_test
