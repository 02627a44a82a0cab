// Node: the pool's process on a host. A single-threaded keeper owns the memfds, the listening sockets and the folder's
// lock, and forks the worker (service + donor + perhaps home); a dead worker is restarted and attaches to the same
// memory; the worker dies with the keeper. Started by tm.init() when nobody answers, or as a service by
// `torch-mooncake node`.
#pragma once

#include <string>
#include <vector>

#include "common/api.h"
#include "common/status.h"
#include "pool/types.h"

namespace torch_mooncake::pool {

struct NodeOptions {
  std::string runtime_dir;  // 0700, ours; holds <pool>/node.sock, lock, log, token
  std::string pool = "default";
  std::vector<std::string> listen;  // extra: "tcp://0.0.0.0:7400" (needs a token)
  std::string leader;               // empty: this node is the leader (first directory node); else its address
  std::string
      discovery;      // "etcd://host:port[,…][/prefix]": the nodes of a pool elect their leader there. Needs `listen`
  std::string token;  // default: the pool's token file in runtime_dir, made if absent
  std::string host_id;
  // What may carry bytes to and from this node, which NICs, and settings of "rdma": see EngineOptions.
  std::vector<std::string> transports = {"local", "shm", "tcp"};
  std::vector<std::string> nics{};
  std::string rdma{};
  uint64_t memory_bytes = 0;    // 0: 25 % of what the cgroup allows
  std::vector<SsdOptions> ssd;  // folders on SSDs that hold what the memory has no room for
  double linger_s = 60;         // exits this long after its last client; < 0: never. (Waits 30 s at least for a first.)
  double drain_s = 30;          // the longest that SIGTERM lets it drain
  int ready_fd = -1;            // gets "ready <address> <address>...\n" or "error <text>\n", then EOF
};

// Runs the keeper in this process until it is told to stop (SIGTERM drains) or lingers out; the process must have no
// other threads. Returns its exit code: 0 stopped, 1 failed, 2 bad options, 3 the pool has a node on this host already.
TM_API int run_node(const NodeOptions& options);

}  // namespace torch_mooncake::pool
