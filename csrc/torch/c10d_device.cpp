#include "torch/c10d_device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "collectives/reduce.h"
#include "torch/c10d_backend.h"
#include "torch/c10d_tensors.h"

namespace torch_mooncake::dist {
namespace {

using coll::DType;
using coll::ReduceOp;
using coll::StreamGate;

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

[[noreturn]] void raise(const char* op, const Status& status) {
  C10_THROW_ERROR(DistBackendError, std::string("mooncake: ") + op + ": " + status.to_string());
}

// A stream that is nobody else's, as torch names streams that others made: by their handle.
c10::Stream make_stream(c10::Device device) {
  auto made = coll::make_own_stream(device.index());
  if (!made.is_ok()) raise("a stream", made.status());
  c10::Stream stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(reinterpret_cast<intptr_t>(*made)));
  TORCH_CHECK(stream.native_handle() == *made, "mooncake: this torch has other names for streams");
  return stream;
}

at::ScalarType scalar_of(DType dtype) {
  static constexpr at::ScalarType kTypes[] = {
      at::kByte, at::kChar,     at::kUInt16, at::kShort,  at::kUInt32,       at::kInt,           at::kUInt64, at::kLong,
      at::kHalf, at::kBFloat16, at::kFloat,  at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kBool};
  return kTypes[static_cast<size_t>(dtype)];
}

// What ATen has no kernels for everywhere.
bool is_odd(DType dtype) { return dtype == DType::u16 || dtype == DType::u32 || dtype == DType::u64; }

void combine(at::Tensor& acc, const at::Tensor& in, bool is_bool, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      is_bool ? acc.logical_or_(in) : acc.add_(in);
      return;
    case ReduceOp::product:
      is_bool ? acc.logical_and_(in) : acc.mul_(in);
      return;
    case ReduceOp::min:
      is_bool ? acc.logical_and_(in) : acc.copy_(at::minimum(acc, in.to(acc.scalar_type())));
      return;
    case ReduceOp::max:
      is_bool ? acc.logical_or_(in) : acc.copy_(at::maximum(acc, in.to(acc.scalar_type())));
      return;
    case ReduceOp::band:
      acc.bitwise_and_(in);
      return;
    case ReduceOp::bor:
      acc.bitwise_or_(in);
      return;
    case ReduceOp::bxor:
      acc.bitwise_xor_(in);
      return;
  }
}

}  // namespace

std::optional<c10::Device> device_of(const TensorList& inputs, const TensorList& outputs, const char* op) {
  std::optional<c10::Device> found;
  for (const auto* tensors : {&inputs, &outputs}) {
    for (const auto& tensor : *tensors) {
      if (!found) found = tensor.device();
      TORCH_CHECK_VALUE(*found == tensor.device(), "mooncake: ", op, ": tensors on ", *found, " and ", tensor.device());
    }
  }
  if (found && found->is_cpu()) found.reset();
  return found;
}

// ---- one backend, one device

DeviceContext::DeviceContext(c10::Device device, uint64_t staged_bytes)
    : device_(device), stream_(make_stream(device)), side_(std::make_shared<SideStreams>()) {
  // All that is ever needed: later, when streams wait for us, CUDA might wait for them before it gives more.
  constexpr uint64_t kPadding = 64 << 10;
  const auto memory = pinned(2 * staged_bytes + kPadding);
  if (!memory.is_ok()) raise("pinned memory", memory.status());
}

coll::StreamGatePtr DeviceContext::gate(const char* op) {
  auto gate = StreamGate::after(device_.index(), current_stream(device_).native_handle());
  if (!gate.is_ok()) raise(op, gate.status());
  std::lock_guard lock(mutex_);
  std::erase_if(gates_, [](const auto& one) { return one.expired(); });
  gates_.push_back(*gate);
  return *gate;
}

void DeviceContext::settle() {
  std::vector<std::weak_ptr<StreamGate>> gates;
  {
    std::lock_guard lock(mutex_);
    gates.swap(gates_);
  }
  for (const auto& one : gates) {
    if (auto gate = one.lock()) gate->wait_if_held();
  }
}

bool DeviceContext::hold(StreamGate& gate) {
  const Status status = gate.hold(current_stream(device_).native_handle());
  if (!status.is_ok() && status.code() != Code::unsupported) raise("wait", status);
  return status.is_ok();
}

c10::Stream DeviceContext::take_side_stream() {
  {
    std::lock_guard lock(side_->mutex);
    if (!side_->free.empty()) {
      const c10::Stream stream = side_->free.back();
      side_->free.pop_back();
      return stream;
    }
  }
  return make_stream(device_);
}

