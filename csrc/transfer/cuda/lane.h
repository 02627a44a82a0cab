// CudaCopyPart: device memory to device memory, of one process, on the engine's stream of the remote device. The copies
// are queued a few at a time: what the device has been given it carries out.
#pragma once

#include "transfer/cuda/memory.h"
#include "transfer/op.h"

namespace torch_mooncake::transfer {

class CudaCopyPart final : public Part, public std::enable_shared_from_this<CudaCopyPart> {
 public:
  static constexpr uint64_t kStepBytes = 64 << 20;

  // `hold`: leave to touch both sides' regions, until nothing does.
  CudaCopyPart(OpImplPtr op, CudaQueue& queue, std::vector<CudaQueue::Copy> copies, std::shared_ptr<void> hold);
  void run();
  void stop(const Status& why) override;

 private:
  void step();
  void over(const Status& status);

  const OpImplPtr op_;
  CudaQueue& queue_;
  const std::vector<CudaQueue::Copy> copies_;
  uint64_t nbytes_ = 0;
  size_t next_ = 0;  // only by the step under way
  uint64_t at_ = 0;
  std::mutex mutex_;
  bool stopped_ = false, told_ = false;
  Status why_;
  std::shared_ptr<void> hold_;
};

}  // namespace torch_mooncake::transfer
