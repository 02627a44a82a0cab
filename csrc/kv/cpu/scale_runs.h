// Tiles of runs of contiguous elements with a scale for each group: the largest, in 8 bits, and back. kv/quantize.h
// says which bits; all paths give the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv/quantize.h"

namespace torch_mooncake::kv {

// `rows` rows of `groups` runs of `n` elements (of NHD: tokens, heads, elements). Strides in bytes; of scales in
// floats.
struct Tile {
  int64_t rows = 1;
  int64_t groups = 1;
  int64_t n = 1;
  int64_t wide_row = 0, wide_group = 0;
  int64_t narrow_row = 0, narrow_group = 0;
  int64_t scale_group = 0;
};

// largest, inverse, scales: of the tile's first group.
struct ScaleRuns {
  // Raises largest to the bits of the largest |x| as float32, NaN and infinity included: from 0x7F800000 on.
  void (*amax)(const std::byte* wide, const Tile& tile, uint32_t* largest);
  // The same of the finite |x| alone.
  void (*amax_finite)(const std::byte* wide, const Tile& tile, uint32_t* largest);
  // Any x.
  void (*quantize)(const std::byte* wide, std::byte* narrow, const Tile& tile, const float* inverse);
  // All x finite, and `inverse` that of their scale: nothing is NaN and nothing saturates.
  void (*quantize_finite)(const std::byte* wide, std::byte* narrow, const Tile& tile, const float* inverse);
  void (*dequantize)(const std::byte* narrow, std::byte* wide, const Tile& tile, const float* scales);
};

// fn(wide offset, narrow offset, scale offset) of every run.
template <typename Fn>
__attribute__((always_inline)) inline void for_runs(const Tile& tile, const Fn& fn) {
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t g = 0; g < tile.groups; ++g)
      fn(r * tile.wide_row + g * tile.wide_group, r * tile.narrow_row + g * tile.narrow_group, g * tile.scale_group);
}

ScaleRuns scale_runs_portable(WideType wide, NarrowType narrow);
#ifdef __x86_64__
ScaleRuns scale_runs_avx2(WideType wide, NarrowType narrow);    // AVX2, F16C
ScaleRuns scale_runs_avx512(WideType wide, NarrowType narrow);  // AVX-512 F, BW, VL
#endif

}  // namespace torch_mooncake::kv
