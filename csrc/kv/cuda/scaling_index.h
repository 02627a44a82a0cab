// What one thread of the quantising kernels does, as code that also runs on the CPU, where its arithmetic is tested.
//
// A team of threads (a warp, or the block) has a group of elements with one scale, in vectors of kVector neighbours:
// vector v of the group goes to lane v % team. The first kHeld vectors of each lane stay in registers between the
// search for the largest and the writing; those beyond are read a second time.
#pragma once

#include <cstdint>

#include "kv/cuda/copy_index.h"
#include "kv/cuda/numbers.h"

namespace torch_mooncake::kv::cuda {

inline constexpr int kScalingThreads = 128;
inline constexpr int kHeld = 4;

// Strides in elements.
struct ScalingDim {
  Divider size;
  int64_t wide_stride, narrow_stride, scale_stride;
};

struct ScalingShape {
  std::byte* wide = nullptr;
  std::byte* narrow = nullptr;
  float* scales = nullptr;
  uint32_t groups = 0;
  uint32_t vectors = 0;  // a group
  uint32_t team = 32;    // threads a group: 32 or kScalingThreads
  int num_outer = 0;     // dimensions over groups, outermost first
  int num_inner = 0;     // inside a group; the last one counts vectors
  ScalingDim outer[kMaxQuantizeDims];
  ScalingDim inner[kMaxQuantizeDims];
};

struct Group {
  int64_t wide, narrow;  // elements
  float* scale;
};

TM_HD Group group_at(const ScalingShape& shape, uint32_t group) {
  Group at{0, 0, shape.scales};
  uint32_t rest = group;
  for (int d = shape.num_outer - 1; d >= 0; --d) {
    const ScalingDim& dim = shape.outer[d];
    const uint32_t outer = dim.size.quotient(rest), i = rest - outer * dim.size.divisor;
    at.wide += i * dim.wide_stride;
    at.narrow += i * dim.narrow_stride;
    at.scale += i * dim.scale_stride;
    rest = outer;
  }
  return at;
}

struct VectorAt {
  int64_t wide, narrow;  // elements
};

TM_HD VectorAt vector_at(const ScalingShape& shape, const Group& group, uint32_t vector) {
  VectorAt at{group.wide, group.narrow};
  uint32_t rest = vector;
  for (int d = shape.num_inner - 1; d >= 0; --d) {
    const ScalingDim& dim = shape.inner[d];
    const uint32_t outer = d == 0 ? 0 : dim.size.quotient(rest), i = rest - outer * dim.size.divisor;
    at.wide += i * dim.wide_stride;
    at.narrow += i * dim.narrow_stride;
    rest = outer;
  }
  return at;
}

// kVector elements of kElementNbytes, packed into words.
template <int kElementNbytes, int kVector>
struct Packed {
  static constexpr int kNbytes = kElementNbytes * kVector;
  static constexpr int kWords = (kNbytes + 3) / 4;
  uint32_t word[kWords];

  TM_HD uint32_t get(int i) const {
    if constexpr (kElementNbytes == 4) return word[i];
    constexpr int kPerWord = 4 / kElementNbytes;
    return word[i / kPerWord] >> (i % kPerWord * kElementNbytes * 8) & ((1u << kElementNbytes * 8 % 32) - 1u);
  }
  TM_HD void put(int i, uint32_t element) {  // in order, from 0
    if constexpr (kElementNbytes == 4) {
      word[i] = element;
    } else {
      constexpr int kPerWord = 4 / kElementNbytes;
      const uint32_t shifted = element << (i % kPerWord * kElementNbytes * 8);
      word[i / kPerWord] = i % kPerWord == 0 ? shifted : word[i / kPerWord] | shifted;
    }
  }
  TM_HD void load(const std::byte* from) {
    using Word = typename AccessWord<kNbytes>::type;
    const Word loaded = load_once<Word>(from);
    if constexpr (kNbytes < 4) word[0] = 0;
    memcpy(word, &loaded, kNbytes);
  }
  TM_HD void save(std::byte* to) const {
    using Word = typename AccessWord<kNbytes>::type;
    Word out;
    memcpy(&out, word, kNbytes);
    store(to, out);
  }
};

template <WideType kWide, NarrowType kNarrow, int kVector>
struct Scaling {
  static constexpr int64_t kWideNbytes = nbytes_of(kWide);
  using WideVector = Packed<static_cast<int>(kWideNbytes), kVector>;
  using NarrowVector = Packed<1, kVector>;

