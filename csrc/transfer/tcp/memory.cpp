#include "transfer/tcp/memory.h"

#include <algorithm>

#include "common/packed.h"
#include "transfer/peer.h"

namespace torch_mooncake::transfer {
namespace {
constexpr size_t kPieceBytes = 20;
}

ChunkPlan plan_chunks(std::span<const Batch> batches, uint64_t slice_bytes, int lanes) {
  ChunkPlan plan;
  size_t extents = 0;
  for (auto& batch : batches) {
    extents += batch.extents.size();
    for (auto& extent : batch.extents) plan.nbytes += extent.nbytes;
  }
  plan.pieces.reserve(extents);
  plan.local.reserve(extents);
  uint64_t share = (plan.nbytes + lanes - 1) / lanes;
  uint64_t chunk_bytes = std::clamp<uint64_t>((share + 4095) & ~uint64_t{4095}, 128 << 10, slice_bytes);
  auto full = [&] { return plan.chunks.back().nbytes == chunk_bytes || plan.chunks.back().count == kMaxChunkPieces; };
  for (auto& batch : batches) {
    uint32_t grant = static_cast<RemoteRegionImpl&>(*batch.remote).grant();
    std::byte* base = batch.local->data();
    for (auto& extent : batch.extents) {
      for (uint64_t at = 0; at < extent.nbytes;) {
        if (plan.chunks.empty() || full()) plan.chunks.push_back({static_cast<uint32_t>(plan.pieces.size()), 0, 0});
        auto& chunk = plan.chunks.back();
        uint64_t n = std::min(extent.nbytes - at, chunk_bytes - chunk.nbytes);
        plan.pieces.push_back({grant, extent.remote_offset + at, n});
        plan.local.push_back(base + extent.local_offset + at);
        ++chunk.count;
        chunk.nbytes += n;
        at += n;
      }
    }
  }
  return plan;
}

void append_pieces(std::string& out, std::span<const Piece> pieces) {
  size_t at = out.size();
  out.resize(at + 4 + pieces.size() * kPieceBytes);
  char* to = store(out.data() + at, static_cast<uint32_t>(pieces.size()));
  for (auto& piece : pieces) to = store(to, piece.grant, piece.offset, piece.nbytes);
}

std::vector<Piece> get_pieces(ByteReader& in) {
  std::vector<Piece> pieces(in.get_count(kPieceBytes));
  const char* from = in.rest().data();
  for (auto& piece : pieces) from = load(from, piece.grant, piece.offset, piece.nbytes);
  if (!pieces.empty()) in = ByteReader(in.rest().substr(pieces.size() * kPieceBytes));
  return pieces;
}

std::string FrameHead::encode() const {
  std::string out = ByteWriter().put(kind).put(stream).put(chunk).put(attempt).take();
  if (kind == StreamKind::write) append_pieces(out, pieces);
  return out;
}

Result<FrameHead> FrameHead::decode(std::string_view body) {
  ByteReader in(body);
  FrameHead head;
  head.kind = in.get<StreamKind>();
  head.stream = in.get<uint64_t>();
  head.chunk = in.get<uint32_t>();
  head.attempt = in.get<uint32_t>();
  if (head.kind == StreamKind::write) head.pieces = get_pieces(in);
  bool known = head.kind == StreamKind::write || head.kind == StreamKind::read;
  if (!in.done() || !known || head.chunk >= kMaxChunks) return Status(Code::corrupt, "malformed head of a bulk frame");
  return head;
}

}  // namespace torch_mooncake::transfer
