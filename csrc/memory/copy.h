// Bulk copy: plain memcpy for little, non-temporal stores for much (AVX2 or AVX-512 chosen at run time; four streams
// advance together, in one piece or in four), several threads for more. A copy has completed, and is visible to every
// other thread that synchronises with the caller, when the function returns (non-temporal stores are fenced).
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

// The ways to copy. copy_path_for() is the choice for a list of that many bytes in that many pieces.
enum class CopyPath { plain, avx2, avx512 };
TM_API bool copy_path_available(CopyPath path);
TM_API CopyPath copy_path_for(size_t total_nbytes, size_t pieces);
// Bytes [offset, offset + nbytes) of a list laid end to end, `offset` being inside its first piece; one thread.
TM_API void copy_run(CopyPath path, const CopyPiece* first, size_t offset, size_t nbytes);

// A small pool of persistent copy threads (made on first use, asleep when idle, recreated after fork). The calling
// thread always takes part. `threads` counts it. Several callers may use one pool at once. `fn` must not throw.
class TM_API CopyPool {
 public:
  explicit CopyPool(int threads);
  ~CopyPool();
  static CopyPool& shared();  // one per process: min(4, cores) threads
  int threads() const;
  // Pieces must not overlap. Up to 1 MiB in all is copied on the calling thread alone.
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
