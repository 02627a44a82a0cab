// Every copy path at every awkward size and alignment, with guards around the destination; the pool; fork.
#include "memory/copy.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "common/random.h"

using namespace torch_mooncake;

#if defined(__SANITIZE_THREAD__)
// Children of a process with threads are part of what is tested here.
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

static std::vector<unsigned char> noise(size_t n) {
  std::vector<unsigned char> v(n);
  random_bytes(v.data(), n);
  return v;
}

static void check_copy(CopyPath path, size_t n, size_t dst_shift, size_t src_shift) {
  auto src = noise(n + src_shift);
  std::vector<unsigned char> dst(n + dst_shift + 64, 0xEE);
  CopyPiece piece{dst.data() + dst_shift, src.data() + src_shift, n};
  copy_run(path, &piece, 0, n);
  REQUIRE(std::memcmp(dst.data() + dst_shift, src.data() + src_shift, n) == 0);
  for (size_t i = 0; i < dst_shift; ++i) REQUIRE(dst[i] == 0xEE);
  for (size_t i = 0; i < 64; ++i) REQUIRE(dst[dst_shift + n + i] == 0xEE);
}

TEST_CASE("copy: all paths, sizes around every boundary, all alignments") {
  for (auto path : {CopyPath::plain, CopyPath::avx2, CopyPath::avx512}) {
    if (!copy_path_available(path)) {
      MESSAGE("this CPU lacks path " << static_cast<int>(path));
      continue;
    }
    for (size_t base : {0u, 64u, 4096u, 16384u, 16448u, 32768u, 65536u, 262144u, 1u << 20}) {
      for (int delta : {-65, -1, 0, 1, 63, 64, 65}) {
        if (static_cast<int64_t>(base) + delta < 0) continue;
        size_t n = base + static_cast<size_t>(delta);
        for (size_t dst : {0u, 1u, 63u}) {
          for (size_t src : {0u, 7u}) check_copy(path, n, dst, src);
        }
      }
    }
  }
}

TEST_CASE("copy: lists of pieces of every length and alignment, by every path, whole and in part") {
  auto src = noise(1 << 20);
  for (auto path : {CopyPath::plain, CopyPath::avx2, CopyPath::avx512}) {
    if (!copy_path_available(path)) continue;
    for (size_t most : {1u, 63u, 64u, 200u, 4096u, 16384u, 70000u, 300000u}) {
      for (int round = 0; round < 8; ++round) {
        // What must come out is written by memcpy; 0xEE where nothing may be written.
        std::vector<unsigned char> dst(1 << 20, 0xEE), want(dst);
        std::vector<CopyPiece> pieces;
        size_t at = 0, total = 0;
        for (int i = 0; i < 40; ++i) {
          size_t n = round == 0 ? most : random_u64() % (most + 1), from = random_u64() % (src.size() - n + 1);
          at += random_u64() % 130;
          if (at + n > dst.size()) break;
          pieces.push_back({dst.data() + at, src.data() + from, n});
          at += n;
          total += n;
        }
        size_t skip = random_u64() % (pieces[0].nbytes + 1);
        size_t length = round < 4 ? total - skip : random_u64() % (total - skip + 1);
        size_t left = length, offset = skip;
        for (auto& piece : pieces) {
          size_t n = std::min(left, piece.nbytes - offset);
          std::memcpy(want.data() + (static_cast<unsigned char*>(piece.dst) - dst.data()) + offset,
                      static_cast<const unsigned char*>(piece.src) + offset, n);
          left -= n;
          offset = 0;
        }
        copy_run(path, pieces.data(), skip, length);
        REQUIRE(dst == want);
      }
    }
  }
}

TEST_CASE("copy: the path by total and by length of the pieces") {
  CHECK(copy_path_for(255 << 10, 1) == CopyPath::plain);
  CHECK(copy_path_for(1 << 20, 4096) == CopyPath::plain);  // 256 bytes each
  auto large = copy_path_for(1 << 20, 64);
  CHECK(large == (copy_path_available(CopyPath::avx512) ? CopyPath::avx512
                  : copy_path_available(CopyPath::avx2) ? CopyPath::avx2
                                                        : CopyPath::plain));
}

TEST_CASE("copy pool: pieces of random sizes, more pieces than chunks and the reverse") {
  CopyPool pool(3);
  CHECK(pool.threads() == 3);
  for (size_t count : {1u, 2u, 1000u}) {
    for (size_t most : {1u, 5000u, 3u << 20}) {
      if (count * most > (64u << 20)) continue;
      std::vector<std::vector<unsigned char>> src, dst;
      std::vector<CopyPiece> pieces;
      for (size_t i = 0; i < count; ++i) {
        src.push_back(noise(random_u64() % (most + 1)));
        dst.emplace_back(src.back().size());
      }
      for (size_t i = 0; i < count; ++i) pieces.push_back({dst[i].data(), src[i].data(), src[i].size()});
      pool.copy(pieces);
      CHECK(src == dst);
    }
  }
  pool.copy({});
}

TEST_CASE("copy pool: parallel_for covers [0, n) exactly once, also from many callers at once and nested") {
  CopyPool pool(4);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (size_t n : {0u, 1u, 7u, 1000u, 4096u}) {
        std::vector<std::atomic<int>> hits(n);
        pool.parallel_for(n, 3, [&](size_t begin, size_t end) {
          for (size_t i = begin; i < end; ++i) ++hits[i];
        });
        for (auto& h : hits) wrong += h != 1;
      }
      std::atomic<size_t> sum{0};
      pool.parallel_for(8, 1, [&](size_t, size_t) {
        pool.parallel_for(10, 1, [&](size_t begin, size_t end) { sum += end - begin; });
      });
      wrong += sum != 80;
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(wrong == 0);
}

TEST_CASE("copy pool: works in a forked child after use in the parent") {
  auto& pool = CopyPool::shared();
  auto src = noise(8 << 20);
  std::vector<unsigned char> dst(src.size());
  pool.copy(dst.data(), src.data(), src.size());
  REQUIRE(src == dst);
  pid_t pid = ::fork();
  if (pid == 0) {
    std::fill(dst.begin(), dst.end(), 0);
    pool.copy(dst.data(), src.data(), src.size());
    ::_exit(src == dst ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
