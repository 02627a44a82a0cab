// What this host consists of: NICs, GPUs and NUMA nodes, where they sit in the PCIe tree, and how near they are to each
// other. Read once from sysfs (a parameter: tests give a tree of files) and from the kernel's list of interfaces.
//
// Plain values; nothing here is kept up to date. Files that are missing or odd leave a field at "unknown": a container
// without sysfs still has its interfaces and addresses. Threads: const methods are safe from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/api.h"
#include "topology/filter.h"
#include "topology/interfaces.h"

namespace torch_mooncake {

// As `nvidia-smi topo -m` calls it, nearest first.
enum class Distance : uint8_t {
  pix,   // below the same PCIe switch (or the same device)
  pxb,   // several PCIe switches, one root port
  phb,   // one PCIe host bridge
  node,  // one NUMA node
  sys,   // the interconnect of the sockets, or not known
};
TM_API const char* distance_name(Distance distance);  // "PIX" …

// From the host bridge down to the device: "pci0000:17", "0000:17:00.0", …, "0000:1a:00.0". Empty: not on PCIe.
using PciPath = std::vector<std::string>;

struct TM_API Nic {
  std::string name;  // of the netdev; of the RDMA device where that has no netdev
  int index = 0;     // of the netdev, 0 without one
  bool up = false;
  bool loopback = false;
  uint32_t mtu = 0;
  int64_t speed_mbps = 0;  // 0: unknown
  int numa_node = -1;      // -1: unknown
  std::string mac;
  std::vector<IpAddress> addresses;
  PciPath pci;
  std::vector<std::string> rdma_devices;  // "mlx5_0"
};

struct TM_API Gpu {
  std::string bus_id;  // "0000:1a:00.0"
  uint16_t vendor = 0, device = 0;
  int numa_node = -1;
  PciPath pci;
};

struct TM_API NumaNode {
  int id = 0;
  std::string cpus;  // "0-15,32-47"
  uint64_t memory_nbytes = 0;
  std::vector<int> distances;  // by position in Topology::numa_nodes; 10 is here
};

struct RankedNic {
  size_t nic;  // index in Topology::nics
  Distance distance;
};

struct TM_API Topology {
  std::vector<Nic> nics;
  std::vector<Gpu> gpus;  // by bus id
  std::vector<NumaNode> numa_nodes;

  // `interfaces`: instead of asking the kernel. With another sysfs than "/sys" and none given, those that it lists.
  static Topology discover(const std::string& sysfs = "/sys",
                           std::optional<std::vector<Interface>> interfaces = std::nullopt);

  const Gpu* find_gpu(std::string_view bus_id) const;  // as CUDA or NVML write it
  // The NICs that the filter allows, nearest first; within one distance the faster, then by name, beginning with a
  // different one for each GPU (or node) that has the same choice. NICs of unknown place are SYS.
  std::vector<RankedNic> rank_for_gpu(const Gpu& gpu, const NicFilter& filter = {}) const;
  std::vector<RankedNic> rank_for_memory(int numa_node, const NicFilter& filter = {}) const;
  Distance distance(const Gpu& gpu, const Nic& nic) const;
  Distance distance(int numa_node, const Nic& nic) const;  // node or sys
};

// "00000000:1A:00.0" and "1a:00.0" -> "0000:1a:00.0".
TM_API std::string normalise_bus_id(std::string_view bus_id);

}  // namespace torch_mooncake
