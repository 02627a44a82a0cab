// Page ids on the GPU, looked at before a copy: for debugging (TM_CHECK_IDS=1), since the host has to wait for the
// verdict.
#include "kv/cuda/launch.h"

namespace torch_mooncake::kv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned long long kNone = ~0ull;

// First positions of ids that are out of range, or that have been seen in the bitmap.
struct Verdict {
  unsigned long long outside, seen;
};

__device__ int64_t id_at(const PageIds& ids, int64_t i) {
  return ids.wide ? static_cast<const int64_t*>(ids.data)[i] : static_cast<const int32_t*>(ids.data)[i];
}

// `mark`: an id sets its bit, and must be the first to do so; else it must not be set.
__global__ void __launch_bounds__(kThreads)
    check_kernel(PageIds ids, int64_t num_pages, unsigned* bitmap, bool mark, Verdict* verdict) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < ids.count; i += int64_t{kThreads} * gridDim.x) {
    const int64_t id = id_at(ids, i);
    if (id < 0 || id >= num_pages) {
      atomicMin(&verdict->outside, static_cast<unsigned long long>(i));
    } else if (bitmap != nullptr) {
      const unsigned bit = 1u << (id % 32);
      const unsigned before = mark ? atomicOr(&bitmap[id / 32], bit) : bitmap[id / 32];
      if (before & bit) atomicMin(&verdict->seen, static_cast<unsigned long long>(i));
    }
  }
}

void check_list(const PageIds& ids, int64_t num_pages, const char* name, unsigned* bitmap, bool mark,
                Verdict* on_device, cudaStream_t stream) {
  check(cudaMemsetAsync(on_device, 0xFF, sizeof(Verdict), stream), "cudaMemsetAsync");
  const uint32_t blocks = grid_for<check_kernel>((ids.count + kThreads - 1) / kThreads, kThreads);
  check_kernel<<<blocks, kThreads, 0, stream>>>(ids, num_pages, bitmap, mark, on_device);
  check(cudaGetLastError(), "check of page ids");
  Verdict found;
  check(cudaMemcpyAsync(&found, on_device, sizeof found, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const unsigned long long position = found.outside != kNone ? found.outside : found.seen;
  if (position == kNone) return;

  int64_t wide = 0;
  int32_t narrow = 0;
  const auto* at = static_cast<const char*>(ids.data) + position * (ids.wide ? 8 : 4);
  check(cudaMemcpyAsync(ids.wide ? static_cast<void*>(&wide) : &narrow, at, ids.wide ? 8 : 4, cudaMemcpyDeviceToHost,
                        stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const auto id = static_cast<long long>(ids.wide ? wide : narrow);
  if (found.outside != kNone)
    refuse(Code::out_of_bounds, "%s[%llu] is %lld, not in [0, %lld)", name, position, id,
           static_cast<long long>(num_pages));
  if (mark)
    refuse(Code::invalid_argument, "%s has %lld twice, once at position %llu: a page can be written once", name, id,
           position);
  refuse(Code::invalid_argument,
         "%s[%llu] is %lld, which is written too: a page of one pool is read or written, not both", name, position, id);
}

}  // namespace

void check_device_ids(const PageCopy& copy, void* scratch, cudaStream_t stream) {
  if (capturing(stream))
    refuse(Code::unsupported,
           "page ids on the GPU cannot be checked while a CUDA graph is captured: unset TM_CHECK_IDS");
  auto* verdict = static_cast<Verdict*>(scratch);
  auto* bitmap = reinterpret_cast<unsigned*>(static_cast<char*>(scratch) + CudaCopyWorkspace::kVerdictNbytes);
  if (copy.dst_ids.on_device) {
    check(cudaMemsetAsync(bitmap, 0, CudaCopyWorkspace::bitmap_nbytes(copy), stream), "cudaMemsetAsync");
    check_list(copy.dst_ids, copy.dst_pages, copy.dst_ids_name, bitmap, true, verdict, stream);
  }
  if (copy.src_ids.on_device) {
    const bool apart = copy.in_place && copy.dst_ids.on_device;
    check_list(copy.src_ids, copy.src_pages, copy.src_ids_name, apart ? bitmap : nullptr, false, verdict, stream);
  }
}

}  // namespace torch_mooncake::kv::cuda
