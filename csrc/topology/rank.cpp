#include <algorithm>
#include <iterator>
#include <tuple>

#include "topology/topology.h"

namespace torch_mooncake {
namespace {

// A device below a switch is two steps from it (the switch's downstream port, the device); a device straight below a
// root port is one.
constexpr size_t kStepsBelowSwitch = 2;

Distance by_numa(int a, int b, size_t nodes) {
  if (nodes <= 1) return Distance::node;  // firmware of small machines says -1
  return a >= 0 && a == b ? Distance::node : Distance::sys;
}

// How many leading components of two paths agree.
size_t common(const PciPath& a, const PciPath& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

int numa_distance(const std::vector<NumaNode>& nodes, int from, int to) {
  auto at = [&](int id) { return std::find_if(nodes.begin(), nodes.end(), [&](auto& node) { return node.id == id; }); };
  auto source = at(from), target = at(to);
  if (source == nodes.end() || target == nodes.end()) return 255;
  auto column = static_cast<size_t>(target - nodes.begin());
  return column < source->distances.size() ? source->distances[column] : 255;
}

// Sorts by distance, then the interconnect's distance, speed and name, and rotates the nearest class by `turn`.
std::vector<RankedNic> rank(const Topology& topology, const NicFilter& filter, int numa_node, size_t turn,
                            auto&& distance_to) {
  std::vector<RankedNic> out;
  for (size_t i = 0; i < topology.nics.size(); ++i)
    if (filter.allows(topology.nics[i])) out.push_back({i, distance_to(topology.nics[i])});
  auto key = [&](const RankedNic& r) {
    auto& nic = topology.nics[r.nic];
    int far = r.distance == Distance::sys ? numa_distance(topology.numa_nodes, numa_node, nic.numa_node) : 0;
    return std::make_tuple(r.distance, far, -nic.speed_mbps);
  };
  std::sort(out.begin(), out.end(), [&](auto& a, auto& b) {
    auto x = key(a), y = key(b);
    return x != y ? x < y : topology.nics[a.nic].name < topology.nics[b.nic].name;
  });
  auto equals = std::find_if(out.begin(), out.end(), [&](auto& r) { return key(r) != key(out.front()); });
  if (equals != out.begin()) {
    auto n = static_cast<size_t>(equals - out.begin());
    std::rotate(out.begin(), out.begin() + static_cast<ptrdiff_t>(turn % n), equals);
  }
  return out;
}

}  // namespace

const char* distance_name(Distance distance) {
  static constexpr const char* names[] = {"PIX", "PXB", "PHB", "NODE", "SYS"};
  return names[static_cast<size_t>(distance)];
}

Distance Topology::distance(const Gpu& gpu, const Nic& nic) const {
  if (gpu.pci.empty() || nic.pci.empty() || gpu.pci[0] != nic.pci[0])
    return by_numa(gpu.numa_node, nic.numa_node, numa_nodes.size());
  size_t shared = common(gpu.pci, nic.pci);
  if (shared <= 1) return Distance::phb;
  size_t steps = std::max(gpu.pci.size(), nic.pci.size()) - shared;
  return steps <= kStepsBelowSwitch ? Distance::pix : Distance::pxb;
}

Distance Topology::distance(int numa_node, const Nic& nic) const {
  return by_numa(numa_node, nic.numa_node, numa_nodes.size());
}

std::vector<RankedNic> Topology::rank_for_gpu(const Gpu& gpu, const NicFilter& filter) const {
  // GPUs at the same distances from all NICs have the same choice: each begins with another of the nearest.
  auto choice = [&](const Gpu& g) {
    std::vector<Distance> distances;
    std::transform(nics.begin(), nics.end(), std::back_inserter(distances),
                   [&](auto& nic) { return distance(g, nic); });
    return distances;
  };
  size_t turn = 0;
  for (auto& other : gpus) {
    if (other.bus_id == gpu.bus_id) break;
    if (choice(other) == choice(gpu)) ++turn;
  }
  return rank(*this, filter, gpu.numa_node, turn, [&](auto& nic) { return distance(gpu, nic); });
}

std::vector<RankedNic> Topology::rank_for_memory(int numa_node, const NicFilter& filter) const {
  return rank(*this, filter, numa_node, 0, [&](auto& nic) { return distance(numa_node, nic); });
}

}  // namespace torch_mooncake
