// Collectives that reduce.
#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <vector>

#include "collectives/board.h"
#include "collectives/collectives.h"
#include "collectives/device.h"
#include "collectives/exchange.h"
#include "collectives/reduce.h"

namespace torch_mooncake::coll {
namespace {

constexpr uint64_t kDirectBytes = 16 << 10;  // up to this size everybody sends everything to everybody
constexpr int kDirectRanks = 8;              // … unless there are more ranks than this
constexpr uint64_t kSliceBytes = 4 << 20;    // a rank's slice of one round of a large reduction

// The part of `count` elements that rank `i` of `n` reduces; cut on cache lines where that is possible.
struct Part {
  uint64_t begin, count;
};
Part part_of(uint64_t count, int i, int n, uint64_t item) {
  const uint64_t line = std::max<uint64_t>(1, 64 / item);
  const uint64_t each = ((count + n - 1) / n + line - 1) / line * line;
  const uint64_t begin = std::min(count, each * i);
  return {begin, std::min(count, begin + each) - begin};
}

// Sends to_ranks[r] to every other rank r, receives theirs for this rank into scratch, and reduces them and its own.
// Nothing is sent for an empty piece: its receiver knows that it is empty.
Status collect_and_reduce(const Call& call, std::span<const ConstPiece> to_ranks, const void* own, void* out,
                          uint64_t count, DType dtype, ReduceOp op) {
  const int n = call.group.size();
  const int rank = call.group.rank();
  const uint64_t nbytes = count * item_bytes(dtype);
  const uint64_t stride = (nbytes + 63) / 64 * 64;
  std::byte* scratch = call.scratch.get(stride * (n - 1));
  std::vector<const void*> inputs(n);
  Exchange exchange(call);
  for (int i = 1; i < n && nbytes > 0; ++i) {
    const int from = (rank + n - i) % n;
    std::byte* slot = scratch + stride * (i - 1);
    inputs[from] = slot;
    exchange.receive(from, slot, nbytes);
  }
  for (int i = 1; i < n; ++i) {
    const int to = (rank + i) % n;
    if (to_ranks[to].nbytes > 0) exchange.send(to, to_ranks[to].data, to_ranks[to].nbytes);
  }
  TM_TRY(exchange.wait());
  inputs[rank] = own;
  if (count > 0) reduce_many(out, inputs, count, dtype, op);
  return {};
}

Status all_reduce_direct(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op) {
  const std::vector<ConstPiece> same(call.group.size(), {data, count * item_bytes(dtype)});
  return collect_and_reduce(call, same, data, data, count, dtype, op);
}

// Recursive doubling over accumulators (fp32 for fp16 and bf16). With N not a power of two, the ranks beyond the
// largest one hand their part to a partner first and get the result from it. Both ends of a pair add the same two
// numbers, so all ranks end with the same bits.
Status all_reduce_doubling(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op) {
  const int n = call.group.size();
  const int rank = call.group.rank();
  const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const uint64_t nbytes = count * item_bytes(accumulator_of(dtype));
  const uint64_t stride = (nbytes + 63) / 64 * 64;
  std::byte* mine = call.scratch.get(2 * stride);
  std::byte* theirs = mine + stride;
  load_accumulator(mine, data, count, dtype);
  const bool extra = rank >= core;
  const bool has_extra = !extra && rank + core < n;
  if (extra) {
    Exchange handing(call);
    handing.send(rank - core, mine, nbytes);
    TM_TRY(handing.wait());
    Exchange result(call);
    result.receive(rank - core, mine, nbytes);
    TM_TRY(result.wait());
  } else {
    if (has_extra) {
      Exchange taking(call);
      taking.receive(rank + core, theirs, nbytes);
      TM_TRY(taking.wait());
      accumulate(mine, theirs, count, dtype, op);
    }
    for (int bit = 1; bit < core; bit <<= 1) {
      TM_TRY(Exchange::send_receive(call, rank ^ bit, {mine, nbytes}, rank ^ bit, {theirs, nbytes}));
      accumulate(mine, theirs, count, dtype, op);
    }
    if (has_extra) {
      Exchange result(call);
      result.send(rank + core, mine, nbytes);
      TM_TRY(result.wait());
    }
  }
  store_accumulator(data, mine, count, dtype, op, n);
  return {};
}

// One round of a large reduction: `data` holds the round's elements. Afterwards this rank's part is reduced in `out`.
Status reduce_parts(const Call& call, const std::byte* data, uint64_t count, void* out, DType dtype, ReduceOp op) {
  const int n = call.group.size();
  const uint64_t item = item_bytes(dtype);
  std::vector<ConstPiece> pieces(n);
  for (int r = 0; r < n; ++r) {
    const Part part = part_of(count, r, n, item);
    pieces[r] = {data + part.begin * item, part.count * item};
  }
  const Part mine = part_of(count, call.group.rank(), n, item);
  return collect_and_reduce(call, pieces, data + mine.begin * item, out, mine.count, dtype, op);
}

uint64_t round_elements(const Call& call, uint64_t item) { return kSliceBytes / item * call.group.size(); }

Status all_reduce_slices(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op) {
  const int n = call.group.size();
  const int rank = call.group.rank();
  const uint64_t item = item_bytes(dtype);
  for (uint64_t at = 0; at < count; at += round_elements(call, item)) {
    auto* round = static_cast<std::byte*>(data) + at * item;
    const uint64_t elements = std::min(round_elements(call, item), count - at);
    const Part mine = part_of(elements, rank, n, item);
    std::byte* own = round + mine.begin * item;
    TM_TRY(reduce_parts(call, round, elements, own, dtype, op));
    Exchange exchange(call);
    for (int i = 1; i < n; ++i) {
      const int from = (rank + n - i) % n;
      const Part part = part_of(elements, from, n, item);
      if (part.count > 0) exchange.receive(from, round + part.begin * item, part.count * item);
    }
    for (int i = 1; i < n && mine.count > 0; ++i) exchange.send((rank + i) % n, own, mine.count * item);
    TM_TRY(exchange.wait());
  }
  return {};
}

// Every rank reduces its slice, the root collects the slices.
Status reduce_slices(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op, int root) {
  const int n = call.group.size();
  const int rank = call.group.rank();
  const uint64_t item = item_bytes(dtype);
  Scratch slice_memory;  // apart from the scratch that collects
  for (uint64_t at = 0; at < count; at += round_elements(call, item)) {
    auto* round = static_cast<std::byte*>(data) + at * item;
    const uint64_t elements = std::min(round_elements(call, item), count - at);
    const Part mine = part_of(elements, rank, n, item);
    // In place at the root, whose other slices have been read by their ranks when they answer with the result.
    void* own = rank == root ? round + mine.begin * item : slice_memory.get(mine.count * item);
    TM_TRY(reduce_parts(call, round, elements, own, dtype, op));
    Exchange exchange(call);
    if (rank != root) {
      if (mine.count > 0) exchange.send(root, own, mine.count * item);
    } else {
      for (int from = 0; from < n; ++from) {
        const Part part = part_of(elements, from, n, item);
        if (from != root && part.count > 0) exchange.receive(from, round + part.begin * item, part.count * item);
      }
    }
    TM_TRY(exchange.wait());
  }
  return {};
}

Status reduce_at_root(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op, int root) {
  const int n = call.group.size();
  const uint64_t nbytes = count * item_bytes(dtype);
  const uint64_t stride = (nbytes + 63) / 64 * 64;
  Exchange exchange(call);
  if (call.group.rank() != root) {
    exchange.send(root, data, nbytes);
    return exchange.wait();
  }
  std::byte* scratch = call.scratch.get(stride * n);
  std::vector<const void*> inputs(n);
  for (int from = 0; from < n; ++from) {
    inputs[from] = from == root ? data : scratch + stride * from;
    if (from != root) exchange.receive(from, scratch + stride * from, nbytes);
  }
  TM_TRY(exchange.wait());
  reduce_many(data, inputs, count, dtype, op);
  return {};
}

// What the others show, in rank order, with `own` in its place.
Result<std::vector<const void*>> shown_by_all(const Call& call, Turn& turn, uint64_t nbytes, uint64_t at,
                                              const void* own) {
  std::vector<const void*> inputs(call.group.size());
  for (int rank = 0; rank < call.group.size(); ++rank) {
    inputs[rank] = own;
    if (rank == call.group.rank()) continue;
    TM_ASSIGN(const std::byte* shown, turn.theirs(rank, nbytes));
    inputs[rank] = shown + at;
  }
  return inputs;
}

Status all_reduce_shown(const Call& call, Turn& turn, void* data, uint64_t count, DType dtype, ReduceOp op) {
  const uint64_t nbytes = count * item_bytes(dtype);
  if (count > 0) std::memcpy(turn.mine(), data, nbytes);
  turn.post();
  TM_ASSIGN(const auto inputs, shown_by_all(call, turn, nbytes, 0, data));
  if (count > 0) reduce_many(data, inputs, count, dtype, op);
  return {};
}

uint64_t line_up(uint64_t nbytes) { return (nbytes + 63) / 64 * 64; }

// Every rank shows what it has for all.
Status reduce_scatter_shown(const Call& call, Turn& turn, std::span<const ConstPiece> in, Piece out, DType dtype,
                            ReduceOp op) {
  uint64_t total = 0, ours = 0;
  for (int rank = 0; rank < call.group.size(); ++rank) {
    if (rank == call.group.rank()) ours = total;
    if (in[rank].nbytes > 0) std::memcpy(turn.mine() + total, in[rank].data, in[rank].nbytes);
    total += line_up(in[rank].nbytes);
  }
  turn.post();
  TM_ASSIGN(const auto inputs, shown_by_all(call, turn, total, ours, in[call.group.rank()].data));
  if (out.nbytes > 0) reduce_many(out.data, inputs, out.nbytes / item_bytes(dtype), dtype, op);
  return {};
}

// One piece of much data over the large board: pieces[r] of every rank goes to rank r, which reduces them into `out`.
Status collect_piece(const Call& call, std::span<const ConstPiece> pieces, uint64_t room, void* out, uint64_t count,
                     DType dtype, ReduceOp op, Board::Kind kind) {
  const int n = call.group.size(), me = call.group.rank();
  uint64_t total = 0;
  for (const ConstPiece& piece : pieces) total += piece.nbytes;
  Turn turn(call, Board::kLarge);
  TM_TRY(turn.begin(kind, total, room * (n - 1)));
  for (int to = 0; to < n; ++to)
    if (to != me && pieces[to].nbytes > 0)
      std::memcpy(turn.mine() + place_of(me, to) * room, pieces[to].data, pieces[to].nbytes);
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
  const int n = call.group.size(), me = call.group.rank();
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
    if (all || me != root) std::memcpy(turn.mine(), own, parts[me].nbytes);
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
  const int n = call.group.size();
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

std::byte* Scratch::get(uint64_t nbytes) {
  if (nbytes > capacity_) {
    data_.reset(static_cast<std::byte*>(::operator new[](nbytes, std::align_val_t{64})));
    capacity_ = nbytes;
  }
  return data_.get();
}

void Scratch::trim() {
  if (capacity_ <= 16 * kSliceBytes) return;
  data_.reset();
  capacity_ = 0;
}

void Scratch::Free::operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }

Status all_reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op) {
  TM_TRY(check_reducible(dtype, op));
  if (call.device) return on_device::all_reduce(call, data, count, dtype, op);
  if (call.group.size() == 1) return {};
  const uint64_t nbytes = count * item_bytes(dtype);
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::all_reduce, nbytes, nbytes));
  if (turn.on_board()) return all_reduce_shown(call, turn, data, count, dtype, op);
  if (count == 0) return {};
  TM_TRY(turn.meet(nbytes));
  TM_ASSIGN(const bool large, has_large_board(call));
  if (large) return reduce_on_board(call, data, count, dtype, op, -1);
  if (nbytes > kDirectBytes) return all_reduce_slices(call, data, count, dtype, op);
  if (call.group.size() <= kDirectRanks) return all_reduce_direct(call, data, count, dtype, op);
  return all_reduce_doubling(call, data, count, dtype, op);
}

