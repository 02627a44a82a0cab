// Paged gather and scatter on the GPU: one launch for all layers (up to kLayersPerLaunch), the widest access that every
// address allows, a byte-wise tail.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

#include "kv/cuda/plugin.h"

namespace torch_mooncake::kv {
namespace {

constexpr int kLayersPerLaunch = 100;  // the table travels as a kernel parameter (4 KiB)
constexpr int kThreads = 256;
constexpr int kPerThread = 4;  // accesses of one thread in one tile
constexpr unsigned long long kNone = ~0ull;

struct Layers {
  PageLayer layer[kLayersPerLaunch];
};

struct Shape {
  const void* ids;
  int64_t count;
  int64_t page_nbytes;
  int64_t tiles_per_page;
  int64_t tiles;
  bool wide;
};

__device__ int64_t page_id(const void* ids, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

// A tile is kThreads * kPerThread accesses of one page of one layer; blocks stride over the tiles.
template <typename Access, bool kScatter>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Layers table, Shape shape) {
  constexpr int64_t kTile = kThreads * kPerThread;
  const int64_t accesses = shape.page_nbytes / sizeof(Access);
  for (int64_t tile = blockIdx.x; tile < shape.tiles; tile += gridDim.x) {
    const int64_t item = tile / shape.tiles_per_page, part = tile % shape.tiles_per_page;
    const PageLayer& layer = table.layer[item / shape.count];
    const int64_t place = item % shape.count;
    auto* in_pool =
        reinterpret_cast<char*>(layer.pool) + page_id(shape.ids, shape.wide, place) * layer.pool_stride_nbytes;
    auto* in_list = reinterpret_cast<char*>(layer.pages) + place * layer.pages_stride_nbytes;
    char* dst = kScatter ? in_pool : in_list;
    const char* src = kScatter ? in_list : in_pool;
    Access value[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t at = part * kTile + k * kThreads + threadIdx.x;
      if (at < accesses) value[k] = reinterpret_cast<const Access*>(src)[at];
    }
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t at = part * kTile + k * kThreads + threadIdx.x;
      if (at < accesses) reinterpret_cast<Access*>(dst)[at] = value[k];
    }
    if (part + 1 == shape.tiles_per_page) {
      const int64_t tail = accesses * sizeof(Access) + threadIdx.x;
      if (threadIdx.x < sizeof(Access) && tail < shape.page_nbytes) dst[tail] = src[tail];
    }
  }
}

// verdict[0]: the first position whose id is out of range; verdict[1]: a position whose id was there before.
__global__ void check_kernel(const void* ids, bool wide, int64_t count, int64_t num_pages, unsigned* bitmap,
                             unsigned long long* verdict) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{kThreads} * gridDim.x) {
    const int64_t id = page_id(ids, wide, i);
    if (id < 0 || id >= num_pages) {
      atomicMin(&verdict[0], static_cast<unsigned long long>(i));
    } else if (bitmap != nullptr) {
      const unsigned bit = 1u << (id % 32);
      if (atomicOr(&bitmap[id / 32], bit) & bit) atomicMin(&verdict[1], static_cast<unsigned long long>(i));
    }
  }
}

struct Failed {
  cudaError_t error;
  const char* what;
};

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Failed{error, what};
}

int blocks(int64_t wanted) { return static_cast<int>(std::min<int64_t>(std::max<int64_t>(wanted, 1), 132 * 16)); }

