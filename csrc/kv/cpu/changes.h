// Which elements of two arrays differ.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_mooncake::kv {

// Bits that changes_*() may write behind the positions that it finds.
inline constexpr int64_t kChangesSlack = 32;

// Positions, from `first` on, of those of n elements (first + n <= 4096) that differ; how many. All paths find the
// same.
using FindChanges = int64_t (*)(const std::byte* a, const std::byte* b, int64_t n, uint16_t first, uint16_t* positions);

FindChanges find_changes_portable(int64_t element_nbytes);
#ifdef __x86_64__
FindChanges find_changes_avx2(int64_t element_nbytes);  // AVX2, BMI1
#endif

}  // namespace torch_mooncake::kv
