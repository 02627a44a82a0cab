#include "torch/c10d_backend.h"

#include <torch/csrc/distributed/c10d/exception.h>

#include "common/log.h"
#include "common/random.h"
#include "torch/c10d_tensors.h"
#include "torch/without_gil.h"

namespace torch_mooncake::dist {
namespace {

constexpr int64_t kLeaveMs = 2000;

[[noreturn]] void raise(const std::string& text) { C10_THROW_ERROR(DistBackendError, "mooncake: " + text); }

// One that its streams wait for, or the host.
template <typename... Args>
c10::intrusive_ptr<CollectiveWork> make_collective_work(const DeviceOpPtr& on, Args&&... args) {
  if (!on) return c10::make_intrusive<CollectiveWork>(std::forward<Args>(args)...);
  return c10::make_intrusive<OnStream<CollectiveWork>>(on->context(), on->gate(), std::forward<Args>(args)...);
}

}  // namespace

MooncakeBackend::MooncakeBackend(int rank, int size, c10::intrusive_ptr<Options> options, coll::SeatsPtr seats)
    : Backend(rank, size), options_(std::move(options)), seats_(std::move(seats)) {
  init();
}

MooncakeBackend::~MooncakeBackend() { shutdown(); }

void MooncakeBackend::shutdown() {
  WithoutGil without_gil;
  settle_devices();
  seats_->close(Deadline::after_ms(kLeaveMs));
  pending_messages_->flush();
  executor_.stop();
  finisher_->stop();
}

void MooncakeBackend::abort() {
  WithoutGil without_gil;
  const Status why(Code::cancelled, "the process group was aborted");
  seats_->cancel(why);
  seats_->group()->abort(why);
  pending_messages_->flush();
}

Status MooncakeBackend::run_body(coll::Group& group, const Body& body, uint64_t sequence, Deadline deadline,
                                 DeviceOp* on, std::exception_ptr& raised) {
  TM_TRY(group.trouble());
  Status status;
  try {
    const coll::Call call{group, sequence, deadline, scratch_};
    status = on ? on->run(call, body) : body(call);
  } catch (...) {  // torch ran out of memory, say: the other ranks wait in vain for our part
    raised = std::current_exception();
    status = {Code::internal, "an exception on this rank"};
  }
  scratch_.trim();
  if (!status.is_ok()) {
    error_ = status.code() == Code::deadline_exceeded ? c10d::ErrorType::TIMEOUT
             : status.code() == Code::peer_lost       ? c10d::ErrorType::REMOTE_ERROR
                                                      : c10d::ErrorType::COMM_ERROR;
    group.give_up(status);
  }
  return status;
}

WorkPtr MooncakeBackend::run(Plan plan, Body body) {
  for (size_t i = 0; i < plan.outputs.size() && !plan.reads_only; ++i) check_writable(plan.outputs[i], plan.name);
  const DeviceOpPtr on = device_op_of(plan);
  std::unique_lock order(order_mutex_);
  const coll::GroupPtr group = seats_->group();
  const uint64_t sequence = ++sequence_;
  std::string what =
      std::string(plan.name) + " (sequence " + std::to_string(sequence) + ") on " + group->name_of(group->rank());
  auto work =
      make_collective_work(on, group, plan.type, plan.title, std::move(what), sequence, plan.outputs, plan.inputs);
  const Deadline deadline = deadline_of(plan.timeout);
  auto task = [this, work, group, on, body = std::move(body), sequence, deadline] {
    std::exception_ptr raised;
    work->begin();
    const Status status = run_body(*group, body, sequence, deadline, on.get(), raised);
    raised ? work->end(raised) : work->end(status);
    if (on) on->gate()->open();  // however it ended
    if (onCompletionHook_) tell_hook(*work);
  };
  if (!executor_.submit(std::move(task), !plan.async && !on, &order)) raise("the process group was shut down");
  if (order.owns_lock()) order.unlock();
  std::lock_guard lock(coalescing_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

void MooncakeBackend::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(!onCompletionHook_, "mooncake: the group has a completion hook already");
  executor_.drain();
  onCompletionHook_ = std::move(hook);
}

void MooncakeBackend::tell_hook(const CollectiveWork& work) {
  try {
    onCompletionHook_(work.info());
  } catch (const std::exception& error) {
    log::error("collectives", std::string("the completion hook raised: ") + error.what());
  }
}

// ---- messages

WorkPtr MooncakeBackend::message(bool sending, TensorList& tensors, int peer, int tag) {
  const char* name = sending ? "send" : "recv";
  const at::Tensor tensor = only(tensors, name);
  if (!sending) check_writable(tensor, name);
  TORCH_CHECK_VALUE(tag >= 0, "mooncake: ", name, ": tag must not be negative");
  const uint64_t number = ++messages_;
  const bool any = !sending && peer == coll::kAnySource;
  const coll::GroupPtr group = seats_->group();
  if (!any) {
    TORCH_CHECK_VALUE(peer >= 0 && peer < size_, "mooncake: ", name, ": there is no rank ", peer);
    const int seat = peer;
    peer = group->rank_in(seat);
    TORCH_CHECK_VALUE(peer >= 0, "mooncake: ", name, ": rank ", seat, " is not active");
  }
  std::string what = std::string(name) + (sending ? " to " : " from ") + group->name_of(peer) + " (tag " +
                     std::to_string(tag) + ") on " + group->name_of(group->rank());
  at::Tensor memory = tensor;
  at::Tensor staging;
  if (needs_staging(tensor)) {
    memory = sending ? contiguous_copy(tensor) : contiguous_like(tensor);
    if (!sending) staging = memory;
  }
  auto keep = std::make_shared<at::Tensor>(memory);
  const DeviceContextPtr on = tensor.is_cuda() ? context_of(tensor.device()) : nullptr;
  const auto type = sending ? c10d::OpType::SEND : (any ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV);
  const char* title = sending ? "mooncake:send" : (any ? "mooncake:recvAnySource" : "mooncake:recv");
  const Deadline deadline = Deadline::after_ms(options_->timeout.count());
  // Messages of CUDA tensors wait for a stream first, and are not overtaken by others: they match only one another.
  const auto wire_tag = static_cast<uint64_t>(tag) | (on ? uint64_t{1} << 32 : 0);
  auto post = [=] {
    constexpr auto channel = coll::Channel::p2p;
    const auto place = on ? coll::Place::cuda : coll::Place::host;
    return sending
               ? group->send(peer, channel, wire_tag, memory.const_data_ptr(), memory.nbytes(), deadline, keep, place)
               : group->receive(peer, channel, wire_tag, memory.mutable_data_ptr(), memory.nbytes(), deadline, keep,
                                place);
  };
  WorkPtr work;
  if (on) {
    const auto gate = on->gate(name);
    auto message = c10::make_intrusive<OnStream<DeviceMessage>>(on, gate, group, type, title, std::move(what), number,
                                                                tensor, staging, on, gate, finisher_);
    pending_messages_->add({sending, peer, tag}, gate, finisher_, [message, gate, post, peer] {
      const auto before = gate->reached();
      message->follow(before.is_ok() ? post() : coll::Request::ended_with(peer, before.status()));
    });
    work = message;
  } else {
    auto message =
        c10::make_intrusive<MessageWork>(group, type, title, std::move(what), number, tensor, staging, finisher_);
    message->follow(post());
    work = message;
  }
  std::lock_guard lock(coalescing_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

WorkPtr MooncakeBackend::send(TensorList& tensors, int to, int tag) { return message(true, tensors, to, tag); }
WorkPtr MooncakeBackend::recv(TensorList& tensors, int from, int tag) {
  TORCH_CHECK_VALUE(from >= 0, "mooncake: recv: invalid source rank ", from);
  return message(false, tensors, from, tag);
}
WorkPtr MooncakeBackend::recvAnysource(TensorList& tensors, int tag) {
  return message(false, tensors, coll::kAnySource, tag);
}

// Everything starts when it is called; coalescing only gathers the works into one.
void MooncakeBackend::startCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  coalescing_ = true;
}

WorkPtr MooncakeBackend::endCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  coalescing_ = false;
  return c10::make_intrusive<JointWork>(std::exchange(coalesced_, {}));
}

}  // namespace torch_mooncake::dist
