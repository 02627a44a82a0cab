// How much memory this process may use: the host's and its cgroup's numbers, whichever is less.
#pragma once

#include <cstdint>

#include "common/api.h"

namespace torch_mooncake {

// Total memory of the host, or the least memory.max (v2) / limit_in_bytes (v1) of our cgroup and its parents.
TM_API uint64_t memory_limit();
// What could be allocated now: MemAvailable, or what the cgroups have left (their page cache counted as free).
TM_API uint64_t memory_available();
TM_API uint64_t page_size();

}  // namespace torch_mooncake
