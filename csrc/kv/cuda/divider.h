// Division by a number that the host knows before the launch: one wide multiplication and a shift.
#pragma once

#include <cstdint>

#include "kv/host_device.h"

namespace torch_mooncake::kv::cuda {

// Exact for n < 2^31 and 1 <= divisor < 2^31: with 2^(s-1) < divisor <= 2^s and magic = ceil(2^(31+s) / divisor), the
// error of n * magic / 2^(31+s) is below n / 2^(31+s) < 2^-s <= 1 / divisor.
struct Divider {
  uint32_t divisor = 1;
  uint32_t magic = 1u << 31;
  uint32_t shift = 31;

  Divider() = default;
  explicit Divider(uint32_t d) : divisor(d) {
    uint32_t s = 0;
    while ((uint64_t{1} << s) < d) ++s;
    shift = 31 + s;
    magic = static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / d);
  }

  TM_HD uint32_t quotient(uint32_t n) const { return static_cast<uint32_t>((uint64_t{n} * magic) >> shift); }
};

inline constexpr int64_t kDividerLimit = int64_t{1} << 31;

}  // namespace torch_mooncake::kv::cuda
