#include <sys/socket.h>

#include <algorithm>

#include "rpc/session_impl.h"
#include "rpc/socket.h"
#include "rpc/wire.h"

namespace torch_mooncake::rpc {
namespace {

constexpr int64_t kSameHostDialMs = 1000;

Status exchange_proofs(Wire& wire, InitiatorHandshake& handshake) {
  TM_TRY(wire.send(FrameType::hello, handshake.hello()));
  TM_ASSIGN(auto challenge, wire.expect(FrameType::challenge, Stage::unproven));
  auto proof = handshake.on_challenge(challenge);
  if (!proof) {
    (void)wire.send(FrameType::reject, encode_reject(proof.status()));
    return proof.status();
  }
  TM_TRY(wire.send(FrameType::proof, *proof));
  TM_ASSIGN(auto welcome, wire.expect(FrameType::welcome, Stage::unproven));
  return handshake.on_welcome(welcome);
}

// Credentials were wanted during the handshake only.
void stop_credentials(int fd) {
  int off = 0;
  (void)::setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &off, sizeof off);
}

// A Unix connection to a peer that was dialled over TCP: proof that it is on this host. None is no error.
std::optional<DialledLane> prove_same_host(const std::shared_ptr<Core>& core, const SessionKey& key,
                                           const Identity& peer, Deadline deadline, std::string& dialled) {
  if (peer.host_id != core->options.host_id) return {};
  Deadline limit = min(deadline, Deadline::after_ms(kSameHostDialMs));
  for (auto& address : peer.addresses) {
    if (address.rfind("unix://", 0) != 0) continue;
    auto lane = dial_lane(core, key, 0, {.address = address}, limit);
    if (!lane) continue;
    dialled = address;  // further lanes take this way too
    return std::move(*lane);
  }
  return {};
}

}  // namespace

Result<DialledLane> dial_lane(const std::shared_ptr<Core>& core, const SessionKey& key, uint32_t index,
                              const LaneTarget& target, Deadline deadline) {
  const std::string& text = target.address;
  TM_ASSIGN(auto address, parse_address(text));
  TM_ASSIGN(auto fd, dial(address, deadline, core->closing, {target.from, target.device}));
  Wire wire(fd.get(), deadline, core->closing);
  InitiatorHandshake handshake(core->engine, std::string(as_view(key.key)), text, LaneClaim{key.id, index});
  TM_TRY(exchange_proofs(wire, handshake).with("lane to " + text));
  if (address.kind == Address::Kind::unix) stop_credentials(fd.get());
  return DialledLane{std::move(fd), wire.peer_pid()};
}

Result<std::shared_ptr<SessionImpl>> connect_session(const std::shared_ptr<Core>& core, const std::string& text,
                                                     Deadline deadline) {
  TM_ASSIGN(auto address, parse_address(text));
  TM_ASSIGN(auto fd, dial(address, deadline, core->closing));
  std::string context = "connecting to " + address.to_string();
  Wire wire(fd.get(), deadline, core->closing);
  InitiatorHandshake handshake(core->engine, core->options.token, address.to_string());
  TM_TRY(exchange_proofs(wire, handshake).with(context));
  auto told = wire.expect(FrameType::identity, Stage::proven);
  if (!told) return told.status().with(context);
  ByteReader reader(*told);
  SessionImpl::Setup setup;
  setup.peer = Identity::decode(reader);
  if (!reader.done() || setup.peer.engine != handshake.peer_engine()) {
    return {Code::corrupt, context + ": an identity that does not fit"};
  }
  setup.key = handshake.session();
  setup.is_initiator = true;
  setup.dialled = address.to_string();

  // Control rides the Unix connection if there is one: it is faster, and it can carry file descriptors.
  std::optional<DialledLane> same_host;
  if (address.kind == Address::Kind::unix) {
    stop_credentials(fd.get());
  } else {
    same_host = prove_same_host(core, setup.key, setup.peer, deadline, setup.dialled);
  }
  ByteWriter identity;
  core->identity().encode(identity);
  Wire control(same_host ? same_host->fd.get() : fd.get(), deadline, core->closing);
  TM_TRY(control.send(FrameType::ready, identity.take()).with(context));

  auto session = std::make_shared<SessionImpl>(core, std::move(setup));
  std::vector<std::shared_ptr<LaneImpl>> lanes;
  if (same_host) {
    TM_ASSIGN(auto lane, session->add_lane(std::move(same_host->fd), 0, same_host->peer_pid));
    lanes.push_back(std::move(lane));
  }
  TM_ASSIGN(auto lane, session->add_lane(std::move(fd), same_host ? 1 : 0, wire.peer_pid()));
  lanes.push_back(std::move(lane));
  core->begin_session(session, lanes);
  if (Status status = session->status(); !status) return status;
  return session;
}

}  // namespace torch_mooncake::rpc
