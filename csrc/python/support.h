// What every binding needs: errors, deadlines, the GIL, lifetimes, capsules.
//
// The GIL is released around everything that can block. Python objects that native code keeps alive (a region's
// tensor) are released on a Python thread: engine threads only push them on a list that API calls, and a pending call
// of the interpreter, drain. In a forked child native objects are leaked, never destroyed: their threads are gone.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <sys/uio.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/bytes.h"
#include "common/clock.h"
#include "common/status.h"

namespace torch_mooncake::python {

namespace nb = nanobind;

// --- errors: a Status becomes the class of torch_mooncake.errors that has its code ---
nb::object make_exception(const Status& status, const std::string& peer = {}, uint64_t bytes_done = 0);
[[noreturn]] void raise(const Status& status, const std::string& peer = {}, uint64_t bytes_done = 0);
inline void check(const Status& status) {
  if (!status) raise(status);
}
template <typename T>
T unwrap(Result<T> result) {
  if (!result) raise(result.status());
  return std::move(result).value();
}

// --- time: Python passes time.monotonic_ns() values; INT64_MAX is never ---
inline Deadline deadline_at(int64_t ns) { return Deadline::at_ns(ns); }

// --- the GIL ---
// Releases it for a scope. As nb::gil_scoped_release does, but a daemon thread that comes back when the interpreter is
// ending sleeps for ever instead. CPython before 3.14 would end it by pthread_exit(), inside frames that are noexcept,
// and so abort the process.
class NoGil {
 public:
  NoGil();
  ~NoGil();
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* const state_;
};
// At exit, with the GIL held: threads inside a NoGil get a second to come back, then no other thread does.
void park_threads();

// --- lifetimes ---
bool in_forked_child();  // of the process that loaded this module

// Keeps a Python object alive for native code; its last copy may go on any thread.
std::shared_ptr<void> keep_alive(nb::object object);
// Releases what native code let go of. Cheap when there is nothing. Called with the GIL.
void drain_released();

// A native object as Python holds it: dropped without the GIL, leaked in a forked child. `keeps_nothing`: to drop it
// can neither wait nor run anything, so the GIL stays.
template <typename T>
class Held {
 public:
  explicit Held(std::shared_ptr<T> object, bool keeps_nothing = false)
      : object_(std::move(object)), keeps_nothing_(keeps_nothing) {}
  Held(Held&&) noexcept = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (!object_) return;
    if (in_forked_child()) {
      new std::shared_ptr<T>(std::move(object_));
      return;
    }
    if (keeps_nothing_) return;
    NoGil no_gil;
    object_.reset();
  }
  const std::shared_ptr<T>& get() const { return object_; }
  T* operator->() const { return object_.get(); }

 private:
  std::shared_ptr<T> object_;
  bool keeps_nothing_ = false;
};

// --- capsules: how _core and _c10d pass objects, a heap-allocated shared_ptr under a name ---
template <typename T>
nb::capsule to_capsule(const std::shared_ptr<T>& object, const char* name) {
  return nb::capsule(new std::shared_ptr<T>(object), name,
                     [](void* p) noexcept { delete static_cast<std::shared_ptr<T>*>(p); });
}
template <typename T>
std::shared_ptr<T> from_capsule(nb::handle capsule, const char* name) {
  auto* object = static_cast<std::shared_ptr<T>*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (!object) throw nb::python_error();
  return *object;
}

// --- blocking calls ---
// Runs fn() without the GIL on this thread.
template <typename F>
auto without_gil(F&& fn) {
  drain_released();
  NoGil no_gil;
  return fn();
}

bool on_main_thread();

// Runs fn() so that Ctrl-C ends the wait within 100 ms: on the main thread (the only one that handles signals) the
// call moves to a helper thread, which ends by the call's own deadline. fn owns (by value) all it touches.
template <typename F>
auto interruptible(F fn) {
  drain_released();
  using R = decltype(fn());
  if (!on_main_thread()) {
    NoGil no_gil;
    return fn();
  }
  struct Shared {
    std::mutex mutex;
    std::condition_variable done;
    std::optional<R> result;
  };
  auto shared = std::make_shared<Shared>();
  std::thread([shared, fn = std::move(fn)]() mutable {
    R result = fn();
    std::lock_guard lock(shared->mutex);
    shared->result.emplace(std::move(result));
    shared->done.notify_one();
  }).detach();
  for (;;) {
    {
      NoGil no_gil;
      std::unique_lock lock(shared->mutex);
      if (shared->done.wait_for(lock, std::chrono::milliseconds(50), [&] { return shared->result.has_value(); }))
        return std::move(*shared->result);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// For calls that may be repeated with a later deadline (waits): slices of 50 ms. wait(slice) returns
// deadline_exceeded when only the slice is over; `over` tells that the whole is.
template <typename F>
auto in_slices(Deadline deadline, F&& wait) {
  drain_released();
  for (;;) {
    auto slice = min(deadline, Deadline::after_ms(50));
    auto result = [&] {
      NoGil no_gil;
      return wait(slice);
    }();
    const Status* status;
    if constexpr (std::is_same_v<decltype(result), Status>)
      status = &result;
    else
      status = &result.status();
    if (status->code() != Code::deadline_exceeded || deadline.expired()) return result;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// --- memory given by Python: (address, nbytes) pairs and objects with the buffer protocol, mixed ---
class Buffers {
 public:
  Buffers(nb::sequence items, bool writable);
  ~Buffers();
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  const std::vector<iovec>& iov() const { return iov_; }

 private:
  std::vector<iovec> iov_;
  std::vector<Py_buffer> views_;
};

inline nb::bytes to_bytes(std::string_view s) { return nb::bytes(s.data(), s.size()); }
inline nb::bytes to_bytes(const Id128& id) { return nb::bytes(reinterpret_cast<const char*>(id.data()), id.size()); }
inline std::string to_string(const nb::bytes& b) { return std::string(b.c_str(), b.size()); }

void bind_memory(nb::module_& m);
void bind_transfer(nb::module_& m);
void bind_plain(nb::module_& m);
void bind_pool(nb::module_& m);
void bind_pool_chains(nb::module_& m);
void bind_topology(nb::module_& m);

}  // namespace torch_mooncake::python