Status reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op, int root) {
  TM_TRY(check_reducible(dtype, op));
  if (root < 0 || root >= call.group.size()) return {Code::invalid_argument, "root " + std::to_string(root)};
  if (call.device) return on_device::reduce(call, data, count, dtype, op, root);
  if (call.group.size() == 1) return {};
  const uint64_t nbytes = count * item_bytes(dtype);
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::reduce, nbytes, nbytes));
  if (turn.on_board()) {
    if (call.group.rank() != root && count > 0) std::memcpy(turn.mine(), data, nbytes);
    turn.post();
    if (call.group.rank() != root) return {};
    TM_ASSIGN(const auto inputs, shown_by_all(call, turn, nbytes, 0, data));
    if (count > 0) reduce_many(data, inputs, count, dtype, op);
    return {};
  }
  if (count == 0) return {};
  TM_TRY(turn.meet_at(root, nbytes, nbytes));
  TM_ASSIGN(const bool large, has_large_board(call));
  if (large) return reduce_on_board(call, data, count, dtype, op, root);
  if (nbytes > kDirectBytes) return reduce_slices(call, data, count, dtype, op, root);
  return reduce_at_root(call, data, count, dtype, op, root);
}

Status reduce_scatter(const Call& call, std::span<const ConstPiece> in, Piece out, DType dtype, ReduceOp op) {
  TM_TRY(check_reducible(dtype, op));
  const int n = call.group.size();
  const int rank = call.group.rank();
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
  TM_ASSIGN(const bool large, has_large_board(call));
  if (large) return reduce_scatter_on_board(call, in, out, longest, dtype, op);
  auto part = [](uint64_t at, uint64_t nbytes) { return at < nbytes ? std::min(kSliceBytes, nbytes - at) : 0; };
  for (uint64_t at = 0; at < longest; at += kSliceBytes) {
    std::vector<ConstPiece> pieces(n);
    for (int r = 0; r < n; ++r) pieces[r] = {static_cast<const std::byte*>(in[r].data) + at, part(at, in[r].nbytes)};
    TM_TRY(collect_and_reduce(call, pieces, pieces[rank].data, static_cast<std::byte*>(out.data) + at,
                              part(at, out.nbytes) / item_bytes(dtype), dtype, op));
  }
  return {};
}

}  // namespace torch_mooncake::coll
