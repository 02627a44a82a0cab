// Segments: bounds, sealing, sharing across processes, exhaustion as pool_full; the shared heap.
#include "memory/segment.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "memory/host_memory.h"
#include "memory/shared_heap.h"

using namespace torch_mooncake;

#if defined(__SANITIZE_THREAD__)
// Children of a process with threads are part of what is tested here.
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

static constexpr size_t kMiB = 1 << 20;

TEST_CASE("segment: grows to its capacity, then pool_full with sizes; what was written stays") {
  auto segment = Segment::create("test", kMiB, 4 * kMiB).value();
  CHECK(segment->size() == kMiB);
  CHECK(segment->capacity() == 4 * kMiB);
  auto map = segment->map(Protection::read_write).value();
  REQUIRE(map->nbytes == 4 * kMiB);
  map->data[kMiB - 1] = std::byte{42};
  CHECK(segment->grow(3 * kMiB).is_ok());
  CHECK(segment->size() == 3 * kMiB);
  std::memset(map->data + kMiB, 7, 2 * kMiB);
  auto status = segment->grow(5 * kMiB);
  CHECK(status.code() == Code::pool_full);
  CHECK(status.message().find("4 MiB") != std::string::npos);
  CHECK(segment->size() == 3 * kMiB);
  CHECK(map->data[kMiB - 1] == std::byte{42});
  CHECK(segment->map(Protection::read_write).value() == map);
  CHECK(segment->map(Protection::read_only).value() != map);
}

TEST_CASE("segment: more than the host has is pool_full, at once, and nothing is left allocated") {
  uint64_t before = memory_available();
  auto status = Segment::create("huge", memory_limit() * 4, memory_limit() * 8).status();
  CHECK(status.code() == Code::pool_full);
  CHECK(memory_available() > before / 2);
}

TEST_CASE("segment: bad arguments") {
  CHECK(Segment::create("x", 2, 1).status().code() == Code::invalid_argument);
  CHECK(Segment::create("x", 0, 0).status().code() == Code::invalid_argument);
  auto segment = Segment::create("x", kMiB, kMiB).value();
  CHECK(segment->map_private(1, 10).status().code() == Code::invalid_argument);
  CHECK(segment->map_private(kMiB, 1).status().code() == Code::out_of_bounds);
  CHECK(segment->map_private(0, kMiB + 1).status().code() == Code::out_of_bounds);
  CHECK(segment->map_private(0, SIZE_MAX).status().code() == Code::out_of_bounds);
  CHECK(segment->map_private(0, 0).status().code() == Code::out_of_bounds);
}

