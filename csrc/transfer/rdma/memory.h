// Memory as NICs reach it: keys of one region on every NIC, one for each chunk of at most max_mr_size. A NIC that was
// gone when they were made has none.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "transfer/descriptor.h"
#include "transfer/rdma/rank.h"
#include "transfer/rdma/words.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {
class CudaMemory;
}

namespace torch_mooncake::transfer::rdma {

// Our own memory. Dropping the last reference fences: no NIC touches it afterwards, whatever keys peers still hold.
class RegionKeys {
 public:
  // Errors: io, which says what to do where the limit of locked memory is the reason.
  static Result<std::shared_ptr<RegionKeys>> make(WordTable& words, const NicRanks& ranks, void* data, uint64_t nbytes,
                                                  bool readable, bool writable);
  // Device memory (GPUDirect RDMA): by dmabuf, or, where the kernel has nvidia_peermem, by its address. Errors: those
  // of both ways.
  static Result<std::shared_ptr<RegionKeys>> of_device(WordTable& words, const NicRanks& ranks,
                                                       const CudaMemory& memory, bool readable, bool writable);
  bool host() const { return host_; }    // the CPU reaches it, too
  bool flush() const { return flush_; }  // see CudaDriver::orders_nic_writes
  uint64_t chunk_nbytes() const { return chunk_nbytes_; }
  bool has(uint32_t nic) const { return chunks_ == 0 || registrations_[nic * chunks_] != nullptr; }
  uint32_t local_key(uint32_t nic, uint32_t chunk) const { return registrations_[nic * chunks_ + chunk]->local_key(); }
  Distance distance(uint32_t nic) const { return distances_[nic]; }
  // What a reader compares after it has read; 0 when the region is nobody's any more.
  void set_generation(uint64_t generation) { generation_->set(0, generation); }
  // Body: u64 address, u64 bytes a chunk, u64 address of the generation, u8 flush, u32 NICs; for each its name, u8
  // distance, u32 key of the generation, u32 chunks (0: none on that NIC), u32 their keys.
  AccessRecord record() const;

 private:
  using RegisterChunk = std::function<Result<std::unique_ptr<Registration>>(Device&, uint64_t at, uint64_t nbytes)>;
  static Result<std::shared_ptr<RegionKeys>> make(WordTable& words, uint64_t address, uint64_t nbytes, bool host,
                                                  const RegisterChunk& fn);
  Status register_with(const Nic& nic, uint64_t nbytes, const RegisterChunk& fn);

  uint64_t address_ = 0, chunk_nbytes_ = 0;
  size_t chunks_ = 0;
  bool host_ = true, flush_ = false;
  SlotPtr generation_;
  std::vector<std::unique_ptr<Registration>> registrations_;  // of the first NIC, of the second, …
  std::vector<Distance> distances_;                           // by NIC
};

// A peer's.
struct RdmaMemory final : RemoteMemory {
  uint64_t address = 0, chunk_nbytes = 0;
  uint64_t generation = 0, generation_address = 0;  // what its word holds while it lives, and where that is
  bool flush = false;  // what is written there has to be flushed by its owner before it counts as there
  std::vector<uint32_t> generation_keys;    // by the owner's NIC
  std::vector<std::vector<uint32_t>> keys;  // by the owner's NIC, by chunk; none: not on that NIC
  std::vector<Distance> distances;          // by the owner's NIC
  std::vector<std::string> nics;
  uint32_t chunks = 0;
  bool has(uint32_t nic) const { return nic < keys.size() && keys[nic].size() == chunks; }
};
// invalid_argument: bytes that cannot be the record of a region of `nbytes`.
Result<std::shared_ptr<RdmaMemory>> parse_rdma_record(const std::string& body, uint64_t nbytes);

}  // namespace torch_mooncake::transfer::rdma
