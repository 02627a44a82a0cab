// A remote region that is reached by way of slots: the owner's, if it is no host memory. The local side's are the
// endpoint's business.
#pragma once

#include "transfer/transport.h"

namespace torch_mooncake::transfer {

struct StageMemory final : RemoteMemory {
  explicit StageMemory(RemoteRegionPtr a) : area(std::move(a)) {}
  const RemoteRegionPtr area;  // null: the remote region is host memory, and read and written as such
};

// kStage: u8 direction (read: out of the file or device, into the slot), u32 slot, u32 grant, then the pieces: u64
// offset, u64 nbytes; they lie in the slot one after the other.
struct StageRequest {
  Direction direction = Direction::read;
  uint32_t slot = 0, grant = 0;
  struct Piece {
    uint64_t offset, nbytes;
  };
  std::vector<Piece> pieces;

  std::string encode() const {
    ByteWriter out;
    out.put(direction).put(slot).put(grant).put(static_cast<uint32_t>(pieces.size()));
    for (auto& piece : pieces) out.put(piece.offset).put(piece.nbytes);
    return out.take();
  }
  static Result<StageRequest> decode(std::string_view body) {
    ByteReader in(body);
    StageRequest r;
    auto direction = in.get<uint8_t>();
    r.direction = static_cast<Direction>(direction);
    r.slot = in.get<uint32_t>();
    r.grant = in.get<uint32_t>();
    r.pieces.resize(in.get_count(16));
    for (auto& piece : r.pieces) {
      piece.offset = in.get<uint64_t>();
      piece.nbytes = in.get<uint64_t>();
    }
    if (!in.done() || direction > 1) return Status(Code::invalid_argument, "malformed stage request");
    return r;
  }
};

}  // namespace torch_mooncake::transfer
