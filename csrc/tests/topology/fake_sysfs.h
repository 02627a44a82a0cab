// A folder that looks like /sys of a server of the test's choice. Gone with the object.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace torch_mooncake {

class FakeSysfs {
 public:
  FakeSysfs() {
    char pattern[] = "/tmp/tm-sysfs-XXXXXX";
    root_ = ::mkdtemp(pattern);
  }
  ~FakeSysfs() { std::filesystem::remove_all(root_); }
  FakeSysfs(const FakeSysfs&) = delete;
  std::string root() const { return root_.string(); }

  void file(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }
  void link(const std::string& path, const std::string& target) {
    auto at = root_ / path;
    std::filesystem::create_directories(at.parent_path());
    std::filesystem::create_symlink(std::filesystem::relative(root_ / target, at.parent_path()), at);
  }

  // `path`: from the host bridge, "pci0000:17/0000:17:00.0/…/0000:1a:00.0". The last part is the device.
  std::string pci(const std::string& path, const std::string& pci_class, const std::string& vendor, int numa) {
    std::string folder = "devices/" + path;
    file(folder + "/class", pci_class);
    file(folder + "/vendor", vendor);
    file(folder + "/device", "0x1234");
    file(folder + "/numa_node", std::to_string(numa));
    link("bus/pci/devices/" + path.substr(path.rfind('/') + 1), folder);
    return folder;
  }
  void gpu(const std::string& path, int numa) { pci(path, "0x030200", "0x10de", numa); }
  void nic(const std::string& path, const std::string& name, int index, int speed_mbps, int numa,
           const std::string& rdma = "") {
    std::string device = pci(path, "0x020000", "0x15b3", numa), folder = device + "/net/" + name;
    netdev(folder, name, index, speed_mbps);
    link(folder + "/device", device);
    if (rdma.empty()) return;
    file(device + "/infiniband/" + rdma + "/ports/1/state", "4: ACTIVE");
    file(device + "/infiniband/" + rdma + "/ports/1/rate", "400 Gb/sec (4X NDR)");
    link("class/infiniband/" + rdma, device + "/infiniband/" + rdma);
    link(device + "/infiniband/" + rdma + "/device", device);
  }
  void netdev(const std::string& folder, const std::string& name, int index, int speed_mbps) {
    file(folder + "/ifindex", std::to_string(index));
    file(folder + "/address", "02:00:00:00:00:0" + std::to_string(index % 10));
    file(folder + "/mtu", "9000");
    file(folder + "/operstate", "up");
    file(folder + "/type", "1");
    file(folder + "/speed", std::to_string(speed_mbps));
    link("class/net/" + name, folder);
  }
  void numa_node(int id, const std::string& cpus, const std::string& distances) {
    std::string folder = "devices/system/node/node" + std::to_string(id);
    file(folder + "/cpulist", cpus);
    file(folder + "/distance", distances);
    file(folder + "/meminfo", "Node " + std::to_string(id) + " MemTotal:       1048576 kB");
  }

  // Two sockets, each with two host bridges; below each bridge one switch with two GPUs and two 400G NICs. A slow NIC
  // for management and the BMC's VGA stand beside them on socket 0.
  void hgx() {
    numa_node(0, "0-31", "10 21");
    numa_node(1, "32-63", "21 10");
    file("devices/system/node/online", "0-1");
    file("devices/system/node/nodefoo/cpulist", "?");
    int index = 2;
    for (int bridge = 0; bridge < 4; ++bridge) {
      std::string bus = std::to_string(bridge + 1) + "0";
      std::string up = "pci0000:" + bus + "/0000:" + bus + ":01.0/0000:" + std::to_string(bridge + 1) + "1:00.0/";
      auto slot = [&](int port, int below) {
        return up + "0000:" + std::to_string(bridge + 1) + "2:0" + std::to_string(port) +
               ".0/0000:" + std::to_string(bridge + 1) + std::to_string(below) + ":00.0";
      };
      int numa = bridge / 2;
      gpu(slot(0, 3), numa);
      gpu(slot(1, 4), numa);
      for (int i = 0; i < 2; ++i, ++index) {
        std::string n = std::to_string(bridge * 2 + i);
        nic(slot(2 + i, 5 + i), "eth" + n, index, 400000, numa, "mlx5_" + n);
      }
    }
    nic("pci0000:00/0000:00:1c.0/0000:01:00.0", "mgmt0", 30, 1000, 0);
    pci("pci0000:00/0000:00:1d.0/0000:02:00.0", "0x030000", "0x1a03", 0);
    netdev("devices/virtual/net/docker0", "docker0", 31, -1);
    netdev("devices/virtual/net/lo", "lo", 1, -1);
    file("devices/virtual/net/lo/type", "772");
  }

 private:
  std::filesystem::path root_;
};

}  // namespace torch_mooncake
