// How far an engine's NICs are from memory: lanes over the nearest that are up carry it, the others stand in for them.
//
// Threads: const methods are safe from any.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "topology/topology.h"
#include "transfer/rdma/nic.h"

namespace torch_mooncake::transfer::rdma {

class NicRanks {
 public:
  NicRanks(const std::vector<std::shared_ptr<Nic>>& nics, std::shared_ptr<const Driver> driver);
  // By NIC. All alike where nothing is known: then all are the nearest.
  std::vector<Distance> of_host(const void* data, uint64_t nbytes) const;
  std::vector<Distance> of_gpu(const std::string& bus_id) const;

 private:
  const std::shared_ptr<const Driver> driver_;
  Topology topology_;  // of our NICs only, in their order
};

}  // namespace torch_mooncake::transfer::rdma
