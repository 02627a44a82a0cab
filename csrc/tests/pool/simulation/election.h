// An etcd of the simulated world, as the election sees it: answers late, sometimes not at all, forgets leases in time.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include "pool/election.h"
#include "pool/simulation/scheduler.h"

namespace torch_mooncake::pool::sim {

class Etcd {
 public:
  std::unique_ptr<Election> client(Host* host);
  void down(int64_t until) { down_until_ = std::max(down_until_, until); }
  void cut(Host* host, int64_t until) { cut_until_[host] = std::max(cut_until_[host], until); }
  void restart();  // leases begin anew
  Host* leading() const { return leader_ ? leader_->host : nullptr; }

 private:
  friend class SimElection;
  struct Key {
    Leader leader;
    uint64_t term = 0, lease = 0;
    Host* host = nullptr;
  };
  bool reached(Host* host) const;
  void pass();  // what has run out, goes

  int64_t down_until_ = 0;
  std::map<Host*, int64_t> cut_until_;
  uint64_t revision_ = 1, next_lease_ = 1;
  std::map<uint64_t, int64_t> leases_;  // until when
  std::optional<Key> leader_;
  LastView view_;
};

}  // namespace torch_mooncake::pool::sim
