// How the kernels of this room get threads: the caller's runtime runs a body over a range.
#pragma once

#include <cstdint>
#include <functional>

#include "common/api.h"

namespace torch_mooncake::kv {

// Runs fn(begin, end) over [0, n) in chunks of at least `grain`, on as many threads as the caller's runtime likes.
using ParallelBody = std::function<void(int64_t begin, int64_t end)>;
using ParallelFor = std::function<void(int64_t n, int64_t grain, const ParallelBody& fn)>;
TM_API void serial_for(int64_t n, int64_t grain, const ParallelBody& fn);

}  // namespace torch_mooncake::kv
