#include "transfer/cuda/share.h"

#include <map>
#include <tuple>

#include "common/random.h"
#include "transfer/peer.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {

Id128 process_nonce() {
  static const Id128 nonce = random_id();
  return nonce;
}

// ---- What this process has mapped

class Mappings {
 public:
  // Device here, owner, id, address there, bytes.
  using Key = std::tuple<CudaDriver*, int, Id128, uint64_t, uint64_t, uint64_t>;
  static Mappings& instance() {
    static auto* all = new Mappings;  // outlives static destructors
    return *all;
  }
  Result<std::shared_ptr<void>> map(CudaDriver& driver, int device, const Id128& process,
                                    const CudaShared::Allocation& allocation, CudaHandle handle) {
    if (allocation.id == 0) return driver.map(device, std::move(handle), allocation.nbytes);
    std::lock_guard lock(mutex_);
    std::erase_if(mapped_, [](auto& entry) { return entry.second.expired(); });
    auto& slot = mapped_[{&driver, device, process, allocation.id, allocation.base, allocation.nbytes}];
    if (auto known = slot.lock()) return known;
    TM_ASSIGN(auto made, driver.map(device, std::move(handle), allocation.nbytes));
    slot = made;
    return made;
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<void>> mapped_;
};

// The device here that shall copy to and from memory of that hardware. Only one with a context: none is made.
Result<int> device_for(CudaDriver& driver, const std::string& uuid) {
  int same = -1;
  for (int device = 0; device < driver.devices(); ++device)
    if (driver.uuid(device) == uuid) same = device;
  if (same < 0) return Status(Code::unsupported, "its device is not visible to this process (CUDA_VISIBLE_DEVICES)");
  if (driver.in_use(same)) return same;
  for (int device = 0; device < driver.devices(); ++device)
    if (driver.in_use(device) && driver.reaches(device, same)) return device;
  return Status(Code::unsupported, "this process does not use CUDA device " + std::to_string(same) +
                                       ", and no device that it uses has peer access to it");
}

}  // namespace

// ---- The owner

Result<std::pair<CudaShared, std::vector<UniqueFd>>> CudaShared::of(const CudaMemory& memory, uint32_t first) {
  if (!memory.shareable()) return Status(Code::unsupported, "its region does not keep the memory (it is weak)");
  CudaShared out;
  std::vector<UniqueFd> fds;
  auto& driver = memory.driver();
  auto& all = memory.allocations();
  out.process = process_nonce();
  out.device = driver.uuid(memory.queue().device());
  out.address = memory.address();
  for (size_t i = first; i < all.size() && out.allocations.size() < kMost; ++i) {
    auto now = driver.find(all[i].base);
    if (!now || now->base != all[i].base || now->nbytes != all[i].nbytes || now->id != all[i].id)
      return Status(Code::key_not_found, "its memory was freed after it was registered");
    TM_ASSIGN(auto handle, driver.share(all[i]));
    bool by_fd = handle.fd.valid();
    out.allocations.push_back({all[i].id, all[i].base, all[i].nbytes, by_fd, std::move(handle.name)});
    if (by_fd) fds.push_back(std::move(handle.fd));
  }
  return std::pair(std::move(out), std::move(fds));
}

std::string CudaShared::encode() const {
  ByteWriter out;
  out.put(process).put(std::string_view(device)).put(address);
  out.put(static_cast<uint32_t>(allocations.size()));
  for (auto& a : allocations)
    out.put(a.id).put(a.base).put(a.nbytes).put(static_cast<uint8_t>(a.by_fd)).put(std::string_view(a.name));
  return out.take();
}

Result<CudaShared> CudaShared::decode(std::string_view body) {
  ByteReader in(body);
  CudaShared s;
  s.process = in.get_id();
  s.device = in.get_string();
  s.address = in.get<uint64_t>();
  s.allocations.resize(in.get_count(29));
  for (auto& a : s.allocations) {
    a.id = in.get<uint64_t>();
    a.base = in.get<uint64_t>();
    a.nbytes = in.get<uint64_t>();
    a.by_fd = in.get<uint8_t>() != 0;
    a.name = in.get_string();
  }
  if (!in.done()) return Status(Code::corrupt, "an answer about shared CUDA memory that cannot be read");
  return s;
}

// ---- The holder

Result<std::shared_ptr<CudaMemory>> map_cuda(PeerImpl& peer, std::shared_ptr<CudaDriver> driver,
                                             const OpenedRegion& region, Deadline deadline) {
  const uint64_t nbytes = region.descriptor.nbytes;
  const Status strange(Code::corrupt, peer.name() + " shares CUDA memory that does not cover its region");
  if (nbytes == 0) return strange;  // nobody can have registered it
  std::vector<CudaRun> runs;
  int device = -1;
  uint64_t covered = 0;
  for (uint32_t first = 0;;) {
    ByteWriter request;
    request.put(region.grant).put(first);
    TM_ASSIGN(auto answer, peer.session()->call_sync(kCudaShare, request.take(), deadline));
    TM_ASSIGN(auto shared, CudaShared::decode(answer.body));
    if (device < 0) {
      TM_ASSIGN(device, device_for(*driver, shared.device));
    }
    if (shared.address + nbytes < nbytes) return strange;
    auto fd = answer.fds.begin();
    for (auto& allocation : shared.allocations) {
      CudaHandle handle{std::move(allocation.name), {}};
      if (allocation.by_fd && fd == answer.fds.end()) return strange;
      if (allocation.by_fd) handle.fd = std::move(*fd++);
      // Each begins where the one before it ends, the first at or before the region.
      uint64_t at = shared.address + covered;
      if (at < allocation.base || at - allocation.base >= allocation.nbytes || covered == nbytes) return strange;
      uint64_t skip = at - allocation.base, n = std::min(nbytes - covered, allocation.nbytes - skip);
      TM_ASSIGN(auto mapping, Mappings::instance().map(*driver, device, shared.process, allocation, std::move(handle)));
      runs.push_back({covered, n, reinterpret_cast<uint64_t>(mapping.get()) + skip, std::move(mapping)});
      covered += n;
    }
    first += static_cast<uint32_t>(shared.allocations.size());
    if (covered == nbytes) break;
    if (shared.allocations.empty()) return strange;
  }
  TM_ASSIGN(auto* queue, CudaQueue::of(driver, device));
  return std::make_shared<CudaMemory>(std::move(driver), *queue, std::move(runs));
}

}  // namespace torch_mooncake::transfer
