// tm.topology(): what this host consists of, as plain dicts.

#include "topology/topology.h"

#include "python/support.h"

namespace torch_mooncake::python {
namespace {

nb::list ranked(const Topology& topology, const std::vector<RankedNic>& ranking) {
  nb::list out;
  for (auto& entry : ranking) {
    nb::dict d;
    d["nic"] = topology.nics[entry.nic].name;
    d["distance"] = distance_name(entry.distance);
    out.append(d);
  }
  return out;
}

nb::dict topology_of(const std::string& sysfs, const std::vector<std::string>& nics) {
  auto filter = unwrap(NicFilter::parse(nics));
  auto topology = without_gil([&] { return Topology::discover(sysfs); });
  nb::list nic_list, gpu_list, node_list;
  nb::dict gpu_paths, node_paths;
  for (auto& nic : topology.nics) {
    nb::list addresses;
    for (auto& address : nic.addresses) addresses.append(address.to_string());
    nb::dict d;
    d["name"] = nic.name;
    d["up"] = nic.up;
    d["loopback"] = nic.loopback;
    d["used"] = filter.allows(nic);
    d["speed_mbps"] = nic.speed_mbps;
    d["mtu"] = nic.mtu;
    d["numa_node"] = nic.numa_node;
    d["mac"] = nic.mac;
    d["addresses"] = addresses;
    d["pci"] = nic.pci;
    d["rdma_devices"] = nic.rdma_devices;
    nic_list.append(d);
  }
  for (auto& gpu : topology.gpus) {
    nb::dict d;
    d["bus_id"] = gpu.bus_id;
    d["vendor"] = gpu.vendor;
    d["device"] = gpu.device;
    d["numa_node"] = gpu.numa_node;
    d["pci"] = gpu.pci;
    gpu_list.append(d);
    gpu_paths[gpu.bus_id.c_str()] = ranked(topology, topology.rank_for_gpu(gpu, filter));
  }
  for (auto& node : topology.numa_nodes) {
    nb::dict d;
    d["id"] = node.id;
    d["cpus"] = node.cpus;
    d["memory_nbytes"] = node.memory_nbytes;
    d["distances"] = node.distances;
    node_list.append(d);
    node_paths[nb::int_(node.id)] = ranked(topology, topology.rank_for_memory(node.id, filter));
  }
  nb::dict out;
  out["nics"] = nic_list;
  out["gpus"] = gpu_list;
  out["numa_nodes"] = node_list;
  out["gpu_paths"] = gpu_paths;
  out["numa_paths"] = node_paths;
  return out;
}

}  // namespace

void bind_topology(nb::module_& m) { m.def("topology", &topology_of, nb::arg("sysfs"), nb::arg("nics")); }

}  // namespace torch_mooncake::python
