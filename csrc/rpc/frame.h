// The one wire format: a 32-byte header, a body, and for bulk frames a payload. Pure functions, fuzzed.
//
//     u32 magic "TMK1" | u32 body bytes | u64 payload bytes | u64 id | u16 method | u8 type | u8 fds | u32 sequence
//
// Little-endian. `id` names a call within its session and direction. Everything is checked before a byte of body is
// taken: magic, type against the stage, sizes against the stage's limits, and that only control messages have a
// sequence number.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/status.h"

namespace torch_mooncake::rpc {

enum class FrameType : uint8_t {
  // Handshake, at most kMaxBodyBeforeAuth bytes of body (identity and ready: kMaxIdentity, after the proof).
  hello = 1,
  challenge = 2,
  proof = 3,
  welcome = 4,
  reject = 5,
  identity = 6,
  ready = 7,
  // Within a session.
  call = 16,
  reply = 17,
  error = 18,
  post = 19,
  bulk = 20,
  ping = 21,
  pong = 22,
  control = 23,       // control rides this lane from now on; id: the last message received without a gap
  acknowledged = 24,  // id: likewise
  hot_call = 25,      // a call whose caller spins for the answer, and may well call again at once
};

inline constexpr size_t kHeaderBytes = 32;
inline constexpr size_t kMaxIdentity = 16 << 10;
inline constexpr size_t kMaxFds = 64;
inline constexpr uint64_t kMaxPayload = uint64_t{1} << 40;

struct FrameHeader {
  FrameType type{};
  uint8_t nfds = 0;
  uint16_t method = 0;
  uint32_t body_bytes = 0;
  uint64_t payload_bytes = 0;
  uint64_t id = 0;
  uint32_t sequence = 0;  // of a control message within its session and direction; 0: not numbered
};

using HeaderBytes = std::array<char, kHeaderBytes>;

// What may arrive: before the proof, between proof and session, within a session.
enum class Stage { unproven, proven, session };

HeaderBytes encode_header(const FrameHeader& header);
// `bytes` holds kHeaderBytes. Fails with `corrupt`, saying what is wrong.
Result<FrameHeader> decode_header(std::string_view bytes, Stage stage);

// Cuts a byte stream into frames. The payload of a bulk frame is left to the caller, who must consume it before the
// next push().
class FrameDecoder {
 public:
  explicit FrameDecoder(Stage stage) : stage_(stage) {}
  enum class Step { need_more, frame, error };
  // Takes bytes off the front of `in`, until a frame (header(), take_body()) is whole, or an error (status(); final).
  Step push(std::string_view& in);
  // How many bytes may be read next without reading into the following frame.
  size_t needed() const;
  bool in_body() const { return in_body_; }
  void set_stage(Stage stage) { stage_ = stage; }
  const FrameHeader& header() const { return header_; }
  std::string take_body() { return std::move(body_); }
  const Status& status() const { return status_; }

 private:
  Stage stage_;
  HeaderBytes raw_{};
  size_t have_ = 0;  // header bytes
  bool in_body_ = false;
  FrameHeader header_;
  std::string body_;
  Status status_;
};

}  // namespace torch_mooncake::rpc
