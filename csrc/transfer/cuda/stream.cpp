#include "transfer/cuda/stream.h"

#include "transfer/cuda/queue.h"

namespace torch_mooncake::transfer {

Status start_on_stream(const OpImplPtr& op, const StreamOrder& order) {
  TM_ASSIGN(auto driver, CudaDriver::get());
  TM_ASSIGN(auto* queue, CudaQueue::of(driver, order.device));
  auto stream = reinterpret_cast<CudaStream>(order.stream);
  TM_ASSIGN(auto* word, queue->take_flag());
  // Another op's when this one has ended and the stream has passed it, or never will.
  std::shared_ptr<uint32_t> flag(word, [queue](uint32_t* w) { queue->give_flag(w); });
  TM_ASSIGN(auto before, driver->record(order.device, stream));
  op->set_at_end([flag] { __atomic_store_n(flag.get(), 1u, __ATOMIC_RELEASE); });
  Status status = op->begin();
  if (status) {
    status = driver->wait_flag(order.device, stream, flag.get(), 1);
    if (!status) {
      op->stop(status);
      // Another thread may have stopped it before, and be about to set the flag. Nothing was launched: it ends at once.
      (void)op->wait(Deadline::never());
    }
  }
  if (!status) {
    driver->destroy_event(order.device, before);
    return status;
  }
  auto after = driver->record(order.device, stream);
  if (after)
    queue->when_reached(*after, [flag](const Status&) {});
  else
    new std::shared_ptr<uint32_t>(flag);  // nobody knows when the stream has passed it: it is no other op's
  queue->when_reached(before, [op](const Status& reached) {
    if (!reached) return op->stop(reached.with("work on the CUDA stream before the op"));
    op->launch();
  });
  return {};
}

}  // namespace torch_mooncake::transfer
