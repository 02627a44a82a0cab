#include "torch/c10d_work.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace torch_mooncake::dist {
namespace {

FuturePtr new_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}
Deadline deadline_of(Ms timeout) {
  return timeout.count() > 0 ? Deadline::after_ms(timeout.count()) : Deadline::never();
}

}  // namespace

std::exception_ptr make_error(const std::string& what, const Status& status) {
  // Torch's own tests look for the word "timeout" here.
  const char* verb = status.code() == Code::deadline_exceeded ? " ran into its timeout and failed: " : " failed: ";
  const std::string text = "mooncake: " + what + verb + status.to_string();
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
}

void copy_tensor(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;  // also lets inference tensors be filled
  to.copy_(from);
}

bool needs_staging(const at::Tensor& tensor) { return !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg(); }

at::Tensor contiguous_like(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::empty(tensor.sizes(), tensor.options().memory_format(c10::nullopt));
}

at::Tensor contiguous_copy(const at::Tensor& tensor) {
  at::Tensor out = contiguous_like(tensor);
  copy_tensor(out, tensor);
  return out;
}

BaseWork::BaseWork(int rank, c10d::OpType type, const char* title, std::string what, uint64_t seq, TensorList outputs,
                   const TensorList& inputs)
    : Work(rank, type, title, inputs), what_(std::move(what)), seq_(seq), outputs_(std::move(outputs)) {}

bool BaseWork::wait(Ms timeout) {
  std::unique_lock lock(mutex_);
  if (timeout.count() <= 0) {
    cv_.wait(lock, [&] { return completed_; });
  } else if (!cv_.wait_for(lock, timeout, [&] { return completed_; })) {
    lock.unlock();
    C10_THROW_ERROR(DistBackendError, "mooncake: " + what_ + " has not ended within " +
                                          std::to_string(timeout.count()) + " ms: waiting for " + awaited());
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

FuturePtr BaseWork::getFuture() {
  bool ended;
  {
    std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = new_future();
    ended = completed_;
  }
  if (ended) mark(future_);
  return future_;
}

void BaseWork::mark(const FuturePtr& future) {
  if (marked_.test_and_set()) return;
  if (exception_) {
    future->setError(exception_);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
}

float BaseWork::getDuration() const {
  const int64_t ended = ended_ns_;
  TORCH_CHECK(ended > 0, "mooncake: ", what_, " has not ended");
  return static_cast<float>(ended - began_ns_) / 1e6F;
}

std::shared_ptr<c10d::WorkInfo> BaseWork::info() const {
  using Clock = std::chrono::steady_clock;
  const auto at = [](int64_t ns) { return Clock::time_point(std::chrono::nanoseconds(ns)); };
  return std::make_shared<c10d::WorkInfo>(opType_, seq_, at(began_ns_), at(ended_ns_),
                                          std::chrono::duration<float>(at(ended_ns_) - at(began_ns_)));
}

void BaseWork::complete(std::exception_ptr error) {
  ended_ns_ = steady_ns();
  finish(std::move(error));
  FuturePtr future;
  {
    std::lock_guard lock(mutex_);
    future = future_;
  }
  if (future) mark(future);
}

// ---- messages

MessageWork::MessageWork(coll::GroupPtr group, c10d::OpType type, const char* title, std::string what, uint64_t seq,
                         at::Tensor tensor, at::Tensor staging, std::shared_ptr<Executor> finisher)
    : BaseWork(group->seat_of(group->rank()), type, title, std::move(what), seq, {tensor}, {tensor}),
      group_(std::move(group)),
      staging_(std::move(staging)),
      finisher_(std::move(finisher)) {
  begin();
}

void MessageWork::follow(coll::RequestPtr request) {
  request_ = std::move(request);
  // Without a copy to make or a future to mark, the request's own end is all there is.
  if (!staging_.defined()) return;
  auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  request_->on_end([self] { self->finisher_->submit([self] { self->finalize(); }, false); });
}

void MessageWork::finalize() {
  std::call_once(finalized_, [&] {
    const Status status = request_->status();
    std::exception_ptr error;
    if (!status.is_ok()) {
      error = make_error(what_, status);
    } else if (staging_.defined()) {
      try {
        copy_tensor(outputs_[0], staging_);
      } catch (...) {
        error = std::current_exception();
      }
    }
    complete(error);
  });
}

bool MessageWork::wait(Ms timeout) {
  const Deadline deadline = deadline_of(timeout);
  std::unique_lock lock(waiting_, std::defer_lock);
  if (deadline.is_never()) {
    lock.lock();
  } else {
    (void)lock.try_lock_for(timeout);
  }
  if (lock.owns_lock()) (void)request_->wait(deadline);  // the outcome is looked at below
  if (!request_->ended()) {
    C10_THROW_ERROR(DistBackendError, "mooncake: " + what_ + " has not ended within " +
                                          std::to_string(timeout.count()) + " ms: waiting for " + awaited());
  }
  finalize();
  return BaseWork::wait(kNoTimeout);
}

bool MessageWork::isCompleted() {
  if (!request_->ended()) return false;
  finalize();
  return BaseWork::isCompleted();
}

FuturePtr MessageWork::getFuture() {
  auto future = BaseWork::getFuture();
  auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  request_->on_end([self] { self->finisher_->submit([self] { self->finalize(); }, false); });
  return future;
}

// ---- several as one

bool JointWork::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) return false;
  }
  return true;
}

bool JointWork::isSuccess() const {
  for (const auto& work : works_) {
    if (!work->isSuccess()) return false;
  }
  return true;
}

bool JointWork::wait(Ms timeout) {
  const Deadline deadline = deadline_of(timeout);
  for (const auto& work : works_) {
    work->wait(deadline.is_never() ? kNoTimeout : Ms(std::max(1, deadline.remaining_ms())));
  }
  return true;
}

void JointWork::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

TensorList JointWork::result() {
  TensorList out;
  for (const auto& work : works_) {
    for (auto& tensor : work->result()) out.push_back(tensor);
  }
  return out;
}

FuturePtr JointWork::getFuture() {
  c10::List<FuturePtr> futures(c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  std::vector<c10::Device> devices;  // whose streams a callback runs behind
  for (const auto& work : works_) {
    futures.push_back(work->getFuture());
    const FuturePtr future = futures.get(futures.size() - 1);
    for (const auto& device : future->devices()) devices.push_back(device);
  }
  std::sort(devices.begin(), devices.end(), [](const auto& a, const auto& b) { return a.index() < b.index(); });
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  auto all = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  auto self = c10::intrusive_ptr<JointWork>::reclaim_copy(this);
  c10::collectAll(futures)->addCallback([all, self](c10::ivalue::Future& done) {
    if (done.hasError()) return all->setError(done.exception_ptr());
    // On streams of their own that wait for what the futures wait for, not on the caller's.
    std::vector<c10::Stream> streams;
    for (const auto& device : all->devices())
      streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
    std::optional<c10::MultiStreamGuard> guard;
    if (!streams.empty()) guard.emplace(streams);
    for (const c10::IValue& one : done.value().toList()) {
      auto future = one.toFuture();
      if (future->hasError()) return all->setError(future->exception_ptr());
      future->wait();  // has ended
    }
    all->markCompleted(c10::IValue(self->result()));
  });
  return all;
}

}  // namespace torch_mooncake::dist
