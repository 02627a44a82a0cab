// What differs between the versions of torch that are supported (2.11 to 2.14), in one place. Only for what is built
// against the installed torch (_c10d); _ops stands on the stable ABI and needs none of it.
#pragma once

#include <torch/version.h>

#define TM_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

static_assert(TM_TORCH_AT_LEAST(2, 11), "torch_mooncake needs torch 2.11 or newer");
