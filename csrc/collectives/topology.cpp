#include "collectives/topology.h"

#include <algorithm>
#include <map>

namespace torch_mooncake::coll {

Topology::Topology(const std::vector<std::string>& host_ids, int rank) : rank_(rank) {
  std::map<std::string, int> numbers;
  for (int r = 0; r < static_cast<int>(host_ids.size()); ++r) {
    const auto [it, is_new] = numbers.emplace(host_ids[r], static_cast<int>(hosts_.size()));
    if (is_new) hosts_.emplace_back();
    host_of_.push_back(it->second);
    place_of_.push_back(static_cast<int>(hosts_[it->second].size()));
    hosts_[it->second].push_back(r);
    all_.ranks.push_back(r);
  }
  carriers_ = static_cast<int>(host_ids.size());
  for (const auto& ranks : hosts_) carriers_ = std::min(carriers_, static_cast<int>(ranks.size()));
  all_.me = rank;
  host_ = {hosts_[host_of_[rank]], place_of_[rank]};
}

Team Topology::across(int place, int root) const {
  Team team;
  for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
    const int member = root >= 0 && host_of_[root] == host ? root : hosts_[host][place];
    if (member == rank_) team.me = team.size();
    team.ranks.push_back(member);
  }
  return team;
}

}  // namespace torch_mooncake::coll
