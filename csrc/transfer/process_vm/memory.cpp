#include "transfer/process_vm/memory.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <fstream>

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

bool can_read_process(int pid, const rpc::Identity& identity) { return why_unreadable(pid, identity).empty(); }

std::string why_unreadable(int pid, const rpc::Identity& identity) {
  if (pid <= 0) return "the kernel does not tell the peer's pid (another pid namespace?)";
  if (identity.nonce_address == 0) return "the peer gave no nonce to read";
  Id128 nonce{};
  iovec local{nonce.data(), nonce.size()};
  iovec remote{reinterpret_cast<void*>(identity.nonce_address), nonce.size()};
  if (process_vm_readv(pid, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(nonce.size()))
    return nonce == identity.nonce ? "" : "process " + std::to_string(pid) + " is not the peer";
  if (errno != EPERM) return std::string("process_vm_readv: ") + std::strerror(errno);
  std::ifstream yama("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  if (yama >> scope && scope > 0) return "Yama: kernel.yama.ptrace_scope is " + std::to_string(scope);
  return "ptrace is not permitted (another user, a process that is not dumpable, or seccomp)";
}

}  // namespace torch_mooncake::transfer
