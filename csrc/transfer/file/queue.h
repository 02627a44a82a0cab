// IoQueue: positional reads and writes of files, carried out by io_uring or, where the kernel or seccomp forbid that,
// by a few threads. Both give the raw result of each request; short results and errors are FileMove's business.
//
// Ownership: shared() gives one queue a process, made on first use and gone with its last holder; a forked child makes
// its own. Whoever has a request in flight holds the queue. Threads: submit() is safe from any thread and never waits
// for the disk; `done` runs on a thread of the queue and must not block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/status.h"

namespace torch_mooncake::transfer {

struct IoRequest {
  int fd = -1;
  bool write = false;
  uint64_t offset = 0;
  void* data = nullptr;  // untouched after done
  uint32_t nbytes = 0;
  bool cached = false;                // through the page cache: carried out beside the submitting thread if it is long
  std::function<void(int64_t)> done;  // bytes moved, or -errno
};

class IoQueue {
 public:
  virtual ~IoQueue();
  virtual const char* name() const = 0;  // "io_uring" or "threads"
  virtual void submit(std::vector<IoRequest> requests) = 0;

  // Bounce buffers of kBlockBytes at kBlockAlign, some of them kept for reuse.
  static constexpr size_t kBlockBytes = 1 << 20, kBlockAlign = 4096, kSpareBlocks = 32;
  std::byte* take_block();
  void give_block(std::byte* block);

  // io_uring if this process may use it, else threads.
  static std::shared_ptr<IoQueue> shared();

 private:
  std::mutex blocks_mutex_;
  std::vector<std::byte*> spare_blocks_;
};

// Errors: unsupported, with the reason (io_uring_disabled, seccomp, too old a kernel).
Result<std::shared_ptr<IoQueue>> make_uring_queue();
std::shared_ptr<IoQueue> make_thread_queue();

}  // namespace torch_mooncake::transfer
