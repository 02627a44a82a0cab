// Bulk copy: plain memcpy for small sizes, non-temporal stores interleaved over four pages for large ones (AVX2 or
// AVX-512 chosen at run time), several threads for larger ones. A copy has completed, and is visible to every other
// thread that synchronises with the caller, when the function returns (non-temporal stores are fenced).
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <span>

#include "common/api.h"

namespace torch_mooncake {

struct CopyPiece {
  void* dst;
  const void* src;
  size_t nbytes;
};

// One thread, inline.
TM_API void copy_bytes(void* dst, const void* src, size_t nbytes);

// The ways to copy, for tests and benchmarks; copy_bytes picks.
enum class CopyPath { plain, avx2, avx512 };
TM_API bool copy_path_available(CopyPath path);
TM_API void copy_bytes_by(CopyPath path, void* dst, const void* src, size_t nbytes);

// A small pool of persistent copy threads (made on first use, asleep when idle, recreated after fork). The calling
// thread always takes part. `threads` counts it. Several callers may use one pool at once. `fn` must not throw.
class TM_API CopyPool {
 public:
  explicit CopyPool(int threads);
  ~CopyPool();
  static CopyPool& shared();  // one per process: min(4, cores) threads
  int threads() const;
  void copy(std::span<const CopyPiece> pieces);
  void copy(void* dst, const void* src, size_t nbytes);
  // Runs fn(begin, end) over [0, n) in chunks of at least `grain`, on the pool.
  void parallel_for(size_t n, size_t grain, const std::function<void(size_t, size_t)>& fn);

 private:
  struct Impl;
  Impl& impl();  // this process's: a forked child gets a new one
  const int threads_;
  std::atomic<Impl*> impl_{nullptr};
};

}  // namespace torch_mooncake
