// MooncakeWindow: torch's one-sided window (torch 2.14 and later) over coll::Window. Tensors of the CPU, contiguous,
// of one dtype on all ranks; a rank's sizes are its own.
//
// Ownership: the window keeps the backend, and the registered tensor unless told that the caller does. Threads: any;
// the GIL is not held while waiting. Errors: as of all works of the backend; what is synchronous raises at once. A
// window that is dropped without tensor_deregister() takes its memory back by itself.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef C10D_BACKEND_HAS_WINDOW

#include <atomic>
#include <mutex>
#include <torch/csrc/distributed/c10d/Window.hpp>

#include "collectives/window.h"
#include "torch/c10d_backend.h"

namespace torch_mooncake::dist {

class MooncakeWindow final : public c10d::Window {
 public:
  explicit MooncakeWindow(c10::intrusive_ptr<MooncakeBackend> backend) : backend_(std::move(backend)) {}

  void tensor_register(const at::Tensor& tensor, bool owning = true) override;
  void tensor_deregister() override;
  WorkPtr put(const at::Tensor& tensor, int64_t to, int64_t offset, bool async,
              const c10d::PutOptions& opts = {}) override;
  WorkPtr signal(int64_t to, bool async, const c10d::SignalOptions& opts = {}) override;
  WorkPtr wait_signal(int64_t from, bool async, const c10d::WaitSignalOptions& opts = {}) override;
  // One's own, if the window owns it: other ranks' memory is not mapped, only written to.
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10d::WindowAttr get_attr(int64_t) override { return {c10d::WindowAccessType::UNIFIED}; }

 private:
  coll::WindowPtr opened() const;
  // `seat`: torch's rank, which the ranks of the window's group need not be equal to once ranks were lost.
  static int rank_of(const coll::Window& window, int64_t seat);
  WorkPtr follow(const coll::Window& window, coll::RequestPtr request, const char* name, const char* title,
                 const at::Tensor& tensor, bool async);

  const c10::intrusive_ptr<MooncakeBackend> backend_;
  mutable std::mutex mutex_;
  coll::WindowPtr window_;
  at::Tensor tensor_;  // if the window owns it
  std::atomic<at::ScalarType> dtype_{at::kByte};
};

}  // namespace torch_mooncake::dist

#endif
