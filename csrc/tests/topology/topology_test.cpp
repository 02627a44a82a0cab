#include "topology/topology.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "topology/fake_sysfs.h"

using namespace torch_mooncake;

namespace {

std::vector<std::string> nearest(const Topology& topology, const std::vector<RankedNic>& ranked, Distance distance) {
  std::vector<std::string> names;
  for (auto& r : ranked)
    if (r.distance == distance) names.push_back(topology.nics[r.nic].name);
  return names;
}

const Nic& nic(const Topology& topology, const std::string& name) {
  auto it = std::find_if(topology.nics.begin(), topology.nics.end(), [&](auto& n) { return n.name == name; });
  REQUIRE(it != topology.nics.end());
  return *it;
}

IpAddress ip(const char* text) {
  auto parsed = IpAddress::parse(text);
  REQUIRE(parsed);
  return *parsed;
}

}  // namespace

TEST_CASE("a server of 8 GPUs and 8 NICs: everything is found where it is") {
  FakeSysfs sysfs;
  sysfs.hgx();
  auto topology = Topology::discover(sysfs.root());
  REQUIRE(topology.gpus.size() == 8);  // the BMC's VGA is none
  REQUIRE(topology.numa_nodes.size() == 2);
  CHECK(topology.numa_nodes[1].cpus == "32-63");
  CHECK(topology.numa_nodes[1].memory_nbytes == uint64_t{1} << 30);
  CHECK(topology.numa_nodes[0].distances == std::vector{10, 21});
  CHECK(topology.gpus[0].bus_id == "0000:13:00.0");
  CHECK(topology.gpus[0].pci.size() == 5);
  CHECK(topology.gpus[7].numa_node == 1);
  auto& eth5 = nic(topology, "eth5");
  CHECK(eth5.speed_mbps == 400000);
  CHECK(eth5.numa_node == 1);
  CHECK(eth5.mtu == 9000);
  CHECK(eth5.rdma_devices == std::vector<std::string>{"mlx5_5"});
  CHECK(nic(topology, "lo").loopback);
  CHECK(topology.find_gpu("00000000:44:00.0") == &topology.gpus[7]);
  CHECK(topology.find_gpu("0000:44:00.1") == nullptr);
}

TEST_CASE("every GPU gets its nearest NICs, and no two GPUs begin with the same") {
  FakeSysfs sysfs;
  sysfs.hgx();
  auto topology = Topology::discover(sysfs.root());
  std::set<std::string> firsts;
  for (size_t i = 0; i < topology.gpus.size(); ++i) {
    CAPTURE(i);
    auto ranked = topology.rank_for_gpu(topology.gpus[i]);
    REQUIRE(ranked.size() == 9);  // not lo, not docker0
    auto pix = nearest(topology, ranked, Distance::pix);
    auto a = "eth" + std::to_string(i), b = "eth" + std::to_string(i ^ 1);
    CHECK(pix == std::vector{a, b});
    firsts.insert(pix.front());
    CHECK(std::is_sorted(ranked.begin(), ranked.end(), [](auto& x, auto& y) { return x.distance < y.distance; }));
    auto& other_socket = topology.nics[ranked.back().nic];
    CHECK(other_socket.numa_node != topology.gpus[i].numa_node);
    CHECK(ranked.back().distance == Distance::sys);
  }
  CHECK(firsts.size() == 8);
}

TEST_CASE("every NUMA node's memory gets its own NICs, the fast ones first") {
  FakeSysfs sysfs;
  sysfs.hgx();
  auto topology = Topology::discover(sysfs.root());
  auto own = nearest(topology, topology.rank_for_memory(1), Distance::node);
  CHECK(own == std::vector<std::string>{"eth4", "eth5", "eth6", "eth7"});
  own = nearest(topology, topology.rank_for_memory(0), Distance::node);
  CHECK(own == std::vector<std::string>{"eth0", "eth1", "eth2", "eth3", "mgmt0"});
  CHECK(nearest(topology, topology.rank_for_memory(-1), Distance::sys).size() == 9);
}

