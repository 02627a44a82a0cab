// The CUDA kernels' work done by the CPU, thread after thread and block after block: what copy_index.h,
// scaling_index.h, hash_index.h and delta_index.h compute, launched as csrc/kv/cuda/*.cu do.
#pragma once

#include <algorithm>
#include <vector>

#include "kv/cuda/copy_plan.h"
#include "kv/cuda/delta_index.h"
#include "kv/cuda/hash_index.h"
#include "kv/cuda/plugin.h"
#include "kv/cuda/scaling_plan.h"

namespace torch_mooncake::kv {

template <int kNbytes, bool kStrided>
void run_grid(const PageCopy& copy, uint32_t blocks) {
  const auto total = static_cast<int64_t>(copy.regions.size());
  const int64_t at_once = cuda::regions_per_launch(copy, cuda::SmallCopyTable::kCapacity);
  for (int64_t first = 0; first < total; first += at_once) {
    const int64_t regions = std::min(at_once, total - first);
    cuda::SmallCopyTable table;
    std::copy_n(copy.regions.data() + first, regions, table.region);
    cuda::CopyShape shape = cuda::plan_copy(copy, kNbytes, regions);
    shape.src_ids = copy.src_ids.data;
    shape.dst_ids = copy.dst_ids.data;
    shape.set_grid(blocks);
    for (uint32_t block = 0; block < blocks; ++block)
      for (uint32_t thread = 0; thread < cuda::kCopyThreads; ++thread)
        cuda::copy_tiles<kNbytes, kStrided>(table, shape, block, blocks, thread);
  }
}

template <int kNbytes>
void run_width(const PageCopy& copy, uint32_t blocks) {
  copy.page.num_dims > 0 ? run_grid<kNbytes, true>(copy, blocks) : run_grid<kNbytes, false>(copy, blocks);
}

// In accesses of `nbytes`, by `blocks` blocks.
inline void copy_as_the_gpu_does(const PageCopy& copy, int nbytes, uint32_t blocks) {
  switch (nbytes) {
    case 16:
      return run_width<16>(copy, blocks);
    case 8:
      return run_width<8>(copy, blocks);
    case 4:
      return run_width<4>(copy, blocks);
    case 2:
      return run_width<2>(copy, blocks);
    default:
      return run_width<1>(copy, blocks);
  }
}

template <typename Kind>
void run_kernel(const cuda::ScalingShape& shape, bool quantize) {
  for (uint32_t g = 0; g < shape.groups; ++g) {
    const cuda::Group group = cuda::group_at(shape, g);
    std::vector<typename Kind::WideVector[cuda::kHeld]> held(shape.team);
    uint32_t amax = 0;
    for (uint32_t lane = 0; quantize && lane < shape.team; ++lane)
      amax = std::max(amax, Kind::search(shape, group, lane, held[lane]));
    for (uint32_t lane = 0; lane < shape.team; ++lane)
      quantize ? Kind::write(shape, group, lane, held[lane], amax) : Kind::restore(shape, group, lane);
  }
}

template <WideType kWide, NarrowType kNarrow>
void run_types(const cuda::ScalingPlan& plan, bool quantize) {
  if (plan.vector > 1)
    run_kernel<cuda::Scaling<kWide, kNarrow, cuda::full_vector(kWide)>>(plan.shape, quantize);
  else
    run_kernel<cuda::Scaling<kWide, kNarrow, 1>>(plan.shape, quantize);
}

inline void scale_as_the_gpu_does(const PageScaling& call, bool quantize) {
  const cuda::ScalingPlan plan = cuda::plan_scaling(call);
  const bool int8 = call.narrow_type == NarrowType::int8;
  auto run = [&]<WideType kWide>() {
    int8 ? run_types<kWide, NarrowType::int8>(plan, quantize)
         : run_types<kWide, NarrowType::fp8_e4m3fn>(plan, quantize);
  };
  switch (call.wide_type) {
    case WideType::fp32:
      return run.operator()<WideType::fp32>();
    case WideType::fp16:
      return run.operator()<WideType::fp16>();
    case WideType::bf16:
      return run.operator()<WideType::bf16>();
  }
}

inline void delta_count_as_the_gpu_does(const DeltaOnDevice& call) {
  const auto arrays = cuda::delta_arrays(call.base, call.fresh, call.elements);
  for_delta_size(call.element_nbytes, [&]<int kNbytes>() {
    for (int64_t s = 0; s < delta_segments(call.elements); ++s)
      call.directory[s] = cuda::DeltaKernel<kNbytes>::count(arrays, s);
  });
}

inline void delta_write_as_the_gpu_does(const DeltaOnDevice& call) {
  const auto arrays = cuda::delta_arrays(call.base, call.fresh, call.elements);
  for_delta_size(call.element_nbytes, [&]<int kNbytes>() {
    for (int64_t s = 0; s < delta_segments(call.elements); ++s)
      cuda::DeltaKernel<kNbytes>::write(arrays, s, call.segments[s], call.tokens, call.values);
  });
}

inline void delta_apply_as_the_gpu_does(const DeltaOnDevice& call) {
  for_delta_size(call.element_nbytes, [&]<int kNbytes>() {
    for (int64_t s = 0; s < delta_segments(call.elements); ++s)
      cuda::DeltaKernel<kNbytes>::apply(call.target, s, call.segments[s], call.segments[s + 1], call.tokens,
                                        call.values);
  });
}

inline void hash_as_the_gpu_does(const PageHashing& call) {
  uint8_t* hashes = call.hashes;
  for (int64_t p = 0; p < call.prompts; ++p) {
    const int64_t tokens = call.offsets[p + 1] - call.offsets[p];
    cuda::hash_prompt(call, call.roots + p * call.root_stride, call.offsets[p], tokens, hashes);
    hashes += tokens / call.page_size * kPageHashNbytes;
  }
}

}  // namespace torch_mooncake::kv
