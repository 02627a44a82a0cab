#include "transfer/rdma/driver.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "topology/sysfs.h"

namespace torch_mooncake::transfer::rdma {

void QueuePairAddress::encode(ByteWriter& out) const { out.put(lid).put(number).put(first_packet).put(mtu); }

QueuePairAddress QueuePairAddress::decode(ByteReader& in) {
  QueuePairAddress out;
  out.lid = in.get<uint16_t>();
  out.number = in.get<uint32_t>();
  out.first_packet = in.get<uint32_t>();
  out.mtu = in.get<uint32_t>();
  return out;
}

int Driver::numa_nodes() const {
  const auto names = sysfs::list("/sys/devices/system/node");
  return static_cast<int>(std::count_if(names.begin(), names.end(), [](auto& name) {
    return name.starts_with("node") && name.find_first_not_of("0123456789", 4) == name.npos;
  }));
}

int Driver::numa_node_of(const void* data, uint64_t nbytes) const {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uint64_t>(data);
  std::array<void*, 3> pages;
  for (size_t i = 0; i < pages.size(); ++i)  // of the first, the middle and the last byte
    pages[i] = reinterpret_cast<void*>((begin + (nbytes > 0 ? (nbytes - 1) * i / 2 : 0)) / page * page);
  std::array<int, 3> nodes{-1, -1, -1};
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0) return -1;
  std::sort(nodes.begin(), nodes.end());  // pages that nobody has touched have a negative number
  return std::max(-1, nodes[1] >= 0 ? nodes[1] : nodes[2]);
}

}  // namespace torch_mooncake::transfer::rdma
