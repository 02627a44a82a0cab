// A CUDA device for a torch that was built without CUDA: memory, streams and events of the fake driver (fake_cuda.h)
// under torch's own device type "cuda", so that the backend's CUDA paths run as they are, in several processes.
// Operators run on the host when the current stream has come to them; what a test wants queued it queues itself. Memory
// that is freed is given out again at once to who allocates on the same stream, as torch's own allocator does.
#define DOCTEST_CONFIG_IMPLEMENT
#include "transfer/fake_cuda.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

using transfer_test::FakeCuda;
using Event = std::shared_ptr<FakeCuda::Event>;

FakeCuda& cuda() { return FakeCuda::install(); }

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

void* default_stream() {
  static void* stream = *cuda().make_stream(0);
  return stream;
}
thread_local c10::StreamId current = 0;
c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
void* handle_of(c10::StreamId id) { return id == 0 ? default_stream() : reinterpret_cast<void*>(id); }

void synchronize(void* stream) {
  void* event = *cuda().record(0, stream);
  while (true) {
    auto reached = cuda().reached(0, event);
    TORCH_CHECK(reached.is_ok(), "CUDA error: ", reached.status().to_string());
    if (*reached) break;
    usleep(20);
  }
  cuda().destroy_event(0, event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream_of(reinterpret_cast<c10::StreamId>(*cuda().make_stream(0)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream.id()); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) cuda().destroy_event(0, event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event) cuda().destroy_event(0, *event);
    *event = *cuda().record(0, handle_of(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    cuda().queue(handle_of(stream.id()), [event = *static_cast<Event*>(event)] {
      while (event->state == 0) usleep(20);
    });
  }
  bool queryEvent(void* event) const override { return *cuda().reached(0, event); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(handle_of(stream.id())); }
  void synchronizeEvent(void* event) const override {
    while (!*cuda().reached(0, event)) usleep(20);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Allocator final : c10::Allocator {
  struct Block {
    std::shared_ptr<void> memory;
    c10::StreamId stream;
    size_t nbytes;
  };
  std::mutex mutex;
  std::multimap<std::pair<c10::StreamId, size_t>, std::unique_ptr<Block>> free;

  static Allocator& instance() {
    static auto* allocator = new Allocator;
    return *allocator;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    nbytes = (std::max<size_t>(nbytes, 1) + 4095) / 4096 * 4096;
    std::unique_ptr<Block> block;
    {
      std::lock_guard lock(mutex);
      if (auto it = free.find({current, nbytes}); it != free.end()) {
        block = std::move(it->second);
        free.erase(it);
      }
    }
    if (!block) block = std::make_unique<Block>(Block{cuda().allocate(nbytes), current, nbytes});
    void* data = block->memory.get();
    return {data, block.release(), &give_back, kDevice};
  }
  static void give_back(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    auto& all = instance();
    std::lock_guard lock(all.mutex);
    all.free.emplace(std::pair(block->stream, block->nbytes), std::move(block));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    synchronize(handle_of(current));
    std::memcpy(to, from, nbytes);
  }
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &Allocator::instance(),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &Allocator::instance(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// The same memory, in the eyes of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  at::Tensor out = at::for_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes())
                       .strides(tensor.strides())
                       .options(at::TensorOptions().dtype(tensor.dtype()))
                       .make_tensor();
  out._set_conj(tensor.is_conj());
  out._set_neg(tensor.is_neg());
  return out;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool) {
  synchronize(handle_of(current));
  on_host(self).copy_(on_host(from));
  return self;
}

// Any operator: its arguments' images on the host, in place; new tensors are copied to the device.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  synchronize(handle_of(current));
  const auto n = op.schema().arguments().size();
  std::vector<at::Tensor> originals;
  for (auto it = stack->end() - static_cast<std::ptrdiff_t>(n); it != stack->end(); ++it) {
    if (it->isTensor() && it->toTensor().defined() && it->toTensor().is_cuda()) {
      originals.push_back(it->toTensor());
      *it = on_host(originals.back());
    } else if (it->isTensorList()) {
      auto list = it->toTensorVector();
      for (auto& tensor : list) {
        originals.push_back(tensor);
        tensor = on_host(tensor);
      }
      *it = list;
    } else if (it->isDevice()) {
      *it = c10::Device(at::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto returns = op.schema().returns().size();
  for (auto it = stack->end() - static_cast<std::ptrdiff_t>(returns); it != stack->end(); ++it) {
    if (!it->isTensor() || !it->toTensor().defined() || !it->toTensor().is_cpu()) continue;
    const at::Tensor result = it->toTensor();
    at::Tensor device;
    for (const auto& original : originals)
      if (original.const_data_ptr() == result.const_data_ptr() && original.sizes() == result.sizes()) device = original;
    if (!device.defined()) {
      device = at::empty_strided(result.sizes(), result.strides(), result.options().device(kDevice));
      on_host(device).copy_(result);
    }
    *it = device;
  }
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view_as_real", &at::native::view_as_real);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

PYBIND11_MODULE(fake_cuda, m) {
  static doctest::Context context;
  context.setAsDefaultForAssertsOutOfTestCases();
  cuda();
  c10::SetAllocator(c10::DeviceType::CUDA, &Allocator::instance());
  namespace py = pybind11;
  // Kernels, on the current stream.
  using Unlocked = py::call_guard<py::gil_scoped_release>;  // streams may need the GIL to let go of a tensor
  m.def(
      "to_device",
      [](const at::Tensor& host) {
        at::Tensor out = at::empty_strided(host.sizes(), host.strides(), host.options().device(kDevice));
        return out.copy_(host);
      },
      Unlocked());
  m.def(
      "queue_fill",
      [](const at::Tensor& tensor, double value, int after_ms) {
        cuda().queue(handle_of(current), [host = on_host(tensor), tensor, value, after_ms] {
          usleep(after_ms * 1000);
          const at::NoGradGuard no_grad;
          at::Tensor(host).fill_(value);
        });
      },
      Unlocked());
  m.def(
      "queue_copy",
      [](const at::Tensor& to, const at::Tensor& from) {
        cuda().queue(handle_of(current), [to = on_host(to), from = on_host(from), keep = std::pair(to, from)] {
          const at::NoGradGuard no_grad;
          at::Tensor(to).copy_(from);
        });
      },
      Unlocked());
  m.def(
      "synchronize", [] { synchronize(handle_of(current)); }, Unlocked());
  m.def("no_flags", [](bool yes) { cuda().no_flags = yes; });
  m.def("capture", [](bool yes) { cuda().captures = yes; });
  m.def("mappings_made", [] { return cuda().mappings_made.load(); });
}
