#include "kv/quantize.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "kv/cpu/scale_runs.h"

namespace torch_mooncake::kv {
namespace {

constexpr int64_t kGrainElements = 64 << 10;  // what one thread must have to do to be worth its wake-up

ScaleRuns scale_runs(WideType wide, NarrowType narrow) {
#ifdef __x86_64__
  static const bool avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  static const bool avx2 = __builtin_cpu_supports("avx2");  // F16C is older: whoever has AVX2 has it
  if (avx512) return scale_runs_avx512(wide, narrow);
  if (avx2) return scale_runs_avx2(wide, narrow);
#endif
  return scale_runs_portable(wide, narrow);
}

// Where something of a block lies: elements from the tensors' starts, and the index of its group.
struct At {
  int64_t wide = 0;
  int64_t narrow = 0;
  int64_t group = 0;

  void move(const QuantizeDim& dim, int64_t steps) {
    wide += steps * dim.wide_stride;
    narrow += steps * dim.narrow_stride;
    group += steps * dim.scale_stride;
  }
};

// The walk over blocks, and over the runs of a block: as long as both sides are dense and the group is one.
class Walk {
 public:
  explicit Walk(const PageScaling& call) : call_(call), inner_(call.dims + call.block_dims, call.dims + call.num_dims) {
    std::stable_sort(inner_.begin(), inner_.end(), [](const QuantizeDim& a, const QuantizeDim& b) {
      return a.wide_stride > b.wide_stride;  // in the order of the wide side: it has more bytes
    });
    if (!inner_.empty()) {
      const QuantizeDim& last = inner_.back();
      if (last.wide_stride == 1 && last.narrow_stride == 1 && last.scale_stride == 0) {
        run_ = last.size;
        inner_.pop_back();
      }
    }
  }

  int64_t run() const { return run_; }
  int64_t grain() const { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, call_.block_elements())); }

  At block(int64_t index) const {
    At at;
    for (int d = call_.block_dims - 1; d >= 0; --d) {
      at.move(call_.dims[d], index % call_.dims[d].size);
      index /= call_.dims[d].size;
    }
    return at;
  }

  // fn(at) for every run of the block.
  template <typename Fn>
  void runs(At block, const Fn& fn) const {
    walk(0, block, fn);
  }

 private:
  template <typename Fn>
  void walk(size_t depth, At at, const Fn& fn) const {
    if (depth == inner_.size()) return fn(at);
    for (int64_t i = 0; i < inner_[depth].size; ++i, at.move(inner_[depth], 1)) walk(depth + 1, at, fn);
  }

  const PageScaling& call_;
  std::vector<QuantizeDim> inner_;
  int64_t run_ = 1;
};

Status check(const PageScaling& call) {
  if (call.num_dims < 0 || call.num_dims > kMaxQuantizeDims || call.block_dims < 0 || call.block_dims > call.num_dims)
    return {Code::invalid_argument, "no pages have this shape"};
  return {};
}

}  // namespace

Status quantize_pages(const PageScaling& call, const ParallelFor& parallel_for) {
  TM_TRY(check(call));
  const ScaleRuns kernel = scale_runs(call.wide_type, call.narrow_type);
  const Walk walk(call);
  const float largest = largest_of(call.narrow_type);
  const int64_t wide_nbytes = nbytes_of(call.wide_type);
  parallel_for(call.blocks(), walk.grain(), [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> amax(static_cast<size_t>(call.groups_per_block));
    std::vector<float> inverse(amax.size());
    for (int64_t b = begin; b < end; ++b) {
      const At block = walk.block(b);
      std::fill(amax.begin(), amax.end(), 0);
      walk.runs(block, [&](const At& at) {
        uint32_t& group = amax[at.group - block.group];
        group = std::max(group, kernel.amax(call.wide + at.wide * wide_nbytes, walk.run()));
      });
      for (size_t g = 0; g < amax.size(); ++g) {
        const float scale = std::max(std::bit_cast<float>(amax[g]) / largest, kScaleFloor);
        call.scales[block.group + static_cast<int64_t>(g)] = scale;
        inverse[g] = 1.0f / scale;
      }
      walk.runs(block, [&](const At& at) {
        kernel.quantize(call.wide + at.wide * wide_nbytes, call.narrow + at.narrow, walk.run(),
                        inverse[at.group - block.group]);
      });
    }
  });
  return {};
}

Status dequantize_pages(const PageScaling& call, const ParallelFor& parallel_for) {
  TM_TRY(check(call));
  const ScaleRuns kernel = scale_runs(call.wide_type, call.narrow_type);
  const Walk walk(call);
  const int64_t wide_nbytes = nbytes_of(call.wide_type);
  parallel_for(call.blocks(), walk.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      walk.runs(walk.block(b), [&](const At& at) {
        kernel.dequantize(call.narrow + at.narrow, call.wide + at.wide * wide_nbytes, walk.run(),
                          call.scales[at.group]);
      });
  });
  return {};
}

}  // namespace torch_mooncake::kv
