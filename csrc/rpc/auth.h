// The handshake, as two pure state machines that turn frame bodies into frame bodies.
//
//     initiator                                     acceptor
//     HELLO  version, purpose, id, nonce, dialled →
//                                                 ← CHALLENGE  version, id, nonce
//     PROOF  HMAC(key, "initiator" + T)           →
//                                                 ← WELCOME  HMAC(key, "acceptor" + T)
//     (a new session)                             ← IDENTITY  the acceptor's
//     READY  the initiator's identity             →
//
// T = SHA-256 of both bodies, so the proofs cover both nonces, roles, engine ids, versions and the address dialled. The
// key is the pool's token for a new session, and the session's key for a further lane of one. The session key is
// HMAC(token, "session" + T); a session is found by its id, a digest of that key. The acceptor sends nothing that
// depends on the token before the initiator has proven it. Either side may answer REJECT (a status) and close.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "common/bytes.h"
#include "common/sha256.h"
#include "common/status.h"

namespace torch_mooncake::rpc {

struct SessionKey {
  Digest key{};
  Id128 id{};
};

// What a further lane says: which session it belongs to, and its index there. Index 0 takes over control before READY.
struct LaneClaim {
  Id128 session{};
  uint32_t index = 0;
};

std::string encode_reject(const Status& status);
Status decode_reject(std::string_view body);  // `corrupt` if it is not one

class InitiatorHandshake {
 public:
  // A new session, or (with a claim, `key` being the session's) a lane of one.
  InitiatorHandshake(const Id128& engine, std::string key, std::string dialled, std::optional<LaneClaim> claim = {},
                     uint16_t version = 0);
  std::string hello();
  Result<std::string> on_challenge(std::string_view body);  // gives PROOF
  Status on_welcome(std::string_view body);
  const Id128& peer_engine() const { return peer_engine_; }
  const SessionKey& session() const { return session_; }

 private:
  const Id128 engine_;
  const std::string key_, dialled_;
  const std::optional<LaneClaim> claim_;
  const uint16_t version_;
  std::string hello_;
  Digest transcript_{};
  Id128 peer_engine_{};
  SessionKey session_;
};

class AcceptorHandshake {
 public:
  using FindSession = std::function<std::optional<Digest>(const Id128& session)>;  // its key
  AcceptorHandshake(const Id128& engine, std::string token, FindSession find_session, uint16_t version = 0);
  Result<std::string> on_hello(std::string_view body);  // gives CHALLENGE
  Result<std::string> on_proof(std::string_view body);  // gives WELCOME
  const std::optional<LaneClaim>& claim() const { return claim_; }
  const Id128& peer_engine() const { return peer_engine_; }
  const std::string& dialled() const { return dialled_; }
  const SessionKey& session() const { return session_; }

 private:
  const Id128 engine_;
  std::string key_;
  const FindSession find_session_;
  const uint16_t version_;
  std::optional<LaneClaim> claim_;
  bool greeted_ = false;
  std::string dialled_;
  Digest transcript_{};
  Id128 peer_engine_{};
  SessionKey session_;
};

}  // namespace torch_mooncake::rpc
