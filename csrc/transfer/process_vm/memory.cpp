#include "transfer/process_vm/memory.h"

#include <sys/uio.h>

namespace torch_mooncake::transfer {

AccessRecord process_vm_record(const RegionImpl& region) {
  ByteWriter out;
  out.put(reinterpret_cast<uint64_t>(region.data())).put(reinterpret_cast<uint64_t>(region.generation_word()));
  return {AccessKind::process_vm, out.take()};
}

Result<std::shared_ptr<ProcessVmMemory>> parse_process_vm_record(const std::string& body, uint64_t generation) {
  ByteReader in(body);
  auto memory = std::make_shared<ProcessVmMemory>();
  memory->address = reinterpret_cast<std::byte*>(in.get<uint64_t>());
  memory->generation_word = in.get<uint64_t>();
  memory->generation = generation;
  if (!in.done()) return Status(Code::invalid_argument, "malformed process_vm record in a descriptor");
  return memory;
}

bool can_read_process(int pid, const rpc::Identity& identity) {
  if (pid <= 0 || identity.nonce_address == 0) return false;
  Id128 nonce{};
  iovec local{nonce.data(), nonce.size()};
  iovec remote{reinterpret_cast<void*>(identity.nonce_address), nonce.size()};
  return process_vm_readv(pid, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(nonce.size()) &&
         nonce == identity.nonce;
}

}  // namespace torch_mooncake::transfer
