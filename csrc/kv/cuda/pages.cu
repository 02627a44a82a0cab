// Paged gather and scatter on the GPU: one launch for all regions (up to kRegionsPerLaunch), the widest access that
// every address allows, a byte-wise tail.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

#include "kv/cuda/plugin.h"

namespace torch_mooncake::kv {
namespace {

constexpr int kRegionsPerLaunch = 200;  // the table travels as a kernel parameter (4 KiB)
constexpr int kThreads = 256;
constexpr int kPerThread = 4;  // accesses of one thread in one tile
constexpr unsigned long long kNone = ~0ull;

struct Regions {
  CopyRegion region[kRegionsPerLaunch];
};

struct Shape {
  PageIds src_ids, dst_ids;
  int64_t src_stride, dst_stride;
  int64_t count;
  int64_t page_nbytes;
  int64_t tiles_per_page;
  int64_t tiles;
};

__device__ int64_t page_id(const PageIds& ids, int64_t i) {
  if (ids.data == nullptr) return i;
  return ids.wide ? static_cast<const int64_t*>(ids.data)[i] : static_cast<const int32_t*>(ids.data)[i];
}

// A tile is kThreads * kPerThread accesses of one page of one region; blocks stride over the tiles.
template <typename Access>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Regions table, Shape shape) {
  constexpr int64_t kTile = kThreads * kPerThread;
  const int64_t accesses = shape.page_nbytes / sizeof(Access);
  for (int64_t tile = blockIdx.x; tile < shape.tiles; tile += gridDim.x) {
    const int64_t item = tile / shape.tiles_per_page, part = tile % shape.tiles_per_page;
    const CopyRegion& region = table.region[item / shape.count];
    const int64_t place = item % shape.count;
    auto* src = reinterpret_cast<const char*>(region.src) + page_id(shape.src_ids, place) * shape.src_stride;
    auto* dst = reinterpret_cast<char*>(region.dst) + page_id(shape.dst_ids, place) * shape.dst_stride;
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
__global__ void check_kernel(PageIds ids, int64_t num_pages, unsigned* bitmap, unsigned long long* verdict) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < ids.count; i += int64_t{kThreads} * gridDim.x) {
    const int64_t id = page_id(ids, i);
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

// Waits for the stream: nothing may be written before the ids are known to be good. `bitmap` (of `bitmap_nbytes`) when
// an id may be there once.
bool ids_are_good(const PageIds& ids, int64_t num_pages, const char* name, unsigned* bitmap, int64_t bitmap_nbytes,
                  const CudaRun& run, CudaVerdict* out) {
  auto stream = static_cast<cudaStream_t>(run.stream);
  cudaStreamCaptureStatus capture;
  check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) {
    out->code = Code::unsupported;
    std::snprintf(out->message, sizeof out->message,
                  "%s on the GPU cannot be checked while a CUDA graph is captured: pass them as a CPU tensor", name);
    return false;
  }
  auto* verdict = static_cast<unsigned long long*>(run.workspace);
  check(cudaMemsetAsync(verdict, 0xFF, CudaCopyWorkspace::kVerdictNbytes, stream), "cudaMemsetAsync");
  if (bitmap != nullptr) check(cudaMemsetAsync(bitmap, 0, bitmap_nbytes, stream), "cudaMemsetAsync");
  check_kernel<<<blocks((ids.count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(ids, num_pages, bitmap, verdict);
  check(cudaGetLastError(), "check of page ids");
  unsigned long long found[2];
  check(cudaMemcpyAsync(found, verdict, sizeof found, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const unsigned long long position = found[0] != kNone ? found[0] : found[1];
  if (position == kNone) return true;

  int64_t id = 0;
  int32_t narrow = 0;
  const auto* at = static_cast<const char*>(ids.data) + position * (ids.wide ? 8 : 4);
  check(cudaMemcpy(ids.wide ? static_cast<void*>(&id) : &narrow, at, ids.wide ? 8 : 4, cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  if (!ids.wide) id = narrow;
  if (found[0] != kNone) {
    out->code = Code::out_of_bounds;
    std::snprintf(out->message, sizeof out->message, "%s[%llu] is %lld, not in [0, %lld)", name, position,
                  static_cast<long long>(id), static_cast<long long>(num_pages));
  } else {
    out->code = Code::invalid_argument;
    std::snprintf(out->message, sizeof out->message,
                  "%s has %lld twice, once at position %llu: a page can be written once", name,
                  static_cast<long long>(id), position);
  }
  return false;
}

template <typename Access>
void launch(const PageCopy& copy, const PageIds& src_ids, const PageIds& dst_ids, cudaStream_t stream) {
  constexpr int64_t kTileNbytes = int64_t{kThreads} * kPerThread * sizeof(Access);
  const int64_t page_nbytes = copy.page.run_nbytes;
  Shape shape{src_ids,
              dst_ids,
              copy.src_page_stride,
              copy.dst_page_stride,
              copy.count(),
              page_nbytes,
              (page_nbytes + kTileNbytes - 1) / kTileNbytes,
              0};
  const auto total = static_cast<int64_t>(copy.regions.size());
  for (int64_t first = 0; first < total; first += kRegionsPerLaunch) {
    const int64_t regions = std::min<int64_t>(kRegionsPerLaunch, total - first);
    Regions table;
    std::copy_n(copy.regions.data() + first, regions, table.region);
    shape.tiles = regions * shape.count * shape.tiles_per_page;
    copy_kernel<Access><<<blocks(shape.tiles), kThreads, 0, stream>>>(table, shape);
    check(cudaGetLastError(), "copy of pages");
  }
}

// The widest access at which every page of every region starts.
int64_t alignment(const PageCopy& copy) {
  uintptr_t bits = 16 | static_cast<uintptr_t>(copy.src_page_stride) | static_cast<uintptr_t>(copy.dst_page_stride);
  for (const CopyRegion& region : copy.regions)
    bits |= reinterpret_cast<uintptr_t>(region.src) | reinterpret_cast<uintptr_t>(region.dst);
  return static_cast<int64_t>(bits & -bits);
}

void run_copy(const PageCopy& copy, const CudaRun& run, CudaVerdict* out) {
  if (copy.page.num_dims > 0 || copy.in_place) {
    out->code = Code::unsupported;
    std::snprintf(out->message, sizeof out->message, "the CUDA copy needs contiguous pages and two pools");
    return;
  }
  auto stream = static_cast<cudaStream_t>(run.stream);
  auto* workspace = static_cast<char*>(run.workspace) + CudaCopyWorkspace::kVerdictNbytes;
  PageIds src_ids = copy.src_ids, dst_ids = copy.dst_ids;
  for (PageIds* ids : {&src_ids, &dst_ids}) {
    const int64_t nbytes = CudaCopyWorkspace::staged_nbytes(*ids);
    if (nbytes == 0) continue;
    // From pageable memory: the ids have been read when this returns.
    check(cudaMemcpyAsync(workspace, ids->data, ids->count * (ids->wide ? 8 : 4), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync of page ids");
    ids->data = workspace;
    workspace += nbytes;
  }
  auto* bitmap = reinterpret_cast<unsigned*>(workspace);
  if (src_ids.on_device && !ids_are_good(src_ids, copy.src_pages, copy.src_ids_name, nullptr, 0, run, out)) return;
  if (dst_ids.on_device && !ids_are_good(dst_ids, copy.dst_pages, copy.dst_ids_name, bitmap,
                                         CudaCopyWorkspace::bitmap_nbytes(copy), run, out))
    return;
  if (copy.nbytes() == 0) return;
  switch (alignment(copy)) {
    case 16:
      return launch<uint4>(copy, src_ids, dst_ids, stream);
    case 8:
      return launch<uint2>(copy, src_ids, dst_ids, stream);
    case 4:
      return launch<uint32_t>(copy, src_ids, dst_ids, stream);
    case 2:
      return launch<uint16_t>(copy, src_ids, dst_ids, stream);
    default:
      return launch<uint8_t>(copy, src_ids, dst_ids, stream);
  }
}

// No exception crosses the border.
template <typename Call, void (*kRun)(const Call&, const CudaRun&, CudaVerdict*)>
void guarded(const Call& call, const CudaRun& run, CudaVerdict* out) {
  try {
    kRun(call, run, out);
  } catch (const Failed& failed) {
    out->code = Code::internal;
    std::snprintf(out->message, sizeof out->message, "%s: %s", failed.what, cudaGetErrorString(failed.error));
  }
}

}  // namespace
}  // namespace torch_mooncake::kv

extern "C" TM_API const torch_mooncake::kv::CudaKernels* torch_mooncake_cuda_kernels_2() {
  using namespace torch_mooncake::kv;
  static const CudaKernels kernels{guarded<PageCopy, run_copy>, nullptr, nullptr, nullptr};
  return &kernels;
}
