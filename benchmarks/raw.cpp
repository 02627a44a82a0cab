// What the machine can do: plain copies, process_vm_readv and socket loops, for the benchmarks to be held against.
// Compiled by raw.py; nothing of the library is used here.

#include <immintrin.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

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

// Calls work(thread, round) on `threads` threads, all of which finish a round before the next one begins, and writes
// the seconds each round took. The threads are made once: made anew for every round they would add no speed.
template <typename Work>
void in_rounds(int threads, int rounds, double* seconds, Work work) {
  std::atomic<int> arrived{0};
  auto meet = [&](int nth) {  // spins: a wake-up would cost more than a small copy
    arrived.fetch_add(1);
    while (arrived.load() < nth * threads) _mm_pause();
  };
  auto run = [&](int t) {
    for (int round = 0; round < rounds; ++round) {
      meet(2 * round + 1);
      const auto start = std::chrono::steady_clock::now();
      work(t, round);
      meet(2 * round + 2);
      if (t == 0) seconds[round] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(run, t);
  run(0);
  for (auto& thread : pool) thread.join();
}

}  // namespace

extern "C" {

// Copies nbytes `rounds` times, from and to another of `spans` places each time, and writes the seconds each round
// took. mode 0: memcpy; 1: interleaved non-temporal stores.
void raw_copy(char* dst, const char* src, size_t nbytes, int threads, int mode, size_t spans, int rounds,
              double* seconds) {
  auto copy = mode == 0 ? copy_plain : copy_interleaved;
  const size_t part = (nbytes / threads + 4095) & ~size_t{4095};
  in_rounds(threads, rounds, seconds, [&](int t, int round) {
    const size_t begin = std::min(nbytes, part * t), end = std::min(nbytes, part * (t + 1));
    const size_t at = (round % spans) * nbytes + begin;
    copy(dst + at, src + at, end - begin);
  });
}

// Reads `count` pieces of `nbytes` out of process `pid` with process_vm_readv, `batch` pieces a call. Round r takes the
// offsets from r * count on. Returns 0, or the number of calls that did not give what was asked for.
int raw_readv(int pid, char* dst, const char* src, const int64_t* to, const int64_t* from, size_t nbytes, size_t count,
              int threads, size_t batch, int rounds, double* seconds) {
  std::atomic<int> failed{0};
  in_rounds(threads, rounds, seconds, [&](int t, int round) {
    const size_t begin = count * t / threads, end = count * (t + 1) / threads;
    std::vector<iovec> local(batch), remote(batch);
    for (size_t i = begin; i < end; i += batch) {
      const size_t n = std::min(batch, end - i);
      for (size_t k = 0; k < n; ++k) {
        const size_t at = round * count + i + k;
        local[k] = {dst + to[at], nbytes};
        remote[k] = {const_cast<char*>(src) + from[at], nbytes};
      }
      if (::process_vm_readv(pid, local.data(), n, remote.data(), n, 0) != static_cast<ssize_t>(n * nbytes)) ++failed;
    }
  });
  return failed;
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

// Blocking ping-pong: `nbytes` there, 8 bytes back, after `idle_us` of sleep each time. Writes the microseconds of each
// round trip. Returns 0, or -1 at the first error.
int raw_ping(int fd, char* data, size_t nbytes, int idle_us, int rounds, double* microseconds) {
  char answer[8];
  for (int i = 0; i < rounds; ++i) {
    if (idle_us) ::usleep(idle_us);
    const auto start = std::chrono::steady_clock::now();
    if (raw_send(fd, data, nbytes, nbytes) || raw_recv(fd, answer, sizeof answer, sizeof answer)) return -1;
    microseconds[i] = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  }
  return 0;
}

int raw_pong(int fd, char* data, size_t nbytes, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    if (raw_recv(fd, data, nbytes, nbytes) || raw_send(fd, data, 8, 8)) return -1;
  }
  return 0;
}
}
