#include "kv/quantize.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>
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

constexpr uint32_t kInfinity = 0x7F800000;  // as float32; NaN is above

// Where something of a block lies: bytes from the tensors' starts, and the index of its group.
struct At {
  int64_t wide = 0;
  int64_t narrow = 0;
  int64_t group = 0;
};

// The walk over blocks, and over the tiles of a block. A run goes on as long as both sides are dense and the scale is
// one; the innermost dimension with a scale and the innermost one without are the tile's.
class Walk {
 public:
  explicit Walk(const PageScaling& call) : call_(call), wide_nbytes_(nbytes_of(call.wide_type)) {
    outer_.assign(call.dims + call.block_dims, call.dims + call.num_dims);
    std::stable_sort(outer_.begin(), outer_.end(), [](const QuantizeDim& a, const QuantizeDim& b) {
      return a.wide_stride > b.wide_stride;  // in the order of the wide side: it has more bytes
    });
    if (!outer_.empty() && outer_.back().wide_stride == 1 && outer_.back().narrow_stride == 1 &&
        outer_.back().scale_stride == 0) {
      tile_.n = outer_.back().size;
      outer_.pop_back();
    }
    if (auto groups = take([](const QuantizeDim& dim) { return dim.scale_stride != 0; })) {
      tile_.groups = groups->size;
      tile_.wide_group = groups->wide_stride * wide_nbytes_;
      tile_.narrow_group = groups->narrow_stride;
      tile_.scale_group = groups->scale_stride;
    }
    if (auto rows = take([](const QuantizeDim& dim) { return dim.scale_stride == 0; })) {
      tile_.rows = rows->size;
      tile_.wide_row = rows->wide_stride * wide_nbytes_;
      tile_.narrow_row = rows->narrow_stride;
    }
  }

  const Tile& tile() const { return tile_; }
  int64_t grain() const { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, call_.block_elements())); }

  At block(int64_t index) const {
    At at;
    for (int d = call_.block_dims - 1; d >= 0; --d) {
      at = moved(at, call_.dims[d], index % call_.dims[d].size);
      index /= call_.dims[d].size;
    }
    return at;
  }

  // fn(at) for all tiles of the block.
  template <typename Fn>
  void for_tiles(At block, const Fn& fn) const {
    walk(0, block, fn);
  }

 private:
  std::optional<QuantizeDim> take(bool (*wanted)(const QuantizeDim&)) {
    auto found = std::find_if(outer_.rbegin(), outer_.rend(), wanted);
    if (found == outer_.rend()) return std::nullopt;
    const QuantizeDim dim = *found;
    outer_.erase(std::next(found).base());
    return dim;
  }
  At moved(At at, const QuantizeDim& dim, int64_t steps) const {
    return {at.wide + steps * dim.wide_stride * wide_nbytes_, at.narrow + steps * dim.narrow_stride,
            at.group + steps * dim.scale_stride};
  }
  template <typename Fn>
  void walk(size_t depth, At at, const Fn& fn) const {
    if (depth == outer_.size()) return fn(at);
    for (int64_t i = 0; i < outer_[depth].size; ++i, at = moved(at, outer_[depth], 1)) walk(depth + 1, at, fn);
  }

  const PageScaling& call_;
  int64_t wide_nbytes_;
  std::vector<QuantizeDim> outer_;
  Tile tile_;
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
  parallel_for(call.blocks(), walk.grain(), [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> amax(static_cast<size_t>(call.groups_per_block));
    std::vector<float> inverse(amax.size());
    for (int64_t b = begin; b < end; ++b) {
      const At block = walk.block(b);
      auto find_largest = [&](auto* of_tile) {
        std::fill(amax.begin(), amax.end(), 0);
        walk.for_tiles(block, [&](const At& at) {
          of_tile(call.wide + at.wide, walk.tile(), amax.data() + (at.group - block.group));
        });
      };
      find_largest(kernel.amax);
      const bool finite = std::all_of(amax.begin(), amax.end(), [](uint32_t bits) { return bits < kInfinity; });
      if (!finite) find_largest(kernel.amax_finite);
      for (size_t g = 0; g < amax.size(); ++g) {
        const float scale = std::max(std::bit_cast<float>(amax[g]) / largest, kScaleFloor);
        call.scales[block.group + static_cast<int64_t>(g)] = scale;
        inverse[g] = 1.0f / scale;
      }
      auto* quantize = finite ? kernel.quantize_finite : kernel.quantize;
      walk.for_tiles(block, [&](const At& at) {
        quantize(call.wide + at.wide, call.narrow + at.narrow, walk.tile(), inverse.data() + (at.group - block.group));
      });
    }
  });
  return {};
}

Status dequantize_pages(const PageScaling& call, const ParallelFor& parallel_for) {
  TM_TRY(check(call));
  const ScaleRuns kernel = scale_runs(call.wide_type, call.narrow_type);
  const Walk walk(call);
  parallel_for(call.blocks(), walk.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      walk.for_tiles(walk.block(b), [&](const At& at) {
        kernel.dequantize(call.narrow + at.narrow, call.wide + at.wide, walk.tile(), call.scales + at.group);
      });
  });
  return {};
}

}  // namespace torch_mooncake::kv
