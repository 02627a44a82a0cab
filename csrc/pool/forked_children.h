// Which forks of this process may still have its maps: a forked child keeps them until it ends or execs, so a pin that
// is older than the fork must stay until then.
//
// A pipe a fork tells: its writing end lives in the child only and closes on exec. Threads: safe from any.
#pragma once

#include <cstdint>

namespace torch_mooncake::pool {

// The number of forks so far. The first call installs the handlers: call it before the first pin is made.
uint64_t fork_epoch();
// No child forked after that epoch is left (or all have exec'ed). In the child itself: true.
bool no_child_since(uint64_t epoch);

}  // namespace torch_mooncake::pool