TEST_CASE("segment: sealed against truncation, close-on-exec, no name") {
  auto segment = Segment::create("x", kMiB, 2 * kMiB).value();
  CHECK(::ftruncate(segment->fd(), 0) != 0);
  CHECK(::ftruncate(segment->fd(), 8 * kMiB) != 0);
  CHECK(::fcntl(segment->fd(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
  CHECK((::fcntl(segment->fd(), F_GETFD) & FD_CLOEXEC) != 0);
  struct stat info;
  REQUIRE(::fstat(segment->fd(), &info) == 0);
  CHECK(info.st_nlink == 0);
}

TEST_CASE("segment: adopting an unsealed or strange fd is refused") {
  UniqueFd unsealed(::memfd_create("u", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(unsealed.get(), kMiB) == 0);
  CHECK(Segment::adopt(std::move(unsealed), {}).status().code() == Code::invalid_argument);
  CHECK(Segment::adopt(UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)), {}).status().code() ==
        Code::invalid_argument);
  CHECK(Segment::adopt(UniqueFd(), {}).status().code() == Code::io);
}

TEST_CASE("segment: an adopter sees the same bytes, and the maker's growth") {
  auto maker = Segment::create("x", kMiB, 8 * kMiB).value();
  auto made = maker->map(Protection::read_write).value();
  auto other = Segment::adopt(UniqueFd(::fcntl(maker->fd(), F_DUPFD_CLOEXEC, 0)), maker->id()).value();
  CHECK(other->id() == maker->id());
  CHECK(other->capacity() == 8 * kMiB);
  CHECK(other->size() == kMiB);
  auto seen = other->map(Protection::read_only).value();
  REQUIRE(maker->grow(6 * kMiB).is_ok());
  CHECK(other->size() == 6 * kMiB);
  made->data[6 * kMiB - 1] = std::byte{9};
  CHECK(seen->data[6 * kMiB - 1] == std::byte{9});
  maker.reset();
  other.reset();
  CHECK(seen->data[6 * kMiB - 1] == std::byte{9});  // maps outlive the segments
}

TEST_CASE("segment: a private map never writes back, and is a view of its offset") {
  auto segment = Segment::create("x", kMiB, kMiB).value();
  auto shared = segment->map(Protection::read_write).value();
  std::memset(shared->data, 1, kMiB);
  auto mine = segment->map_private(page_size(), 100).value();
  CHECK(mine->data[0] == std::byte{1});
  mine->data[0] = std::byte{2};
  CHECK(shared->data[page_size()] == std::byte{1});
}

TEST_CASE("shared heap: found again by address, memory comes back") {
  auto& heap = SharedHeap::instance();
  auto resting = heap.stats();
  auto* large = static_cast<std::byte*>(heap.allocate(5 * kMiB + 1).value());
  auto* small = static_cast<std::byte*>(heap.allocate(100).value());
  auto* other = static_cast<std::byte*>(heap.allocate(0).value());
  CHECK(reinterpret_cast<uintptr_t>(small) % page_size() == 0);
  CHECK(small != other);
  small[99] = std::byte{5};
  auto place = heap.find(small + 90, 10);
  REQUIRE(place.has_value());
  auto map = place->segment->map(Protection::read_only).value();
  CHECK(map->data[place->offset + 9] == std::byte{5});
  CHECK(heap.find(large + 5 * kMiB, 1).has_value());
  CHECK_FALSE(heap.find(large + 5 * kMiB, 2 * kMiB).has_value());
  CHECK_FALSE(heap.find(large, SIZE_MAX).has_value());
  int on_stack = 0;
  CHECK_FALSE(heap.find(&on_stack, 1).has_value());
  heap.free(large);
  CHECK_FALSE(heap.find(large, 1).has_value());
  heap.free(small);
  heap.free(other);
  CHECK(heap.stats().bytes_held == resting.bytes_held);
  CHECK(heap.stats().allocations == resting.allocations);
}

TEST_CASE("shared heap: many threads, nothing overlaps, nothing leaks") {
  auto& heap = SharedHeap::instance();
  auto resting = heap.stats();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::pair<unsigned char*, size_t>> mine;
      for (int i = 0; i < 300; ++i) {
        size_t nbytes = static_cast<size_t>(i * 7919 % 200'000);
        auto* p = static_cast<unsigned char*>(heap.allocate(nbytes).value());
        std::memset(p, t + 1, nbytes);
        mine.emplace_back(p, nbytes);
        if (mine.size() > 20) {
          auto [q, n] = mine[static_cast<size_t>(i) % mine.size()];
          for (size_t k = 0; k < n; k += 512) wrong += q[k] != t + 1;
          heap.free(q);
          mine.erase(mine.begin() + i % static_cast<int>(mine.size()));
        }
      }
      for (auto [q, n] : mine) heap.free(q);
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(heap.stats().bytes_held == resting.bytes_held);
}

TEST_CASE("shared heap: a child writes, the parent reads") {
  auto& heap = SharedHeap::instance();
  auto* p = static_cast<unsigned char*>(heap.allocate(10).value());
  p[0] = 0;
  pid_t pid = ::fork();
  if (pid == 0) {
    p[0] = 77;
    auto more = heap.allocate(10);  // the child may go on using it
    ::_exit(more.is_ok() ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(p[0] == 77);
  heap.free(p);
}

TEST_CASE(
    "segment: fault_in changes no byte, wherever the pieces lie, and the pages are there for writing afterwards") {
  auto segment = Segment::create("t", 4 << 20, 8 << 20).value();
  auto mapping = segment->map(Protection::read_write).value();
  for (size_t i = 0; i < (4u << 20); ++i) mapping->data[i] = static_cast<std::byte>(i * 7);
  auto other = Segment::adopt(UniqueFd(::fcntl(segment->fd(), F_DUPFD_CLOEXEC, 0)), segment->id()).value();
  auto theirs = other->map(Protection::read_write).value();
  std::byte outside[64]{};
  std::vector<CopyPiece> pieces{{theirs->data + 1, nullptr, 3 << 20},
                                {theirs->data + (4 << 20) - 1, nullptr, 1},
                                {theirs->data, nullptr, 0},
                                {outside, nullptr, sizeof outside}};
  theirs->fault_in(pieces);
  theirs->fault_in(pieces);
  REQUIRE(std::memcmp(theirs->data, mapping->data, 4 << 20) == 0);
  CHECK(segment->size() == 4 << 20);
  rusage before{}, after{};
  ::getrusage(RUSAGE_THREAD, &before);
  for (size_t i = 1; i < (3u << 20); i += 4096) theirs->data[i] = std::byte{1};
  ::getrusage(RUSAGE_THREAD, &after);
  CHECK(after.ru_minflt - before.ru_minflt < 16);  // not 768
}
