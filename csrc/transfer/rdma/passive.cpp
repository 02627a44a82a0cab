// RdmaEndpoint: what the peer asks for: its ends of queue pairs, and keys of regions.
#include <algorithm>

#include "transfer/engine_impl.h"
#include "transfer/rdma/endpoint.h"
#include "transfer/rdma/later.h"
#include "transfer/rdma/passive_pair.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr uint32_t kMostGids = 256;

std::string no_gids_in_common(const std::string& nic, std::span<const Gid> ours, std::span<const Gid> theirs) {
  auto list = [](std::span<const Gid> gids) {
    std::string out;
    for (auto& gid : gids) out += (out.empty() ? "" : ", ") + gid.to_string();
    return out.empty() ? "none" : out;
  };
  return nic + ": no two GIDs of one kind; here " + list(ours) + "; there " + list(theirs);
}

}  // namespace

// One thread has all of a connection, so that its end follows its beginning; others have other connections.
void RdmaEndpoint::on_connect(rpc::Message message, rpc::Responder responder) {
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  const auto connection = ByteReader(message.body).get<uint64_t>();
  peer_.engine()
      .repair(connection)
      .post([this, peer = peer_.shared_from_this(), body = std::move(message.body), shared] {
        Later later(peer->engine());
        auto made = accept(body, later);
        made ? shared->ok(std::move(*made)) : shared->fail(made.status());
      });
}

Result<std::string> RdmaEndpoint::accept(std::string_view body, Later& later) {
  ByteReader in(body);
  auto connection = in.get<uint64_t>();
  auto index = in.get<uint32_t>();
  auto which = in.get<uint32_t>();
  auto remote = QueuePairAddress::decode(in);
  std::vector<Gid> theirs(std::min(in.get_count(17), kMostGids));
  for (auto& gid : theirs) gid = Gid::decode(in);
  auto& engine = peer_.engine();
  if (!in.done() || index >= engine.nics().size()) return Status(Code::invalid_argument, "malformed rdma connect");
  auto& nic = engine.nics()[index];
  if (!nic->up()) return Status(Code::io, nic->info().name + ": its port is down");
  auto ours = nic->device().gids();
  auto pairs = rank_pairs(ours, theirs);
  if (pairs.empty()) return Status(Code::io, no_gids_in_common(nic->info().name, ours, theirs));
  auto [our_index, their_index] = pairs[which % pairs.size()];
  TM_ASSIGN(auto made, queue_pair_on(nic, 1, kReceives));
  auto pair = std::make_shared<PassivePair>(*this, peer_.shared_from_this(), nic, std::move(made));
  nic->add(pair->number(), pair);
  TM_TRY(pair->queue_pair().connect(remote, ours[our_index], theirs[their_index]).with(nic->info().name));
  TM_TRY(pair->queue_pair().post_receives(kReceives).with(nic->info().name));
  ByteWriter out;
  out.put(static_cast<uint32_t>(pairs.size())).put(static_cast<uint32_t>(their_index));
  ours[our_index].encode(out);
  pair->queue_pair().address().encode(out);
  out.put(engine.nic_identity()->address()).put(engine.nic_identity()->remote_key(nic->index()));
  Turn turn(*this);
  if (over_) return peer_.session()->status();
  later.add([before = std::exchange(passive_[connection], std::move(pair))] {});
  return out.take();
}

void RdmaEndpoint::on_disconnect(rpc::Message message, rpc::Responder responder) {
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  const auto connection = ByteReader(message.body).get<uint64_t>();
  peer_.engine().repair(connection).post([this, peer = peer_.shared_from_this(), connection, shared] {
    std::shared_ptr<PassivePair> pair;
    {
      Turn turn(*this);
      auto it = passive_.find(connection);
      if (it != passive_.end()) {
        pair = std::move(it->second);
        passive_.erase(it);
      }
    }
    if (pair) {  // the NIC's thread may hold it for the length of a callback; the answer waits for its real end
      auto gone = pair->gone();
      pair.reset();
      gone->wait(Deadline::never());
    }
    shared->ok();
  });
}

// keys: u64 region, u64 generation. Answer: its record.
void RdmaEndpoint::on_keys(rpc::Message message, rpc::Responder responder) {
  ByteReader in(message.body);
  auto id = in.get<uint64_t>();
  auto generation = in.get<uint64_t>();
  auto region = peer_.engine().regions().find(id, generation);
  if (!in.done() || !region || region->kind() != MemoryKind::host || !region->usage().acquire(peer_.name()))
    return responder.fail({Code::key_not_found, "that region is not registered any more"});
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  peer_.engine().pinner().post([peer = peer_.shared_from_this(), region, shared]() mutable {
    Status status = peer->engine().ensure_nic_keys(*region);
    auto keys = region->nic_keys();
    if (status && !keys) status = {Code::key_not_found, region->name() + " is not registered any more"};
    status ? shared->ok(keys->record().body) : shared->fail(status);
    keys = nullptr;
    region->usage().release(peer->name());
    auto callbacks = peer->engine().callbacks();
    callbacks->post([peer = std::move(peer), region = std::move(region)] {});  // perhaps the last references
  });
}

}  // namespace torch_mooncake::transfer::rdma
