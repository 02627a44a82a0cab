// What the plug-in's sources share: CUDA's errors, and grids of the device's size. For nvcc only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>

#include "kv/cuda/plugin.h"

namespace torch_mooncake::kv::cuda {

struct Failed {
  cudaError_t error;
  const char* what;
};

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Failed{error, what};
}

// Something the caller is told, not a failure of CUDA's.
struct Refused {
  Code code;
  char message[256];
};

template <typename... Args>
[[noreturn]] void refuse(Code code, const char* format, Args... args) {
  Refused refused{code, ""};
  std::snprintf(refused.message, sizeof refused.message, format, args...);
  throw refused;
}

inline cudaStream_t stream_of(const CudaRun& run) { return static_cast<cudaStream_t>(run.stream); }

inline bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// As many blocks as the device runs at once of this kernel, or as there is work for. `kKernel` is the key under which
// the occupancy is remembered, a device at a time.
template <auto kKernel>
uint32_t grid_for(uint64_t wanted, int threads) {
  constexpr int kDevices = 64;
  static std::array<std::atomic<int>, kDevices> remembered{};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  int resident = device < kDevices ? remembered[device].load(std::memory_order_relaxed) : 0;
  if (resident == 0) {
    int processors = 0, blocks = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, threads, 0), "occupancy of a kernel");
    resident = std::max(1, processors * blocks);
    if (device < kDevices) remembered[device].store(resident, std::memory_order_relaxed);
  }
  return static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, resident));
}

// The kernels' entry points; each throws Failed or Refused.
void copy_pages(const PageCopy& copy, const CudaRun& run);
void quantize_pages(const PageScaling& call, const CudaRun& run);
void dequantize_pages(const PageScaling& call, const CudaRun& run);
void hash_pages(const PageHashing& call, const CudaRun& run);
void delta_count(const DeltaOnDevice& call, const CudaRun& run);
void delta_write(const DeltaOnDevice& call, const CudaRun& run);
void delta_apply(const DeltaOnDevice& call, const CudaRun& run);

// Whether the ids of `copy` that lie on the device are good (kv::check_page_ids says what that is); refuses if not.
// Waits for the stream. `scratch`: CudaCopyWorkspace::check_nbytes() of device memory.
void check_device_ids(const PageCopy& copy, void* scratch, cudaStream_t stream);

}  // namespace torch_mooncake::kv::cuda
