// Named failpoints for fault tests: TM_FAILPOINTS="donor.copy=stop,home.flip=kill,rpc.send=error,x=sleep:200,y=kill@3".
//
// A point in the code reads
//     TM_TRY(failpoint("home.flip"));
// and costs one load and branch when TM_FAILPOINTS is not set. Actions: `error` (returns io), `kill` (SIGKILL to the
// own process), `stop` (SIGSTOP to the own process), `sleep:MS`. "@N" fires at the Nth passage only (from 1), without
// it at each. An entry that is not understood aborts the process: a fault test must not pass because of a typing error.
#pragma once

#include <atomic>
#include <string_view>

#include "common/api.h"
#include "common/status.h"

namespace torch_mooncake {

namespace failpoint_detail {
TM_API extern std::atomic<bool> armed;
TM_API Status hit(std::string_view name);
}  // namespace failpoint_detail

// Replaces what the environment says ("" turns all off). For tests within one process.
TM_API void set_failpoints(std::string_view spec);

// Called at each passage of any point, on the passing thread, instead of a specification; null: no more. For a
// simulator, to which each point is a place where it may take the processor away for a while, or for ever.
TM_API void set_failpoint_hook(Status (*hook)(std::string_view name));

inline Status failpoint(std::string_view name) {
  if (!failpoint_detail::armed.load(std::memory_order_relaxed)) [[likely]]
    return {};
  return failpoint_detail::hit(name);
}

}  // namespace torch_mooncake
