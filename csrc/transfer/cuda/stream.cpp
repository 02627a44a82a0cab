#include "transfer/cuda/stream.h"

#include "transfer/cuda/queue.h"

namespace torch_mooncake::transfer {

Status start_on_stream(const OpImplPtr& op, const StreamOrder& order) {
  TM_ASSIGN(auto driver, CudaDriver::get());
  TM_ASSIGN(auto* queue, CudaQueue::of(driver, order.device));
  auto stream = reinterpret_cast<CudaStream>(order.stream);
  TM_ASSIGN(auto* flag, queue->take_flag());
  auto set = [flag] { __atomic_store_n(flag, 1u, __ATOMIC_RELEASE); };
  auto before = driver->record(order.device, stream);
  if (!before) {
    queue->give_flag(flag);
    return before.status();
  }
  op->set_at_end(set);
  Status status = op->begin();
  if (status) {
    status = driver->wait_flag(order.device, stream, flag, 1);
    if (!status) {
      op->stop(status);
      // Another thread may have stopped it before, and be about to set the flag. Nothing was launched: it ends at once.
      (void)op->wait(Deadline::never());
    }
  }
  if (!status) {
    driver->destroy_event(order.device, *before);
    queue->give_flag(flag);
    return status;
  }
  // The flag is another op's when the stream has passed it.
  auto after = driver->record(order.device, stream);
  if (after) queue->when_reached(*after, [queue, flag](const Status&) { queue->give_flag(flag); });
  queue->when_reached(*before, [op](const Status& reached) {
    if (!reached) return op->stop(reached.with("work on the CUDA stream before the op"));
    op->launch();
  });
  return {};
}

}  // namespace torch_mooncake::transfer
