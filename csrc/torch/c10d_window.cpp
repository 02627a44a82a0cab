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
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_cpu(), "mooncake: window: only tensors on cpu");
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

int MooncakeWindow::rank_of(const coll::Window& window, int64_t seat) {
  const int rank = seat < 0 ? -1 : window.group()->rank_in(static_cast<int>(seat));
  TORCH_CHECK_VALUE(rank >= 0, "mooncake: there is no rank ", seat, " in the window");
  return rank;
}

WorkPtr MooncakeWindow::follow(const coll::Window& window, coll::RequestPtr request, const char* name,
                               const char* title, const at::Tensor& tensor, bool async) {
  const auto& group = window.group();
  const std::string what = std::string(name) + group->name_of(request->peer()) + " on " + group->name_of(group->rank());
  auto work = c10::make_intrusive<MessageWork>(group, c10d::OpType::UNKNOWN, title, what, ++backend_->messages_, tensor,
                                               at::Tensor(), backend_->finisher_);
  work->follow(std::move(request));
  if (!async) work->wait();
  return work;
}

WorkPtr MooncakeWindow::put(const at::Tensor& tensor, int64_t to, int64_t offset, bool async,
                            const c10d::PutOptions& opts) {
  const auto window = opened();
  check_tensor(tensor, "put");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_cpu(), "mooncake: put: only tensors on cpu");
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype_, "mooncake: put: a tensor of ", tensor.scalar_type(),
                   " into a window of ", dtype_.load());
  TORCH_CHECK_VALUE(offset >= 0, "mooncake: put: negative offset ", offset);
  const int rank = rank_of(*window, to);
  const WithoutGil without_gil;
  auto keep = std::make_shared<at::Tensor>(readable(tensor));
  auto request = window->put(rank, static_cast<uint64_t>(offset) * tensor.element_size(), keep->const_data_ptr(),
                             keep->nbytes(), backend_->deadline_of(opts.timeout), keep);
  return follow(*window, std::move(request), "put to ", "mooncake:put", tensor, async);
}

WorkPtr MooncakeWindow::signal(int64_t to, bool async, const c10d::SignalOptions& opts) {
  const auto window = opened();
  const int rank = rank_of(*window, to);
  const WithoutGil without_gil;
  auto request = window->signal(rank, backend_->deadline_of(opts.timeout));
  return follow(*window, std::move(request), "signal to ", "mooncake:signal", at::empty({0}), async);
}

WorkPtr MooncakeWindow::wait_signal(int64_t from, bool async, const c10d::WaitSignalOptions& opts) {
  const auto window = opened();
  const int rank = rank_of(*window, from);
  const WithoutGil without_gil;
  auto request = window->wait_signal(rank, backend_->deadline_of(opts.timeout));
  return follow(*window, std::move(request), "wait for a signal from ", "mooncake:wait_signal", at::empty({0}), async);
}

at::Tensor MooncakeWindow::map_remote_tensor(int64_t rank) {
  (void)opened();
  TORCH_CHECK_NOT_IMPLEMENTED(rank == backend_->getRank() && tensor_.defined(),
                              "mooncake: map_remote_tensor: only of this rank's own tensor, which the window owns");
  return tensor_;
}

}  // namespace torch_mooncake::dist

#endif
