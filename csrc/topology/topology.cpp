#include "topology/topology.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>
#include <sstream>

#include "topology/sysfs.h"

namespace torch_mooncake {
namespace {

// "400 Gb/sec (4X NDR)" -> 400000.
int64_t rdma_rate_mbps(const std::string& device_folder) {
  auto ports = sysfs::list(device_folder + "/ports");
  int64_t best = 0;
  for (auto& port : ports) {
    std::istringstream rate(sysfs::read(device_folder + "/ports/" + port + "/rate"));
    double gbps = 0;
    if (rate >> gbps && gbps > 0) best = std::max(best, static_cast<int64_t>(gbps * 1000));
  }
  return best;
}

bool rdma_is_active(const std::string& device_folder) {
  auto ports = sysfs::list(device_folder + "/ports");
  return std::any_of(ports.begin(), ports.end(), [&](auto& port) {
    return sysfs::read(device_folder + "/ports/" + port + "/state").find("ACTIVE") != std::string::npos;
  });
}

std::vector<Interface> interfaces_of(const std::string& sysfs_root) {
  std::vector<Interface> found;
  for (auto& name : sysfs::list(sysfs_root + "/class/net")) {
    std::string folder = sysfs_root + "/class/net/" + name + "/";
    Interface interface;
    interface.name = name;
    interface.index = static_cast<int>(sysfs::read_int(folder + "ifindex").value_or(0));
    interface.mac = sysfs::read(folder + "address");
    interface.mtu = static_cast<uint32_t>(std::max<int64_t>(0, sysfs::read_int(folder + "mtu").value_or(0)));
    interface.up = sysfs::read(folder + "operstate") == "up";
    interface.loopback = sysfs::read_int(folder + "type") == 772;  // ARPHRD_LOOPBACK
    found.push_back(std::move(interface));
  }
  return found;
}

// sysfs may have been mounted in another network namespace, where the same name is another device.
bool is_same_device(const std::string& folder, const Interface& interface) {
  auto index = sysfs::read_int(folder + "/ifindex");
  std::string mac = sysfs::read(folder + "/address");
  return (!index || interface.index == 0 || *index == interface.index) &&
         (mac.empty() || interface.mac.empty() || mac == interface.mac);
}

// The PCIe place of a netdev: its own, or that of the devices it is stacked on if they agree (bonds, VLANs).
void place(const std::string& sysfs_root, const std::string& name, Nic& nic, int depth = 0) {
  std::string folder = sysfs_root + "/class/net/" + name;
  std::string device = sysfs::real_path(folder + "/device");
  if (!device.empty()) {
    nic.pci = sysfs::pci_components(device);
    nic.numa_node = sysfs::numa_node(device);
    for (auto& rdma : sysfs::list(device + "/infiniband")) nic.rdma_devices.push_back(rdma);
    return;
  }
  std::vector<Nic> lower;
  for (auto& entry : depth < 4 ? sysfs::list(folder) : std::vector<std::string>()) {
    if (entry.rfind("lower_", 0) != 0) continue;
    place(sysfs_root, entry.substr(6), lower.emplace_back(), depth + 1);
  }
  if (lower.empty()) return;
  auto agree = [&](auto member) {
    return std::all_of(lower.begin(), lower.end(), [&](auto& l) { return l.*member == lower.front().*member; });
  };
  if (agree(&Nic::pci)) nic.pci = lower.front().pci;
  if (agree(&Nic::numa_node)) nic.numa_node = lower.front().numa_node;
}

std::vector<Nic> find_nics(const std::string& root, const std::vector<Interface>& interfaces) {
  std::vector<Nic> nics;
  std::set<std::string> rdma_beside;
  for (auto& interface : interfaces) {
    Nic nic;
    nic.name = interface.name;
    nic.index = interface.index;
    nic.up = interface.up;
    nic.loopback = interface.loopback;
    nic.mtu = interface.mtu;
    nic.mac = interface.mac;
    nic.addresses = interface.addresses;
    nic.speed_mbps = interface.speed_mbps;
    std::string folder = root + "/class/net/" + nic.name;
    if (is_same_device(folder, interface)) {
      place(root, nic.name, nic);
      if (nic.speed_mbps <= 0) nic.speed_mbps = std::max<int64_t>(0, sysfs::read_int(folder + "/speed").value_or(0));
      rdma_beside.insert(nic.rdma_devices.begin(), nic.rdma_devices.end());
    }
    nics.push_back(std::move(nic));
  }
  for (auto& name : sysfs::list(root + "/class/infiniband")) {
    std::string folder = root + "/class/infiniband/" + name;
    auto beside = std::find_if(nics.begin(), nics.end(), [&](auto& nic) {
      return std::find(nic.rdma_devices.begin(), nic.rdma_devices.end(), name) != nic.rdma_devices.end();
    });
    if (beside != nics.end()) {
      if (beside->speed_mbps == 0) beside->speed_mbps = rdma_rate_mbps(folder);
      continue;
    }
    Nic nic;
    nic.name = name;
    nic.rdma_devices = {name};
    nic.up = rdma_is_active(folder);
    nic.speed_mbps = rdma_rate_mbps(folder);
    std::string device = sysfs::real_path(folder + "/device");
    nic.pci = sysfs::pci_components(device);
    nic.numa_node = sysfs::numa_node(device);
    nics.push_back(std::move(nic));
  }
  return nics;
}

// 3D and display controllers and accelerators; VGA only of those who make GPUs (a server's BMC has a VGA too).
bool is_gpu(int64_t pci_class, int64_t vendor) {
  bool gpu_maker = vendor == 0x10de || vendor == 0x1002 || vendor == 0x8086;
  switch (pci_class >> 8) {
    case 0x0302:
    case 0x1200:
      return true;
    case 0x0300:
    case 0x0380:
      return gpu_maker;
    default:
      return false;
  }
}

std::vector<Gpu> find_gpus(const std::string& root) {
  std::vector<Gpu> gpus;
  for (auto& bus_id : sysfs::list(root + "/bus/pci/devices")) {
    std::string folder = root + "/bus/pci/devices/" + bus_id;
    auto vendor = sysfs::read_int(folder + "/vendor").value_or(0);
    if (!is_gpu(sysfs::read_int(folder + "/class").value_or(0), vendor)) continue;
    Gpu gpu;
    gpu.bus_id = normalise_bus_id(bus_id);
    gpu.vendor = static_cast<uint16_t>(vendor);
    gpu.device = static_cast<uint16_t>(sysfs::read_int(folder + "/device").value_or(0));
    std::string device = sysfs::real_path(folder);
    gpu.pci = sysfs::pci_components(device);
    gpu.numa_node = sysfs::numa_node(device);
    gpus.push_back(std::move(gpu));
  }
  std::sort(gpus.begin(), gpus.end(), [](auto& a, auto& b) { return a.bus_id < b.bus_id; });
  return gpus;
}

std::vector<NumaNode> find_numa_nodes(const std::string& root) {
  std::vector<NumaNode> nodes;
  std::string folder = root + "/devices/system/node";
  for (auto& name : sysfs::list(folder)) {
    NumaNode node;
    const char* end = name.data() + name.size();
    if (name.rfind("node", 0) != 0) continue;
    auto [stop, error] = std::from_chars(name.data() + 4, end, node.id);
    if (error != std::errc{} || stop != end) continue;
    node.cpus = sysfs::read(folder + "/" + name + "/cpulist");
    std::istringstream distances(sysfs::read(folder + "/" + name + "/distance"));
    for (int d; distances >> d;) node.distances.push_back(d);
    std::ifstream meminfo(folder + "/" + name + "/meminfo");
    for (std::string line; std::getline(meminfo, line);) {
      auto at = line.find("MemTotal:");
      if (at != line.npos) node.memory_nbytes = std::strtoull(line.c_str() + at + 9, nullptr, 10) << 10;
    }
    nodes.push_back(std::move(node));
  }
  std::sort(nodes.begin(), nodes.end(), [](auto& a, auto& b) { return a.id < b.id; });
  return nodes;
}

}  // namespace

std::string normalise_bus_id(std::string_view bus_id) {
  std::string out(bus_id);
  for (auto& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (std::count(out.begin(), out.end(), ':') == 1) return "0000:" + out;
  while (out.find(':') != out.npos && out.find(':') > 4 && out[0] == '0') out.erase(0, 1);
  return out;
}

Topology Topology::discover(const std::string& sysfs, std::optional<std::vector<Interface>> interfaces) {
  Topology topology;
  if (!interfaces) {
    if (sysfs != "/sys") {
      interfaces = interfaces_of(sysfs);
    } else if (auto live = live_interfaces()) {
      interfaces = std::move(*live);
    } else {
      interfaces.emplace();
    }
  }
  topology.nics = find_nics(sysfs, *interfaces);
  topology.gpus = find_gpus(sysfs);
  topology.numa_nodes = find_numa_nodes(sysfs);
  return topology;
}

const Gpu* Topology::find_gpu(std::string_view bus_id) const {
  auto it = std::find_if(gpus.begin(), gpus.end(),
                         [&, wanted = normalise_bus_id(bus_id)](auto& gpu) { return gpu.bus_id == wanted; });
  return it == gpus.end() ? nullptr : &*it;
}

}  // namespace torch_mooncake
