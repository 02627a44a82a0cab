// File: an open file whose bytes are a region. Reads and writes bypass the page cache (O_DIRECT) where the file system
// can: whole blocks directly, the heads and tails of a write through the cache, everything else by way of aligned
// bounce buffers. Where it cannot (tmpfs), all goes through the cache.
//
// A read always lands in a bounce buffer first, unless the file lies in memory: the kernel takes a request to a hanging
// disk not back, and after an op's end nothing may land in the caller's memory.
//
// Ownership: shared by its region and the moves in progress; closes its descriptors with the last. Threads: any.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "common/fd.h"
#include "transfer/backing.h"
#include "transfer/file/cufile_driver.h"
#include "transfer/file/queue.h"
#include "transfer/file/threads.h"

namespace torch_mooncake::transfer {

class FileMove;

class File final : public Backing, public std::enable_shared_from_this<File> {
 public:
  static constexpr uint64_t kBlock = 4096;       // unit of direct I/O
  static constexpr uint32_t kMostInFlight = 32;  // requests of one file in the queue

  // Errors: invalid_argument (a directory, a pipe, a socket), out_of_bounds (more than the file holds, and not
  // writable), io with errno's text. A writable file that is shorter than nbytes is made longer (sparse).
  static Result<std::shared_ptr<File>> open(const FileOptions& options, std::shared_ptr<IoQueue> queue);

  uint64_t nbytes() const { return nbytes_; }
  bool direct() const { return direct_.valid(); }
  // "io_uring, O_DIRECT", "threads, page cache"
  std::string how() const;
  const std::string& path() const { return path_; }

  // GPUDirect Storage for this file; null where it cannot be had (storage_choice() says why). The first call opens the
  // driver, which takes a while; later ones do not wait.
  struct Storage {
    std::shared_ptr<CuFileDriver> driver;
    std::shared_ptr<void> file;
  };
  const Storage* storage();
  bool storage_known() const { return storage_known_; }
  // A call of it failed: this file does without it from now on, which a warning and storage_choice() say.
  void storage_broke(const Status& why);
  bool storage_failed() const { return storage_failed_; }
  // Threads that wait for it.
  static std::shared_ptr<Threads> waiters();

  std::vector<AccessRecord> access_records(const RegionImpl& region) const override;
  MovePtr move(MoveRequest request) override;
  std::string name() const override { return "file " + path_; }

 private:
  friend class FileMove;
  File(std::string path, std::shared_ptr<IoQueue> queue) : path_(std::move(path)), queue_(std::move(queue)) {}
  Status check_kind(const FileOptions& options);
  void try_direct(int flags);
  // Moves take turns, request by request.
  void enqueue(std::shared_ptr<FileMove> move);
  void request_over();
  void pump();

  const std::string path_;
  const std::shared_ptr<IoQueue> queue_;
  UniqueFd cached_, direct_;
  uint64_t nbytes_ = 0;
  uint64_t memory_align_ = kBlock;  // of buffers for direct_
  bool in_memory_ = false;          // tmpfs and the like: I/O cannot hang

  std::mutex storage_mutex_;
  std::atomic<bool> storage_known_{false}, storage_failed_{false};
  std::optional<Storage> storage_;    // goes before direct_
  std::shared_ptr<Threads> waiters_;  // so that they stay from op to op

  std::mutex mutex_;
  std::deque<std::shared_ptr<FileMove>> ready_;  // each once
  uint32_t in_flight_ = 0;
};

// What is known of GPUDirect Storage in this process: "libcufile.so.0", "no: …", and why it was not used for the last
// file that it was not used for.
std::string storage_choice();

}  // namespace torch_mooncake::transfer
