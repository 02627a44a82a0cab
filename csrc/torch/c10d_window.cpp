#include "torch/c10d_window.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include "torch/c10d_tensors.h"
#include "torch/without_gil.h"

namespace torch_mooncake::dist {

c10::intrusive_ptr<c10d::Window> MooncakeBackend::new_window(const std::optional<at::Tensor>& tensor) {
  auto self = c10::intrusive_ptr<MooncakeBackend>::reclaim_copy(this);
  auto window = c10::make_intrusive<MooncakeWindow>(std::move(self));
  if (tensor.has_value()) window->tensor_register(*tensor);
  return window;
}

coll::WindowPtr MooncakeWindow::opened() const {
  std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(window_ != nullptr, "mooncake: no tensor is registered with this window");
  return window_;
}

void MooncakeWindow::tensor_register(const at::Tensor& tensor, bool owning) {
  check_tensor(tensor, "window");
  TORCH_CHECK_VALUE(!needs_staging(tensor), "mooncake: window: the tensor must be contiguous");
  {
    std::lock_guard lock(mutex_);
    TORCH_CHECK_VALUE(window_ == nullptr, "mooncake: a tensor is registered with this window already");
  }
  const WithoutGil without_gil;
  auto window = std::make_shared<coll::WindowPtr>();
  auto keep = owning ? std::make_shared<at::Tensor>(tensor) : nullptr;
  auto work = backend_->run(
      {c10d::OpType::UNKNOWN, "mooncake:new_window", "new_window", c10d::kUnsetTimeout, false, {}, {tensor}},
      [window, keep, data = tensor.mutable_data_ptr(), nbytes = tensor.nbytes()](const coll::Call& call) -> Status {
        auto opened = coll::Window::open(call, data, nbytes, keep);
        TM_TRY(opened.status());
        *window = *opened;
        return {};
      });
  work->wait();
  std::lock_guard lock(mutex_);
  window_ = *window;
  dtype_ = tensor.scalar_type();
  if (owning) tensor_ = tensor;
}

void MooncakeWindow::tensor_deregister() {
  auto window = opened();
  const WithoutGil without_gil;
  auto work = backend_->run(
      {c10d::OpType::UNKNOWN, "mooncake:tensor_deregister", "tensor_deregister", c10d::kUnsetTimeout, false, {}, {}},
      [window](const coll::Call& call) { return window->close(call); });
  {
    std::lock_guard lock(mutex_);
    window_ = nullptr;
    tensor_.reset();
  }
  work->wait();
}

WorkPtr MooncakeWindow::follow(coll::RequestPtr request, const char* title, const std::string& what,
                               const at::Tensor& tensor, bool async) {
  const auto& group = backend_->group_;
  auto work = c10::make_intrusive<MessageWork>(group, c10d::OpType::UNKNOWN, title,
                                               what + " on " + group->name_of(group->rank()), ++backend_->messages_,
                                               tensor, at::Tensor(), backend_->finisher_);
  work->follow(std::move(request));
  if (!async) work->wait();
  return work;
}

WorkPtr MooncakeWindow::put(const at::Tensor& tensor, int64_t to, int64_t offset, bool async,
                            const c10d::PutOptions& opts) {
  auto window = opened();
  check_tensor(tensor, "put");
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype_, "mooncake: put: a tensor of ", tensor.scalar_type(),
                   " into a window of ", dtype_.load());
  TORCH_CHECK_VALUE(offset >= 0, "mooncake: put: negative offset ", offset);
  const WithoutGil without_gil;
  auto keep = std::make_shared<at::Tensor>(readable(tensor));
  auto request = window->put(static_cast<int>(to), static_cast<uint64_t>(offset) * tensor.element_size(),
                             keep->const_data_ptr(), keep->nbytes(), backend_->deadline_of(opts.timeout), keep);
  return follow(std::move(request), "mooncake:put", "put to " + backend_->group_->name_of(static_cast<int>(to)), tensor,
                async);
}

WorkPtr MooncakeWindow::signal(int64_t to, bool async, const c10d::SignalOptions& opts) {
  auto window = opened();
  const WithoutGil without_gil;
  return follow(window->signal(static_cast<int>(to), backend_->deadline_of(opts.timeout)), "mooncake:signal",
                "signal to " + backend_->group_->name_of(static_cast<int>(to)), at::empty({0}), async);
}

WorkPtr MooncakeWindow::wait_signal(int64_t from, bool async, const c10d::WaitSignalOptions& opts) {
  auto window = opened();
  const WithoutGil without_gil;
  return follow(window->wait_signal(static_cast<int>(from), backend_->deadline_of(opts.timeout)),
                "mooncake:wait_signal", "wait_signal from " + backend_->group_->name_of(static_cast<int>(from)),
                at::empty({0}), async);
}

at::Tensor MooncakeWindow::map_remote_tensor(int64_t rank) {
  (void)opened();
  TORCH_CHECK_NOT_IMPLEMENTED(rank == backend_->getRank() && tensor_.defined(),
                              "mooncake: map_remote_tensor: only of this rank's own tensor, which the window owns");
  return tensor_;
}

}  // namespace torch_mooncake::dist

#endif
