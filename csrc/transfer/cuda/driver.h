// CudaDriver: what the transfer engine asks of CUDA, and nothing more. The real one opens libcuda with dlopen when the
// first CUDA pointer is registered, never before: a process that uses the CPU only makes no context. Tests put a fake
// in its place.
//
// Contexts: memory belongs to one, and every call that needs it takes the device; the real driver then uses the
// device's primary context, which torch uses too. Threads: all methods are safe from any thread, and leave the current
// context of the calling thread as it was. Nothing waits for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/api.h"
#include "common/fd.h"
#include "common/status.h"

namespace torch_mooncake::transfer {

using CudaStream = void*;
using CudaEvent = void*;

// The allocation, or the part of a reserved range that one handle is mapped to, in which an address lies.
struct CudaAllocation {
  uint64_t base = 0, nbytes = 0;
  int device = 0;
  uint64_t id = 0;  // never another allocation's in this process; 0: the driver gives none
};

// What another process of this host needs to map an allocation: bytes that name it (cudaMalloc's), or a descriptor
// (memory mapped from a handle, as torch's expandable segments are).
struct CudaHandle {
  std::string name{};
  UniqueFd fd{};
};

class TM_API CudaDriver {
 public:
  virtual ~CudaDriver() = default;
  virtual std::string describe() const = 0;  // "libcuda.so.1, CUDA 13.0, 2 devices"

  // invalid_argument: no device memory.
  virtual Result<CudaAllocation> find(uint64_t address) = 0;

  // The device's context is this thread's current one until what is returned is dropped, on the same thread: for
  // libraries that want one (cuFile).
  virtual Result<std::shared_ptr<void>> make_current(int device) = 0;

  virtual Result<CudaStream> make_stream(int device) = 0;
  virtual void destroy_stream(int device, CudaStream stream) = 0;
  // What is queued on it becomes part of a graph, and is not carried out.
  virtual Result<bool> capturing(int device, CudaStream stream) = 0;
  // Any two of device memory and pinned host memory. Queued; what fails later shows at the event.
  virtual Status copy(int device, void* dst, const void* src, size_t nbytes, CudaStream stream) = 0;
  virtual Result<CudaEvent> record(int device, CudaStream stream) = 0;
  virtual Result<bool> reached(int device, CudaEvent event) = 0;  // io: the work before it failed
  virtual void destroy_event(int device, CudaEvent event) = 0;

  // Host memory that devices reach.
  virtual Result<void*> allocate_pinned(int device, size_t nbytes) = 0;
  virtual void free_pinned(int device, void* memory) = 0;

  // The stream goes on when *flag, a word of pinned memory, is at least `value`. unsupported: the device cannot.
  virtual Status wait_flag(int device, CudaStream stream, uint32_t* flag, uint32_t value) = 0;

  // --- For NICs that reach device memory themselves.
  virtual Result<UniqueFd> export_dmabuf(uint64_t address, size_t nbytes) = 0;  // page aligned ranges only
  // Whoever works on the device sees what a NIC has written when it is told that it is there. If not, after
  // flush_nic_writes() of that time, which blocks for microseconds.
  virtual bool orders_nic_writes(int device) = 0;
  virtual Status flush_nic_writes(int device) = 0;
  virtual std::string bus_id(int) { return ""; }  // "0000:1a:00.0"; empty: unknown

  // --- Between processes of one host.
  virtual int devices() const = 0;
  virtual std::string uuid(int device) = 0;         // of the hardware, whatever its number in a process
  virtual bool in_use(int device) = 0;              // this process has a context on it
  virtual bool reaches(int device, int other) = 0;  // peer access, or the same device
  // unsupported, io: this allocation cannot be shared, and why.
  virtual Result<CudaHandle> share(const CudaAllocation& allocation) = 0;
  // Maps all of another process' allocation, for copies by `device`; what get() gives is its address here. Dropping the
  // last reference unmaps it, which may wait for the device. unsupported, io: it cannot be mapped here, and why.
  virtual Result<std::shared_ptr<void>> map(int device, CudaHandle handle, uint64_t nbytes) = 0;

  // The process' driver, made by the first call. unsupported: there is no CUDA here, and why.
  static Result<std::shared_ptr<CudaDriver>> get();
  // Has get() made one? For doctor and explain(), which must make no context.
  static std::shared_ptr<CudaDriver> made();
  // get() if this process uses CUDA already (the engine, or torch, has a context), else null: makes no context.
  static std::shared_ptr<CudaDriver> if_used();
  // In place of the real one, from now on; null: the real one again. For tests.
  static void replace(std::shared_ptr<CudaDriver> driver);
};

Result<std::shared_ptr<CudaDriver>> open_libcuda();
// Somebody in this process has loaded libcuda and made a context on some device.
bool libcuda_in_use();

}  // namespace torch_mooncake::transfer
