#include "transfer/rdma/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "transfer/cuda/memory.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr uint64_t kPage = 4096;                // of a chunk's length
constexpr uint32_t kMostNics = 256;             // of a peer: each makes a rail
constexpr uint64_t kParallelNbytes = 64 << 20;  // from this on the NICs register a region at the same time

Status explain_failure(const Status& status, const Nic& nic, uint64_t nbytes, bool host) {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  std::string hint;
  if (host && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < nbytes)
    hint = "; the limit of locked memory is " + std::to_string(limit.rlim_cur) + " bytes: ulimit -l unlimited";
  return {Code::io,
          "registering " + std::to_string(nbytes) + " bytes with " + nic.info().name + ": " + status.message() + hint};
}

}  // namespace

Result<std::shared_ptr<RegionKeys>> RegionKeys::make(WordTable& words, const NicRanks& ranks, void* data,
                                                     uint64_t nbytes, bool readable, bool writable) {
  auto* bytes = static_cast<std::byte*>(data);
  TM_ASSIGN(auto keys,
            make(words, reinterpret_cast<uint64_t>(data), nbytes, true, [=](Device& device, uint64_t at, uint64_t n) {
              return device.register_memory(bytes + at, n, readable, writable);
            }));
  keys->distances_ = ranks.of_host(data, nbytes);
  return keys;
}

Result<std::shared_ptr<RegionKeys>> RegionKeys::of_device(WordTable& words, const NicRanks& ranks,
                                                          const CudaMemory& memory, bool readable, bool writable) {
  const uint64_t base = memory.address(), page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const int device = memory.queue().device();
  const bool flush = !memory.driver().orders_nic_writes(device);
  if (flush) TM_TRY(memory.driver().flush_nic_writes(device));  // where it cannot be told when bytes are there, none go
  auto by_dmabuf = [&](Device& device, uint64_t at, uint64_t n) -> Result<std::unique_ptr<Registration>> {
    uint64_t begin = (base + at) / page * page, end = (base + at + n + page - 1) / page * page;
    TM_ASSIGN(auto fd, memory.driver().export_dmabuf(begin, end - begin));
    return device.register_dmabuf(fd.get(), base + at - begin, n, base + at, readable, writable);
  };
  auto by_address = [&](Device& device, uint64_t at, uint64_t n) {
    return device.register_memory(reinterpret_cast<void*>(base + at), n, readable, writable);
  };
  auto keys = make(words, base, memory.nbytes(), false, by_dmabuf);
  if (!keys) {
    auto second = make(words, base, memory.nbytes(), false, by_address);
    if (!second) return keys.status().with("neither by dmabuf nor by address (" + second.status().message() + ")");
    keys = std::move(second);
  }
  (*keys)->flush_ = flush;
  (*keys)->distances_ = ranks.of_gpu(memory.driver().bus_id(device));
  return keys;
}

Result<std::shared_ptr<RegionKeys>> RegionKeys::make(WordTable& words, uint64_t address, uint64_t nbytes, bool host,
                                                     const RegisterChunk& fn) {
  auto& nics = words.nics();
  auto keys = std::make_shared<RegionKeys>();
  keys->host_ = host;
  keys->address_ = address;
  keys->chunk_nbytes_ = UINT32_MAX / kPage * kPage;  // a work request's length has 32 bits
  for (auto& nic : nics) {
    uint64_t most = std::min(nic->info().max_mr_nbytes, nic->info().max_message_nbytes);
    keys->chunk_nbytes_ = std::max(kPage, std::min(keys->chunk_nbytes_, most / kPage * kPage));
  }
  keys->chunks_ = (nbytes + keys->chunk_nbytes_ - 1) / keys->chunk_nbytes_;
  keys->registrations_.resize(nics.size() * keys->chunks_);
  TM_ASSIGN(keys->generation_, words.take());
  // Pinning is what takes the time, and each NIC's driver does it anew.
  if (nbytes < kParallelNbytes || nics.size() == 1) {
    for (auto& nic : nics) TM_TRY(keys->register_with(*nic, nbytes, fn));
  } else {
    std::vector<Status> outcomes(nics.size());
    std::vector<std::thread> threads;
    for (size_t i = 1; i < nics.size(); ++i)
      threads.emplace_back([&, i] { outcomes[i] = keys->register_with(*nics[i], nbytes, fn); });
    outcomes[0] = keys->register_with(*nics[0], nbytes, fn);
    for (auto& thread : threads) thread.join();
    for (auto& outcome : outcomes) TM_TRY(outcome);
  }
  for (uint32_t i = 0; i < nics.size(); ++i)
    if (keys->has(i)) return keys;
  return Status(Code::io, "registering " + std::to_string(nbytes) + " bytes: all RDMA devices are gone");
}

