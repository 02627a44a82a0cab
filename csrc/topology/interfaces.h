// Network interfaces as the kernel lists them in this network namespace, without sysfs: getifaddrs and two ioctls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/api.h"
#include "common/status.h"
#include "topology/ip.h"

namespace torch_mooncake {

struct TM_API Interface {
  std::string name;
  int index = 0;
  bool up = false;  // administratively up, and with a carrier
  bool loopback = false;
  std::string mac;  // "02:00:00:00:00:01", empty where there is none
  uint32_t mtu = 0;
  int64_t speed_mbps = 0;  // 0: unknown
  std::vector<IpAddress> addresses;
};

// In the kernel's order.
TM_API Result<std::vector<Interface>> live_interfaces();

}  // namespace torch_mooncake
