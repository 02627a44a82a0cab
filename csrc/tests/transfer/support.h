// What the transfer tests share: engines for each way bytes can go, memory of each kind, patterns that tell every byte
// apart.
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "transfer/engine.h"
#include "transfer/fake_verbs.h"

namespace transfer_test {

using namespace torch_mooncake;

enum class Way { local, segment, process_vm, unix_socket, tcp, rdma };
inline constexpr Way kWays[] = {Way::local, Way::segment, Way::process_vm, Way::unix_socket, Way::tcp, Way::rdma};
inline constexpr Way kTwoProcessWays[] = {Way::segment, Way::process_vm, Way::unix_socket, Way::tcp, Way::rdma};

inline const char* name_of(Way way) {
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
    case Way::rdma:  // two devices, so that every op has two rails; or what libibverbs finds
      o.transports = {"rdma"};
      if (!getenv("TM_TEST_VERBS")) o.rdma_driver = std::make_shared<fake_verbs::FakeDriver>(2);
      break;
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

inline Deadline soon(int64_t ms = 20'000) { return Deadline::after_ms(ms); }

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

// Memory of the kind a way needs: a segment's, or anonymous pages.
struct Memory {
  std::shared_ptr<Segment> segment;
  MappingPtr mapping;
  std::byte* data = nullptr;
  size_t nbytes = 0;

  Memory(Way way, size_t n) : nbytes(n) {
    if (way == Way::segment) {
      segment = must(Segment::create("test", n == 0 ? 1 : n, n == 0 ? 1 : n));
      mapping = must(segment->map(Protection::read_write));
    } else {
      size_t length = n == 0 ? 1 : n;
      mapping = std::make_shared<Mapping>(
          static_cast<std::byte*>(mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
          length);
    }
    data = mapping->data;
  }
  RegionPtr register_in(Engine& engine, RegionOptions options = {}) const {
    return segment ? must(engine.register_segment(segment, 0, nbytes, std::move(options)))
                   : must(engine.register_memory(data, nbytes, std::move(options)));
  }
};

// Byte i of pattern `seed`. Not periodic within any size used here.
inline uint8_t pattern(uint64_t seed, uint64_t i) {
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15 ^ seed * 0xbf58476d1ce4e5b9;
  return static_cast<uint8_t>((x >> 29) ^ (x >> 47));
}
inline void fill(std::byte* data, size_t n, uint64_t seed) {
  for (size_t i = 0; i < n; ++i) data[i] = static_cast<std::byte>(pattern(seed, i));
}
// The first byte that differs, or n.
inline size_t mismatch(const std::byte* data, size_t n, uint64_t seed, uint64_t from = 0) {
  for (size_t i = 0; i < n; ++i)
    if (data[i] != static_cast<std::byte>(pattern(seed, from + i))) return i;
  return n;
}
inline bool all_zero(const std::byte* data, size_t n) {
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
};

struct Counts {
  size_t fds, threads;
};
Counts count_resources();

}  // namespace transfer_test
