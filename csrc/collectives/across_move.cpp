// Messages that only move bytes.
#include <algorithm>
#include <cstring>

#include "collectives/across.h"
#include "collectives/exchange.h"
#include "memory/copy.h"

namespace torch_mooncake::coll::across {
namespace {

Status broadcast_tree(const Call& call, void* data, uint64_t nbytes, int root, const Came& came) {
  const int n = call.size();
  const int me = (call.rank() - root + n) % n;  // as if the root were rank 0
  auto real = [&](int virtual_rank) { return (virtual_rank + root) % n; };
  int bit = 1;
  while (bit < n && (me & bit) == 0) bit <<= 1;  // the lowest set bit tells the parent, those below it the children
  Exchange exchange(call);
  if (me != 0) TM_TRY(exchange.wait_for(exchange.receive(real(me - bit), data, nbytes)));
  for (bit >>= 1; bit > 0; bit >>= 1) {
    if (me + bit < n) exchange.send(real(me + bit), data, nbytes);
  }
  if (came) TM_TRY(came(0, nbytes));
  return exchange.wait();
}

Status broadcast_chain(const Call& call, void* data, uint64_t nbytes, int root, const Came& came) {
  const int n = call.size(), rank = call.rank();
  const int me = (rank - root + n) % n;
  const bool first = me == 0, last = me == n - 1;
  auto* bytes = static_cast<std::byte*>(data);
  auto piece = [&](uint64_t at) { return std::min(kPieceBytes, nbytes - at); };
  Exchange exchange(call);
  std::vector<RequestPtr> coming;
  for (uint64_t at = 0; at < nbytes; at += kPieceBytes)
    first ? exchange.send((rank + 1) % n, bytes + at, piece(at))
          : coming.emplace_back(exchange.receive((rank + n - 1) % n, bytes + at, piece(at)));
  for (uint64_t at = 0, i = 0; at < nbytes; at += kPieceBytes, ++i) {
    if (!first) TM_TRY(exchange.wait_for(coming[i]));
    if (!first && !last) exchange.send((rank + 1) % n, bytes + at, piece(at));
    if (came) TM_TRY(came(at, piece(at)));
  }
  return exchange.wait();
}

Status all_gather_direct(const Call& call, ConstPiece in, std::span<const Piece> out) {
  const int n = call.size(), me = call.rank();
  Exchange exchange(call);
  for (int i = 1; i < n; ++i) {
    const Piece& from = out[(me + n - i) % n];
    exchange.receive((me + n - i) % n, from.data, from.nbytes);
  }
  for (int i = 1; i < n; ++i) exchange.send((me + i) % n, in.data, in.nbytes);
  return exchange.wait();
}

// Every block travels once around the ring, in pieces: what has come goes on at once.
Status all_gather_ring(const Call& call, ConstPiece in, std::span<const Piece> out) {
  const int n = call.size(), me = call.rank();
  const int next = (me + 1) % n, before = (me + n - 1) % n;
  Exchange exchange(call);
  std::vector<std::pair<RequestPtr, ConstPiece>> coming;  // a piece goes on if it has data
  for (int step = 0; step < n - 1; ++step) {
    const Piece& block = out[(me + 2 * n - 1 - step) % n];
    for (uint64_t at = 0; at < block.nbytes; at += kPieceBytes) {
      std::byte* to = static_cast<std::byte*>(block.data) + at;
      const uint64_t nbytes = std::min(kPieceBytes, block.nbytes - at);
      coming.emplace_back(exchange.receive(before, to, nbytes), ConstPiece{step < n - 2 ? to : nullptr, nbytes});
    }
  }
  for (uint64_t at = 0; at < in.nbytes; at += kPieceBytes)
    exchange.send(next, static_cast<const std::byte*>(in.data) + at, std::min(kPieceBytes, in.nbytes - at));
  for (const auto& [request, piece] : coming) {
    TM_TRY(exchange.wait_for(request));
    if (piece.data) exchange.send(next, piece.data, piece.nbytes);
  }
  return exchange.wait();
}

// A rank has the blocks of `have` ranks, its own and those after it, and gets as many more from the rank `have`
// further.
Status all_gather_bruck(const Call& call, ConstPiece in, std::span<const Piece> out) {
  const int n = call.size(), me = call.rank();
  std::vector<uint64_t> ends(n + 1);  // of the blocks from ours on, one behind the other
  for (int i = 0; i < n; ++i) ends[i + 1] = ends[i] + out[(me + i) % n].nbytes;
  std::byte* blocks = call.scratch.get(ends[n]);
  if (in.nbytes > 0) std::memcpy(blocks, in.data, in.nbytes);
  for (int have = 1; have < n; have *= 2) {
    const int more = std::min(have, n - have);
    TM_TRY(Exchange::send_receive(call, (me + n - have) % n, {blocks, ends[more]}, (me + have) % n,
                                  {blocks + ends[have], ends[have + more] - ends[have]}));
  }
  for (int i = 1; i < n; ++i)
    if (const Piece& to = out[(me + i) % n]; to.nbytes > 0) std::memcpy(to.data, blocks + ends[i], to.nbytes);
  return {};
}

}  // namespace

uint64_t piece_bytes(Algorithm algorithm, uint64_t nbytes) {
  return algorithm == Algorithm::tree ? nbytes : kPieceBytes;
}

Status broadcast(const Call& call, Algorithm algorithm, void* data, uint64_t nbytes, int root, const Came& came) {
  return algorithm == Algorithm::tree ? broadcast_tree(call, data, nbytes, root, came)
                                      : broadcast_chain(call, data, nbytes, root, came);
}

Status all_gather(const Call& call, Algorithm algorithm, ConstPiece in, std::span<const Piece> out) {
  Piece own = out[call.rank()];
  if (own.data != in.data && own.nbytes > 0) copy_bytes(own.data, in.data, own.nbytes);
  if (algorithm == Algorithm::ring) return all_gather_ring(call, in, out);
  if (algorithm == Algorithm::bruck) return all_gather_bruck(call, in, out);
  return all_gather_direct(call, in, out);
}

}  // namespace torch_mooncake::coll::across
