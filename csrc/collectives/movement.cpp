// Collectives that only move bytes: over the board of one host, or by messages as across.h and by_host.h have them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/across.h"
#include "collectives/board.h"
#include "collectives/by_host.h"
#include "collectives/collectives.h"
#include "collectives/device.h"
#include "collectives/exchange.h"
#include "memory/copy.h"

namespace torch_mooncake::coll {
namespace {

void copy_own(void* to, const void* from, uint64_t nbytes) {
  if (to != from && nbytes > 0) copy_bytes(to, from, nbytes);
}

Status check_root(const Call& call, int root) {
  if (root >= 0 && root < call.size()) return {};
  return {Code::invalid_argument, "root " + std::to_string(root) + " of a group of " + std::to_string(call.size())};
}

Status check_count(const Call& call, size_t n, const char* what) {
  if (n == static_cast<size_t>(call.size())) return {};
  return {Code::invalid_argument, std::to_string(n) + " " + what + " for a group of " + std::to_string(call.size())};
}

// What a rank keeps for itself.
Status check_own(const Call& call, uint64_t in, uint64_t out) {
  if (in == out) return {};
  return {Code::layout_mismatch, call.name_of(call.rank()) + " keeps " + std::to_string(in) +
                                     " bytes for itself, its output has " + std::to_string(out)};
}

// Copies what that rank shows.
Status take(Turn& turn, int rank, void* to, uint64_t nbytes) {
  TM_ASSIGN(const std::byte* shown, turn.theirs(rank, nbytes));
  if (nbytes > 0) std::memcpy(to, shown, nbytes);
  return {};
}

void show(Turn& turn, const void* data, uint64_t nbytes) {
  turn.put(0, data, nbytes);
  turn.post();
}

// Much data over the large board, a slot at a time: all of `in` of each rank that shows something, to all who want it.
Status show_pieces(const Call& call, Board::Kind kind, ConstPiece in, std::span<const Piece> out, uint64_t most) {
  const int n = call.size(), me = call.rank();
  constexpr uint64_t kStep = Board::kSlotBytes[Board::kLarge];
  auto part = [kStep](uint64_t at, uint64_t nbytes) { return at < nbytes ? std::min(kStep, nbytes - at) : 0; };
  for (uint64_t at = 0; at < most; at += kStep) {
    const uint64_t own = part(at, in.nbytes);
    Turn turn(call, Board::kLarge);
    TM_TRY(turn.begin(kind, own, kStep));
    show(turn, own > 0 ? static_cast<const std::byte*>(in.data) + at : nullptr, own);
    for (int i = 1; i < n; ++i) {
      const Piece& from = out[(me + i) % n];
      const uint64_t nbytes = part(at, from.nbytes);
      if (nbytes > 0) TM_TRY(take(turn, (me + i) % n, static_cast<std::byte*>(from.data) + at, nbytes));
    }
  }
  return {};
}

uint64_t word_up(uint64_t nbytes) { return nbytes > UINT64_MAX - 7 ? nbytes : (nbytes + 7) / 8 * 8; }

// What a rank shows in an all_to_all: the sizes of its pieces by rank, and the pieces, if all of them fit the slot.
struct Shown {
  std::vector<uint64_t> sizes, places;
  uint64_t longest = 0;
  bool fits = true;

