// Ops that keep their place on a CUDA stream: begun when the work queued before them is done (an event, polled), and
// waited for by the work queued after them (a pinned flag that the stream watches). The flag is set at the op's end,
// however it ends: a stream never hangs on an op.
#pragma once

#include "transfer/op.h"

namespace torch_mooncake::transfer {

// Instead of op->start(). Errors, with nothing queued on the stream: unsupported (no CUDA here, or no stream memory
// operations), closed (a region was deregistered).
Status start_on_stream(const OpImplPtr& op, const StreamOrder& order);

}  // namespace torch_mooncake::transfer
