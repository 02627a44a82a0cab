// What a store stands on: a thread for what computes or blocks (checksums, fsync, making files), buffers for direct
// I/O, an inbox through which results come back to the owner's thread, and whole transfers over the engine's I/O queue.
//
// Everything is held by shared_ptr by whatever is under way, so that a disk that hangs can be left behind.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/fd.h"
#include "common/status.h"
#include "transfer/file/queue.h"

namespace torch_mooncake::pool::ssd {

using Task = std::function<void()>;

// Tasks for the owner. put() from any thread; run() on the owner's. `wake` is told when the inbox is no longer empty;
// set_wake() returns when no call of the old one is under way.
class Inbox {
 public:
  void put(Task task);
  size_t run();  // those that are there; how many
  void set_wake(Task wake);
  bool wait(int64_t timeout_ms);  // until there is something; for tests and for closing

 private:
  std::mutex mutex_;
  std::condition_variable cv_;
  std::vector<Task> tasks_;
  Task wake_;
  int waking_ = 0;
};

// One thread, tasks in order. The destructor runs what is queued, then joins.
class Worker {
 public:
  Worker();
  ~Worker();
  void run(Task task);

 private:
  std::mutex mutex_;
  std::condition_variable cv_;
  std::deque<Task> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

// Page-aligned memory; small ones are kept for reuse.
using Buffer = std::shared_ptr<std::byte>;
Buffer make_buffer(size_t nbytes);

// An open file of a store, without the page cache where the file system can do so.
class DataFile {
 public:
  // With `nbytes`: made, with room for so many on the disk (pool_full if there is none).
  static Result<std::shared_ptr<DataFile>> open(const std::string& path, bool direct, uint64_t create_nbytes = 0);
  int fd() const { return fd_.get(); }
  bool direct() const { return direct_; }
  const std::string& path() const { return path_; }
  void moved(std::string path) { path_ = std::move(path); }
  // Blocking, whole or an error; block-aligned in offset and nbytes.
  Status read(void* to, uint64_t nbytes, uint64_t offset) const;
  Status write(const void* from, uint64_t nbytes, uint64_t offset) const;
  Status sync() const;
  Status write_back(uint64_t offset, uint64_t nbytes) const;  // what the page cache has of it; promises nothing more

 private:
  std::string path_;
  UniqueFd fd_;
  bool direct_ = false;
};
using DataFilePtr = std::shared_ptr<DataFile>;

// Does the file system of that folder take O_DIRECT in blocks of ours? Tries it with a file of that name.
Result<bool> direct_io_works(const std::string& path);

// All of `memory`, one piece after the other, to or from the file; `done` runs on a thread of the queue, with the first
// error if any (a short transfer is gone on with). `memory` and the file stay until then: `hold` keeps what they need.
void transfer(const std::shared_ptr<transfer::IoQueue>& queue, DataFilePtr file, bool write, uint64_t offset,
              std::vector<iovec> memory, std::shared_ptr<void> hold, std::function<void(const Status&)> done);

// fsync of a folder, so that names in it stay.
Status sync_folder(const std::string& path);

}  // namespace torch_mooncake::pool::ssd
