#include "transfer/rdma/rank.h"

#include <algorithm>

#include "topology/sysfs.h"

namespace torch_mooncake::transfer::rdma {

NicRanks::NicRanks(const std::vector<std::shared_ptr<Nic>>& nics, std::shared_ptr<const Driver> driver)
    : driver_(std::move(driver)) {
  for (auto& nic : nics) {
    ::torch_mooncake::Nic place;
    place.name = nic->info().name;
    place.numa_node = nic->info().numa_node;
    place.pci = nic->info().pci;
    topology_.nics.push_back(std::move(place));
  }
  topology_.numa_nodes.resize(static_cast<size_t>(std::max(0, driver_->numa_nodes())));
}

std::vector<Distance> NicRanks::of_host(const void* data, uint64_t nbytes) const {
  const bool one = topology_.numa_nodes.size() <= 1 || topology_.nics.size() <= 1;
  const int node = one ? -1 : driver_->numa_node_of(data, nbytes);
  std::vector<Distance> out;
  for (auto& nic : topology_.nics) out.push_back(topology_.distance(node, nic));
  return out;
}

std::vector<Distance> NicRanks::of_gpu(const std::string& bus_id) const {
  Gpu gpu;
  gpu.bus_id = normalise_bus_id(bus_id);
  const auto real = sysfs::real_path("/sys/bus/pci/devices/" + gpu.bus_id);
  if (!bus_id.empty() && !real.empty()) {
    gpu.pci = sysfs::pci_components(real);
    gpu.numa_node = sysfs::numa_node(real);
  }
  std::vector<Distance> out;
  for (auto& nic : topology_.nics) out.push_back(topology_.distance(gpu, nic));
  return out;
}

}  // namespace torch_mooncake::transfer::rdma
