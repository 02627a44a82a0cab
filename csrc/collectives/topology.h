// Topology: which ranks of a group share a host; Team: some of the ranks, among which (a step of) a collective runs.
//
// All ranks derive the same topology from what all have published. Both are values without threads of their own.
#pragma once

#include <string>
#include <vector>

#include "common/api.h"

namespace torch_mooncake::coll {

// Members are numbered from 0 in the order of `ranks`.
struct Team {
  std::vector<int> ranks;  // of the group
  int me = -1;             // this rank's number; -1: it is not in
  int size() const { return static_cast<int>(ranks.size()); }
};

class TM_API Topology {
 public:
  Topology(const std::vector<std::string>& host_ids, int rank);

  // The ranks of each host, ascending; hosts in the order of their first ranks.
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  int host_of(int rank) const { return host_of_[rank]; }
  int place_of(int rank) const { return place_of_[rank]; }  // among the ranks of its host
  // How many ranks of each host talk to other hosts when much is to be moved: as many as the smallest host has.
  int carriers() const { return carriers_; }
  // Several hosts, at least one of them with several ranks.
  bool nested() const { return hosts_.size() > 1 && hosts_.size() < host_of_.size(); }

  const Team& all() const { return all_; }
  const Team& host() const { return host_; }  // the ranks of this one's host
  // One rank of each host: `place` of it, but `root` (if there is one) on its own host.
  Team across(int place, int root = -1) const;

 private:
  const int rank_;
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_, place_of_;
  int carriers_ = 0;
  Team all_, host_;
};

}  // namespace torch_mooncake::coll
