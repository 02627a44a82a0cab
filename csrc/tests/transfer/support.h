// What the transfer tests share: engines for each way bytes can go, memory of each kind, patterns that tell every byte
// apart.
#pragma once

#include <dirent.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "transfer/engine.h"
#include "transfer/fake_cuda.h"
#include "transfer/fake_verbs.h"

namespace transfer_test {

using namespace torch_mooncake;

enum class Way {
  local,
  segment,
  process_vm,
  unix_socket,
  tcp,
  rdma,
  file,
  file_by_shm,
  file_by_tcp,
  cuda,
  cuda_by_tcp,
  cuda_ipc
};
// In the virtual machine of tests/rdma/vm: libibverbs and four devices of Soft-RoCE, two rails, instead of the fake.
inline bool real_verbs() { return getenv("TM_TEST_VERBS") != nullptr; }

// Each test of what all ways promise runs once for each; for RDMA alone in that machine, and if TM_TEST_RDMA asks for
// it.
inline std::vector<Way> ways(std::initializer_list<Way> all) {
  return real_verbs() || getenv("TM_TEST_RDMA") ? std::vector<Way>{Way::rdma} : std::vector<Way>(all);
}
inline const std::vector<Way> kWays =
    ways({Way::local, Way::segment, Way::process_vm, Way::unix_socket, Way::tcp, Way::rdma, Way::file, Way::cuda});
inline const std::vector<Way> kTwoProcessWays =
    ways({Way::segment, Way::process_vm, Way::unix_socket, Way::tcp, Way::rdma});
// The same, a file of the other process, staged through slots, which are mapped or sent, and its CUDA memory.
inline const std::vector<Way> kAllTwoProcessWays =
    ways({Way::segment, Way::process_vm, Way::unix_socket, Way::tcp, Way::rdma, Way::file_by_shm, Way::file_by_tcp,
          Way::cuda_by_tcp, Way::cuda_ipc});
inline bool is_file(Way way) { return way == Way::file || way == Way::file_by_shm || way == Way::file_by_tcp; }
inline bool is_cuda(Way way) { return way == Way::cuda || way == Way::cuda_by_tcp || way == Way::cuda_ipc; }
// The kind of memory that an op reads and writes on its own side.
inline Way local_of(Way way) { return is_file(way) || is_cuda(way) ? Way::process_vm : way; }

inline std::string name_of(Way way) {
  switch (way) {
    case Way::local:
      return "local";
    case Way::segment:
      return "shm";
    case Way::process_vm:
      return "process_vm";
    case Way::unix_socket:
      return "unix";
    case Way::tcp:
      return "tcp";
    case Way::rdma:
      return "rdma";
    case Way::file:
      return "file";
    case Way::file_by_shm:
    case Way::file_by_tcp:
    case Way::cuda_by_tcp:
      return "staged";
    case Way::cuda:
      return "cuda";
    case Way::cuda_ipc:
      return "cuda_ipc";
  }
  return "";
}

inline EngineOptions options_for(Way way, const std::string& name) {
  EngineOptions o;
  o.rpc.name = name;
  o.listen = {"tcp://127.0.0.1:0"};
  switch (way) {
    case Way::local:
      o.transports = {"local"};
      break;
    case Way::segment:
    case Way::process_vm:
      o.transports = {"shm"};
      break;
    case Way::rdma:  // two devices, so that every op has two rails
      o.transports = {"rdma"};
      if (real_verbs())
        o.nics = {name == "a" || name == "parent" || name == "owner" ? "rxe_?0" : "rxe_?1"};
      else
        o.rdma_driver = std::make_shared<fake_verbs::FakeDriver>(2);
      break;
    case Way::file:
    case Way::file_by_shm:
    case Way::cuda:
      break;
    case Way::cuda_ipc:
      FakeCuda::install();  // a process that uses no CUDA maps none
      break;
    case Way::file_by_tcp:
    case Way::cuda_by_tcp:
    case Way::tcp:
      o.rpc.same_host_listener = false;
      [[fallthrough]];
    case Way::unix_socket:
      o.transports = {"tcp"};
      break;
  }
  o.slice_bytes = 256 << 10;
  return o;
}

// RDMA and nothing else, over these NICs.
inline EngineOptions options_over(std::shared_ptr<fake_verbs::FakeDriver> driver, const std::string& name,
                                  const std::string& settings = "") {
  auto options = options_for(Way::tcp, name);
  options.rdma = settings;
  options.transports = {"rdma"};
  options.rdma_driver = std::move(driver);
  return options;
}

inline Deadline soon(int64_t ms = 20'000) { return Deadline::after_ms(ms); }

template <typename F>
bool eventually(F condition, int64_t ms = 20'000) {
  for (auto until = soon(ms); !until.expired(); usleep(1000))
    if (condition()) return true;
  return condition();
}

template <typename T>
T must(Result<T> result) {
  if (!result) FAIL(result.status().to_string());
  return std::move(result).value();
}

#define REQUIRE_OK(expr)                                   \
  do {                                                     \
    ::torch_mooncake::Status status_ = (expr);             \
    REQUIRE_MESSAGE(status_.is_ok(), status_.to_string()); \
  } while (0)

// Memory of the kind a way needs: a segment's, anonymous pages, a file (which has no name any more) seen by mmap,
// or the fake driver's, whose bytes a test may look at.
struct Memory {
  std::shared_ptr<Segment> segment;
  MappingPtr mapping;
  std::shared_ptr<UniqueFd> file;
  std::shared_ptr<void> device;
  std::byte* data = nullptr;
  size_t nbytes = 0;

  Memory(Way way, size_t n) : nbytes(n) {
    if (way == Way::segment) {
      segment = must(Segment::create("test", n == 0 ? 1 : n, n == 0 ? 1 : n));
      mapping = must(segment->map(Protection::read_write));
    } else if (is_cuda(way)) {
      device = FakeCuda::install().allocate(n == 0 ? 1 : n, way == Way::cuda_ipc ? 1 : 3);
      data = static_cast<std::byte*>(device.get());
      return;
    } else if (is_file(way)) {
      char path[] = "/var/tmp/tm-transfer-test-XXXXXX";
      file = std::make_shared<UniqueFd>(mkostemp(path, O_CLOEXEC));
      REQUIRE(file->valid());
      REQUIRE(unlink(path) == 0);
      size_t length = n == 0 ? 1 : n;
      REQUIRE(ftruncate(file->get(), static_cast<off_t>(length)) == 0);
      auto* at = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file->get(), 0);
      mapping = std::make_shared<Mapping>(static_cast<std::byte*>(at), length);
    } else {
      size_t length = n == 0 ? 1 : n;
      mapping = std::make_shared<Mapping>(
          static_cast<std::byte*>(mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
          length);
    }
    data = mapping->data;
  }
  RegionPtr register_in(Engine& engine, RegionOptions options = {}) const {
    if (device) return must(engine.register_cuda(data, nbytes, std::move(options)));
    if (file) {
      FileOptions f{.path = "test", .fd = file->get(), .nbytes = nbytes, .writable = true};
      return must(engine.register_file(f, std::move(options)));
    }
    return segment ? must(engine.register_segment(segment, 0, nbytes, std::move(options)))
                   : must(engine.register_memory(data, nbytes, std::move(options)));
  }
};

// ThreadSanitizer says nothing about payload (thread_sanitizer.supp), and would take most of a test's time for it.
#define TM_PAYLOAD __attribute__((no_sanitize("thread")))

// Byte i of pattern `seed`. Not periodic within any size used here.
TM_PAYLOAD inline uint8_t pattern(uint64_t seed, uint64_t i) {
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15 ^ seed * 0xbf58476d1ce4e5b9;
  return static_cast<uint8_t>((x >> 29) ^ (x >> 47));
}
TM_PAYLOAD inline void fill(std::byte* data, size_t n, uint64_t seed) {
  for (size_t i = 0; i < n; ++i) data[i] = static_cast<std::byte>(pattern(seed, i));
}
// The first byte that differs, or n.
TM_PAYLOAD inline size_t mismatch(const std::byte* data, size_t n, uint64_t seed, uint64_t from = 0) {
  for (size_t i = 0; i < n; ++i)
    if (data[i] != static_cast<std::byte>(pattern(seed, from + i))) return i;
  return n;
}
TM_PAYLOAD inline bool all_zero(const std::byte* data, size_t n) {
  for (size_t i = 0; i < n; ++i)
    if (data[i] != std::byte{0}) return false;
  return true;
}

// Two engines of this process, and a region of each.
struct Pair {
  Way way;
  EnginePtr a, b;
  PeerPtr peer;  // b, as a sees it
  explicit Pair(Way w) : way(w) {
    a = must(Engine::create(options_for(w, "a")));
    b = must(Engine::create(options_for(w, "b")));
    peer = must(a->connect(b->addresses().front(), soon()));
  }
  ~Pair() {
    a->close();
    b->close();
  }
  RemoteRegionPtr open(const RegionPtr& region) { return must(peer->open(region->descriptor(), soon())); }
  // This thread has written to b's memory, which b's threads will read. A lock they share says so to TSan: it does not
  // see that what comes out of a socket was put into another one before.
  void hand_over() { (void)b->stats(); }
};

struct Counts {
  size_t fds, threads;
};
inline Counts count_resources() {
  auto entries = [](const char* path) {
    size_t n = 0;
    DIR* dir = opendir(path);
    while (readdir(dir)) ++n;
    closedir(dir);
    return n;
  };
  return {entries("/proc/self/fd"), entries("/proc/self/task")};
}

}  // namespace transfer_test
