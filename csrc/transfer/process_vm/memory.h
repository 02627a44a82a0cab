// Ordinary memory of another process on this host: where a region lies in its owner's address space.
#pragma once

#include "rpc/session.h"
#include "transfer/region_table.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

// Body: u64 address of the first byte, u64 address of the generation word.
AccessRecord process_vm_record(const RegionImpl& region);

struct ProcessVmMemory final : RemoteMemory {
  std::byte* address = nullptr;  // in the owner's address space
  uint64_t generation_word = 0;  // likewise
  uint64_t generation = 0;
};
Result<std::shared_ptr<ProcessVmMemory>> parse_process_vm_record(const std::string& body, uint64_t generation);

// May we read that process, and is it the one that sent `identity`? Reads its nonce. False where Yama, seccomp or
// another user forbid it.
bool can_read_process(int pid, const rpc::Identity& identity);
// Why it cannot, in words; empty if it can (now).
std::string why_unreadable(int pid, const rpc::Identity& identity);

}  // namespace torch_mooncake::transfer