  Shown(const uint64_t* from, size_t n) : sizes(from, from + n) {
    uint64_t at = n * sizeof(uint64_t);
    for (const uint64_t size : sizes) {
      places.push_back(at);
      longest = std::max(longest, size);
      fits = fits && size <= Board::kSlotBytes[Board::kSmall] - at;
      at = fits ? std::min(Board::kSlotBytes[Board::kSmall], at + word_up(size)) : at;
    }
  }
};

// All learn all sizes in one turn, in which what is little goes along; so they agree on how many pieces the rest takes.
Status all_to_all_on_board(const Call& call, Turn& turn, std::span<const ConstPiece> in, std::span<const Piece> out) {
  const int n = call.size(), me = call.rank();
  std::vector<uint64_t> sizes;
  for (const ConstPiece& piece : in) sizes.push_back(piece.nbytes);
  sizes[me] = 0;
  const Shown ours(sizes.data(), sizes.size());
  std::memcpy(turn.mine(), sizes.data(), sizes.size() * sizeof(uint64_t));
  for (int to = 0; to < n && ours.fits; ++to) turn.put(ours.places[to], in[to].data, sizes[to]);
  turn.post();
  uint64_t longest = ours.fits ? 0 : ours.longest;
  std::vector<bool> late(n);
  for (int i = 1; i < n; ++i) {
    const int from = (me + i) % n;
    TM_ASSIGN(const std::byte* slot, turn.theirs(from, sizes.size() * sizeof(uint64_t)));
    const Shown shown(reinterpret_cast<const uint64_t*>(slot), sizes.size());
    if (shown.sizes[me] != out[from].nbytes)
      return {Code::layout_mismatch, call.name_of(from) + " sends " + std::to_string(shown.sizes[me]) +
                                         " bytes, where " + std::to_string(out[from].nbytes) + " are expected"};
    late[from] = !shown.fits;
    if (late[from]) longest = std::max(longest, shown.longest);
    if (!late[from] && out[from].nbytes > 0) std::memcpy(out[from].data, slot + shown.places[me], out[from].nbytes);
  }
  copy_own(out[me].data, in[me].data, in[me].nbytes);
  if (longest == 0) return {};
  TM_ASSIGN(const bool large, has_large_board(call, Board::Kind::all_to_all));
  if (!large) {
    Exchange exchange(call);
    for (int i = 1; i < n; ++i)
      if (const int from = (me + n - i) % n; late[from]) exchange.receive(from, out[from].data, out[from].nbytes);
    for (int i = 1; i < n && !ours.fits; ++i) exchange.send((me + i) % n, in[(me + i) % n].data, sizes[(me + i) % n]);
    return exchange.wait();
  }
  const uint64_t room = room_of_piece(n);
  auto part = [&](uint64_t at, uint64_t nbytes) { return at < nbytes ? std::min(room, nbytes - at) : 0; };
  for (uint64_t at = 0; at < longest; at += room) {
    Turn piece(call, Board::kLarge);
    TM_TRY(piece.begin(Board::Kind::all_to_all, at, room * static_cast<uint64_t>(n - 1)));
    for (int to = 0; to < n && !ours.fits; ++to)
      if (const uint64_t nbytes = part(at, sizes[to]); nbytes > 0)
        piece.put(place_of(me, to) * room, static_cast<const std::byte*>(in[to].data) + at, nbytes);
    piece.post();
    for (int i = 1; i < n; ++i) {
      const int from = (me + i) % n;
      const uint64_t nbytes = late[from] ? part(at, out[from].nbytes) : 0;
      if (nbytes == 0) continue;
      TM_ASSIGN(const std::byte* shown, piece.theirs(from, at));
      std::memcpy(static_cast<std::byte*>(out[from].data) + at, shown + place_of(from, me) * room, nbytes);
    }
  }
  return {};
}

}  // namespace

// By messages a dissemination: after step k everybody has heard, directly or not, of 2^(k+1) ranks.
Status barrier(const Call& call) {
  const int n = call.size();
  const int rank = call.rank();
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::barrier, 0, 0));
  if (turn.on_board()) {
    turn.post();
    for (int i = 1; i < n; ++i) TM_TRY(turn.theirs((rank + i) % n, 0).status());
    return {};
  }
  const Choice choice = call.choose(Collective::barrier, 0);
  if (choice.by_host) return by_host::barrier(call);
  for (int distance = 1; distance < n; distance *= 2) {
    TM_TRY(Exchange::send_receive(call, (rank + distance) % n, {nullptr, 0}, (rank + n - distance) % n, {nullptr, 0}));
  }
  return {};
}

Status monitored_barrier(const Call& call) {
  const int n = call.size();
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::other, 0, UINT64_MAX));
  Exchange arriving(call);
  if (call.rank() != 0) arriving.send(0, nullptr, 0);
  for (int rank = 1; rank < n && call.rank() == 0; ++rank) arriving.receive(rank, nullptr, 0);
  TM_TRY(arriving.wait());
  Exchange leaving(call);
  if (call.rank() != 0) leaving.receive(0, nullptr, 0);
  for (int rank = 1; rank < n && call.rank() == 0; ++rank) leaving.send(rank, nullptr, 0);
  return leaving.wait();
}

Status broadcast(const Call& call, void* data, uint64_t nbytes, int root) {
  TM_TRY(check_root(call, root));
  if (call.device) return on_device::broadcast(call, data, nbytes, root);
  if (call.size() == 1) return {};
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::broadcast, nbytes, nbytes));
  if (turn.on_board()) {
    show(turn, data, call.rank() == root ? nbytes : 0);
    return call.rank() == root ? Status() : take(turn, root, data, nbytes);
  }
  TM_TRY(turn.meet_at(root, nbytes, nbytes));
  TM_ASSIGN(const bool large, has_large_board(call, Board::Kind::broadcast));
  if (large) {
    std::vector<Piece> from(call.size(), {nullptr, 0});
    const bool is_root = call.rank() == root;
    if (!is_root) from[root] = {data, nbytes};
    return show_pieces(call, Board::Kind::broadcast, {data, is_root ? nbytes : 0}, from, nbytes);
  }
  const Choice choice = call.choose(Collective::broadcast, nbytes);
  if (choice.by_host) return by_host::broadcast(call, choice.algorithm, data, nbytes, root);
  return across::broadcast(call, choice.algorithm, data, nbytes, root);
}

