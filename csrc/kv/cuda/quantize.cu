// Quantising and dequantising pages on the GPU: one launch. What a thread does: scaling_index.h.
#include "kv/cuda/launch.h"
#include "kv/cuda/scaling_plan.h"

namespace torch_mooncake::kv::cuda {
namespace {

// The largest value of a team's threads, for each of them.
__device__ uint32_t team_max(uint32_t value, uint32_t team) {
  value = __reduce_max_sync(0xFFFFFFFFu, value);
  if (team == 32) return value;
  __shared__ uint32_t of_warp[kScalingThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kScalingThreads / 32; ++w) value = max(value, of_warp[w]);
  __syncthreads();
  return value;
}

template <typename Kind>
__global__ void __launch_bounds__(kScalingThreads, 8) quantize_kernel(const __grid_constant__ ScalingShape shape) {
  const uint32_t teams = kScalingThreads / shape.team, lane = threadIdx.x % shape.team;
  for (uint32_t g = blockIdx.x * teams + threadIdx.x / shape.team; g < shape.groups; g += gridDim.x * teams) {
    typename Kind::WideVector held[kHeld];
    const Group group = group_at(shape, g);
    const uint32_t amax = team_max(Kind::search(shape, group, lane, held), shape.team);
    Kind::write(shape, group, lane, held, amax);
  }
}

template <typename Kind>
__global__ void __launch_bounds__(kScalingThreads, 8) dequantize_kernel(const __grid_constant__ ScalingShape shape) {
  const uint32_t teams = kScalingThreads / shape.team, lane = threadIdx.x % shape.team;
  for (uint32_t g = blockIdx.x * teams + threadIdx.x / shape.team; g < shape.groups; g += gridDim.x * teams)
    Kind::restore(shape, group_at(shape, g), lane);
}

template <auto kKernel>
void launch(const ScalingShape& shape, cudaStream_t stream) {
  const uint32_t teams = kScalingThreads / shape.team;
  kKernel<<<grid_for<kKernel>((uint64_t{shape.groups} + teams - 1) / teams, kScalingThreads), kScalingThreads, 0,
            stream>>>(shape);
  check(cudaGetLastError(), "quantising of pages");
}

template <WideType kWide, NarrowType kNarrow, bool kQuantize>
void launch(const ScalingPlan& plan, cudaStream_t stream) {
  using Full = Scaling<kWide, kNarrow, full_vector(kWide)>;
  using Single = Scaling<kWide, kNarrow, 1>;
  if constexpr (kQuantize) {
    plan.vector > 1 ? launch<quantize_kernel<Full>>(plan.shape, stream)
                    : launch<quantize_kernel<Single>>(plan.shape, stream);
  } else {
    plan.vector > 1 ? launch<dequantize_kernel<Full>>(plan.shape, stream)
                    : launch<dequantize_kernel<Single>>(plan.shape, stream);
  }
}

template <WideType kWide, bool kQuantize>
void launch(const ScalingPlan& plan, NarrowType narrow, cudaStream_t stream) {
  narrow == NarrowType::int8 ? launch<kWide, NarrowType::int8, kQuantize>(plan, stream)
                             : launch<kWide, NarrowType::fp8_e4m3fn, kQuantize>(plan, stream);
}

template <bool kQuantize>
void scale_pages(const PageScaling& call, const CudaRun& run) {
  const ScalingPlan plan = plan_scaling(call);
  if (!plan.fits) refuse(Code::unsupported, "pages with 2^31 or more scales, or elements a scale");
  if (plan.shape.groups == 0 || (!kQuantize && plan.shape.vectors == 0)) return;
  cudaStream_t stream = stream_of(run);
  switch (call.wide_type) {
    case WideType::fp32:
      return launch<WideType::fp32, kQuantize>(plan, call.narrow_type, stream);
    case WideType::fp16:
      return launch<WideType::fp16, kQuantize>(plan, call.narrow_type, stream);
    case WideType::bf16:
      return launch<WideType::bf16, kQuantize>(plan, call.narrow_type, stream);
  }
}

}  // namespace

void quantize_pages(const PageScaling& call, const CudaRun& run) { scale_pages<true>(call, run); }
void dequantize_pages(const PageScaling& call, const CudaRun& run) { scale_pages<false>(call, run); }

}  // namespace torch_mooncake::kv::cuda
