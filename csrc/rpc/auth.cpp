#include "rpc/auth.h"

#include <algorithm>
#include <cstring>

#include "common/random.h"
#include "rpc/endpoint.h"

namespace torch_mooncake::rpc {
namespace {

constexpr uint8_t kNewSession = 1, kLane = 2;
constexpr size_t kMaxDialled = 256;

std::string nonce() {
  std::string bytes(32, '\0');
  random_bytes(bytes.data(), bytes.size());
  return bytes;
}

Digest transcript_of(std::string_view hello, std::string_view challenge) {
  ByteWriter w;
  w.put(hello).put(challenge);
  return sha256(w.take());
}

Digest proof_of(std::string_view key, std::string_view role, const Digest& transcript) {
  return hmac_sha256(key, std::string(role) + std::string(as_view(transcript)));
}

SessionKey session_of(std::string_view token, const Digest& transcript) {
  SessionKey session;
  session.key = proof_of(token, "session", transcript);
  Digest id = proof_of(as_view(session.key), "id", transcript);
  std::memcpy(session.id.data(), id.data(), session.id.size());
  return session;
}

Status proof_matches(std::string_view body, const Digest& expected, const char* complaint) {
  Digest given;
  if (body.size() != given.size()) return {Code::corrupt, "proof of the wrong size"};
  std::memcpy(given.data(), body.data(), given.size());
  if (!equal_constant_time(given, expected)) return {Code::auth, complaint};
  return {};
}

Status version_error(uint16_t ours, uint16_t theirs) {
  return {Code::version_mismatch,
          "this side speaks protocol version " + std::to_string(ours) + ", the other " + std::to_string(theirs)};
}

}  // namespace

std::string encode_reject(const Status& status) {
  ByteWriter w;
  w.put(status.code()).put(std::string_view(status.message()).substr(0, kMaxBodyBeforeAuth - 16));
  return w.take();
}

Status decode_reject(std::string_view body) {
  ByteReader r(body);
  auto code = r.get<uint8_t>();
  auto message = r.get_string();
  if (!r.done() || code == 0 || code > static_cast<uint8_t>(Code::internal)) {
    return {Code::corrupt, "rejected, with a reason that cannot be read"};
  }
  return {static_cast<Code>(code), message};
}

InitiatorHandshake::InitiatorHandshake(const Id128& engine, std::string key, std::string dialled,
                                       std::optional<LaneClaim> claim, uint16_t version)
    : engine_(engine),
      key_(std::move(key)),
      dialled_(dialled.substr(0, kMaxDialled)),
      claim_(claim),
      version_(version ? version : kProtocolVersion) {}

std::string InitiatorHandshake::hello() {
  ByteWriter w;
  w.put(version_).put(claim_ ? kLane : kNewSession).put(engine_).put(std::string_view(nonce()));
  w.put(std::string_view(dialled_));
  if (claim_) w.put(claim_->session).put(claim_->index);
  hello_ = w.take();
  return hello_;
}

Result<std::string> InitiatorHandshake::on_challenge(std::string_view body) {
  ByteReader r(body);
  auto version = r.get<uint16_t>();
  if (r.ok() && version != version_) return version_error(version_, version);
  peer_engine_ = r.get_id();
  auto peer_nonce = r.get_bytes();
  if (!r.done() || peer_nonce.size() != 32) return {Code::corrupt, "bad challenge"};
  transcript_ = transcript_of(hello_, body);
  session_ = session_of(key_, transcript_);
  return std::string(as_view(proof_of(key_, "initiator", transcript_)));
}

Status InitiatorHandshake::on_welcome(std::string_view body) {
  return proof_matches(body, proof_of(key_, "acceptor", transcript_), "the other side does not hold the same token");
}

AcceptorHandshake::AcceptorHandshake(const Id128& engine, std::string token, FindSession find_session, uint16_t version)
    : engine_(engine),
      key_(std::move(token)),
      find_session_(std::move(find_session)),
      version_(version ? version : kProtocolVersion) {}

Result<std::string> AcceptorHandshake::on_hello(std::string_view body) {
  if (greeted_) return {Code::corrupt, "second hello"};
  greeted_ = true;
  ByteReader r(body);
  auto version = r.get<uint16_t>();
  if (r.ok() && version != version_) return version_error(version_, version);
  auto purpose = r.get<uint8_t>();
  peer_engine_ = r.get_id();
  auto peer_nonce = r.get_bytes();
  dialled_ = r.get_string();
  if (purpose == kLane) {
    claim_.emplace();
    claim_->session = r.get_id();
    claim_->index = r.get<uint32_t>();
  }
  bool known = purpose == kLane || purpose == kNewSession;
  if (!r.done() || !known || peer_nonce.size() != 32 || dialled_.size() > kMaxDialled) {
    return {Code::corrupt, "bad hello"};
  }
  if (claim_) {
    auto key = find_session_(claim_->session);
    if (!key) return {Code::peer_lost, "the session of this lane is over"};
    key_ = as_view(*key);
  }
  ByteWriter w;
  w.put(version_).put(engine_).put(std::string_view(nonce()));
  std::string challenge = w.take();
  transcript_ = transcript_of(body, challenge);
  return challenge;
}

Result<std::string> AcceptorHandshake::on_proof(std::string_view body) {
  if (!greeted_) return {Code::corrupt, "proof before hello"};
  TM_TRY(proof_matches(body, proof_of(key_, "initiator", transcript_), "wrong token"));
  session_ = session_of(key_, transcript_);
  return std::string(as_view(proof_of(key_, "acceptor", transcript_)));
}

}  // namespace torch_mooncake::rpc
