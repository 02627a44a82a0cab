#include "python/support.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace torch_mooncake::python {

namespace {

std::atomic<bool> forked{false};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

// Objects to release: a lock-free list, so that a fork never finds it locked.
struct Released {
  PyObject* object;
  Released* next;
};
std::atomic<Released*> released{nullptr};

int drain_pending(void*) {
  drain_released();
  return 0;
}

void release_later(PyObject* object) {
  if (!Py_IsInitialized()) return;  // the interpreter is gone, and its memory with it
  auto* node = new Released{object, released.load(std::memory_order_relaxed)};
  while (!released.compare_exchange_weak(node->next, node, std::memory_order_release, std::memory_order_relaxed)) {
  }
  // If the interpreter's queue is full the next API call drains the list.
  if (node->next == nullptr) Py_AddPendingCall(drain_pending, nullptr);
}

// Threads that are inside a NoGil, and above them the flag that says that none comes back any more. One word: the
// flag is set when the count is seen to be zero, so that no thread is between its look at the flag and the GIL.
constexpr uint64_t kParked = uint64_t{1} << 32;
std::atomic<uint64_t> outside{0};

}  // namespace

NoGil::NoGil() : state_((outside.fetch_add(1), PyEval_SaveThread())) {}

NoGil::~NoGil() {
  while ((outside.load() & kParked) && !on_main_thread()) ::pause();
  PyEval_RestoreThread(state_);
  outside.fetch_sub(1);
}

void park_threads() {
  if (in_forked_child()) return;  // no other thread exists
  PyThreadState* state = PyEval_SaveThread();
  auto deadline = Deadline::after_ms(1000);
  uint64_t none = 0;
  while (!outside.compare_exchange_strong(none, kParked) && !deadline.expired()) {
    ::usleep(1000);
    none = 0;
  }
  outside.fetch_or(kParked);
  PyEval_RestoreThread(state);
}

bool in_forked_child() { return forked.load(std::memory_order_relaxed); }

bool on_main_thread() { return ::gettid() == ::getpid(); }

std::shared_ptr<void> keep_alive(nb::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* p) {
    auto* object = static_cast<PyObject*>(p);
    if (Py_IsInitialized() && PyGILState_Check())
      Py_DECREF(object);
    else
      release_later(object);
  });
}

void drain_released() {
  auto* node = released.load(std::memory_order_relaxed);
  if (node == nullptr) return;
  node = released.exchange(nullptr, std::memory_order_acquire);
  while (node != nullptr) {
    auto* next = node->next;
    Py_DECREF(node->object);
    delete node;
    node = next;
  }
}

nb::object make_exception(const Status& status, const std::string& peer, uint64_t bytes_done) {
  nb::object make = nb::module_::import_("torch_mooncake.errors").attr("from_code");
  return make(code_name(status.code()), status.message(), status.retryable(), peer, bytes_done);
}

void raise(const Status& status, const std::string& peer, uint64_t bytes_done) {
  nb::object error = make_exception(status, peer, bytes_done);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

Buffers::Buffers(nb::sequence items, bool writable) {
  size_t n = nb::len(items);
  iov_.reserve(n);
  views_.reserve(n);
  for (nb::handle item : items) {
    if (PyTuple_CheckExact(item.ptr()) && PyTuple_GET_SIZE(item.ptr()) == 2) {
      auto address = nb::cast<uint64_t>(item[0]);
      iov_.push_back({reinterpret_cast<void*>(address), nb::cast<size_t>(item[1])});
      continue;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(item.ptr(), &view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      for (auto& v : views_) PyBuffer_Release(&v);
      throw nb::python_error();
    }
    views_.push_back(view);
    iov_.push_back({view.buf, static_cast<size_t>(view.len)});
  }
}

Buffers::~Buffers() {
  for (auto& view : views_) PyBuffer_Release(&view);
}

}  // namespace torch_mooncake::python
