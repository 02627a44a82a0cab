// NodeService: what the worker process of a node runs: sessions, the donor's verbs over the network, perhaps the home.
//
// The keeper's worker makes one with create() and keeps it until it is told to stop. Ownership: takes the donor and the
// listening sockets. Threads: drain() and close() are called from the worker's main thread; on_clients_changed may be
// called from any thread of the service. After close() (idempotent, ~2 s at most) no callback runs any more.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/api.h"
#include "common/clock.h"
#include "common/fd.h"
#include "common/status.h"
#include "pool/donor.h"
#include "pool/election.h"
#include "pool/node.h"
#include "transfer/engine.h"

namespace torch_mooncake::pool {

// A socket that the keeper bound and listens on; `address` is what others dial, port filled in.
struct Listener {
  UniqueFd fd;
  std::string address;
};

struct NodeServiceOptions {
  NodeOptions node;              // validated; memory_bytes and token are resolved (token: what the handshake proves)
  std::unique_ptr<Donor> donor;  // fresh, or attached to what a previous worker left
  bool attached = false;         // the donor has old entries: the home is rebuilt from its announce()
  std::unique_ptr<Election> election;  // null: of node.discovery, if there is one
  int64_t bridge_ms = kBridgeMs;       // the same at every node of a pool
  EnginePtr engine;                    // null: the service makes its own. Closed with it
  std::vector<Listener> listeners;     // the first is unix://<runtime_dir>/<pool>/node.sock
  // The number of user sessions (role "client", not nodes) changed. The keeper lingers out by it.
  std::function<void(int clients)> on_clients_changed;
  // Somebody asked this node to leave: whoever runs it should drain() and close() it. May be called several times.
  std::function<void()> on_drain_asked;
  uint32_t starts = 1;  // how many workers this node has had, this one counted
};

class TM_API NodeService {
 public:
  // Serves when it returns.
  static Result<std::unique_ptr<NodeService>> create(NodeServiceOptions options);
  virtual ~NodeService() = default;  // closes
  virtual std::vector<std::string> addresses() const = 0;
  // No new reservations; open transactions end or are dropped; the home is told. Then close() follows.
  virtual Status drain(Deadline deadline) = 0;
  virtual void close() = 0;
  // The invariants of donor and directory: ok, or corrupt with what is wrong. At rest nothing is under way either: no
  // operation, reservation or waiting call. For tests.
  virtual Status check(bool at_rest) = 0;
  virtual Donor& donor() = 0;  // tests, between calls of the service's own thread
};

}  // namespace torch_mooncake::pool
