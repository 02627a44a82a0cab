// What the machine can do: plain copies and socket loops, for the benchmarks to be held against. Compiled by
// harness.py; nothing of the library is used here.

#include <immintrin.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// 32-byte non-temporal stores, interleaved over four pages so that four streams are open at a time.
void copy_interleaved(char* dst, const char* src, size_t nbytes) {
  constexpr size_t kPage = 4096, kGroup = 4 * kPage;
  size_t done = std::min(nbytes, -reinterpret_cast<uintptr_t>(dst) & 63);  // the stores want whole lines
  std::memcpy(dst, src, done);
#ifdef __AVX2__
  for (; done + kGroup <= nbytes; done += kGroup) {
    for (size_t i = 0; i < kPage; i += 64) {
      for (size_t page = 0; page < kGroup; page += kPage) {
        auto* from = reinterpret_cast<const __m256i*>(src + done + page + i);
        auto* to = reinterpret_cast<__m256i*>(dst + done + page + i);
        const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
      }
    }
  }
  _mm_sfence();
#endif
  std::memcpy(dst + done, src + done, nbytes - done);
}

void copy_plain(char* dst, const char* src, size_t nbytes) { std::memcpy(dst, src, nbytes); }

}  // namespace

extern "C" {

// Copies nbytes `rounds` times, from and to another of `spans` places each time, and writes the seconds each round
// took. The threads are made once: made anew for every copy they would add no speed. mode 0: memcpy; 1: interleaved
// non-temporal stores.
void raw_copy(char* dst, const char* src, size_t nbytes, int threads, int mode, size_t spans, int rounds,
              double* seconds) {
  auto copy = mode == 0 ? copy_plain : copy_interleaved;
  const size_t part = (nbytes / threads + 4095) & ~size_t{4095};
  std::atomic<int> arrived{0};
  auto meet = [&](int nth) {  // spins: a wake-up would cost more than a small copy
    arrived.fetch_add(1);
    while (arrived.load() < nth * threads) _mm_pause();
  };
  auto work = [&](int t) {
    const size_t begin = std::min(nbytes, part * t), end = std::min(nbytes, part * (t + 1));
    for (int round = 0; round < rounds; ++round) {
      const size_t at = (round % spans) * nbytes + begin;
      meet(2 * round + 1);
      const auto start = std::chrono::steady_clock::now();
      copy(dst + at, src + at, end - begin);
      meet(2 * round + 2);
      if (t == 0) seconds[round] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(work, t);
  work(0);
  for (auto& thread : pool) thread.join();
}

// Send or receive nbytes in calls of at most `call` bytes. Returns 0, or -1 at the first error or EOF.
int raw_send(int fd, const char* data, size_t nbytes, size_t call) {
  for (size_t done = 0; done < nbytes;) {
    const ssize_t n = ::send(fd, data + done, std::min(call, nbytes - done), MSG_NOSIGNAL);
    if (n <= 0) return -1;
    done += static_cast<size_t>(n);
  }
  return 0;
}

int raw_recv(int fd, char* data, size_t nbytes, size_t call) {
  for (size_t done = 0; done < nbytes;) {
    const ssize_t n = ::recv(fd, data + done, std::min(call, nbytes - done), 0);
    if (n <= 0) return -1;
    done += static_cast<size_t>(n);
  }
  return 0;
}
}