  TM_HD static uint32_t largest(const WideVector& vector) {
    uint32_t most = 0;
    TM_UNROLL
    for (int i = 0; i < kVector; ++i) {
      const uint32_t magnitude = finite_magnitude(widen<kWide>(vector.get(i)));
      most = magnitude > most ? magnitude : most;
    }
    return most;
  }

  // What this lane finds, as finite_magnitude(); `held` has its first kHeld vectors.
  TM_HD static uint32_t search(const ScalingShape& shape, const Group& group, uint32_t lane,
                               WideVector (&held)[kHeld]) {
    uint32_t most = 0;
    TM_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      const uint32_t v = lane + k * shape.team;
      if (v < shape.vectors) held[k].load(shape.wide + vector_at(shape, group, v).wide * kWideNbytes);
    }
    TM_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (lane + k * shape.team >= shape.vectors) break;
      const uint32_t found = largest(held[k]);
      most = found > most ? found : most;
    }
    for (uint32_t v = lane + kHeld * shape.team; v < shape.vectors; v += shape.team) {
      WideVector vector;
      vector.load(shape.wide + vector_at(shape, group, v).wide * kWideNbytes);
      const uint32_t found = largest(vector);
      most = found > most ? found : most;
    }
    return most;
  }

  TM_HD static void write_one(const ScalingShape& shape, int64_t narrow_at, const WideVector& vector, float inverse) {
    NarrowVector out;
    TM_UNROLL
    for (int i = 0; i < kVector; ++i) out.put(i, quantized<kNarrow>(widen<kWide>(vector.get(i)), inverse));
    out.save(shape.narrow + narrow_at);
  }

  // `amax`: the most that any lane of the team found.
  TM_HD static void write(const ScalingShape& shape, const Group& group, uint32_t lane, const WideVector (&held)[kHeld],
                          uint32_t amax) {
    const float scale = scale_of(amax, kNarrow), inverse = over(1.0f, scale);
    if (lane == 0) *group.scale = scale;
    TM_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      const uint32_t v = lane + k * shape.team;
      if (v < shape.vectors) write_one(shape, vector_at(shape, group, v).narrow, held[k], inverse);
    }
    for (uint32_t v = lane + kHeld * shape.team; v < shape.vectors; v += shape.team) {
      const VectorAt at = vector_at(shape, group, v);
      WideVector vector;
      vector.load(shape.wide + at.wide * kWideNbytes);
      write_one(shape, at.narrow, vector, inverse);
    }
  }

  TM_HD static void restore(const ScalingShape& shape, const Group& group, uint32_t lane) {
    const float scale = *group.scale;
    for (uint32_t first = lane; first < shape.vectors; first += kHeld * shape.team) {
      NarrowVector held[kHeld];
      int64_t wide_at[kHeld];
      TM_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        const uint32_t v = first + k * shape.team;
        if (v >= shape.vectors) break;
        const VectorAt at = vector_at(shape, group, v);
        held[k].load(shape.narrow + at.narrow);
        wide_at[k] = at.wide;
      }
      TM_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (first + k * shape.team >= shape.vectors) break;
        WideVector out;
        TM_UNROLL
        for (int i = 0; i < kVector; ++i) out.put(i, narrow_to<kWide>(dequantized<kNarrow>(held[k].get(i), scale)));
        out.save(shape.wide + wide_at[k] * kWideNbytes);
      }
    }
  }
};

}  // namespace torch_mooncake::kv::cuda
