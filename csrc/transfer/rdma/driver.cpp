#include "transfer/rdma/driver.h"

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

}  // namespace torch_mooncake::transfer::rdma
