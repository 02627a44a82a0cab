// Collectives that reduce: over the board of one host, or by messages as across.h and by_host.h have them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/across.h"
#include "collectives/board.h"
#include "collectives/by_host.h"
#include "collectives/collectives.h"
#include "collectives/device.h"
#include "collectives/reduce.h"

namespace torch_mooncake::coll {
namespace {

uint64_t line_up(uint64_t nbytes) { return (nbytes + 63) / 64 * 64; }

// What the others show, in rank order, with `own` in its place.
Result<std::vector<const void*>> shown_by_all(const Call& call, Turn& turn, uint64_t nbytes, uint64_t at,
                                              const void* own) {
  std::vector<const void*> inputs(call.size());
  for (int rank = 0; rank < call.size(); ++rank) {
    inputs[rank] = own;
    if (rank == call.rank()) continue;
    TM_ASSIGN(const std::byte* shown, turn.theirs(rank, nbytes));
    inputs[rank] = shown + at;
  }
  return inputs;
}

Status all_reduce_shown(const Call& call, Turn& turn, void* data, uint64_t count, DType dtype, ReduceOp op) {
  const uint64_t nbytes = count * item_bytes(dtype);
  turn.put(0, data, nbytes);
  turn.post();
  TM_ASSIGN(const auto inputs, shown_by_all(call, turn, nbytes, 0, data));
  if (count > 0) reduce_many(data, inputs, count, dtype, op);
  return {};
}

// Every rank shows what it has for all.
Status reduce_scatter_shown(const Call& call, Turn& turn, std::span<const ConstPiece> in, Piece out, DType dtype,
                            ReduceOp op) {
  uint64_t total = 0, ours = 0;
  for (int rank = 0; rank < call.size(); ++rank) {
    if (rank == call.rank()) ours = total;
    turn.put(total, in[rank].data, in[rank].nbytes);
    total += line_up(in[rank].nbytes);
  }
  turn.post();
  TM_ASSIGN(const auto inputs, shown_by_all(call, turn, total, ours, in[call.rank()].data));
  if (out.nbytes > 0) reduce_many(out.data, inputs, out.nbytes / item_bytes(dtype), dtype, op);
  return {};
}

// One piece of much data over the large board: pieces[r] of every rank goes to rank r, which reduces them into `out`.
Status collect_piece(const Call& call, std::span<const ConstPiece> pieces, uint64_t room, void* out, uint64_t count,
                     DType dtype, ReduceOp op, Board::Kind kind) {
  const int n = call.size(), me = call.rank();
  uint64_t total = 0;
  for (const ConstPiece& piece : pieces) total += piece.nbytes;
  Turn turn(call, Board::kLarge);
  TM_TRY(turn.begin(kind, total, room * (n - 1)));
  for (int to = 0; to < n; ++to)
    if (to != me) turn.put(place_of(me, to) * room, pieces[to].data, pieces[to].nbytes);
  turn.post();
  std::vector<const void*> inputs(n, pieces[me].data);
  for (int from = 0; from < n; ++from) {
    if (from == me) continue;
    TM_ASSIGN(const std::byte* shown, turn.theirs(from, total));
    inputs[from] = shown + place_of(from, me) * room;
  }
  if (count > 0) reduce_many(out, inputs, count, dtype, op);
  return {};
}

std::vector<ConstPiece> parts_of(const std::byte* data, uint64_t count, int n, uint64_t item) {
  std::vector<ConstPiece> pieces;
  for (int r = 0; r < n; ++r) {
    const Part part = part_of(count, r, n, item);
    pieces.push_back({data + part.begin * item, part.count * item});
  }
  return pieces;
}

// Piece by piece: every rank reduces its part of it, then shows that to those who want it, all or the root.
Status reduce_on_board(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op, int root) {
  const int n = call.size(), me = call.rank();
  const bool all = root < 0, wants = all || me == root;
  const Board::Kind kind = all ? Board::Kind::all_reduce : Board::Kind::reduce;
  const uint64_t item = item_bytes(dtype), room = room_of_piece(n);
  const uint64_t step = room / item * static_cast<uint64_t>(n);
  std::byte* result = wants ? nullptr : call.scratch.get(room);
  for (uint64_t at = 0; at < count; at += step) {
    auto* piece = static_cast<std::byte*>(data) + at * item;
    const uint64_t elements = std::min(step, count - at);
    const auto parts = parts_of(piece, elements, n, item);
    const Part mine = part_of(elements, me, n, item);
    std::byte* own = wants ? piece + mine.begin * item : result;
    TM_TRY(collect_piece(call, parts, room, own, mine.count, dtype, op, kind));
    Turn turn(call, Board::kLarge);
    TM_TRY(turn.begin(kind, parts[me].nbytes, room));
    if (all || me != root) turn.put(0, own, parts[me].nbytes);
    turn.post();
    for (int i = 1; i < n && wants; ++i) {
      const int from = (me + i) % n;
      const Part part = part_of(elements, from, n, item);
      TM_ASSIGN(const std::byte* shown, turn.theirs(from, parts[from].nbytes));
      std::memcpy(piece + part.begin * item, shown, parts[from].nbytes);
    }
  }
  return {};
}

Status reduce_scatter_on_board(const Call& call, std::span<const ConstPiece> in, Piece out, uint64_t longest,
                               DType dtype, ReduceOp op) {
  const int n = call.size();
  const uint64_t item = item_bytes(dtype), step = room_of_piece(n);
  auto part = [&](uint64_t at, uint64_t nbytes) { return at < nbytes ? std::min(step, nbytes - at) : 0; };
  for (uint64_t at = 0; at < longest; at += step) {
    std::vector<ConstPiece> pieces(n);
    for (int r = 0; r < n; ++r)
      if (const uint64_t nbytes = part(at, in[r].nbytes); nbytes > 0)
        pieces[r] = {static_cast<const std::byte*>(in[r].data) + at, nbytes};
    TM_TRY(collect_piece(call, pieces, step, static_cast<std::byte*>(out.data) + at, part(at, out.nbytes) / item, dtype,
                         op, Board::Kind::reduce_scatter));
  }
  return {};
}

}  // namespace

Status all_reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op) {
  TM_TRY(check_reducible(dtype, op));
  if (call.device) return on_device::all_reduce(call, data, count, dtype, op);
  if (call.size() == 1) return {};
  const uint64_t nbytes = count * item_bytes(dtype);
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::all_reduce, nbytes, nbytes));
  if (turn.on_board()) return all_reduce_shown(call, turn, data, count, dtype, op);
  if (count == 0) return {};
  TM_TRY(turn.meet(nbytes));
  TM_ASSIGN(const bool large, has_large_board(call, Board::Kind::all_reduce));
  if (large) return reduce_on_board(call, data, count, dtype, op, -1);
  const Choice choice = call.choose(Collective::all_reduce, nbytes, dtype);
  if (choice.by_host) return by_host::all_reduce(call, choice.algorithm, data, count, dtype, op);
  return across::all_reduce(call, choice.algorithm, data, count, {dtype, op, static_cast<uint64_t>(call.size())});
}

