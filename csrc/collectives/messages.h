// Control messages between ranks (rpc methods 300-309), torch-free and little-endian. Decoders return false for
// anything malformed; nothing from the wire is trusted with a size or an index before it is checked.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/bytes.h"

namespace torch_mooncake::coll {

enum Method : uint16_t {
  kHello = 300,     // post: the sender speaks collectives on this session
  kEager = 301,     // post: a message with its payload
  kReady = 302,     // post: a message whose payload waits in the sender's memory, described
  kTaken = 303,     // post: the payload of a kReady message was read, or why not
  kCredit = 304,    // post: room for eager bytes is free again
  kTrouble = 305,   // post: a rank was lost, or gave up on a collective
  kWithdraw = 306,  // post: a kReady message is void
  kLeave = 307,     // call: the sender's hub closes; answered when everything before it has been delivered
  kBoard = 308,     // call: the sender's segment for small collectives (see board.h), if it can give one
  kSeats = 309,     // call: about a change of who is in a group (see seats.h)
};

// What a message is matched by, together with the sending rank.
enum class Channel : uint8_t { p2p = 0, collective = 1 };

struct Envelope {
  Id128 group{};
  uint32_t source = 0;  // rank in the group
  Channel channel = Channel::p2p;
  uint64_t tag = 0;

  void encode(ByteWriter& out) const { out.put(group).put(source).put(channel).put(tag); }
  bool decode(ByteReader& in) {
    group = in.get_id();
    source = in.get<uint32_t>();
    channel = in.get<Channel>();
    tag = in.get<uint64_t>();
    return in.ok() && channel <= Channel::collective;
  }
};

struct Ready {
  Envelope envelope;
  uint64_t send_id = 0;
  uint64_t nbytes = 0;
  std::string descriptor;  // of the sender's region; empty when nbytes is 0

  std::string encode() const {
    ByteWriter out;
    envelope.encode(out);
    out.put(send_id).put(nbytes).put(std::string_view(descriptor));
    return out.take();
  }
  bool decode(std::string_view body) {
    ByteReader in(body);
    if (!envelope.decode(in)) return false;
    send_id = in.get<uint64_t>();
    nbytes = in.get<uint64_t>();
    descriptor = in.get_string();
    return in.done();
  }
};

inline constexpr uint32_t kNoRank = UINT32_MAX;  // a verdict of a process that has left the group

// kTaken, kWithdraw: which send of which group, and how it went.
struct Verdict {
  Id128 group{};
  uint32_t from = 0;  // the rank that says it
  uint64_t send_id = 0;
  uint8_t code = 0;
  std::string text;

  std::string encode() const {
    ByteWriter out;
    out.put(group).put(from).put(send_id).put(code).put(std::string_view(text));
    return out.take();
  }
  bool decode(std::string_view body) {
    ByteReader in(body);
    group = in.get_id();
    from = in.get<uint32_t>();
    send_id = in.get<uint64_t>();
    code = in.get<uint8_t>();
    text = in.get_string();
    return in.done();
  }
};

struct Trouble {
  Id128 group{};
  uint32_t from = 0;
  int32_t lost_rank = -1;  // -1: nobody died, `from` gave up
  uint8_t code = 0;
  std::string text;

  std::string encode() const {
    ByteWriter out;
    out.put(group).put(from).put(lost_rank).put(code).put(std::string_view(text));
    return out.take();
  }
  bool decode(std::string_view body) {
    ByteReader in(body);
    group = in.get_id();
    from = in.get<uint32_t>();
    lost_rank = in.get<int32_t>();
    code = in.get<uint8_t>();
    text = in.get_string();
    return in.done();
  }
};

}  // namespace torch_mooncake::coll
