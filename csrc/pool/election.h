// Election: which node leads, as the nodes of a pool agree on it in a store of leases (etcd).
//
// Whoever holds the leader's key leads: it lives under a lease, and goes with it. Its term is the revision at which it
// was made, so that terms only grow. Beside it, and not under the lease, lies the last view: whose named objects count.
// Only who holds the leader's key can change that, so that what a deposed leader still writes comes to nothing.
//
// Time: a holder leads until a time by its own steady clock that is earlier than the lease's end by more than clocks
// differ in their rates; it has to stop by itself then, unless all whose objects count vouch for it
// (service_vouch.cpp).
//
// Threads: one at a time. Calls end by their deadline; io: the store does not answer (the lease may be good still).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/api.h"
#include "common/clock.h"
#include "common/status.h"
#include "pool/messages.h"

namespace torch_mooncake::pool {

inline constexpr int64_t kLeadS = 5;          // the lease's length
inline constexpr int64_t kBridgeMs = 60'000;  // a leader goes on for so long at most while the store does not answer
// The numbers of a term's views follow this many bits of its own, so that a later term's are higher.
inline constexpr int kTermBits = 20;

struct Leader {
  static constexpr const char* kName = "leader";
  NodeId node{};
  Id128 incarnation{};
  std::vector<std::string> addresses;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(node)(incarnation)(addresses, 64);
  }
};

struct LastView {
  static constexpr const char* kName = "last view";
  Id128 lineage{};  // of the pool: its versions compare
  NodeId leader{};
  std::vector<NodeId> members;  // the leader too
  uint64_t term = 0;            // in which it was written
  bool has(const NodeId& node) const;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(lineage)(leader)(members, kMaxNodes)(term);
  }
};

class TM_API Election {
 public:
  struct Won {
    uint64_t term = 0;
    int64_t until_ns = 0;  // leads until then, by steady_ns()
  };
  virtual ~Election() = default;
  virtual Result<std::optional<Leader>> leader(Deadline deadline) = 0;  // none: nobody leads
  // Ends what leader() has just told of: an earlier worker of ours, which is dead.
  virtual Status end_seen(Deadline deadline) = 0;
  // None: another was first.
  virtual Result<std::optional<Won>> campaign(const Leader& self, Deadline deadline) = 0;
  // Of who has won. key_not_found: it leads no more.
  virtual Result<int64_t> renew(Deadline deadline) = 0;  // leads until then
  // io: it may be written yet, but not once a later one has been.
  virtual Status note(const LastView& view, Deadline deadline) = 0;
  virtual Status resign(Deadline deadline) = 0;

  virtual Result<LastView> last_view(Deadline deadline) = 0;  // empty: there was none
};

// "etcd://host:port[,host:port…][/prefix]", as engines' discovery has it. Over etcd's HTTP gateway, without TLS.
TM_API Result<std::unique_ptr<Election>> open_election(const std::string& url);

}  // namespace torch_mooncake::pool