Status reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op, int root) {
  TM_TRY(check_reducible(dtype, op));
  if (root < 0 || root >= call.size()) return {Code::invalid_argument, "root " + std::to_string(root)};
  if (call.device) return on_device::reduce(call, data, count, dtype, op, root);
  if (call.size() == 1) return {};
  const uint64_t nbytes = count * item_bytes(dtype);
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::reduce, nbytes, nbytes));
  if (turn.on_board()) {
    if (call.rank() != root) turn.put(0, data, nbytes);
    turn.post();
    if (call.rank() != root) return {};
    TM_ASSIGN(const auto inputs, shown_by_all(call, turn, nbytes, 0, data));
    if (count > 0) reduce_many(data, inputs, count, dtype, op);
    return {};
  }
  if (count == 0) return {};
  TM_TRY(turn.meet_at(root, nbytes, nbytes));
  TM_ASSIGN(const bool large, has_large_board(call, Board::Kind::reduce));
  if (large) return reduce_on_board(call, data, count, dtype, op, root);
  const Choice choice = call.choose(Collective::reduce, nbytes, dtype);
  if (choice.by_host) return by_host::reduce(call, choice.algorithm, data, count, dtype, op, root);
  return across::reduce(call, choice.algorithm, data, count, {dtype, op, static_cast<uint64_t>(call.size())}, root);
}

Status reduce_scatter(const Call& call, std::span<const ConstPiece> in, Piece out, DType dtype, ReduceOp op) {
  TM_TRY(check_reducible(dtype, op));
  const int n = call.size();
  const int rank = call.rank();
  if (in.size() != static_cast<size_t>(n)) return {Code::invalid_argument, "reduce_scatter needs one input a rank"};
  if (in[rank].nbytes != out.nbytes)
    return {Code::invalid_argument, "reduce_scatter: own input and output differ in size"};
  if (call.device) return on_device::reduce_scatter(call, in, out, dtype, op);
  uint64_t longest = 0, total = 0;
  Agreed sizes;
  for (const auto& piece : in) {
    longest = std::max(longest, piece.nbytes);
    total += line_up(piece.nbytes);
    sizes.add(piece.nbytes);
  }
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::reduce_scatter, total, total, sizes.value()));
  if (turn.on_board()) return reduce_scatter_shown(call, turn, in, out, dtype, op);
  TM_TRY(turn.meet(total));
  TM_ASSIGN(const bool large, has_large_board(call, Board::Kind::reduce_scatter));
  if (large) return reduce_scatter_on_board(call, in, out, longest, dtype, op);
  const Choice choice = call.choose(Collective::reduce_scatter, longest, dtype);
  if (choice.by_host) return by_host::reduce_scatter(call, in, out, dtype, op);
  return across::reduce_scatter(call, choice.algorithm, in, out, {dtype, op, static_cast<uint64_t>(n)});
}

}  // namespace torch_mooncake::coll
