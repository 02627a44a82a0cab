// Bulk copy: plain memcpy for small sizes, non-temporal stores interleaved over four pages for large ones (AVX2 or
// AVX-512 chosen at run time), several threads for larger ones. A copy has completed, and is visible to every other
// thread that synchronises with the caller, when the function returns (non-temporal stores are fenced).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
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

// A small pool of persistent copy threads (made on first use, asleep when idle, recreated after fork). The calling
// thread always takes part. `threads` counts it.
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
  std::unique_ptr<Impl> impl_;
};

}  // namespace torch_mooncake
