// How a list of slices is cut into chunks that any lane may carry, and what a bulk frame says before its payload.
#pragma once

#include <span>
#include <vector>

#include "transfer/grant.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

// The grant is all that the owner needs, and all that the wire carries.
struct StreamMemory final : RemoteMemory {};

// A chunk is a run of pieces that travels as one frame. `local[i]` is where piece i lies in this process.
struct ChunkPlan {
  struct Chunk {
    uint32_t first, count;
    uint64_t nbytes;
  };
  std::vector<Piece> pieces;
  std::vector<std::byte*> local;
  std::vector<Chunk> chunks;
  uint64_t nbytes = 0;

  std::span<const Piece> pieces_of(uint32_t chunk) const {
    return std::span(pieces).subspan(chunks[chunk].first, chunks[chunk].count);
  }
};

inline constexpr uint32_t kMaxChunkPieces = 1024;
inline constexpr uint32_t kMaxChunks = 1u << 22;

// Cuts long extents. Few bytes are still spread over `lanes`, in chunks of at least 128 KiB.
ChunkPlan plan_chunks(std::span<const Batch> batches, uint64_t slice_bytes, int lanes);

enum class StreamKind : uint8_t { write = 1, read = 2 };

// Before the payload: kind, stream, chunk, attempt; and for a write the pieces the payload consists of.
struct FrameHead {
  StreamKind kind;
  uint64_t stream;
  uint32_t chunk;
  uint32_t attempt;
  std::vector<Piece> pieces;
  std::string encode() const;
  static Result<FrameHead> decode(std::string_view body);
};

// u32 count, then 20 bytes a piece.
void append_pieces(std::string& out, std::span<const Piece> pieces);
std::vector<Piece> get_pieces(ByteReader& in);

}  // namespace torch_mooncake::transfer
