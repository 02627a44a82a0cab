#include "transfer/process_vm/endpoint.h"

#include "transfer/copy_part.h"
#include "transfer/engine_impl.h"
#include "transfer/process_vm/lane.h"
#include "transfer/process_vm/pull.h"
#include "transfer/slices.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {

void ProcessVmEndpoint::attach(EngineImpl& engine) {
  auto forward = [](auto member) {
    return [member](PeerImpl& peer, rpc::Message request, rpc::Responder responder) {
      auto* endpoint = peer.endpoint<ProcessVmEndpoint>();
      if (endpoint == nullptr) return responder.fail({Code::unsupported, "shm is not allowed at this engine"});
      (endpoint->*member)(std::move(request), std::move(responder));
    };
  };
  engine.handle(kPull, forward(&ProcessVmEndpoint::on_pull));
  engine.handle(kPullCancel, forward(&ProcessVmEndpoint::on_pull_cancel));
}

bool ProcessVmEndpoint::available() const {
  auto features = peer_.features();
  return peer_.same_host() && features.shm && peer_.we_read_peer_vm() && features.peer_reads_our_vm;
}

Explanation ProcessVmEndpoint::explain() const {
  Explanation out{.transport = name(), .option = "shm", .serves = "any host memory"};
  auto features = peer_.features();
  if (!peer_.same_host()) {
    out.no_read = out.no_write = "the peer is not on this host";
  } else if (features.known && !features.shm) {
    out.no_read = out.no_write = "the peer does not allow shm";
  } else {
    if (!peer_.we_read_peer_vm()) out.no_read = why_unreadable(peer_.session()->peer_pid(), peer_.identity());
    if (!features.peer_reads_our_vm) out.no_write = "the peer may not read our memory, which a write asks it to do";
  }
  add_copy_sizes(out);
  std::erase_if(out.sizes, [](auto& rule) { return rule.direction == "write"; });
  out.sizes.push_back({"write", Pull::kInlineBytes, "pulled by the peer, on its I/O thread"});
  out.sizes.push_back({"write", UINT64_MAX, "pulled by the peer, on its copy threads"});
  return out;
}

Result<RemoteMemoryPtr> ProcessVmEndpoint::open(const OpenedRegion& opened, Direction direction, Deadline) {
  auto* record = opened.descriptor.find(AccessKind::process_vm);
  bool can = direction == Direction::read ? peer_.we_read_peer_vm() : peer_.features().peer_reads_our_vm;
  if (record == nullptr || !peer_.same_host() || !peer_.features().shm || !can) return RemoteMemoryPtr();
  TM_ASSIGN(auto memory, parse_process_vm_record(*record, opened.descriptor.generation));
  return RemoteMemoryPtr(memory);
}

Status ProcessVmEndpoint::copy_now(Direction direction, const Batch& batch) {
  auto& remote = static_cast<RemoteRegionImpl&>(*batch.remote);
  auto& memory = static_cast<ProcessVmMemory&>(*remote.path(direction).memory);
  auto& session = *peer_.session();
  auto pieces = copy_pieces_of({&batch, 1}, direction, [&](auto&) { return memory.address; });
  Status status = vm_read(session.peer_pid(), pieces);
  if (status) status = vm_check_generation(session.peer_pid(), memory.generation_word, memory.generation);
  return session.alive() ? status : session.status();
}

void ProcessVmEndpoint::submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) {
  if (op->direction() == Direction::write) return submit_pull(op, batches);
  auto pieces = copy_pieces_of(batches, Direction::read, [](const RemoteRegionImpl& remote) {
    return static_cast<ProcessVmMemory&>(*remote.path(Direction::read).memory).address;
  });
  std::make_shared<VmReadPart>(op, std::move(pieces), remotes_of(batches))->run();
}

void ProcessVmEndpoint::submit_pull(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) {
  uint64_t id = next_pull_.fetch_add(1), nbytes = 0;
  for (auto& batch : batches)
    for (auto& extent : batch.extents) nbytes += extent.nbytes;
  std::make_shared<PullPart>(op, id, nbytes)->run(PullRequest::encode(id, op->take_notify(), batches));
}

void ProcessVmEndpoint::on_pull(rpc::Message message, rpc::Responder responder) {
  auto request = PullRequest::decode(message.body);
  if (!request) return responder.fail(request.status());
  uint64_t id = request->id;
  auto pull = std::make_shared<Pull>(peer_.shared_from_this(), std::move(*request), std::move(responder));
  {
    std::lock_guard lock(mutex_);
    pulls_[id] = pull;
  }
  if (pull->nbytes() <= Pull::kInlineBytes) return pull->run();
  peer_.engine().mover().post([pull] { pull->run(); });
}

void ProcessVmEndpoint::on_pull_cancel(rpc::Message message, rpc::Responder responder) {
  auto id = ByteReader(message.body).get<uint64_t>();
  std::shared_ptr<Pull> pull;
  {
    std::lock_guard lock(mutex_);
    auto it = pulls_.find(id);
    if (it != pulls_.end()) pull = it->second;
  }
  if (!pull) return responder.ok();  // messages keep their order, so it is over
  pull->cancel(std::move(responder));
}

void ProcessVmEndpoint::pull_over(uint64_t id) {
  std::lock_guard lock(mutex_);
  pulls_.erase(id);
}

void ProcessVmEndpoint::session_over(const Status&) {}  // pulls look at the session before every step

}  // namespace torch_mooncake::transfer
