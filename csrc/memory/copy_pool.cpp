#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "memory/copy.h"

namespace torch_mooncake {
namespace {

// Waking a sleeping thread takes about 45 µs here, the time one thread copies half a MiB in: smaller jobs stay inline.
constexpr size_t kInlineBytes = size_t{1} << 20;
constexpr size_t kChunkBytes = size_t{512} << 10;
constexpr size_t kLeastChunkBytes = size_t{64} << 10;
constexpr int64_t kSpinNs = 50'000;

struct Job {
  const std::function<void(size_t, size_t)>* fn;
  size_t n, grain, least;  // chunks of `grain`, and towards the end of less, in multiples of `least`
  size_t threads;
  std::atomic<size_t> next{0};
  std::atomic<int> inside{0};  // pool threads working on it; changed under the pool's mutex

  void work() {
    for (size_t begin = next.load(std::memory_order_relaxed); begin < n;) {
      size_t end = begin + chunk(n - begin);
      if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      (*fn)(begin, end);
      begin = next.load(std::memory_order_relaxed);
    }
  }
  // The threads should end together: who ends first waits, on average, for half of another's last chunk.
  size_t chunk(size_t left) const {
    return std::min(left, std::clamp(left / (2 * threads) / least * least, least, grain));
  }
  bool exhausted() const { return next.load(std::memory_order_relaxed) >= n; }
};

}  // namespace

struct CopyPool::Impl {
  const pid_t pid = ::getpid();
  std::mutex mutex;
  std::condition_variable work_cv, done_cv;
  std::deque<Job*> jobs;
  std::atomic<uint64_t> posted{0};  // jobs so far
  std::vector<std::thread> workers;
  bool stopping = false;

  explicit Impl(int threads) {
    for (int i = 1; i < threads; ++i) workers.emplace_back([this] { run(); });
  }
  ~Impl() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    work_cv.notify_all();
    for (auto& worker : workers) worker.join();
  }

  void run() {
    std::unique_lock lock(mutex);
    bool worked = false;
    while (true) {
      if (worked && jobs.empty() && !stopping) {  // long copies come in steps: the next one is near
        worked = false;
        uint64_t seen = posted.load(std::memory_order_relaxed);
        lock.unlock();
        for (int64_t limit = steady_ns() + kSpinNs; posted.load(std::memory_order_relaxed) == seen;) {
          if (steady_ns() >= limit) break;
        }
        lock.lock();
      }
      work_cv.wait(lock, [&] { return stopping || !jobs.empty(); });
      if (stopping) return;
      Job* job = jobs.front();
      if (job->exhausted()) {
        jobs.pop_front();  // only its last chunks are still being worked on
        continue;
      }
      ++job->inside;
      worked = true;
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->inside == 0) done_cv.notify_all();
    }
  }

  void take_part(Job& job) {
    size_t helpers = std::min(workers.size(), (job.n - 1) / job.grain);
    {
      std::lock_guard lock(mutex);
      jobs.push_back(&job);
      posted.fetch_add(1, std::memory_order_relaxed);
    }
    for (size_t i = 0; i < helpers; ++i) work_cv.notify_one();
    job.work();
    std::unique_lock lock(mutex);
    std::erase(jobs, &job);  // from here on nobody new comes in
    if (job.inside == 0) return;
    lock.unlock();
    for (int64_t limit = steady_ns() + kSpinNs; job.inside.load(std::memory_order_acquire) > 0;) {
      if (steady_ns() >= limit) break;
    }
    lock.lock();  // also after a successful spin: the worker must have left the mutex before `job` goes
    done_cv.wait(lock, [&] { return job.inside == 0; });
  }
};

CopyPool::CopyPool(int threads) : threads_(std::max(1, threads)) {}

CopyPool::~CopyPool() {
  Impl* impl = impl_.load();
  if (impl && impl->pid == ::getpid()) delete impl;  // in a forked child its threads do not exist: leave it
}

CopyPool& CopyPool::shared() {
  // Never destroyed: threads at exit may still copy.
  static auto* pool = new CopyPool(static_cast<int>(std::min(4u, std::max(1u, std::thread::hardware_concurrency()))));
  return *pool;
}

int CopyPool::threads() const { return threads_; }

CopyPool::Impl& CopyPool::impl() {
  Impl* current = impl_.load(std::memory_order_acquire);
  if (current && current->pid == ::getpid()) return *current;
  auto* fresh = new Impl(threads_);
  if (impl_.compare_exchange_strong(current, fresh)) return *fresh;
  delete fresh;  // another thread was first
  return *impl_.load(std::memory_order_acquire);
}

void CopyPool::parallel_for(size_t n, size_t grain, const std::function<void(size_t, size_t)>& fn) {
  if (n == 0) return;
  grain = std::max<size_t>(grain, 1);
  if (threads_ == 1 || n <= grain) return fn(0, n);
  Job job{&fn, n, grain, grain, static_cast<size_t>(threads_)};
  impl().take_part(job);
}

void CopyPool::copy(std::span<const CopyPiece> pieces) {
  size_t total = 0;
  for (auto& piece : pieces) total += piece.nbytes;
  auto path = copy_path_for(total, pieces.size());
  if (total <= kInlineBytes || threads_ == 1) return copy_run(path, pieces.data(), 0, total);
  std::vector<size_t> ends(pieces.size());  // running totals: a chunk finds its first piece by bisection
  size_t end = 0;
  for (size_t i = 0; i < pieces.size(); ++i) ends[i] = end += pieces[i].nbytes;
  const std::function<void(size_t, size_t)> run = [&](size_t begin, size_t end) {
    auto first = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    copy_run(path, &pieces[first], begin - (ends[first] - pieces[first].nbytes), end - begin);
  };
  Job job{&run, total, kChunkBytes, kLeastChunkBytes, static_cast<size_t>(threads_)};
  impl().take_part(job);
}

void CopyPool::copy(void* dst, const void* src, size_t nbytes) {
  CopyPiece piece{dst, src, nbytes};
  copy({&piece, 1});
}

}  // namespace torch_mooncake
