// FileMove: one list of pieces on its way between host memory and a file, cut into requests.
//
// A request covers one run of the file; several pieces that lie side by side in the file share it. Requests are made
// one at a time when the file has room for them, so that moves take turns and a stopped one has little under way.
#pragma once

#include <mutex>

#include "transfer/file/file.h"

namespace torch_mooncake::transfer {

class FileMove final : public Move, public std::enable_shared_from_this<FileMove> {
 public:
  FileMove(std::shared_ptr<File> file, MoveRequest request);
  void start() override;
  void stop(const Status& why) override;
  void abandon() override;

 private:
  friend class File;
  struct Request {
    std::shared_ptr<FileMove> move;
    bool direct = false;        // past the page cache
    bool bounced = false;       // by way of `data`, a block of the queue
    uint64_t offset = 0;        // in the file, of data
    std::byte* data = nullptr;  // the block, or the caller's memory
    uint32_t head = 0;          // bytes of data before the first piece's
    uint32_t wanted = 0;        // head + what the pieces need
    uint32_t length = 0;        // what the kernel is asked for: wanted, in whole blocks if direct
    uint32_t got = 0;           // so far
    std::vector<HostPiece> parts;
    bool touching = false;  // the host memory: counted in touching_
  };
  using RequestPtr = std::shared_ptr<Request>;

  // With the file's mutex: the next request, null if there is none (any more).
  RequestPtr next();
  // Fills a write's block; what the queue is to do.
  IoRequest prepare(const RequestPtr& request);
  IoRequest io_of(const RequestPtr& request);
  void result(const RequestPtr& request, int64_t n);
  Status short_result(Request& request);
  void deliver(Request& request);
  void over(const RequestPtr& request, const Status& status);
  void touch_no_more(Request& request);
  void settle(std::unique_lock<std::mutex> lock);
  bool add_part(Request& request);
  void plan(Request& request, const HostPiece& first);

  const std::shared_ptr<File> file_;
  MoveRequest request_;

  // The cursor, guarded by the file's mutex.
  size_t piece_ = 0;
  uint64_t at_ = 0;

  std::mutex mutex_;
  uint32_t in_flight_ = 0, touching_ = 0;  // requests; those of them that touch the host memory now
  bool planned_ = false, stopped_ = false, told_ = false;
  Status status_;
};

}  // namespace torch_mooncake::transfer