// Waits for the stream: nothing may be written before the ids are known to be good.
bool ids_are_good(const CudaPageCopy& copy, cudaStream_t stream, CudaVerdict* out) {
  cudaStreamCaptureStatus capture;
  check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) {
    out->code = Code::unsupported;
    std::snprintf(out->message, sizeof out->message,
                  "page_ids on the GPU cannot be checked while a CUDA graph is captured: pass them as a CPU tensor");
    return false;
  }
  auto* verdict = static_cast<unsigned long long*>(copy.workspace);
  auto* bitmap = copy.scatter ? reinterpret_cast<unsigned*>(static_cast<char*>(copy.workspace) +
                                                            CudaPageCopy::kVerdictNbytes + copy.ids_nbytes())
                              : nullptr;
  check(cudaMemsetAsync(verdict, 0xFF, CudaPageCopy::kVerdictNbytes, stream), "cudaMemsetAsync");
  if (bitmap != nullptr) check(cudaMemsetAsync(bitmap, 0, copy.bitmap_nbytes(), stream), "cudaMemsetAsync");
  check_kernel<<<blocks((copy.ids.count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      copy.ids.data, copy.ids.wide, copy.ids.count, copy.num_pages, bitmap, verdict);
  check(cudaGetLastError(), "check of page_ids");
  unsigned long long found[2];
  check(cudaMemcpyAsync(found, verdict, sizeof found, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const unsigned long long position = found[0] != kNone ? found[0] : found[1];
  if (position == kNone) return true;

  int64_t id = 0;
  int32_t narrow = 0;
  const auto* at = static_cast<const char*>(copy.ids.data) + position * (copy.ids.wide ? 8 : 4);
  check(
      cudaMemcpy(copy.ids.wide ? static_cast<void*>(&id) : &narrow, at, copy.ids.wide ? 8 : 4, cudaMemcpyDeviceToHost),
      "cudaMemcpy");
  if (!copy.ids.wide) id = narrow;
  if (found[0] != kNone) {
    out->code = Code::out_of_bounds;
    std::snprintf(out->message, sizeof out->message, "page_ids[%llu] is %lld, not in [0, %lld)", position,
                  static_cast<long long>(id), static_cast<long long>(copy.num_pages));
  } else {
    out->code = Code::invalid_argument;
    std::snprintf(out->message, sizeof out->message,
                  "page_ids has %lld twice, once at position %llu: a page can be written once",
                  static_cast<long long>(id), position);
  }
  return false;
}

template <typename Access>
void launch(const CudaPageCopy& copy, const void* ids, cudaStream_t stream) {
  constexpr int64_t kTileNbytes = int64_t{kThreads} * kPerThread * sizeof(Access);
  Shape shape{ids, copy.ids.count, copy.page_nbytes, (copy.page_nbytes + kTileNbytes - 1) / kTileNbytes,
              0,   copy.ids.wide};
  for (int64_t first = 0; first < copy.num_layers; first += kLayersPerLaunch) {
    const int64_t layers = std::min<int64_t>(kLayersPerLaunch, copy.num_layers - first);
    Layers table;
    std::copy_n(copy.layers + first, layers, table.layer);
    shape.tiles = layers * shape.count * shape.tiles_per_page;
    auto kernel = copy.scatter ? copy_kernel<Access, true> : copy_kernel<Access, false>;
    kernel<<<blocks(shape.tiles), kThreads, 0, stream>>>(table, shape);
    check(cudaGetLastError(), "copy of pages");
  }
}

// The widest access at which every page of every layer starts.
int64_t alignment(const CudaPageCopy& copy) {
  uintptr_t bits = 16;
  for (int64_t i = 0; i < copy.num_layers; ++i) {
    const PageLayer& layer = copy.layers[i];
    bits |= reinterpret_cast<uintptr_t>(layer.pool) | reinterpret_cast<uintptr_t>(layer.pages) |
            static_cast<uintptr_t>(layer.pool_stride_nbytes) | static_cast<uintptr_t>(layer.pages_stride_nbytes);
  }
  return static_cast<int64_t>(bits & -bits);
}

void run(const CudaPageCopy& copy, CudaVerdict* out) {
  auto stream = static_cast<cudaStream_t>(copy.stream);
  const void* ids = copy.ids.data;
  if (copy.ids_on_device) {
    if (!ids_are_good(copy, stream, out)) return;
  } else {
    void* staged = static_cast<char*>(copy.workspace) + CudaPageCopy::kVerdictNbytes;
    // From pageable memory: the ids have been read when this returns.
    check(cudaMemcpyAsync(staged, ids, copy.ids.count * (copy.ids.wide ? 8 : 4), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync of page_ids");
    ids = staged;
  }
  switch (alignment(copy)) {
    case 16:
      return launch<uint4>(copy, ids, stream);
    case 8:
      return launch<uint2>(copy, ids, stream);
    case 4:
      return launch<uint32_t>(copy, ids, stream);
    case 2:
      return launch<uint16_t>(copy, ids, stream);
    default:
      return launch<uint8_t>(copy, ids, stream);
  }
}

}  // namespace
}  // namespace torch_mooncake::kv

extern "C" TM_API void torch_mooncake_cuda_copy_pages_1(const torch_mooncake::kv::CudaPageCopy* copy,
                                                        torch_mooncake::kv::CudaVerdict* out) {
  using namespace torch_mooncake;
  try {
    kv::run(*copy, out);
  } catch (const kv::Failed& failed) {
    out->code = Code::internal;
    std::snprintf(out->message, sizeof out->message, "%s: %s", failed.what, cudaGetErrorString(failed.error));
  }
}