bool DeviceContext::complete_behind(StreamGate& gate, const std::function<void()>& mark) {
  const c10::Stream side = take_side_stream();
  const Status status = gate.hold(side.native_handle());
  if (status.is_ok()) {
    c10::StreamGuard guard(side);
    mark();
  }
  // Behind another future's wait it would wait for that, too: it is free when it has passed.
  auto passed = StreamGate::after(device_.index(), side.native_handle());
  if (passed.is_ok()) {
    (*passed)->when_reached([weak = std::weak_ptr(side_), side] {
      auto streams = weak.lock();
      if (!streams) return;
      std::lock_guard lock(streams->mutex);
      streams->free.push_back(side);
    });
  }
  return status.is_ok();
}

Result<std::byte*> DeviceContext::pinned(uint64_t nbytes) {
  if (nbytes > pinned_bytes_) {
    pinned_ = nullptr;
    TM_ASSIGN(pinned_, coll::make_pinned(device_.index(), nbytes));
    pinned_bytes_ = nbytes;
  }
  return pinned_.get();
}

void DeviceContext::abandon_pinned() {
  new std::shared_ptr<std::byte>(std::move(pinned_));
  pinned_bytes_ = 0;
}

// ---- the backend

DeviceContextPtr MooncakeBackend::context_of(c10::Device device) {
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  std::lock_guard lock(devices_mutex_);
  auto& context = devices_[device.index()];
  if (!context) context = std::make_shared<DeviceContext>(device, options_->cuda_staged_bytes);
  return context;
}

void MooncakeBackend::settle_devices() {
  std::map<c10::DeviceIndex, DeviceContextPtr> contexts;
  {
    std::lock_guard lock(devices_mutex_);
    contexts = devices_;
  }
  for (const auto& [index, context] : contexts) context->settle();
}

DeviceOpPtr MooncakeBackend::device_op_of(const Plan& plan) {
  const auto device = plan.device ? plan.device : device_of(plan.inputs, plan.outputs, plan.name);
  if (!device) return nullptr;
  auto context = context_of(*device);
  auto gate = context->gate(plan.name);
  TensorList tensors = plan.inputs;
  tensors.insert(tensors.end(), plan.outputs.begin(), plan.outputs.end());
  return std::make_shared<DeviceOp>(context, gate, std::move(tensors), options_->cuda_staged_bytes);
}

// ---- reductions

void reduce_tensors(const at::Tensor& out, const TensorList& in, DType dtype, ReduceOp op) {
  at::NoGradGuard no_grad;
  if (is_odd(dtype)) {
    TensorList host;
    std::vector<const void*> inputs;
    for (const auto& tensor : in) inputs.push_back(host.emplace_back(tensor.cpu()).const_data_ptr());
    const at::Tensor result = at::empty_like(host[0]);
    coll::reduce_many(result.mutable_data_ptr(), inputs, static_cast<uint64_t>(result.numel()), dtype, op);
    out.copy_(result);
    return;
  }
  const bool half = dtype == DType::f16 || dtype == DType::bf16;
  at::Tensor acc = half ? in[0].to(at::kFloat) : in[0].clone();
  for (size_t i = 1; i < in.size(); ++i) combine(acc, in[i], dtype == DType::boolean, op);
  if (op == ReduceOp::avg && in.size() > 1) {
    // A divisor on the device: by a number of the host some kernels multiply with its reciprocal instead.
    const bool integral = at::isIntegralType(acc.scalar_type(), false);
    at::Tensor parts = acc.is_complex() ? at::view_as_real(acc) : acc;
    const at::Tensor n = at::full({1}, static_cast<int64_t>(in.size()),
                                  parts.options().dtype(integral ? at::kLong : parts.scalar_type()));
    integral ? parts.div_(n, "trunc") : parts.div_(n);
  }
  out.copy_(acc);
}

// ---- one collective

DeviceOp::DeviceOp(DeviceContextPtr on, coll::StreamGatePtr gate, TensorList tensors, uint64_t staged_bytes)
    : on_(std::move(on)),
      gate_(std::move(gate)),
      staged_bytes_(staged_bytes),
      kept_(std::make_shared<TensorList>(std::move(tensors))) {}

Status DeviceOp::run(const coll::Call& call, const std::function<Status(const coll::Call&)>& body) {
  TM_TRY(gate_->wait(call.deadline, [&] { return call.group.trouble(); }));
  c10::StreamGuard guard(on_->stream());
  coll::Call mine = call;
  mine.device = this;
  Status status;
  try {
    status = body(mine);
  } catch (...) {
    (void)wait(call.deadline);  // what it has queued is at rest, or its memory is kept
    throw;
  }
  const Status done = wait(call.deadline);
  return status.is_ok() ? done : status;
}

Result<std::byte*> DeviceOp::scratch(uint64_t nbytes) {
  if (!scratch_.defined() || scratch_.nbytes() < nbytes) {
    scratch_ = at::empty({static_cast<int64_t>(nbytes)}, at::TensorOptions().dtype(at::kByte).device(on_->device()));
    kept_->push_back(scratch_);
  }
  return static_cast<std::byte*>(scratch_.mutable_data_ptr());
}

