// What differs between the versions of torch that are supported (2.11 to 2.15), in one place. Only for what is built
// against the installed torch (_c10d); _ops stands on the stable ABI and needs none of it.
#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#define TM_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

static_assert(TM_TORCH_AT_LEAST(2, 11), "torch_mooncake needs torch 2.11 or newer");

namespace torch_mooncake::dist::compat {

// The factor of a PREMUL_SUM.
#if TM_TORCH_AT_LEAST(2, 13)
using PreMulSumSupplement = c10d::PreMulSumSupplement;
#else
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#endif

// What a Work of reduce_scatter_tensor_coalesced says it is.
#if TM_TORCH_AT_LEAST(2, 12)
inline constexpr auto kReduceScatterTensorCoalesced = c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
inline constexpr auto kReduceScatterTensorCoalesced = c10d::OpType::COALESCED;
#endif

}  // namespace torch_mooncake::dist::compat
