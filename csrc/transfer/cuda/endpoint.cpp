#include "transfer/cuda/endpoint.h"

#include "transfer/cuda/lane.h"
#include "transfer/cuda/share.h"
#include "transfer/engine_impl.h"
#include "transfer/file/lane.h"
#include "transfer/slices.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {

// For calls of the driver that may wait for what a device is at; of the process, as mappings may outlive engines. What
// gives memory back has a thread of its own: it may stand there until a stream goes on that waits for a peer, who may
// need to be shown other memory before.
Worker& driver_worker() {
  static auto* worker = new Worker("tm-cuda-share");
  return *worker;
}
Worker& showing_worker() {
  static auto* worker = new Worker("tm-cuda-show");
  return *worker;
}

// A peer's region, mapped into this process.
class CudaMapped final : public RemoteMemory {
 public:
  explicit CudaMapped(std::shared_ptr<CudaMemory> memory) : memory_(std::move(memory)) {}
  const std::shared_ptr<CudaMemory>& memory() const { return memory_; }
  bool maps() const override { return true; }
  void let_go(std::function<void()> gone) override {
    driver_worker().post([memory = memory_, gone = std::move(gone)] {
      memory->unmap();
      gone();
    });
  }

 private:
  const std::shared_ptr<CudaMemory> memory_;
};

// What the owner answers to kCudaShare. The grant counts as mapped from the answer on.
void on_share(PeerImpl& peer, rpc::Message request, rpc::Responder responder) {
  ByteReader in(request.body);
  auto grant = in.get<uint32_t>();
  auto first = in.get<uint32_t>();
  auto region = peer.grants().find(grant);
  if (!in.done() || !region || region->kind() != MemoryKind::cuda)
    return responder.fail({Code::key_not_found, "grant " + std::to_string(grant) + " names no CUDA memory"});
  if (!peer.same_host() || !peer.engine().allows("shm"))
    return responder.fail({Code::unsupported, "its owner shares CUDA memory with processes of its host only, by shm"});
  auto shared_peer = peer.shared_from_this();
  auto answer = std::make_shared<rpc::Responder>(std::move(responder));
  showing_worker().post([shared_peer, region, grant, first, answer] {
    auto& peer = *shared_peer;
    auto deregistered = [&] { answer->fail({Code::key_not_found, region->name() + " was deregistered"}); };
    if (!region->usage().acquire(peer.name())) return deregistered();
    auto shared = CudaShared::of(static_cast<CudaMemory&>(*region->backing()), first);
    bool marked = shared && peer.grants().mark_mapped(grant, peer.session()->peer_process());
    region->usage().release(peer.name());
    if (!shared) return answer->fail(shared.status().with(region->name()));
    if (!marked) return deregistered();
    answer->ok(shared->first.encode(), std::move(shared->second));
  });
}

}  // namespace

void CudaEndpoint::attach(EngineImpl& engine) {
  engine.handle(kCudaShare, on_share);
  engine.handle(kCudaNotMapped, [](PeerImpl& peer, rpc::Message m, rpc::Responder r) {
    peer.grants().unmark_mapped(ByteReader(m.body).get<uint32_t>());
    r.ok();
  });
}

std::string CudaEndpoint::why_no_ipc() const {
  if (EngineImpl::find(peer_.identity().engine)) return "the peer is an engine of this process";
  if (!peer_.same_host()) return "the peer is not on this host";
  if (auto features = peer_.features(); features.known && !features.shm) return "the peer does not allow shm";
  if (!CudaDriver::if_used()) return "this process does not use CUDA";
  return {};
}

Result<RemoteMemoryPtr> CudaEndpoint::open(const OpenedRegion& opened, Direction, Deadline deadline) {
  if (!ipc_) return RegionHere::open(opened, MemoryKind::cuda);
  if (opened.descriptor.kind != MemoryKind::cuda || !why_no_ipc().empty()) return RemoteMemoryPtr();
  {
    std::lock_guard lock(mutex_);
    std::erase_if(mapped_, [](auto& entry) { return entry.second.expired(); });
    if (auto it = mapped_.find(opened.grant); it != mapped_.end())
      if (auto known = it->second.lock()) return known;
  }
  auto memory = map_cuda(peer_, CudaDriver::if_used(), opened, deadline);
  if (!memory) {
    auto code = memory.status().code();
    (void)peer_.session()->post(kCudaNotMapped, ByteWriter().put(opened.grant).take());  // dead: it counts no more
    if (code != Code::unsupported && code != Code::io) return memory.status();
    std::lock_guard lock(mutex_);
    not_mapped_ = memory.status().message();
    return RemoteMemoryPtr();
  }
  RemoteMemoryPtr mapped = std::make_shared<CudaMapped>(std::move(*memory));
  std::lock_guard lock(mutex_);
  mapped_[opened.grant] = mapped;
  return mapped;
}

Explanation CudaEndpoint::explain() const {
  Explanation out;
  out.transport = name();
  out.option = ipc_ ? "shm" : "";
  out.serves = ipc_ ? "CUDA memory of the peer, mapped here" : "CUDA memory of this process";
  out.ordinary_memory = false;
  if (ipc_)
    out.no_read = out.no_write = why_no_ipc();
  else if (!EngineImpl::find(peer_.identity().engine))
    out.no_read = out.no_write = "the peer is no engine of this process";
  auto driver = CudaDriver::made();  // asking for one would make a context
  out.facts.emplace_back("driver",
                         driver ? driver->describe() : std::string("not opened: no CUDA memory is registered"));
  std::lock_guard lock(mutex_);
  if (!not_mapped_.empty()) out.facts.emplace_back("staged because not mapped", not_mapped_);
  return out;
}

Reached CudaEndpoint::reach(RemoteRegionImpl& remote, const RemoteRegionImpl::Path& path) const {
  if (!ipc_) return Reached::here(static_cast<RegionHere&>(*path.memory).region);
  return {static_cast<CudaMapped&>(*path.memory).memory(), remote.shared_from_this(), &remote.usage(), remote.name(),
          true};
}

void CudaEndpoint::submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) {
  for (auto* remote : remotes_of(batches)) {
    auto [host, files, devices] = batches_of(*remote, batches);
    auto kind = !host.empty() ? MemoryKind::host : !devices.empty() ? MemoryKind::cuda : MemoryKind::file;
    auto reached = reach(*remote, remote->path(op->direction(), as_local(kind)));
    if (!host.empty()) MovePart::run(op, name(), reached, host);
    if (!files.empty()) FileCudaPart::run(op, name(), reached, files);
    if (!devices.empty()) CudaCopyPart::run(op, name(), reached, devices);
  }
}

}  // namespace torch_mooncake::transfer
