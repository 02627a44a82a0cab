// The real driver: libcuda.so.1 by dlopen, its functions by name. Types and numbers are those of cuda.h, which is not
// needed to build this.
#include <dlfcn.h>

#include <map>
#include <mutex>

#include "transfer/cuda/driver.h"

namespace torch_mooncake::transfer {
namespace {

using Ptr = unsigned long long;  // CUdeviceptr
constexpr int kSuccess = 0, kNotReady = 600, kNotSupported = 801;
constexpr int kMemoryTypeDevice = 2;                            // CU_MEMORYTYPE_DEVICE
constexpr int kAttributeMemoryType = 2, kAttributeOrdinal = 9;  // CU_POINTER_ATTRIBUTE_…
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kHostAllocPortable = 1, kHostAllocMapped = 2;
constexpr unsigned kWaitGeq = 0;
constexpr int kDmaBuf = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

class LibCuda final : public CudaDriver {
 public:
  Status open() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library_) return {Code::unsupported, "there is no CUDA driver here: " + std::string(dlerror())};
    bool all =
        load(cuInit, "cuInit") && load(cuDriverGetVersion, "cuDriverGetVersion") &&
        load(cuDeviceGetCount, "cuDeviceGetCount") && load(cuDeviceGet, "cuDeviceGet") &&
        load(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain") && load(cuCtxPushCurrent, "cuCtxPushCurrent_v2") &&
        load(cuCtxPopCurrent, "cuCtxPopCurrent_v2") && load(cuPointerGetAttribute, "cuPointerGetAttribute") &&
        load(cuMemGetAddressRange, "cuMemGetAddressRange_v2") && load(cuStreamCreate, "cuStreamCreate") &&
        load(cuStreamDestroy, "cuStreamDestroy_v2") && load(cuMemcpyAsync, "cuMemcpyAsync") &&
        load(cuEventCreate, "cuEventCreate") && load(cuEventRecord, "cuEventRecord") &&
        load(cuEventQuery, "cuEventQuery") && load(cuEventDestroy, "cuEventDestroy_v2") &&
        load(cuMemHostAlloc, "cuMemHostAlloc") && load(cuMemFreeHost, "cuMemFreeHost") &&
        load(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2") && load(cuGetErrorString, "cuGetErrorString");
    if (!all) return {Code::unsupported, "libcuda.so.1 is too old: it has no " + missing_};
    // Since CUDA 11.7 and 12: what uses them says so if they are not there.
    load(cuStreamWaitValue32, "cuStreamWaitValue32_v2");
    load(cuMemGetHandleForAddressRange, "cuMemGetHandleForAddressRange");
    TM_TRY(check(cuInit(0), "cuInit"));
    TM_TRY(check(cuDriverGetVersion(&version_), "cuDriverGetVersion"));
    return check(cuDeviceGetCount(&devices_), "cuDeviceGetCount");
  }

  std::string describe() const override {
    return "libcuda.so.1, CUDA " + std::to_string(version_ / 1000) + "." + std::to_string(version_ % 1000 / 10) + ", " +
           std::to_string(devices_) + " devices";
  }

  Result<CudaAllocation> find(uint64_t address) override {
    unsigned type = 0;
    int ordinal = 0;
    if (cuPointerGetAttribute(&type, kAttributeMemoryType, address) != kSuccess || type != kMemoryTypeDevice)
      return Status(Code::invalid_argument, "there is no device memory at that address");
    TM_TRY(check(cuPointerGetAttribute(&ordinal, kAttributeOrdinal, address), "device of a pointer"));
    CudaAllocation out;
    out.device = ordinal;
    TM_ASSIGN(auto current, enter(ordinal));
    Ptr base = 0;
    size_t nbytes = 0;
    TM_TRY(check(cuMemGetAddressRange(&base, &nbytes, address), "cuMemGetAddressRange"));
    out.base = base;
    out.nbytes = nbytes;
    return out;
  }

  Result<CudaStream> make_stream(int device) override {
    TM_ASSIGN(auto current, enter(device));
    void* stream = nullptr;
    TM_TRY(check(cuStreamCreate(&stream, kStreamNonBlocking), "cuStreamCreate"));
    return stream;
  }
  void destroy_stream(int device, CudaStream stream) override {
    if (auto current = enter(device)) cuStreamDestroy(stream);
  }
  Status copy(int device, void* dst, const void* src, size_t nbytes, CudaStream stream) override {
    TM_ASSIGN(auto current, enter(device));
    return check(cuMemcpyAsync(reinterpret_cast<Ptr>(dst), reinterpret_cast<Ptr>(src), nbytes, stream),
                 "cuMemcpyAsync");
  }
  Result<CudaEvent> record(int device, CudaStream stream) override {
    TM_ASSIGN(auto current, enter(device));
    void* event = nullptr;
    TM_TRY(check(cuEventCreate(&event, kEventDisableTiming), "cuEventCreate"));
    if (Status status = check(cuEventRecord(event, stream), "cuEventRecord"); !status) {
      cuEventDestroy(event);
      return status;
    }
    return event;
  }
  Result<bool> reached(int device, CudaEvent event) override {
    TM_ASSIGN(auto current, enter(device));
    int result = cuEventQuery(event);
    if (result == kNotReady) return false;
    TM_TRY(check(result, "work on a CUDA stream"));
    return true;
  }
  void destroy_event(int device, CudaEvent event) override {
    if (auto current = enter(device)) cuEventDestroy(event);
  }

  Result<void*> allocate_pinned(int device, size_t nbytes) override {
    TM_ASSIGN(auto current, enter(device));
    void* memory = nullptr;
    TM_TRY(check(cuMemHostAlloc(&memory, nbytes, kHostAllocPortable | kHostAllocMapped), "cuMemHostAlloc"));
    return memory;
  }
  void free_pinned(int device, void* memory) override {
    if (auto current = enter(device)) cuMemFreeHost(memory);
  }

  Status wait_flag(int device, CudaStream stream, uint32_t* flag, uint32_t value) override {
    if (!cuStreamWaitValue32) return {Code::unsupported, "this CUDA driver has no stream memory operations"};
    TM_ASSIGN(auto current, enter(device));
    Ptr address = 0;
    TM_TRY(check(cuMemHostGetDevicePointer(&address, flag, 0), "cuMemHostGetDevicePointer"));
    return check(cuStreamWaitValue32(stream, address, value, kWaitGeq), "cuStreamWaitValue32");
  }

  Result<UniqueFd> export_dmabuf(uint64_t address, size_t nbytes) override {
    if (!cuMemGetHandleForAddressRange) return Status(Code::unsupported, "this CUDA driver exports no dmabuf");
    int fd = -1;
    TM_TRY(check(cuMemGetHandleForAddressRange(&fd, address, nbytes, kDmaBuf, 0), "cuMemGetHandleForAddressRange"));
    return UniqueFd(fd);
  }

 private:
  // The device's primary context, current until this goes.
  class Current {
   public:
    Current(LibCuda& cuda) : cuda_(&cuda) {}
    Current(Current&& other) noexcept : cuda_(std::exchange(other.cuda_, nullptr)) {}
    ~Current() {
      void* popped;
      if (cuda_) cuda_->cuCtxPopCurrent(&popped);
    }

   private:
    LibCuda* cuda_;
  };

  Result<Current> enter(int device) {
    void* context;
    {
      std::lock_guard lock(mutex_);
      auto& known = contexts_[device];
      if (!known) {
        int handle = 0;
        TM_TRY(check(cuDeviceGet(&handle, device), "cuDeviceGet"));
        TM_TRY(check(cuDevicePrimaryCtxRetain(&known, handle), "cuDevicePrimaryCtxRetain"));
      }
      context = known;
    }
    TM_TRY(check(cuCtxPushCurrent(context), "cuCtxPushCurrent"));
    return Current(*this);
  }

  Status check(int result, const char* what) const {
    if (result == kSuccess) return {};
    const char* text = nullptr;
    if (!cuGetErrorString || cuGetErrorString(result, &text) != kSuccess || !text) text = "unknown error";
    return {result == kNotSupported ? Code::unsupported : Code::io,
            std::string(what) + ": " + text + " (CUDA error " + std::to_string(result) + ")"};
  }

  template <typename Fn>
  bool load(Fn*& fn, const char* name) {
    fn = reinterpret_cast<Fn*>(dlsym(library_, name));
    if (!fn) missing_ = name;
    return fn != nullptr;
  }

  void* library_ = nullptr;  // never closed: libcuda does not like it
  std::string missing_;
  int version_ = 0, devices_ = 0;
  std::mutex mutex_;
  std::map<int, void*> contexts_;

  int (*cuInit)(unsigned) = nullptr;
  int (*cuDriverGetVersion)(int*) = nullptr;
  int (*cuDeviceGetCount)(int*) = nullptr;
  int (*cuDeviceGet)(int*, int) = nullptr;
  int (*cuDevicePrimaryCtxRetain)(void**, int) = nullptr;
  int (*cuCtxPushCurrent)(void*) = nullptr;
  int (*cuCtxPopCurrent)(void**) = nullptr;
  int (*cuPointerGetAttribute)(void*, int, Ptr) = nullptr;
  int (*cuMemGetAddressRange)(Ptr*, size_t*, Ptr) = nullptr;
  int (*cuStreamCreate)(void**, unsigned) = nullptr;
  int (*cuStreamDestroy)(void*) = nullptr;
  int (*cuMemcpyAsync)(Ptr, Ptr, size_t, void*) = nullptr;
  int (*cuEventCreate)(void**, unsigned) = nullptr;
  int (*cuEventRecord)(void*, void*) = nullptr;
  int (*cuEventQuery)(void*) = nullptr;
  int (*cuEventDestroy)(void*) = nullptr;
  int (*cuMemHostAlloc)(void**, size_t, unsigned) = nullptr;
  int (*cuMemFreeHost)(void*) = nullptr;
  int (*cuMemHostGetDevicePointer)(Ptr*, void*, unsigned) = nullptr;
  int (*cuMemGetHandleForAddressRange)(void*, Ptr, size_t, int, unsigned long long) = nullptr;
  int (*cuStreamWaitValue32)(void*, Ptr, uint32_t, unsigned) = nullptr;
  int (*cuGetErrorString)(int, const char**) = nullptr;
};

struct Place {
  std::mutex mutex;
  std::shared_ptr<CudaDriver> real, fake;
};
Place& place() {
  static auto* p = new Place;  // outlives static destructors
  return *p;
}

}  // namespace

Result<std::shared_ptr<CudaDriver>> open_libcuda() {
  auto driver = std::make_shared<LibCuda>();
  TM_TRY(driver->open());
  return std::shared_ptr<CudaDriver>(std::move(driver));
}

Result<std::shared_ptr<CudaDriver>> CudaDriver::get() {
  std::lock_guard lock(place().mutex);
  if (place().fake) return place().fake;
  if (!place().real) {
    TM_ASSIGN(place().real, open_libcuda());
  }
  return place().real;
}

std::shared_ptr<CudaDriver> CudaDriver::made() {
  std::lock_guard lock(place().mutex);
  return place().fake ? place().fake : place().real;
}

void CudaDriver::replace(std::shared_ptr<CudaDriver> driver) {
  std::lock_guard lock(place().mutex);
  place().fake = std::move(driver);
}

}  // namespace torch_mooncake::transfer
