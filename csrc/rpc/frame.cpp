#include "rpc/frame.h"

#include <algorithm>
#include <cstring>

#include "common/bytes.h"
#include "rpc/endpoint.h"

namespace torch_mooncake::rpc {
namespace {

constexpr std::string_view kMagic = "TMK1";

Status foreign(std::string_view start) {
  std::string shown;
  for (char c : start.substr(0, 8)) shown += c >= ' ' && c < 127 ? c : '?';
  return {Code::corrupt, "not this protocol: the bytes start with \"" + shown + "\""};
}

size_t body_limit(FrameType type, Stage stage) {
  switch (type) {
    case FrameType::hello:
    case FrameType::challenge:
    case FrameType::proof:
    case FrameType::welcome:
    case FrameType::reject:
      return kMaxBodyBeforeAuth;
    case FrameType::identity:
    case FrameType::ready:
      return kMaxIdentity;
    case FrameType::ping:
    case FrameType::pong:
    case FrameType::control:
    case FrameType::acknowledged:
      return 0;
    default:
      return stage == Stage::session ? kMaxBody : 0;
  }
}

bool expected(FrameType type, Stage stage) {
  switch (type) {
    case FrameType::hello:
    case FrameType::challenge:
    case FrameType::proof:
    case FrameType::welcome:
      return stage == Stage::unproven;
    case FrameType::reject:
      return stage != Stage::session;
    case FrameType::identity:
    case FrameType::ready:
      return stage == Stage::proven;
    case FrameType::call:
    case FrameType::hot_call:
    case FrameType::reply:
    case FrameType::error:
    case FrameType::post:
    case FrameType::bulk:
    case FrameType::ping:
    case FrameType::pong:
    case FrameType::control:
    case FrameType::acknowledged:
      return stage == Stage::session;
  }
  return false;
}

}  // namespace

HeaderBytes encode_header(const FrameHeader& h) {
  ByteWriter w;
  w.raw(kMagic).put(h.body_bytes).put(h.payload_bytes).put(h.id).put(h.method).put(h.type).put(h.nfds).put(h.sequence);
  HeaderBytes out;
  std::memcpy(out.data(), w.take().data(), out.size());
  return out;
}

Result<FrameHeader> decode_header(std::string_view bytes, Stage stage) {
  if (bytes.size() != kHeaderBytes || bytes.substr(0, 4) != kMagic) return foreign(bytes);
  ByteReader r(bytes.substr(4));
  FrameHeader h;
  h.body_bytes = r.get<uint32_t>();
  h.payload_bytes = r.get<uint64_t>();
  h.id = r.get<uint64_t>();
  h.method = r.get<uint16_t>();
  h.type = static_cast<FrameType>(r.get<uint8_t>());
  h.nfds = r.get<uint8_t>();
  h.sequence = r.get<uint32_t>();
  auto type = std::to_string(static_cast<int>(h.type));
  if (!expected(h.type, stage)) return {Code::corrupt, "frame of type " + type + " at the wrong time"};
  if (h.body_bytes > body_limit(h.type, stage)) {
    return {Code::corrupt, "frame of type " + type + " with " + std::to_string(h.body_bytes) + " bytes of body"};
  }
  if (h.payload_bytes > (h.type == FrameType::bulk ? kMaxPayload : 0)) {
    return {Code::corrupt, "frame of type " + type + " with " + std::to_string(h.payload_bytes) + " payload bytes"};
  }
  bool may_have_fds = h.type == FrameType::call || h.type == FrameType::hot_call || h.type == FrameType::reply;
  bool may_be_numbered = may_have_fds || h.type == FrameType::error || h.type == FrameType::post;
  if (h.nfds > (may_have_fds ? kMaxFds : 0) || (h.sequence != 0 && !may_be_numbered)) {
    return {Code::corrupt, "frame header has bad fields"};
  }
  return h;
}

size_t FrameDecoder::needed() const {
  if (in_body_) return header_.body_bytes - body_.size();
  return have_ < kMagic.size() ? kMagic.size() - have_ : kHeaderBytes - have_;
}

FrameDecoder::Step FrameDecoder::push(std::string_view& in) {
  if (!status_) return Step::error;
  if (!in_body_) {
    size_t n = std::min(kHeaderBytes - have_, in.size());
    std::memcpy(raw_.data() + have_, in.data(), n);
    have_ += n;
    in.remove_prefix(n);
    std::string_view seen(raw_.data(), have_);
    // Strangers are recognised by their first bytes, however few.
    size_t magic = std::min(have_, kMagic.size());
    if (seen.substr(0, magic) != kMagic.substr(0, magic)) {
      status_ = foreign(seen);
      return Step::error;
    }
    if (have_ < kHeaderBytes) return Step::need_more;
    auto header = decode_header(seen, stage_);
    if (!header) {
      status_ = header.status();
      return Step::error;
    }
    header_ = *header;
    in_body_ = true;
    body_.clear();
    body_.reserve(std::min<size_t>(header_.body_bytes, 64 << 10));  // beyond that, memory only for bytes that came
  }
  size_t n = std::min<size_t>(header_.body_bytes - body_.size(), in.size());
  body_.append(in.substr(0, n));
  in.remove_prefix(n);
  if (body_.size() < header_.body_bytes) return Step::need_more;
  in_body_ = false;
  have_ = 0;
  return Step::frame;
}

}  // namespace torch_mooncake::rpc
