#include "topology/interfaces.h"

#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>

#include "common/fd.h"

namespace torch_mooncake {
namespace {

ifreq request_for(const std::string& name) {
  ifreq request{};
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  return request;
}

// The kernel first tells how many words its link-mode masks have, then fills them.
int64_t speed_of(int fd, const std::string& name) {
  alignas(ethtool_link_settings) std::byte memory[sizeof(ethtool_link_settings) + 3 * 127 * sizeof(uint32_t)] = {};
  auto* settings = reinterpret_cast<ethtool_link_settings*>(memory);
  ifreq request = request_for(name);
  request.ifr_data = reinterpret_cast<char*>(memory);
  settings->cmd = ETHTOOL_GLINKSETTINGS;
  if (::ioctl(fd, SIOCETHTOOL, &request) != 0 || settings->link_mode_masks_nwords >= 0) return 0;
  settings->link_mode_masks_nwords = static_cast<int8_t>(-settings->link_mode_masks_nwords);
  settings->cmd = ETHTOOL_GLINKSETTINGS;
  if (::ioctl(fd, SIOCETHTOOL, &request) != 0) return 0;
  return settings->speed == static_cast<uint32_t>(SPEED_UNKNOWN) ? 0 : settings->speed;
}

}  // namespace

Result<std::vector<Interface>> live_interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return Status::from_errno("getifaddrs", errno);
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  std::vector<Interface> found;
  for (auto* entry = list; entry; entry = entry->ifa_next) {
    std::string name = entry->ifa_name;
    if (auto alias = name.find(':'); alias != name.npos) name.resize(alias);  // "eth0:1" labels an address of eth0
    auto it = std::find_if(found.begin(), found.end(), [&](auto& i) { return i.name == name; });
    if (it == found.end()) {
      it = found.insert(found.end(), Interface{});
      it->name = name;
      it->index = static_cast<int>(::if_nametoindex(name.c_str()));
      it->up = (entry->ifa_flags & IFF_UP) && (entry->ifa_flags & IFF_RUNNING);
      it->loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    }
    IpAddress address;
    if (IpAddress::from_socket(entry->ifa_addr, entry->ifa_netmask, address)) it->addresses.push_back(address);
    if (entry->ifa_addr && entry->ifa_addr->sa_family == AF_PACKET) {
      auto* link = reinterpret_cast<sockaddr_ll*>(entry->ifa_addr);
      for (int i = 0; i < link->sll_halen && link->sll_halen <= 8; ++i) {  // longer ones (InfiniBand) do not fit
        char byte[4];
        std::snprintf(byte, sizeof byte, i == 0 ? "%02x" : ":%02x", link->sll_addr[i]);
        it->mac += byte;
      }
    }
  }
  UniqueFd fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return found;
  for (auto& interface : found) {
    ifreq request = request_for(interface.name);
    if (::ioctl(fd.get(), SIOCGIFMTU, &request) == 0) interface.mtu = static_cast<uint32_t>(request.ifr_mtu);
    interface.speed_mbps = speed_of(fd.get(), interface.name);
  }
  return found;
}

}  // namespace torch_mooncake