// One that is gone, or goes meanwhile, is left out.
Status RegionKeys::register_with(const Nic& nic, uint64_t nbytes, const RegisterChunk& fn) {
  if (!nic.up() && nic.gone()) return {};  // a device is not asked as long as all is well: that costs a system call
  auto* mine = registrations_.data() + nic.index() * chunks_;
  for (uint64_t at = 0; at < nbytes; at += chunk_nbytes_) {
    const uint64_t n = std::min(chunk_nbytes_, nbytes - at);
    auto made = fn(nic.device(), at, n);
    if (!made && nic.gone()) {
      for (size_t i = 0; i < chunks_; ++i) mine[i] = nullptr;
      return {};
    }
    if (!made) return explain_failure(made.status(), nic, n, host_);
    mine[at / chunk_nbytes_] = std::move(*made);
  }
  return {};
}

// In one allocation: regions are many.
AccessRecord RegionKeys::record() const {
  std::string out;
  auto put = [&](auto value) { out.append(reinterpret_cast<const char*>(&value), sizeof value); };
  auto& nics = generation_->nics();
  constexpr size_t kFixed = 29, kNic = 13;
  size_t length = kFixed + sizeof(uint32_t) * registrations_.size();
  for (auto& nic : nics) length += kNic + nic->info().name.size();
  out.reserve(length);
  put(address_), put(chunk_nbytes_), put(generation_->address()), put(static_cast<uint8_t>(flush_));
  put(static_cast<uint32_t>(nics.size()));
  for (uint32_t i = 0; i < nics.size(); ++i) {
    auto& name = nics[i]->info().name;
    put(static_cast<uint32_t>(name.size())), out.append(name), put(static_cast<uint8_t>(distances_[i]));
    put(generation_->remote_key(i)), put(static_cast<uint32_t>(has(i) ? chunks_ : 0));
    for (size_t chunk = 0; has(i) && chunk < chunks_; ++chunk) put(registrations_[i * chunks_ + chunk]->remote_key());
  }
  return {AccessKind::rdma, std::move(out)};
}

Result<std::shared_ptr<RdmaMemory>> parse_rdma_record(const std::string& body, uint64_t nbytes) {
  ByteReader in(body);
  auto memory = std::make_shared<RdmaMemory>();
  memory->address = in.get<uint64_t>();
  memory->chunk_nbytes = in.get<uint64_t>();
  memory->generation_address = in.get<uint64_t>();
  memory->flush = in.get<uint8_t>() != 0;
  auto nics = in.get_count(13);
  bool plausible = memory->chunk_nbytes > 0 && memory->chunk_nbytes <= UINT32_MAX && nics > 0 && nics <= kMostNics;
  bool any = false;
  const uint64_t chunks = plausible ? nbytes / memory->chunk_nbytes + (nbytes % memory->chunk_nbytes != 0) : 0;
  for (uint32_t i = 0; i < nics && in.ok(); ++i) {
    memory->nics.push_back(in.get_string());
    memory->distances.push_back(
        static_cast<Distance>(std::min(in.get<uint8_t>(), static_cast<uint8_t>(Distance::sys))));
    memory->generation_keys.push_back(in.get<uint32_t>());
    auto& keys = memory->keys.emplace_back(in.get_count(4));
    for (auto& key : keys) key = in.get<uint32_t>();
    plausible = plausible && (keys.empty() || keys.size() == chunks);
    any = any || keys.size() == chunks;
  }
  memory->chunks = static_cast<uint32_t>(chunks);
  if (!plausible || !any || !in.done()) return Status(Code::invalid_argument, "malformed rdma record in a descriptor");
  return memory;
}

}  // namespace torch_mooncake::transfer::rdma
