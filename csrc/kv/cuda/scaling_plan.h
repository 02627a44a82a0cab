// The host's part of quantising on the GPU: groups, the dimensions inside them in their shortest form, and vectors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kv/cuda/scaling_index.h"

namespace torch_mooncake::kv::cuda {

// Elements that one thread reads or writes at a time where everything lies so that it can: 16 bytes of the wide side.
constexpr int full_vector(WideType type) { return static_cast<int>(16 / nbytes_of(type)); }

struct ScalingPlan {
  ScalingShape shape;
  int vector = 1;     // full_vector() or 1
  bool fits = false;  // fewer than 2^31 groups, of fewer than 2^31 elements each
};

inline ScalingPlan plan_scaling(const PageScaling& call) {
  auto divider = [](int64_t size) { return Divider(static_cast<uint32_t>(std::max<int64_t>(size, 1))); };
  struct Dim {
    int64_t size, wide, narrow, scale;
  };
  ScalingPlan plan;
  ScalingShape& shape = plan.shape;
  Dim inner[kMaxQuantizeDims];
  int num_inner = 0;
  int64_t groups = 1, elements = 1;
  uint64_t bits = 0;  // of everything that has to be a multiple of the vector, in elements
  for (int d = 0; d < call.num_dims; ++d) {
    const QuantizeDim& dim = call.dims[d];
    if (dim.size == 1) continue;
    if (dim.size >= kDividerLimit) return plan;
    if (dim.scale_stride != 0) {
      groups *= dim.size;
      shape.outer[shape.num_outer++] = {divider(dim.size), dim.wide_stride, dim.narrow_stride, dim.scale_stride};
      bits |= static_cast<uint64_t>(dim.wide_stride) | static_cast<uint64_t>(dim.narrow_stride);
      if (groups >= kDividerLimit) return plan;
    } else {
      elements *= dim.size;
      inner[num_inner++] = {dim.size, dim.wide_stride, dim.narrow_stride, 0};
      if (elements >= kDividerLimit) return plan;
    }
  }
  // In the order of the wide side, which has more bytes; then neighbours in memory merge.
  std::stable_sort(inner, inner + num_inner,
                   [](const Dim& a, const Dim& b) { return std::abs(a.wide) > std::abs(b.wide); });
  int merged = 0;
  for (int d = 0; d < num_inner; ++d) {
    if (merged > 0 && inner[merged - 1].wide == inner[d].wide * inner[d].size &&
        inner[merged - 1].narrow == inner[d].narrow * inner[d].size) {
      inner[merged - 1] = {inner[merged - 1].size * inner[d].size, inner[d].wide, inner[d].narrow, 0};
    } else {
      inner[merged++] = inner[d];
    }
  }
  if (merged == 0) inner[merged++] = {1, 1, 1, 0};
  Dim& last = inner[merged - 1];
  for (int d = 0; d + 1 < merged; ++d) bits |= static_cast<uint64_t>(inner[d].wide | inner[d].narrow);
  bits |= static_cast<uint64_t>(last.size) | reinterpret_cast<uintptr_t>(call.narrow) |
          reinterpret_cast<uintptr_t>(call.wide) / static_cast<uint64_t>(nbytes_of(call.wide_type));
  const int full = full_vector(call.wide_type);
  if (last.wide == 1 && last.narrow == 1 && bits % full == 0) plan.vector = full;
  last.size /= plan.vector;
  last.wide *= plan.vector;
  last.narrow *= plan.vector;

  shape.num_inner = merged;
  for (int d = 0; d < merged; ++d) shape.inner[d] = {divider(inner[d].size), inner[d].wide, inner[d].narrow, 0};
  shape.wide = call.wide;
  shape.narrow = call.narrow;
  shape.scales = call.scales;
  shape.groups = static_cast<uint32_t>(groups);
  shape.vectors = static_cast<uint32_t>(elements / plan.vector);
  shape.team = shape.vectors <= 32 * kHeld ? 32 : kScalingThreads;
  plan.fits = true;
  return plan;
}

}  // namespace torch_mooncake::kv::cuda