Status all_gather(const Call& call, ConstPiece in, std::span<const Piece> out) {
  TM_TRY(check_count(call, out.size(), "outputs"));
  const int n = call.size();
  const int rank = call.rank();
  TM_TRY(check_own(call, in.nbytes, out[rank].nbytes));
  if (call.device) return on_device::all_gather(call, in, out);
  uint64_t most = 0;
  Agreed sizes;
  for (const Piece& piece : out) {
    most = std::max(most, piece.nbytes);
    sizes.add(piece.nbytes);
  }
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::all_gather, in.nbytes, most, sizes.value()));
  if (turn.on_board()) {
    show(turn, in.data, in.nbytes);
    for (int i = 1; i < n; ++i) {
      const int from = (rank + i) % n;
      TM_TRY(take(turn, from, out[from].data, out[from].nbytes));
    }
    copy_own(out[rank].data, in.data, in.nbytes);
    return {};
  }
  TM_ASSIGN(const bool large, has_large_board(call, Board::Kind::all_gather));
  if (large) {
    for (int i = 1; i < n; ++i) TM_TRY(turn.theirs((rank + i) % n, out[(rank + i) % n].nbytes).status());
    copy_own(out[rank].data, in.data, in.nbytes);
    return show_pieces(call, Board::Kind::all_gather, in, out, most);
  }
  const Choice choice = call.choose(Collective::all_gather, most);
  if (choice.by_host) return by_host::all_gather(call, in, out);
  return across::all_gather(call, choice.algorithm, in, out);
}

Status gather(const Call& call, const void* in, uint64_t nbytes, std::span<void* const> out, int root) {
  TM_TRY(check_root(call, root));
  if (call.rank() == root) TM_TRY(check_count(call, out.size(), "outputs"));
  if (call.device) return on_device::gather(call, in, nbytes, out, root);
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::gather, nbytes, nbytes));
  if (turn.on_board()) {
    show(turn, in, call.rank() == root ? 0 : nbytes);
    if (call.rank() != root) return {};
    for (int rank = 0; rank < call.size(); ++rank)
      if (rank != root) TM_TRY(take(turn, rank, out[rank], nbytes));
    copy_own(out[root], in, nbytes);
    return {};
  }
  TM_TRY(turn.meet_at(root, nbytes, nbytes));
  Exchange exchange(call);
  if (call.rank() != root) {
    exchange.send(root, in, nbytes);
    return exchange.wait();
  }
  for (int rank = 0; rank < call.size(); ++rank) {
    if (rank != root) exchange.receive(rank, out[rank], nbytes);
  }
  copy_own(out[root], in, nbytes);
  return exchange.wait();
}

Status scatter(const Call& call, std::span<const void* const> in, void* out, uint64_t nbytes, int root) {
  TM_TRY(check_root(call, root));
  if (call.rank() == root) TM_TRY(check_count(call, in.size(), "inputs"));
  if (call.device) return on_device::scatter(call, in, out, nbytes, root);
  const auto n = static_cast<uint64_t>(call.size());
  const uint64_t all = nbytes > Board::kSlotBytes[Board::kSmall] ? UINT64_MAX : nbytes * n;
  Turn turn(call);
  TM_TRY(turn.begin(Board::Kind::scatter, all, all));
  if (turn.on_board()) {
    if (call.rank() == root) {
      for (size_t rank = 0; rank < n; ++rank) turn.put(rank * nbytes, in[rank], nbytes);
      copy_own(out, in[root], nbytes);
      turn.post();
      return {};
    }
    turn.post();
    TM_ASSIGN(const std::byte* shown, turn.theirs(root, all));
    if (nbytes > 0) std::memcpy(out, shown + static_cast<uint64_t>(call.rank()) * nbytes, nbytes);
    return {};
  }
  TM_TRY(turn.meet_at(root, all, all));
  Exchange exchange(call);
  if (call.rank() != root) {
    exchange.receive(root, out, nbytes);
    return exchange.wait();
  }
  for (int rank = 0; rank < call.size(); ++rank) {
    if (rank != root) exchange.send(rank, in[rank], nbytes);
  }
  copy_own(out, in[root], nbytes);
  return exchange.wait();
}

Status all_to_all(const Call& call, std::span<const ConstPiece> in, std::span<const Piece> out) {
  TM_TRY(check_count(call, in.size(), "inputs"));
  TM_TRY(check_count(call, out.size(), "outputs"));
  const int n = call.size();
  const int rank = call.rank();
  TM_TRY(check_own(call, in[rank].nbytes, out[rank].nbytes));
  if (call.device) return on_device::all_to_all(call, in, out);
  Turn turn(call);
  const uint64_t sizes = static_cast<uint64_t>(n) * sizeof(uint64_t);
  TM_TRY(turn.begin(Board::Kind::all_to_all, sizes, sizes));
  if (turn.on_board()) return all_to_all_on_board(call, turn, in, out);
  Exchange exchange(call);
  for (int i = 1; i < n; ++i) {
    const int from = (rank + n - i) % n;
    exchange.receive(from, out[from].data, out[from].nbytes);
  }
  for (int i = 1; i < n; ++i) {
    const int to = (rank + i) % n;
    exchange.send(to, in[to].data, in[to].nbytes);
  }
  copy_own(out[rank].data, in[rank].data, in[rank].nbytes);
  return exchange.wait();
}

}  // namespace torch_mooncake::coll
