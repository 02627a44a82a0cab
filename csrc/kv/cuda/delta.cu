// Deltas on the GPU, a thread a segment. Blobs are the host's (they come from a wire, or go to one): what is found is
// copied there, and what is applied from there, and both are waited for.
#include "kv/cuda/delta_index.h"
#include "kv/cuda/launch.h"

namespace torch_mooncake::kv::cuda {
namespace {

constexpr int kThreads = 128;

template <int kNbytes>
__global__ void __launch_bounds__(kThreads) count_kernel(DeltaArrays arrays, int64_t segments, DeltaEntry* directory) {
  const int64_t s = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (s < segments) directory[s] = DeltaKernel<kNbytes>::count(arrays, s);
}

template <int kNbytes>
__global__ void __launch_bounds__(kThreads)
    write_kernel(DeltaArrays arrays, int64_t segments, const DeltaSegment* __restrict__ at, uint8_t* tokens,
                 std::byte* values) {
  const int64_t s = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (s < segments) DeltaKernel<kNbytes>::write(arrays, s, at[s], tokens, values);
}

template <int kNbytes>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(std::byte* target, int64_t segments, const DeltaSegment* __restrict__ at,
                 const uint8_t* __restrict__ tokens, const std::byte* __restrict__ values) {
  const int64_t s = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (s < segments) DeltaKernel<kNbytes>::apply(target, s, at[s], at[s + 1], tokens, values);
}

uint32_t blocks_for(int64_t segments) {
  const int64_t blocks = (segments + kThreads - 1) / kThreads;
  if (blocks >= INT32_MAX) refuse(Code::unsupported, "2^31 blocks of segments at once");
  return static_cast<uint32_t>(blocks);
}

cudaStream_t quiet_stream(const CudaRun& run) {
  cudaStream_t stream = stream_of(run);
  if (capturing(stream))
    refuse(Code::unsupported, "deltas are made and taken by the host, which cannot be captured in a CUDA graph");
  return stream;
}

void copy(void* to, const void* from, int64_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (nbytes > 0) check(cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes), kind, stream), "cudaMemcpyAsync");
}

}  // namespace

void delta_count(const DeltaOnDevice& call, const CudaRun& run) {
  cudaStream_t stream = quiet_stream(run);
  const int64_t segments = delta_segments(call.elements);
  auto* directory = static_cast<DeltaEntry*>(run.workspace);
  const DeltaArrays arrays = delta_arrays(call.base, call.fresh, call.elements);
  for_delta_size(call.element_nbytes, [&]<int kNbytes>() {
    count_kernel<kNbytes><<<blocks_for(segments), kThreads, 0, stream>>>(arrays, segments, directory);
  });
  check(cudaGetLastError(), "counting of changes");
  copy(call.directory, directory, segments * static_cast<int64_t>(sizeof(DeltaEntry)), cudaMemcpyDeviceToHost, stream);
  check(cudaStreamSynchronize(stream), "counting of changes");
}

void delta_write(const DeltaOnDevice& call, const CudaRun& run) {
  cudaStream_t stream = quiet_stream(run);
  const int64_t segments = delta_segments(call.elements);
  const CudaDeltaWorkspace space(call, run.workspace);
  copy(space.segments, call.segments, space.segments_nbytes, cudaMemcpyHostToDevice, stream);
  const DeltaArrays arrays = delta_arrays(call.base, call.fresh, call.elements);
  for_delta_size(call.element_nbytes, [&]<int kNbytes>() {
    write_kernel<kNbytes>
        <<<blocks_for(segments), kThreads, 0, stream>>>(arrays, segments, space.segments, space.tokens, space.values);
  });
  check(cudaGetLastError(), "writing of changes");
  copy(call.tokens, space.tokens, call.token_nbytes, cudaMemcpyDeviceToHost, stream);
  copy(call.values, space.values, call.changed * call.element_nbytes, cudaMemcpyDeviceToHost, stream);
  check(cudaStreamSynchronize(stream), "writing of changes");
}

void delta_apply(const DeltaOnDevice& call, const CudaRun& run) {
  cudaStream_t stream = quiet_stream(run);
  const int64_t segments = delta_segments(call.elements);
  const CudaDeltaWorkspace space(call, run.workspace);
  copy(space.segments, call.segments, space.segments_nbytes, cudaMemcpyHostToDevice, stream);
  copy(space.tokens, call.tokens, call.token_nbytes, cudaMemcpyHostToDevice, stream);
  copy(space.values, call.values, call.changed * call.element_nbytes, cudaMemcpyHostToDevice, stream);
  for_delta_size(call.element_nbytes, [&]<int kNbytes>() {
    apply_kernel<kNbytes><<<blocks_for(segments), kThreads, 0, stream>>>(call.target, segments, space.segments,
                                                                         space.tokens, space.values);
  });
  check(cudaGetLastError(), "applying of a delta");
  check(cudaStreamSynchronize(stream),
        "applying of a delta");  // a pinned blob may be written to as soon as this returns
}

}  // namespace torch_mooncake::kv::cuda
