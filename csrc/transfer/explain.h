// What Engine::explain() says: how bytes travel to and from one peer, and why not in a better way.
//
// Plain values, copied when asked for. A transport fills in one Explanation (TransportEndpoint::explain()); the engine
// adds the transports that its options do not allow and picks what carries ordinary memory.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/bytes.h"

namespace torch_mooncake {

using Fact = std::variant<bool, int64_t, double, std::string>;

// How one range of sizes travels.
struct SizeRule {
  std::string direction;               // "read" or "write"
  uint64_t up_to_nbytes = UINT64_MAX;  // of one op's share; UINT64_MAX: no limit
  std::string how;                     // "copied on the caller's thread"
};

// One connection, queue pair or file ring; its counters are those of stats().
struct LaneStats {
  std::string peer{};     // "name (pid 42)"; filled in by the engine
  Id128 peer_id{};        // so is this
  std::string transport;  // "tcp", "unix", "rdma" …
  std::string lane{};     // "tcp 127.0.0.1:4000 -> 127.0.0.1:5000", "unix @name #2": no two of a session are equal
  std::string rail{};     // the pair of NICs it runs on: "eth0 -> 10.0.0.2"; "" if there is no choice
  bool alive = true;
  uint64_t bytes_sent = 0, bytes_received = 0;
  uint64_t queued_bytes = 0;                          // accepted and not yet given to the kernel or the NIC
  std::vector<std::pair<std::string, Fact>> facts{};  // "congestion control", "zerocopy", "MTU" …
};

struct Explanation {
  std::string transport;        // what transport_for() and Op::transport() would say
  std::string option;           // the name in EngineOptions::transports that allows it
  std::string serves{};         // which memory: "any host memory", "regions in shared segments", "files"
  bool ordinary_memory = true;  // it carries private host memory
  // Why it cannot be used in that direction; empty: it can. In words a user can act on: "Yama: ptrace_scope is 1".
  std::string no_read{}, no_write{};
  std::vector<SizeRule> sizes{};  // ascending within a direction
  std::vector<std::pair<std::string, Fact>> facts{};
  std::vector<LaneStats> lanes{};
};

struct PeerExplanation {
  std::string peer;  // "name (pid 42)"
  bool alive = false;
  bool same_host = false;
  std::string not_same_host_because{};  // empty if it is
  std::string read{}, write{};          // the transport that carries ordinary memory; "" if none does
  std::vector<Explanation> paths{};     // in order of preference; those that cannot be used say why
};

}  // namespace torch_mooncake
