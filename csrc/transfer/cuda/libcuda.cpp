// The real driver: libcuda.so.1 by dlopen, its functions by name. Types and numbers are those of cuda.h, which is not
// needed to build this.
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>

#include "transfer/cuda/driver.h"

namespace torch_mooncake::transfer {
namespace {

using Ptr = unsigned long long;  // CUdeviceptr
constexpr int kSuccess = 0, kNotReady = 600, kNotSupported = 801;
constexpr int kMemoryTypeDevice = 2;  // CU_MEMORYTYPE_DEVICE
// CU_POINTER_ATTRIBUTE_…
constexpr int kAttributeMemoryType = 2, kAttributeBufferId = 7, kAttributeOrdinal = 9, kAttributeLegacyIpc = 10,
              kAttributeMappingSize = 18, kAttributeMappingBase = 19, kAttributeMemoryBlockId = 20;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kHostAllocPortable = 1, kHostAllocMapped = 2;
constexpr unsigned kWaitGeq = 0;
constexpr int kRelaxedCapture = 2;       // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kDmaBuf = 1;               // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
constexpr int kPosixFd = 1;              // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

constexpr int kNicWritesOrdering = 118;             // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
constexpr int kCurrentContext = 0, kToOwner = 100;  // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER, and the ordering's

struct IpcHandle {  // CUipcMemHandle
  char bytes[64];
};
struct AccessDesc {                     // CUmemAccessDesc
  int location_type = 1, location = 0;  // a device
  int flags = 3;                        // to be read and written
};

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
        load(cuStreamDestroy, "cuStreamDestroy_v2") && load(cuStreamIsCapturing, "cuStreamIsCapturing") &&
        load(cuMemcpyAsync, "cuMemcpyAsync") && load(cuEventCreate, "cuEventCreate") &&
        load(cuEventRecord, "cuEventRecord") && load(cuEventQuery, "cuEventQuery") &&
        load(cuEventDestroy, "cuEventDestroy_v2") && load(cuMemHostAlloc, "cuMemHostAlloc") &&
        load(cuMemFreeHost, "cuMemFreeHost") && load(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2") &&
        load(cuGetErrorString, "cuGetErrorString") && load(cuDeviceGetUuid, "cuDeviceGetUuid_v2") &&
        load(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState") &&
        load(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer") && load(cuIpcGetMemHandle, "cuIpcGetMemHandle") &&
        load(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2") && load(cuIpcCloseMemHandle, "cuIpcCloseMemHandle");
    if (!all) return {Code::unsupported, "libcuda.so.1 is too old: it has no " + missing_};
    // Since CUDA 11.7 and 12: what uses them says so if they are not there.
    load(cuStreamWaitValue32, "cuStreamWaitValue32_v2");
    load(cuMemGetHandleForAddressRange, "cuMemGetHandleForAddressRange");
    load(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
    load(cuDeviceGetAttribute, "cuDeviceGetAttribute");
    load(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId");
    load(cuFlushGPUDirectRDMAWrites, "cuFlushGPUDirectRDMAWrites");
    can_map_ = load(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle") &&
               load(cuMemExportToShareableHandle, "cuMemExportToShareableHandle") &&
               load(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle") &&
               load(cuMemRelease, "cuMemRelease") && load(cuMemAddressReserve, "cuMemAddressReserve") &&
               load(cuMemAddressFree, "cuMemAddressFree") && load(cuMemMap, "cuMemMap") &&
               load(cuMemUnmap, "cuMemUnmap") && load(cuMemSetAccess, "cuMemSetAccess");
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
    // Of memory that was mapped from handles, side by side, the address range may be all of it: ask for the one
    // mapping.
    bool mapped = retain(address).valid();
    Ptr base = 0;
    size_t nbytes = 0;
    if (!mapped || cuPointerGetAttribute(&base, kAttributeMappingBase, address) != kSuccess ||
        cuPointerGetAttribute(&nbytes, kAttributeMappingSize, address) != kSuccess)
      TM_TRY(check(cuMemGetAddressRange(&base, &nbytes, address), "cuMemGetAddressRange"));
    out.base = base;
    out.nbytes = nbytes;
    // Older drivers know no id of a mapping. (An id that another call may not repeat is none: 0.)
    if (cuPointerGetAttribute(&out.id, mapped ? kAttributeMemoryBlockId : kAttributeBufferId, address) != kSuccess)
      out.id = 0;
    return out;
  }

  Result<std::shared_ptr<void>> make_current(int device) override {
    TM_ASSIGN(auto current, enter(device));
    return std::shared_ptr<void>(std::make_shared<Current>(std::move(current)));
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
  Result<bool> capturing(int device, CudaStream stream) override {
    TM_ASSIGN(auto current, enter(device));
    int status = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
    TM_TRY(check(cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing"));
    return status != 0;
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

  std::string bus_id(int device) override {
    int handle = 0;
    char id[32]{};
    const bool told = cuDeviceGetPCIBusId && cuDeviceGet(&handle, device) == kSuccess &&
                      cuDeviceGetPCIBusId(id, sizeof id, handle) == kSuccess;
    return told ? id : "";
  }

  bool orders_nic_writes(int device) override {
    int handle = 0, ordering = 0;
    return cuDeviceGetAttribute && cuDeviceGet(&handle, device) == kSuccess &&
           cuDeviceGetAttribute(&ordering, kNicWritesOrdering, handle) == kSuccess && ordering >= kToOwner;
  }
  Status flush_nic_writes(int device) override {
    if (!cuFlushGPUDirectRDMAWrites) return {Code::unsupported, "this CUDA driver does not flush what NICs write"};
    TM_ASSIGN(auto current, enter(device));
    return check(cuFlushGPUDirectRDMAWrites(kCurrentContext, kToOwner), "cuFlushGPUDirectRDMAWrites");
  }

  int devices() const override { return devices_; }
  std::string uuid(int device) override {
    int handle = 0;
    std::string uuid(16, '\0');
    bool known = cuDeviceGet(&handle, device) == kSuccess && cuDeviceGetUuid(uuid.data(), handle) == kSuccess;
    return known ? uuid : std::string();
  }
  bool in_use(int device) override {
    int handle = 0, active = 0;
    unsigned flags = 0;
    return cuDeviceGet(&handle, device) == kSuccess &&
           cuDevicePrimaryCtxGetState(handle, &flags, &active) == kSuccess && active != 0;
  }
  bool reaches(int device, int other) override {
    int from = 0, to = 0, can = 0;
    return device == other || (cuDeviceGet(&from, device) == kSuccess && cuDeviceGet(&to, other) == kSuccess &&
                               cuDeviceCanAccessPeer(&can, from, to) == kSuccess && can != 0);
  }

  Result<CudaHandle> share(const CudaAllocation& allocation) override {
    TM_ASSIGN(auto current, enter(allocation.device));
    CudaHandle out;
    if (auto handle = retain(allocation.base); handle.valid()) {
      int fd = -1;
      TM_TRY(check(cuMemExportToShareableHandle(&fd, handle.get(), kPosixFd, 0), "cuMemExportToShareableHandle"));
      out.fd.reset(fd);
      return out;
    }
    IpcHandle handle{};
    TM_TRY(check(cuIpcGetMemHandle(&handle, allocation.base), "cuIpcGetMemHandle"));
    out.name.assign(handle.bytes, sizeof handle.bytes);
    return out;
  }

  Result<std::shared_ptr<void>> map(int device, CudaHandle handle, uint64_t nbytes) override {
    TM_ASSIGN(auto current, enter(device));
    if (handle.fd.valid()) return map_fd(device, handle.fd.get(), nbytes);
    IpcHandle name{};
    if (handle.name.size() != sizeof name.bytes)
      return Status(Code::unsupported, "a CUDA IPC handle of another length than this driver's");
    std::memcpy(name.bytes, handle.name.data(), sizeof name.bytes);
    Ptr at = 0;
    TM_TRY(check(cuIpcOpenMemHandle(&at, name, kLazyPeerAccess), "cuIpcOpenMemHandle"));
    std::shared_ptr<void> mapping(reinterpret_cast<void*>(at), [this, device](void* p) {
      if (auto entered = enter(device)) cuIpcCloseMemHandle(reinterpret_cast<Ptr>(p));
    });
    Ptr base = 0;
    size_t size = 0;
    TM_TRY(check(cuMemGetAddressRange(&base, &size, at), "cuMemGetAddressRange"));
    if (at < base || at - base > size || nbytes > size - (at - base))
      return Status(Code::io, "a CUDA IPC handle of less memory than its owner says");
    return mapping;
  }

 private:
  // A handle that this process holds; 0 where there is none.
  class Retained {
   public:
    Retained(LibCuda& cuda, unsigned long long handle) : cuda_(cuda), handle_(handle) {}
    Retained(const Retained&) = delete;
    ~Retained() {
      if (handle_) cuda_.cuMemRelease(handle_);
    }
    bool valid() const { return handle_ != 0; }
    unsigned long long get() const { return handle_; }

   private:
    LibCuda& cuda_;
    const unsigned long long handle_;
  };
  // The handle that is mapped at the address, if the memory there was mapped from one.
  Retained retain(uint64_t address) {
    unsigned long long handle = 0;
    int by_name = 0;  // cudaMalloc's
    if (cuPointerGetAttribute(&by_name, kAttributeLegacyIpc, address) == kSuccess && by_name != 0) return {*this, 0};
    if (!can_map_ || cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)) != kSuccess) handle = 0;
    return {*this, handle};
  }

  Result<std::shared_ptr<void>> map_fd(int device, int fd, uint64_t nbytes) {
    if (!can_map_) return Status(Code::unsupported, "this CUDA driver maps no handles");
    unsigned long long imported = 0;
    TM_TRY(
        check(cuMemImportFromShareableHandle(&imported, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), kPosixFd),
              "cuMemImportFromShareableHandle"));
    Retained handle(*this, imported);  // the mapping keeps the memory
    Ptr at = 0;
    TM_TRY(check(cuMemAddressReserve(&at, nbytes, 0, 0, 0), "cuMemAddressReserve"));
    AccessDesc access;
    access.location = device;
    Status status = check(cuMemMap(at, nbytes, 0, handle.get(), 0), "cuMemMap");
    if (status) {
      status = check(cuMemSetAccess(at, nbytes, &access, 1), "cuMemSetAccess");
      if (!status) cuMemUnmap(at, nbytes);
    }
    if (!status) {
      cuMemAddressFree(at, nbytes);
      return status;
    }
    return std::shared_ptr<void>(reinterpret_cast<void*>(at), [this, device, nbytes](void* p) {
      auto entered = enter(device);
      cuMemUnmap(reinterpret_cast<Ptr>(p), nbytes);
      cuMemAddressFree(reinterpret_cast<Ptr>(p), nbytes);
    });
  }

  // The device's primary context, current until this goes.
  class Current {
   public:
    // What this thread asks of CUDA is none of the business of a graph that another one captures, and does not end it.
    Current(LibCuda& cuda) : cuda_(&cuda) { exchange_mode(); }
    Current(Current&& other) noexcept : cuda_(std::exchange(other.cuda_, nullptr)), mode_(other.mode_) {}
    ~Current() {
      void* popped;
      if (!cuda_) return;
      exchange_mode();
      cuda_->cuCtxPopCurrent(&popped);
    }

   private:
    void exchange_mode() {
      if (cuda_->cuThreadExchangeStreamCaptureMode) cuda_->cuThreadExchangeStreamCaptureMode(&mode_);
    }
    LibCuda* cuda_;
    int mode_ = kRelaxedCapture;  // the thread's own one while this is there
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
  bool can_map_ = false;  // handles of memory (CUDA 10.2, and 11 to find one by its address)
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
  int (*cuStreamIsCapturing)(void*, int*) = nullptr;
  int (*cuThreadExchangeStreamCaptureMode)(int*) = nullptr;
  int (*cuMemcpyAsync)(Ptr, Ptr, size_t, void*) = nullptr;
  int (*cuEventCreate)(void**, unsigned) = nullptr;
  int (*cuEventRecord)(void*, void*) = nullptr;
  int (*cuEventQuery)(void*) = nullptr;
  int (*cuEventDestroy)(void*) = nullptr;
  int (*cuMemHostAlloc)(void**, size_t, unsigned) = nullptr;
  int (*cuMemFreeHost)(void*) = nullptr;
  int (*cuMemHostGetDevicePointer)(Ptr*, void*, unsigned) = nullptr;
  int (*cuMemGetHandleForAddressRange)(void*, Ptr, size_t, int, unsigned long long) = nullptr;
  int (*cuDeviceGetAttribute)(int*, int, int) = nullptr;
  int (*cuDeviceGetPCIBusId)(char*, int, int) = nullptr;
  int (*cuFlushGPUDirectRDMAWrites)(int, int) = nullptr;
  int (*cuStreamWaitValue32)(void*, Ptr, uint32_t, unsigned) = nullptr;
  int (*cuGetErrorString)(int, const char**) = nullptr;
  int (*cuDeviceGetUuid)(char*, int) = nullptr;
  int (*cuDevicePrimaryCtxGetState)(int, unsigned*, int*) = nullptr;
  int (*cuDeviceCanAccessPeer)(int*, int, int) = nullptr;
  int (*cuIpcGetMemHandle)(IpcHandle*, Ptr) = nullptr;
  int (*cuIpcOpenMemHandle)(Ptr*, IpcHandle, unsigned) = nullptr;
  int (*cuIpcCloseMemHandle)(Ptr) = nullptr;
  int (*cuMemRetainAllocationHandle)(unsigned long long*, void*) = nullptr;
  int (*cuMemExportToShareableHandle)(void*, unsigned long long, int, unsigned long long) = nullptr;
  int (*cuMemImportFromShareableHandle)(unsigned long long*, void*, int) = nullptr;
  int (*cuMemRelease)(unsigned long long) = nullptr;
  int (*cuMemAddressReserve)(Ptr*, size_t, size_t, Ptr, unsigned long long) = nullptr;
  int (*cuMemAddressFree)(Ptr, size_t) = nullptr;
  int (*cuMemMap)(Ptr, size_t, size_t, unsigned long long, unsigned long long) = nullptr;
  int (*cuMemUnmap)(Ptr, size_t) = nullptr;
  int (*cuMemSetAccess)(Ptr, size_t, const AccessDesc*, size_t) = nullptr;
};

}  // namespace

Result<std::shared_ptr<CudaDriver>> open_libcuda() {
  auto driver = std::make_shared<LibCuda>();
  TM_TRY(driver->open());
  return std::shared_ptr<CudaDriver>(std::move(driver));
}

bool libcuda_in_use() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (!library) return false;
  auto count_of = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  auto state_of = reinterpret_cast<int (*)(int, unsigned*, int*)>(dlsym(library, "cuDevicePrimaryCtxGetState"));
  int count = 0, active = 0;
  unsigned flags = 0;
  if (count_of && state_of && count_of(&count) == kSuccess)  // an error before anybody has called cuInit
    for (int device = 0; device < count && !active; ++device) (void)state_of(device, &flags, &active);
  dlclose(library);
  return active != 0;
}

}  // namespace torch_mooncake::transfer
