// Inputs of ranks and their sums, for tests of collectives.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_mooncake::coll {

// Element i of rank r's input; small integers, so that sums are exact.
inline float value(int rank, uint64_t i) { return static_cast<float>((i * 3 + rank * 17) % 101); }
inline std::vector<float> input(int rank, uint64_t n) {
  std::vector<float> out(n);
  for (uint64_t i = 0; i < n; ++i) out[i] = value(rank, i);
  return out;
}
inline std::vector<float> sum(int ranks, uint64_t n) {
  std::vector<float> out(n);
  for (int r = 0; r < ranks; ++r)
    for (uint64_t i = 0; i < n; ++i) out[i] += value(r, i);
  return out;
}

}  // namespace torch_mooncake::coll
