// Keeper: the small single-threaded process that outlives its worker.
//
// It owns the folder's lock, the listening sockets and a copy of every segment's fd, forks the worker, restarts it when
// it dies (at once, then with back-off up to 5 s) and hands it the same sockets and memory. The kernel kills the worker
// when the keeper dies, and with the last fd the memory is gone: nothing has a name. SIGTERM or SIGINT: the worker
// drains (drain_s at most), then both are gone; a second one: at once. It sleeps in poll() and does nothing in between.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/api.h"
#include "pool/keeper_link.h"
#include "pool/node_service.h"

namespace torch_mooncake::pool {

// Exit codes of run_keeper and of the node's executable.
enum NodeExit : int {
  kNodeOk = 0,              // stopped by a signal, or lingered out
  kNodeFailed = 1,          // could not start, or could not go on
  kNodeUsage = 2,           // bad options
  kNodeAlreadyRunning = 3,  // the pool has a node on this host; the error names it
};

// What a worker starts with. It runs in a forked process of its own, which ends when the function returns.
struct WorkerContext {
  NodeOptions options;  // complete, token too
  std::vector<Listener> listeners;
  std::vector<HeldSegment> held;  // empty: make new memory and tell the keeper (link.fresh, link.hold)
  std::unique_ptr<KeeperLink> link;
  uint32_t starts = 1;  // how many workers there were, this one counted
};
using WorkerFunction = std::function<int(WorkerContext)>;

// Runs until told to stop or lingered out. The calling process must have no other threads.
TM_API int run_keeper(const NodeOptions& options, const WorkerFunction& worker);

}  // namespace torch_mooncake::pool
