// Between files and CUDA memory of one process: by GPUDirect Storage over a fake driver, and by pinned blocks without.
#include <functional>
#include <random>
#include <thread>

#include "transfer/fake_cufile.h"
#include "transfer/support.h"

namespace transfer_test {
namespace {

constexpr size_t kMiB = 1 << 20;

std::string told(Engine& engine, const PeerPtr& peer) {
  for (auto& path : engine.explain(peer).paths)
    for (auto& [name, fact] : path.facts)
      if (name == "GPUDirect Storage") return std::get<std::string>(fact);
  return "";
}

// One engine with a file and CUDA memory; either may be the local side of an op.
struct FileAndDevice {
  FakeCuda& cuda = FakeCuda::install();
  EnginePtr engine = must(Engine::create({}));
  PeerPtr self = must(engine->self_peer(soon()));
  Memory file, device;
  RegionPtr file_region, device_region;
  RemoteRegionPtr remote_file, remote_device;
  explicit FileAndDevice(size_t nbytes, Memory f) : file(std::move(f)), device(Way::cuda, nbytes) {
    file_region = file.register_in(*engine);
    device_region = device.register_in(*engine);
    remote_file = must(self->open(file_region->descriptor(), soon()));
    remote_device = must(self->open(device_region->descriptor(), soon()));
  }
  explicit FileAndDevice(size_t nbytes) : FileAndDevice(nbytes, Memory(Way::file, nbytes)) {}
  ~FileAndDevice() {
    cuda.hang = false;
    engine->close();
  }
  // Out of the file into the device, or the reverse, begun from either side.
  OpPtr load(size_t at_file, size_t at_device, size_t n, bool file_is_remote = true, OpOptions options = {}) {
    return must(file_is_remote ? engine->read({{device_region, at_device, remote_file, at_file, n}}, options)
                               : engine->write({{file_region, at_file, remote_device, at_device, n}}, options));
  }
  OpPtr store(size_t at_file, size_t at_device, size_t n, bool file_is_remote = true, OpOptions options = {}) {
    return must(file_is_remote ? engine->write({{device_region, at_device, remote_file, at_file, n}}, options)
                               : engine->read({{file_region, at_file, remote_device, at_device, n}}, options));
  }
};

void check_all_places(FileAndDevice& f, size_t most) {
  for (bool file_is_remote : {true, false})
    for (size_t n : {size_t{1}, size_t{511}, size_t{4096}, size_t{4097}, size_t{65536}, 3 * kMiB + 17})
      for (size_t at_file : {0, 1, 4095, 4096, 12'345})
        for (size_t at_device : {0, 512, 7777}) {
          if (at_file + n > most || at_device + n > most) continue;
          CAPTURE(n);
          CAPTURE(at_file);
          CAPTURE(at_device);
          std::memset(f.device.data, 0, most);
          fill(f.file.data, most, 11);
          auto op = f.load(at_file, at_device, n, file_is_remote);
          REQUIRE_OK(op->wait());
          CHECK(op->transport() == (file_is_remote ? "file" : "cuda"));
          CHECK(op->bytes_done() == n);
          REQUIRE(mismatch(f.device.data + at_device, n, 11, at_file) == n);
          REQUIRE(all_zero(f.device.data, at_device));
          REQUIRE(all_zero(f.device.data + at_device + n, most - at_device - n));
          fill(f.device.data, most, 12);
          std::memset(f.file.data, 0, most);
          op = f.store(at_file, at_device, n, file_is_remote);
          REQUIRE_OK(op->wait());
          REQUIRE(mismatch(f.file.data + at_file, n, 12, at_device) == n);
          REQUIRE(all_zero(f.file.data, at_file));
          REQUIRE(all_zero(f.file.data + at_file + n, most - at_file - n));
        }
}

}  // namespace

TEST_CASE("cufile: without the library, by way of pinned blocks; the driver is not asked for before it is needed") {
  FileAndDevice f(3 * kMiB + 50'000);
  CHECK(told(*f.engine, f.self).find("not opened") != std::string::npos);
  check_all_places(f, 3 * kMiB + 50'000);
  auto driver = transfer::open_libcufile();
  if (driver) {
    MESSAGE("this machine has: " << (*driver)->describe());
  } else {
    CHECK(driver.status().code() == Code::unsupported);
    CHECK(told(*f.engine, f.self).find("libcufile.so.0") != std::string::npos);
  }
}

TEST_CASE("cufile: whole blocks go directly, heads and tails by pinned blocks, and no byte beside them is written") {
  auto fake = FakeCuFile::install();
  {
    FileAndDevice f(3 * kMiB + 50'000);
    check_all_places(f, 3 * kMiB + 50'000);
    CHECK(told(*f.engine, f.self).find("fake cuFile") != std::string::npos);
    uint64_t before = fake->nbytes;
    REQUIRE_OK(f.load(4096, 512, 2 * kMiB)->wait());
    CHECK(fake->nbytes - before == 2 * kMiB);
    before = fake->nbytes;
    REQUIRE_OK(f.load(1, 512, 2 * kMiB)->wait());
    CHECK(fake->nbytes - before == 2 * kMiB - 4096);
    CHECK(fake->pins == 1);
    REQUIRE_OK(f.engine->deregister(f.device_region, soon()));
    CHECK(fake->pins == 0);
  }
  CHECK(fake->files == 0);
  transfer::CuFileDriver::replace(nullptr);
}

TEST_CASE("cufile: many pages of one list, scattered on both sides") {
  auto fake = FakeCuFile::install();
  for (bool direct : {true, false}) {
    fake->refuse_files = !direct;
    for (size_t page : {8192, 5000}) {
      CAPTURE(page);
      constexpr size_t kPages = 700;
      FileAndDevice f(kPages * page);
      fill(f.file.data, kPages * page, 3);
      std::vector<size_t> order(kPages);
      for (size_t i = 0; i < kPages; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), std::mt19937(1));
      std::vector<Slice> slices;
      for (size_t i = 0; i < kPages; ++i)
        slices.push_back({f.device_region, i * page, f.remote_file, order[i] * page, page});
      REQUIRE_OK(must(f.engine->read(slices, {.deadline = soon()}))->wait());
      for (size_t i = 0; i < kPages; ++i) REQUIRE(mismatch(f.device.data + i * page, page, 3, order[i] * page) == page);
    }
  }
  transfer::CuFileDriver::replace(nullptr);
}

TEST_CASE("cufile: short calls are finished, errors are the op's, the end of the file is out of bounds") {
  auto fake = FakeCuFile::install();
  constexpr size_t kBytes = 20 * kMiB;
  FileAndDevice f(kBytes);
  fill(f.file.data, kBytes, 5);
  fake->short_calls = 2;
  auto op = f.load(0, 0, kBytes);
  REQUIRE_OK(op->wait());
  CHECK(op->bytes_done() == kBytes);
  REQUIRE(mismatch(f.device.data, kBytes, 5) == kBytes);
  std::memset(f.file.data, 0, kBytes);
  fake->short_calls = 2;
  REQUIRE_OK(f.store(0, 0, kBytes)->wait());
  REQUIRE(mismatch(f.file.data, kBytes, 5) == kBytes);

  // A call that fails: the same bytes the other way, in plain sight, and the file is not tried directly again.
  fake->failing_calls = 1;
  std::memset(f.device.data, 0, kBytes);
  op = f.load(0, 0, kBytes);
  REQUIRE_OK(op->wait());
  CHECK(op->bytes_done() == kBytes);
  REQUIRE(mismatch(f.device.data, kBytes, 5) == kBytes);
  CHECK(told(*f.engine, f.self).find("not used for file test: cuFileRead: Input/output error") != std::string::npos);
  int calls = fake->calls;
  REQUIRE_OK(f.store(0, 0, kBytes)->wait());
  CHECK(fake->calls == calls);
  f.cuda.fail_copies = 1;  // of a head
  CHECK(f.load(1, 0, 10'000)->wait().code() == Code::io);
  f.cuda.fail_copies = 0;

  f.file.mapping.reset();
  REQUIRE(ftruncate(f.file.file->get(), 5 * kMiB + 100) == 0);
  Status status = f.load(0, 0, kBytes)->wait();
  CHECK(status.code() == Code::out_of_bounds);
  CHECK(status.message().find("cut short") != std::string::npos);
  transfer::CuFileDriver::replace(nullptr);
}

TEST_CASE(
    "cufile: a file it does not take is bounced, and explain() says why; memory it cannot register is used as it is") {
  auto fake = FakeCuFile::install();
  fake->refuse_files = true;
  {
    FileAndDevice f(kMiB);
    fill(f.file.data, kMiB, 6);
    REQUIRE_OK(f.load(0, 0, kMiB)->wait());
    CHECK(mismatch(f.device.data, kMiB, 6) == kMiB);
    CHECK(fake->calls == 0);
    CHECK(told(*f.engine, f.self).find("cuFile error 5008") != std::string::npos);
  }
  fake->refuse_files = false;
  {  // a file in memory
    Memory shared(Way::segment, kMiB);
    FakeCuda::install();
    auto engine = must(Engine::create({}));
    Memory device(Way::cuda, kMiB);
    fill(shared.data, kMiB, 8);
    auto file = must(engine->register_file({.path = "shm", .fd = shared.segment->fd(), .nbytes = kMiB}, {}));
    auto local = device.register_in(*engine);
    auto self = must(engine->self_peer(soon()));
    auto remote = must(self->open(file->descriptor(), soon()));
    REQUIRE_OK(must(engine->read({{local, 0, remote, 0, kMiB}}, {.deadline = soon()}))->wait());
    CHECK(mismatch(device.data, kMiB, 8) == kMiB);
    CHECK(told(*engine, self).find("O_DIRECT") != std::string::npos);
    engine->close();
  }
  fake->refuse_pins = true;
  FileAndDevice f(kMiB);
  fill(f.file.data, kMiB, 7);
  REQUIRE_OK(f.load(0, 0, kMiB)->wait());
  CHECK(mismatch(f.device.data, kMiB, 7) == kMiB);
  CHECK(fake->calls > 0);
  CHECK(fake->pins == 0);
  transfer::CuFileDriver::replace(nullptr);
}

TEST_CASE("cufile: a disk or a device that hangs: ops end by their deadline, and the memory is kept until it answers") {
  auto fake = FakeCuFile::install();
  for (bool disk : {true, false})
    for (bool loads : {true, false}) {
      CAPTURE(disk);
      CAPTURE(loads);
      fake->refuse_files = !disk;  // then by pinned blocks
      FileAndDevice f(16 * kMiB);
      fake->hang = disk;
      f.cuda.hang = !disk;
      OpOptions options{.deadline = Deadline::after_ms(200)};
      auto start = steady_ns();
      auto op = loads ? f.load(0, 0, 16 * kMiB, true, options) : f.store(0, 0, 16 * kMiB, true, options);
      CHECK(op->wait().code() == Code::deadline_exceeded);
      CHECK(steady_ns() - start < 2'450'000'000);  // promised: 0.45 s
      CHECK(f.engine->deregister(f.device_region, Deadline::after_ms(20)).code() == Code::busy);
      CHECK(f.engine->deregister(f.file_region, Deadline::after_ms(20)).code() == Code::busy);
      fake->hang = false;
      f.cuda.hang = false;
      REQUIRE_OK(f.engine->deregister(f.device_region, soon()));
      REQUIRE_OK(f.engine->deregister(f.file_region, soon()));
      CHECK(fake->pins == 0);
    }
  transfer::CuFileDriver::replace(nullptr);
}

TEST_CASE("cufile: a file whose region goes while it is being asked whether it can go directly") {
  auto fake = FakeCuFile::install();
  {
    FileAndDevice f(kMiB);
    fake->hang_open = true;
    auto op = f.load(0, 0, kMiB, true, {.deadline = Deadline::after_ms(100)});
    CHECK(op->wait().code() == Code::deadline_exceeded);
    REQUIRE_OK(f.engine->deregister(f.file_region, soon()));
    op.reset();
    f.remote_file.reset();
    f.file_region.reset();
    fake->hang_open = false;  // it looks at the file, which is still there
    CHECK(eventually([&] { return fake->opens == 1 && fake->files == 0; }));
    CHECK(fake->opens == 1);
    CHECK(fake->files == 0);
  }
  transfer::CuFileDriver::replace(nullptr);
}

}  // namespace transfer_test