TEST_CASE("distances") {
  Topology topology;
  topology.numa_nodes.resize(2);
  Gpu gpu{"0000:05:00.0", 0, 0, 0, {"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:05:00.0"}};
  auto at = [](PciPath path, int numa) {
    Nic n;
    n.pci = std::move(path);
    n.numa_node = numa;
    return n;
  };
  CHECK(topology.distance(gpu, at({"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:01.0", "0000:06:00.0"}, 0)) ==
        Distance::pix);
  CHECK(topology.distance(gpu, at({"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:01.0", "0000:06:00.0",
                                   "0000:07:00.0", "0000:08:00.0"},
                                  0)) == Distance::pxb);
  CHECK(topology.distance(gpu, at({"pci0000:00", "0000:00:02.0", "0000:09:00.0"}, 0)) == Distance::phb);
  CHECK(topology.distance(gpu, at({"pci0000:10", "0000:10:02.0"}, 0)) == Distance::node);
  CHECK(topology.distance(gpu, at({"pci0000:80", "0000:80:02.0"}, 1)) == Distance::sys);
  CHECK(topology.distance(gpu, at({}, -1)) == Distance::sys);
  topology.numa_nodes.resize(1);
  CHECK(topology.distance(gpu, at({}, -1)) == Distance::node);
  CHECK(std::string(distance_name(Distance::pxb)) == "PXB");
}

TEST_CASE("missing and odd files leave fields unknown") {
  FakeSysfs sysfs;
  sysfs.nic("pci0000:00/0000:00:03.0", "eth0", 2, -1, -1);
  sysfs.file("class/net/eth0/mtu", "many");
  sysfs.file("class/net/eth0/ifindex", "");
  sysfs.file("class/net/bonding_masters", "bond0");
  sysfs.netdev("devices/virtual/net/bond0", "bond0", 4, 25000);
  sysfs.link("class/net/bond0/lower_eth0", "class/net/eth0");
  sysfs.link("class/net/loop", "class/net/loop");  // a link to itself
  sysfs.file("bus/pci/devices/odd/class", "0x030200");
  sysfs.nic("pci10000:00/10000:00:02.0", "ib0", 5, 0, 0, "mlx5_0");
  auto topology = Topology::discover(sysfs.root());
  CHECK(nic(topology, "eth0").mtu == 0);
  CHECK(nic(topology, "eth0").speed_mbps == 0);
  CHECK(nic(topology, "eth0").numa_node == -1);
  CHECK(nic(topology, "bond0").pci == nic(topology, "eth0").pci);
  CHECK(nic(topology, "bond0").speed_mbps == 25000);
  CHECK(nic(topology, "ib0").speed_mbps == 400000);  // the RDMA port knows
  CHECK(nic(topology, "ib0").pci.front() == "pci10000:00");
  REQUIRE(topology.gpus.size() == 1);
  CHECK(topology.gpus[0].numa_node == -1);
  CHECK(topology.numa_nodes.empty());
  CHECK(Topology::discover("/nonexistent").nics.empty());
}

TEST_CASE("without sysfs the interfaces of the kernel are there") {
  auto live = live_interfaces();
  REQUIRE(live);
  auto topology = Topology::discover("/nonexistent", *live);
  REQUIRE(topology.nics.size() == live->size());
  auto lo = std::find_if(topology.nics.begin(), topology.nics.end(), [](auto& n) { return n.loopback; });
  REQUIRE(lo != topology.nics.end());
  CHECK(lo->mtu > 0);
  CHECK(std::any_of(lo->addresses.begin(), lo->addresses.end(), [](auto& a) { return a.host() == "127.0.0.1"; }));
  CHECK(lo->addresses.front().prefix_bits == 8);
}

TEST_CASE("sysfs of another network namespace is not believed") {
  FakeSysfs sysfs;
  sysfs.nic("pci0000:00/0000:00:03.0", "eth0", 2, 100000, 1);
  Interface ours;
  ours.name = "eth0";
  ours.index = 7;
  ours.mac = "02:00:00:00:00:07";
  auto topology = Topology::discover(sysfs.root(), std::vector{ours});
  REQUIRE(topology.nics.size() == 1);
  CHECK(topology.nics[0].pci.empty());
  CHECK(topology.nics[0].speed_mbps == 0);
}

