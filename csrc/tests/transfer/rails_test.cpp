#include "transfer/tcp/rails.h"

#include <doctest/doctest.h>

using namespace torch_mooncake;
using namespace torch_mooncake::transfer;

namespace {

RailEnd end(const char* nic, const char* address, uint16_t port = 7000, int64_t speed_mbps = 0, int numa = -1) {
  auto ip = IpAddress::parse(address);
  REQUIRE(ip);
  return {nic, *ip, port, true, speed_mbps, numa};
}

std::vector<std::string> names(const std::vector<RailPlan>& rails) {
  std::vector<std::string> out;
  for (auto& rail : rails) out.push_back(rail.local.nic + ">" + rail.remote.nic + " " + rail.key().remote);
  return out;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("NICs of one subnet are paired, each once, IPv4 first") {
  std::vector<RailEnd> ours = {end("e0", "10.0.0.1/24"), end("e0", "fd00::1/64"), end("e1", "10.0.1.1/24")};
  std::vector<RailEnd> theirs = {end("x1", "10.0.1.2/24"), end("x0", "fd00::2/64"), end("x0", "10.0.0.2/24")};
  CHECK(names(plan_rails(ours, theirs)) == Names{"e0>x0 10.0.0.2", "e1>x1 10.0.1.2"});
}

TEST_CASE("on a flat subnet the first goes with the first, what is left over is routed") {
  std::vector<RailEnd> ours = {end("e0", "10.0.0.1/16"), end("e1", "10.0.0.2/16"), end("e2", "192.168.0.1/24")};
  std::vector<RailEnd> theirs = {end("e1", "10.0.1.2/16"), end("e0", "10.0.1.1/16"), end("e2", "192.168.9.1/24")};
  CHECK(names(plan_rails(ours, theirs)) == Names{"e0>e0 10.0.1.1", "e1>e1 10.0.1.2", "e2>e2 192.168.9.1"});
  // NUMA nodes order before names do.
  ours = {end("e0", "10.0.0.1/16", 0, 0, 1), end("e1", "10.0.0.2/16", 0, 0, 0)};
  theirs = {end("e0", "10.0.1.1/16", 1, 0, 0), end("e1", "10.0.1.2/16", 1, 0, 1)};
  CHECK(names(plan_rails(ours, theirs)) == Names{"e1>e0 10.0.1.1", "e0>e1 10.0.1.2"});
}

TEST_CASE("no rail to where nobody listens, to our own address, or over a slow management network") {
  std::vector<RailEnd> ours = {end("e0", "10.0.0.1/24", 1, 100'000), end("docker0", "172.17.0.1/16", 1, 10'000),
                               end("mgmt", "10.9.0.1/24", 1, 1000)};
  std::vector<RailEnd> theirs = {end("e0", "10.0.0.2/24", 1, 100'000), end("docker0", "172.17.0.1/16", 1, 10'000),
                                 end("mgmt", "10.9.0.2/24", 1, 1000), end("e1", "10.0.0.3/24", 0)};
  CHECK(names(plan_rails(ours, theirs)) == Names{"e0>e0 10.0.0.2"});
  CHECK(plan_rails(ours, {}).empty());
  CHECK(plan_rails({}, theirs).empty());
}

TEST_CASE("ends have the port of what listens at their address") {
  Nic nic;
  nic.name = "e0";
  nic.up = true;
  for (auto* text : {"10.0.0.1/24", "fd00::1/64", "fe80::1/64"}) nic.addresses.push_back(*IpAddress::parse(text));
  auto ports = [&](std::vector<rpc::Address> listening) {
    std::vector<int> out;
    for (auto& e : rail_ends(std::vector{nic}, NicFilter(), listening)) out.push_back(e.port);
    return out;
  };
  auto at = [](const char* host, uint16_t port) {
    rpc::Address address;
    address.host = host;
    address.port = port;
    return address;
  };
  CHECK(ports({}) == std::vector{0, 0});  // link-local addresses are none
  CHECK(ports({at("0.0.0.0", 7)}) == std::vector{7, 0});
  CHECK(ports({at("::", 8)}) == std::vector{8, 8});
  CHECK(ports({at("10.0.0.1", 9)}) == std::vector{9, 0});
  CHECK(ports({at("10.0.0.9", 9)}) == std::vector{0, 0});
  auto only = NicFilter::parse({"fd00::/16"});
  REQUIRE(only);
  CHECK(rail_ends(std::vector{nic}, *only, {}).size() == 1);
}

TEST_CASE("ends survive the wire, and hostile bytes are refused") {
  std::vector<RailEnd> ends = {end("e0", "10.0.0.1/24", 1, 100'000, 1), end("e1", "fd00::1/64")};
  ends[1].up = false;
  ByteWriter out;
  encode_ends(out, ends);
  std::string bytes = out.take();
  ByteReader in(bytes);
  CHECK(decode_ends(in) == ends);
  CHECK(in.done());
  for (size_t n = 0; n < bytes.size(); ++n) {
    ByteReader cut(std::string_view(bytes).substr(0, n));
    (void)decode_ends(cut);
    CHECK_FALSE(cut.ok());
  }
  ByteReader many(std::string_view("\xff\xff\xff\xff", 4));
  CHECK(decode_ends(many).empty());
  CHECK_FALSE(many.ok());
}
