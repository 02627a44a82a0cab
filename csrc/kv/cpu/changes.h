// Which elements of two arrays differ.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_mooncake::kv {

// Positions that find_changes_*() may write behind those that it finds.
inline constexpr int64_t kChangesSlack = 32;

// Positions, from `first` on, of those of n elements (first + n <= 4096) that differ; how many. All paths find the
// same.
using FindChanges = int64_t (*)(const std::byte* a, const std::byte* b, int64_t n, uint16_t first, uint16_t* positions);

FindChanges find_changes_portable(int64_t element_nbytes);
#ifdef __x86_64__
FindChanges find_changes_avx2(int64_t element_nbytes);    // AVX2, BMI1
FindChanges find_changes_avx512(int64_t element_nbytes);  // AVX-512 F, BW, VL, DQ, VBMI2
inline bool has_changes_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vbmi2");
}
#endif

}  // namespace torch_mooncake::kv
