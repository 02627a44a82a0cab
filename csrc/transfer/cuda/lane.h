// CudaCopyPart: device memory to device memory, both in this process' address space, on the engine's stream of the
// remote device. The copies are queued a few at a time: what the device has been given it carries out.
#pragma once

#include "transfer/cuda/memory.h"
#include "transfer/move_part.h"

namespace torch_mooncake::transfer {

class CudaCopyPart final : public Part, public std::enable_shared_from_this<CudaCopyPart> {
 public:
  static constexpr uint64_t kStepBytes = 64 << 20;

  // Starts one for these batches, whose remote region is `remote` and stands on CudaMemory.
  static void run(const OpImplPtr& op, std::string transport, Reached remote, const std::vector<const Batch*>& batches);
  void stop(const Status& why) override;

 private:
  CudaCopyPart(OpImplPtr op, std::string transport, Reached remote);
  void step();
  void over(const Status& status);

  const OpImplPtr op_;
  const std::string transport_;
  Reached remote_;
  CudaQueue& queue_;
  std::vector<CudaQueue::Copy> copies_;
  uint64_t nbytes_ = 0;
  size_t next_ = 0;  // only by the step under way
  uint64_t at_ = 0;
  std::mutex mutex_;
  bool stopped_ = false, told_ = false;
  Status why_;
  std::shared_ptr<void> hold_;  // leave to touch both sides' regions, until nothing does
};

}  // namespace torch_mooncake::transfer
