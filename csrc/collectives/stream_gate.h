// StreamGate: the place of one asynchronous operation among the work on CUDA streams. It comes after what was queued on
// one stream when the gate was made; streams that are told to wait for it go on when it has ended. The host waits for
// neither: a stream waits for a word of pinned memory that is set when the gate opens.
//
// Ownership: whoever runs the operation holds the gate. Threads: every method is safe from any thread. Streams never
// hang: the destructor opens, and an operation that fails opens its gate like any other.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "common/api.h"
#include "common/clock.h"
#include "common/status.h"

namespace torch_mooncake::transfer {
class CudaDriver;
class CudaQueue;
}  // namespace torch_mooncake::transfer

namespace torch_mooncake::coll {

class TM_API StreamGate : public std::enable_shared_from_this<StreamGate> {
 public:
  using Stream = void*;  // CUstream

  // unsupported: there is no CUDA here, or the stream is being captured into a graph (whose replay would find an
  // operation that has long ended).
  static Result<std::shared_ptr<StreamGate>> after(int device, Stream stream);
  ~StreamGate();
  StreamGate(const StreamGate&) = delete;
  StreamGate& operator=(const StreamGate&) = delete;

  // Whether the work before it is done; io: it failed.
  Result<bool> reached();
  // Until it is. deadline_exceeded, or what `trouble` says, if that comes first.
  Status wait(Deadline deadline, const std::function<Status()>& trouble);
  // Instead of wait(): `ready` once, when reached() is no longer false, on a thread that it must not block.
  void when_reached(std::function<void()> ready);

  // The operation has ended. Idempotent.
  void open();
  // What is queued on that stream from now on comes after the operation. unsupported: the device has no such waits, or
  // the stream is being captured; then nothing is queued.
  Status hold(Stream stream);
  // If a stream has to wait: until the operation has ended.
  void wait_if_held();

 private:
  StreamGate(std::shared_ptr<transfer::CudaDriver> driver, transfer::CudaQueue* queue);
  void settle(const Status& status);  // with the mutex
  const std::shared_ptr<transfer::CudaDriver> driver_;
  transfer::CudaQueue* const queue_;
  std::mutex mutex_;
  std::condition_variable opened_;
  void* before_ = nullptr;  // until it was reached, or is the queue's to ask for
  bool reached_ = false;
  Status before_status_;
  std::shared_ptr<uint32_t> flag_;  // made for the first stream that has to wait
  bool open_ = false;
};
using StreamGatePtr = std::shared_ptr<StreamGate>;

// A stream of one's own, which nobody else queues anything on: what is queued there never stands behind a wait of the
// user's. Kept for the life of the process, as the device's context is.
TM_API Result<void*> make_own_stream(int device);
// Between memory of the device and pinned memory, queued.
TM_API Status copy_on_stream(int device, void* to, const void* from, uint64_t nbytes, void* stream);
TM_API Result<std::shared_ptr<std::byte>> make_pinned(int device, uint64_t nbytes);
// Until what is queued on the stream now is done. io: it failed.
TM_API Status wait_for_stream(int device, void* stream, Deadline deadline);

}  // namespace torch_mooncake::coll