TEST_CASE("an RDMA device without a netdev is a NIC without addresses") {
  FakeSysfs sysfs;
  auto device = sysfs.pci("pci0000:00/0000:00:03.0", "0x020700", "0x15b3", 0);
  sysfs.file(device + "/infiniband/mlx5_9/ports/1/state", "4: ACTIVE");
  sysfs.file(device + "/infiniband/mlx5_9/ports/1/rate", "200 Gb/sec (4X HDR)");
  sysfs.link("class/infiniband/mlx5_9", device + "/infiniband/mlx5_9");
  sysfs.link(device + "/infiniband/mlx5_9/device", device);
  auto topology = Topology::discover(sysfs.root());
  REQUIRE(topology.nics.size() == 1);
  CHECK(topology.nics[0].name == "mlx5_9");
  CHECK(topology.nics[0].up);
  CHECK(topology.nics[0].speed_mbps == 200000);
  CHECK(topology.nics[0].numa_node == 0);
}

TEST_CASE("addresses and networks") {
  CHECK(ip("10.1.2.3/23").contains(ip("10.1.3.9")));
  CHECK_FALSE(ip("10.1.2.3/23").contains(ip("10.1.4.9")));
  CHECK(ip("0.0.0.0/0").contains(ip("8.8.8.8")));
  CHECK_FALSE(ip("::/0").contains(ip("8.8.8.8")));
  CHECK(ip("fd00:1::/33").contains(ip("fd00:1:7fff::1")));
  CHECK_FALSE(ip("fd00:1::/33").contains(ip("fd00:1:8000::1")));
  CHECK(ip("fe80::1").is_link_local());
  CHECK(ip("::1").is_loopback());
  CHECK(ip("fd00::1/64").to_string() == "fd00::1/64");
  for (auto* bad : {"", "10.0.0", "10.0.0.1/33", "10.0.0.1/", "10.0.0.1/x", "::1/129", "eth0"})
    CHECK(IpAddress::parse(bad).status().code() == Code::invalid_argument);
}

TEST_CASE("filters") {
  Nic eth;
  eth.name = "eth0";
  eth.up = true;
  eth.addresses = {ip("10.0.0.1/24"), ip("192.168.0.1/24")};
  eth.rdma_devices = {"mlx5_0"};
  Nic docker = eth;
  docker.name = "docker0";
  docker.rdma_devices.clear();
  auto allows = [](std::vector<std::string> patterns, const Nic& nic) {
    auto filter = NicFilter::parse(patterns);
    REQUIRE(filter);
    return filter->allows(nic);
  };
  CHECK(allows({}, eth));
  CHECK_FALSE(allows({}, docker));
  CHECK(allows({"docker0"}, docker));
  CHECK(allows({"!eth*"}, docker));
  CHECK_FALSE(allows({"!eth*"}, eth));
  CHECK(allows({"eth*", "!eth1"}, eth));
  CHECK_FALSE(allows({"eth*", "!eth0"}, eth));
  CHECK(allows({"mlx5_*"}, eth));
  CHECK_FALSE(allows({"!mlx5_0"}, eth));
  CHECK(allows({"10.0.0.0/8"}, eth));
  CHECK_FALSE(allows({"10.1.0.0/16"}, eth));
  CHECK(allows({"!10.0.0.0/8"}, eth));  // by its other address
  CHECK_FALSE(allows({"!10.0.0.0/8", "!192.168.0.0/16"}, eth));
  auto filter = NicFilter::parse({"!10.0.0.0/8"});
  CHECK_FALSE(filter->allows(eth.addresses[0]));
  CHECK(filter->allows(eth.addresses[1]));
  eth.up = false;
  CHECK_FALSE(allows({"eth0"}, eth));
  CHECK(NicFilter::parse({"!"}).status().code() == Code::invalid_argument);
  CHECK(NicFilter::parse({"10.0.0.0/40"}).status().code() == Code::invalid_argument);
}