Status DeviceOp::copy(void* to, const void* from, uint64_t nbytes) {
  return coll::copy_on_stream(on_->device().index(), to, from, nbytes, on_->stream().native_handle());
}

Status DeviceOp::reduce_many(void* out, std::span<const void* const> in, uint64_t count, DType dtype, ReduceOp op) {
  const auto options = at::TensorOptions().dtype(scalar_of(dtype)).device(on_->device());
  auto tensor_at = [&](const void* data) {
    return at::for_blob(const_cast<void*>(data), {static_cast<int64_t>(count)})
        .options(options)
        .target_device(on_->device())
        .make_tensor();
  };
  TensorList inputs;
  for (const void* one : in) inputs.push_back(tensor_at(one));
  reduce_tensors(tensor_at(out), inputs, dtype, op);
  return {};
}

Status DeviceOp::wait(Deadline deadline) {
  Status status = coll::wait_for_stream(on_->device().index(), on_->stream().native_handle(), deadline);
  if (!status.is_ok()) {  // a device that hangs may still write there
    on_->abandon_pinned();
    new std::shared_ptr<TensorList>(kept_);
  }
  return status;
}

// ---- messages

DeviceMessage::DeviceMessage(coll::GroupPtr group, c10d::OpType type, const char* title, std::string what, uint64_t seq,
                             at::Tensor tensor, at::Tensor staging, DeviceContextPtr on, coll::StreamGatePtr gate,
                             std::shared_ptr<Executor> finisher)
    : BaseWork(group->seat_of(group->rank()), type, title, std::move(what), seq, {tensor}, {tensor}),
      group_(std::move(group)),
      staging_(std::move(staging)),
      on_(std::move(on)),
      gate_(std::move(gate)),
      finisher_(std::move(finisher)) {
  begin();
}

int DeviceMessage::sourceRank() const {
  const_cast<DeviceMessage*>(this)->BaseWork::wait(kNoTimeout);
  std::lock_guard lock(request_mutex_);
  return request_ ? group_->seat_of(request_->peer()) : -1;
}

std::string DeviceMessage::awaited() const {
  std::lock_guard lock(request_mutex_);
  return request_ ? group_->name_of(request_->peer()) : "work on the CUDA stream before it";
}

void DeviceMessage::follow(coll::RequestPtr request) {
  {
    std::lock_guard lock(request_mutex_);
    request_ = request;
  }
  auto self = c10::intrusive_ptr<DeviceMessage>::reclaim_copy(this);
  request->on_end([self, raw = request.get()] {
    auto end = [self, status = raw->status()] { self->finalize(status); };
    if (!self->finisher_->submit(end, false)) end();
  });
}

void DeviceMessage::finalize(const Status& status) {
  std::exception_ptr error;
  if (!status.is_ok()) {
    error = make_error(what_, status);
  } else if (staging_.defined()) {
    try {
      c10::StreamGuard guard(on_->stream());
      copy_tensor(outputs_[0], staging_);
      const Status copied =
          coll::wait_for_stream(on_->device().index(), on_->stream().native_handle(), Deadline::never());
      if (!copied.is_ok()) error = make_error(what_, copied);
    } catch (...) {
      error = std::current_exception();
    }
  }
  complete(error);
  gate_->open();
}

void PendingMessages::add(Key key, coll::StreamGatePtr gate, std::shared_ptr<Executor> finisher,
                          std::function<void()> post) {
  auto ready = std::make_shared<std::atomic<bool>>(false);
  {
    std::lock_guard lock(mutex_);
    pending_.push_back({key, std::move(post), ready});
  }
  gate->when_reached([self = shared_from_this(), ready, finisher = std::move(finisher)] {
    ready->store(true);
    if (!finisher->submit([self] { self->pump(false); }, false)) self->pump(false);  // stopped
  });
}

void PendingMessages::flush() { pump(true); }

void PendingMessages::pump(bool all) {
  std::vector<std::function<void()>> posts;
  std::lock_guard posting(posting_mutex_);
  std::unique_lock lock(mutex_);
  std::vector<Pending> left;
  for (auto& one : pending_) {
    const bool behind = std::any_of(left.begin(), left.end(), [&](const Pending& before) {
      return before.key.sending == one.key.sending && before.key.tag == one.key.tag &&
             (before.key.peer == one.key.peer || before.key.peer < 0 || one.key.peer < 0);
    });
    if (all || (!behind && one.ready->load()))
      posts.push_back(std::move(one.post));
    else
      left.push_back(std::move(one));
  }
  pending_ = std::move(left);
  lock.unlock();
  for (const auto& post : posts) post();
}

}  // namespace torch_mooncake::dist
