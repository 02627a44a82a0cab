// What one thread of the delta kernels does, as code that also runs on the CPU, where its arithmetic is tested: a
// segment (kv/delta.h).
#pragma once

#include <cstdint>

#include "kv/cuda/copy_index.h"
#include "kv/delta.h"
#include "kv/delta_segment.h"

namespace torch_mooncake::kv::cuda {

struct DeltaArrays {
  const std::byte* base = nullptr;
  const std::byte* fresh = nullptr;
  int64_t elements = 0;
  bool vectors = false;  // both lie at multiples of 16 bytes

  TM_HD int64_t in_segment(int64_t segment) const {
    const int64_t left = elements - segment * kDeltaSegment;
    return left < kDeltaSegment ? left : kDeltaSegment;
  }
};

inline DeltaArrays delta_arrays(const std::byte* base, const std::byte* fresh, int64_t elements) {
  const auto bits = reinterpret_cast<uintptr_t>(base) | reinterpret_cast<uintptr_t>(fresh);
  return {base, fresh, elements, bits % 16 == 0};
}

template <int kNbytes>
struct DeltaKernel {
  // fn(position) of each element of the segment that differs.
  template <typename Fn>
  TM_HD static void for_differences(const DeltaArrays& arrays, int64_t segment, const Fn& fn) {
    constexpr int kLanes = 16 / kNbytes;
    const int64_t first = segment * kDeltaSegment * kNbytes, n = arrays.in_segment(segment);
    const std::byte *a = arrays.base + first, *b = arrays.fresh + first;
    int64_t i = 0;
    using Word = typename AccessWord<16>::type;
    for (; arrays.vectors && i + kLanes <= n; i += kLanes) {
      const Word x = load_once<Word>(a + i * kNbytes), y = load_once<Word>(b + i * kNbytes);
      uint32_t old_words[4], new_words[4];
      memcpy(old_words, &x, 16);
      memcpy(new_words, &y, 16);
      TM_UNROLL
      for (int w = 0; w < 4; ++w) {
        const uint32_t differ = old_words[w] ^ new_words[w];
        if (differ == 0 && kNbytes < 8) continue;
        if constexpr (kNbytes == 8) {
          if (w % 2 == 1 && ((old_words[w - 1] ^ new_words[w - 1]) | differ) != 0) fn(static_cast<uint32_t>(i + w / 2));
        } else {
          constexpr int kPerWord = 4 / kNbytes;
          TM_UNROLL
          for (int k = 0; k < kPerWord; ++k)
            if ((differ >> (k * kNbytes * 8 % 32) & (0xFFFFFFFFu >> (32 - kNbytes * 8))) != 0)
              fn(static_cast<uint32_t>(i + w * kPerWord + k));
        }
      }
    }
    for (; i < n; ++i)
      if (delta_element<kNbytes>(a, i) != delta_element<kNbytes>(b, i)) fn(static_cast<uint32_t>(i));
  }

  TM_HD static DeltaEntry count(const DeltaArrays& arrays, int64_t segment) {
    DeltaTokens<false> tokens(nullptr);
    uint32_t changed = 0;
    for_differences(arrays, segment, [&](uint32_t position) {
      tokens.change(position);
      ++changed;
    });
    return {static_cast<uint16_t>(changed), static_cast<uint16_t>(tokens.finish())};
  }

  // `tokens` and `values`: of all segments.
  TM_HD static void write(const DeltaArrays& arrays, int64_t segment, const DeltaSegment& at, uint8_t* tokens,
                          std::byte* values) {
    DeltaTokens<true> writer(tokens + at.token);
    const std::byte* fresh = arrays.fresh + segment * kDeltaSegment * kNbytes;
    std::byte* to = values + at.value * kNbytes;
    for_differences(arrays, segment, [&](uint32_t position) {
      writer.change(position);
      memcpy(to, fresh + int64_t{position} * kNbytes, kNbytes);
      to += kNbytes;
    });
    writer.finish();
  }

  TM_HD static void apply(std::byte* target, int64_t segment, const DeltaSegment& at, const DeltaSegment& next,
                          const uint8_t* tokens, const std::byte* values) {
    std::byte* origin = target + segment * kDeltaSegment * kNbytes;
    const std::byte* from = values + at.value * kNbytes;
    for_delta_changes(tokens + at.token, next.token - at.token, [&](uint32_t position, uint32_t n) {
      for (uint32_t i = 0; i < n; ++i) {
        const auto value = delta_element<kNbytes>(from, 0);
        memcpy(origin + int64_t{position + i} * kNbytes, &value, kNbytes);
        from += kNbytes;
      }
    });
  }
};

}  // namespace torch_mooncake::kv::cuda
