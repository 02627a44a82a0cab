// The tokens of one segment of a delta (kv/delta.h), written and read: code that the CPU and the GPU share.
#pragma once

#include <cstdint>
#include <cstring>

#include "kv/host_device.h"

namespace torch_mooncake::kv {

inline constexpr uint32_t kDeltaFarGap = 254, kDeltaRun = 255;  // tokens with a uint16 behind them
inline constexpr uint32_t kDeltaShortestRun = 4;
// Tokens never take more than this: a byte for each change, two more for each of the few gaps of 254 and over.
inline constexpr int64_t kDeltaMaxTokens = 4096 + 64;

// Makes the tokens of changed elements that are told in order; counts them alone with kWrite = false.
template <bool kWrite>
class DeltaTokens {
 public:
  TM_HD explicit DeltaTokens(uint8_t* to) : to_(to) {}

  // `position` within the segment.
  TM_HD void change(uint32_t position) {
    const uint32_t gap = position - next_;
    next_ = position + 1;
    if (gap == 0) {
      ++run_;
      return;
    }
    flush();
    if (gap < kDeltaFarGap) {
      put(static_cast<uint8_t>(gap));
    } else {
      put(kDeltaFarGap, gap);
    }
  }
  // After the last one: how many bytes there are.
  TM_HD uint32_t finish() {
    flush();
    return nbytes_;
  }

 private:
  TM_HD void flush() {
    if (run_ >= kDeltaShortestRun) {
      put(kDeltaRun, run_);
    } else {
      for (uint32_t i = 0; i < run_; ++i) put(0);
    }
    run_ = 0;
  }
  TM_HD void put(uint8_t byte) {
    if constexpr (kWrite) to_[nbytes_] = byte;
    ++nbytes_;
  }
  TM_HD void put(uint32_t token, uint32_t n) {
    put(static_cast<uint8_t>(token));
    put(static_cast<uint8_t>(n & 0xFF));
    put(static_cast<uint8_t>(n >> 8));
  }

  uint8_t* to_;
  uint32_t nbytes_ = 0, next_ = 0, run_ = 0;
};

// fn(first position, count) of each stretch of changed elements that the tokens tell of. They have to be good.
template <typename Fn>
TM_HD void for_delta_changes(const uint8_t* tokens, int64_t nbytes, const Fn& fn) {
  uint32_t position = 0;
  for (int64_t i = 0; i < nbytes;) {
    const uint32_t token = tokens[i];
    if (token < kDeltaFarGap) {
      position += token;
      fn(position, 1u);
      position += 1;
      i += 1;
      continue;
    }
    const uint32_t n = tokens[i + 1] | static_cast<uint32_t>(tokens[i + 2]) << 8;
    i += 3;
    if (token == kDeltaFarGap) {
      position += n;
      fn(position, 1u);
      position += 1;
    } else {
      fn(position, n);
      position += n;
    }
  }
}

// Whether the tokens tell of `changed` changes within `elements` elements.
inline bool delta_tokens_good(const uint8_t* tokens, int64_t nbytes, int64_t changed, int64_t elements) {
  int64_t position = 0, found = 0;
  for (int64_t i = 0; i < nbytes;) {
    const uint32_t token = tokens[i];
    if (token < kDeltaFarGap) {
      position += token + 1;
      found += 1;
      i += 1;
      continue;
    }
    if (i + 3 > nbytes) return false;
    const int64_t n = tokens[i + 1] | static_cast<int64_t>(tokens[i + 2]) << 8;
    if (n < (token == kDeltaFarGap ? kDeltaFarGap : kDeltaShortestRun)) return false;
    position += token == kDeltaFarGap ? n + 1 : n;
    found += token == kDeltaFarGap ? 1 : n;
    i += 3;
  }
  return position <= elements && found == changed;
}

// An element, as bits.
template <int kNbytes>
struct DeltaElement;
template <>
struct DeltaElement<1> {
  using type = uint8_t;
};
template <>
struct DeltaElement<2> {
  using type = uint16_t;
};
template <>
struct DeltaElement<4> {
  using type = uint32_t;
};
template <>
struct DeltaElement<8> {
  using type = uint64_t;
};

template <int kNbytes>
TM_HD auto delta_element(const std::byte* from, int64_t i) {
  typename DeltaElement<kNbytes>::type value;
  memcpy(&value, from + i * kNbytes, kNbytes);
  return value;
}

// fn.operator()<size>() for an element size that there is.
template <typename Fn>
auto for_delta_size(int64_t element_nbytes, const Fn& fn) {
  switch (element_nbytes) {
    case 1:
      return fn.template operator()<1>();
    case 2:
      return fn.template operator()<2>();
    case 4:
      return fn.template operator()<4>();
    default:
      return fn.template operator()<8>();
  }
}

}  // namespace torch_mooncake::kv
