#include "collectives/device.h"

#include <algorithm>
#include <vector>

#include "collectives/board.h"
#include "collectives/exchange.h"

namespace torch_mooncake::coll::on_device {
namespace {

constexpr uint64_t kSliceBytes = 16 << 20;  // a rank's slice of one round of a reduction
constexpr uint64_t kChainBytes = 16 << 20;  // piece of a broadcast
// What this path adds to the sizes that ranks agree on: one whose data is on the host has others.
constexpr uint64_t kOnDevice = 0xc0da;

uint64_t line_up(uint64_t nbytes) { return (nbytes + 63) / 64 * 64; }
const std::byte* at(const void* data, uint64_t offset) { return static_cast<const std::byte*>(data) + offset; }
std::byte* at(void* data, uint64_t offset) { return static_cast<std::byte*>(data) + offset; }

// For what is of the host: the board, the collectives of staged pieces.
Call on_host(const Call& call) {
  Call host = call;
  host.device = nullptr;
  return host;
}

// The images of pieces of device memory in pinned memory.
class Staged {
 public:
  explicit Staged(const Call& call) : call_(call), device_(*call.device) {}
  // One more; with what it holds (`in`), to be copied back (`out`).
  void add(const void* data, uint64_t nbytes, bool in, bool out) {
    images_.push_back({data, nbytes, total_, in, out});
    total_ += line_up(nbytes);
  }
  Status load() {
    TM_ASSIGN(base_, device_.pinned(std::max<uint64_t>(total_, 1)));
    for (const Image& image : images_)
      if (image.in && image.nbytes > 0) TM_TRY(device_.copy(base_ + image.at, image.data, image.nbytes));
    return device_.wait(call_.deadline);
  }
  std::byte* operator[](size_t i) const { return base_ + images_[i].at; }
  Status store() {
    for (const Image& image : images_)
      if (image.out && image.nbytes > 0)
        TM_TRY(device_.copy(const_cast<void*>(image.data), base_ + image.at, image.nbytes));
    return device_.wait(call_.deadline);
  }

 private:
  struct Image {
    const void* data;
    uint64_t nbytes, at;
    bool in, out;
  };
  const Call& call_;
  Device& device_;
  std::vector<Image> images_;
  uint64_t total_ = 0;
  std::byte* base_ = nullptr;
};

// Says on the board what is about to go by messages. The one who is the root, or everybody (-1), hears of all ranks.
Status announce(Turn& turn, Board::Kind kind, uint64_t nbytes, int root, uint64_t agreed = 0) {
  TM_TRY(turn.begin(kind, nbytes, UINT64_MAX, agreed + kOnDevice));
  return root < 0 ? turn.meet(nbytes) : turn.meet_at(root, nbytes, nbytes);
}

Status copy_own(const Call& call, void* to, const void* from, uint64_t nbytes) {
  if (to == from || nbytes == 0) return {};
  return call.device->copy(to, from, nbytes);
}

// The part of `count` elements that rank `i` of `n` reduces; cut on cache lines.
struct Part {
  uint64_t begin, count;
};
Part part_of(uint64_t count, int i, int n, uint64_t item) {
  const uint64_t line = std::max<uint64_t>(1, 64 / item);
  const uint64_t each = ((count + n - 1) / n + line - 1) / line * line;
  const uint64_t begin = std::min(count, each * i);
  return {begin, std::min(count, begin + each) - begin};
}

// Sends to_ranks[r] to every other rank r, takes theirs for this rank and reduces them with its own into `out`, which
// null puts behind them in the scratch memory. Returns where that is; it is there.
Result<void*> collect(const Call& call, std::span<const ConstPiece> to_ranks, void* out, uint64_t count, DType dtype,
                      ReduceOp op) {
  const int n = call.size(), rank = call.rank();
  const uint64_t nbytes = count * item_bytes(dtype), stride = line_up(nbytes);
  std::byte* scratch = nullptr;
  if (nbytes > 0) {
    TM_ASSIGN(scratch, call.device->scratch(stride * static_cast<uint64_t>(n)));
    TM_TRY(call.device->wait(call.deadline));  // whatever that memory was used for before
  }
  std::vector<const void*> inputs(n);
  Exchange exchange(call);
  for (int i = 1; i < n && nbytes > 0; ++i) {
    const int from = (rank + n - i) % n;
    inputs[from] = scratch + stride * static_cast<uint64_t>(i);
    exchange.receive(from, scratch + stride * static_cast<uint64_t>(i), nbytes);
  }
  for (int i = 1; i < n; ++i) {
    const int to = (rank + i) % n;
    if (to_ranks[to].nbytes > 0) exchange.send(to, to_ranks[to].data, to_ranks[to].nbytes);
  }
  TM_TRY(exchange.wait());
  if (out == nullptr) out = scratch;
  if (nbytes == 0) return out;
  inputs[rank] = to_ranks[rank].data;
  TM_TRY(call.device->reduce_many(out, inputs, count, dtype, op));
  TM_TRY(call.device->wait(call.deadline));
  return out;
}

// Round by round: every rank reduces its slice, then hands it to those who want it: the root, or all (-1).
Status reduce_rounds(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op, int root) {
  const int n = call.size(), rank = call.rank();
  const bool wants = root < 0 || rank == root;
  const uint64_t item = item_bytes(dtype), step = kSliceBytes / item * static_cast<uint64_t>(n);
  for (uint64_t begin = 0; begin < count; begin += step) {
    std::byte* round = at(data, begin * item);
    const uint64_t elements = std::min(step, count - begin);
    std::vector<Part> parts;
    std::vector<ConstPiece> pieces;
    for (int r = 0; r < n; ++r) {
      parts.push_back(part_of(elements, r, n, item));
      pieces.push_back({round + parts[r].begin * item, parts[r].count * item});
    }
    void* own = wants ? round + parts[rank].begin * item : nullptr;
    TM_ASSIGN(own, collect(call, pieces, own, parts[rank].count, dtype, op));
    Exchange exchange(call);
    for (int i = 1; i < n && wants; ++i) {
      const int from = (rank + n - i) % n;
      if (parts[from].count > 0) exchange.receive(from, round + parts[from].begin * item, parts[from].count * item);
    }
    for (int i = 1; i < n && parts[rank].count > 0; ++i) {
      const int to = (rank + i) % n;
      if (root < 0 || to == root) exchange.send(to, own, parts[rank].count * item);
    }
    TM_TRY(exchange.wait());
  }
  return {};
}

}  // namespace

Status broadcast(const Call& call, void* data, uint64_t nbytes, int root) {
  const int n = call.size(), rank = call.rank();
  if (n == 1) return {};
  if (nbytes <= call.device->staged_bytes()) {
    Staged staged(call);
    staged.add(data, nbytes, rank == root, rank != root);
    TM_TRY(staged.load());
    TM_TRY(coll::broadcast(on_host(call), staged[0], nbytes, root));
    return staged.store();
  }
  TM_TRY(call.device->wait(call.deadline));
  const Call host = on_host(call);
  Turn turn(host);
  TM_TRY(announce(turn, Board::Kind::broadcast, nbytes, root));
  Exchange forwarding(call);
  for (uint64_t begin = 0; begin < nbytes; begin += kChainBytes) {
    const uint64_t piece = std::min(kChainBytes, nbytes - begin);
    if (rank != root) {
      Exchange incoming(call);
      incoming.receive((rank + n - 1) % n, at(data, begin), piece);
      TM_TRY(incoming.wait());
    }
    if ((rank + 1) % n != root) forwarding.send((rank + 1) % n, at(data, begin), piece);
  }
  return forwarding.wait();
}

Status all_reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op) {
  if (call.size() == 1) return {};
  const uint64_t nbytes = count * item_bytes(dtype);
  if (nbytes <= call.device->staged_bytes()) {
    Staged staged(call);
    staged.add(data, nbytes, true, true);
    TM_TRY(staged.load());
    TM_TRY(coll::all_reduce(on_host(call), staged[0], count, dtype, op));
    return staged.store();
  }
  TM_TRY(call.device->wait(call.deadline));
  const Call host = on_host(call);
  Turn turn(host);
  TM_TRY(announce(turn, Board::Kind::all_reduce, nbytes, -1));
  return reduce_rounds(call, data, count, dtype, op, -1);
}

Status reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op, int root) {
  if (call.size() == 1) return {};
  const uint64_t nbytes = count * item_bytes(dtype);
  if (nbytes <= call.device->staged_bytes()) {
    Staged staged(call);
    staged.add(data, nbytes, true, call.rank() == root);
    TM_TRY(staged.load());
    TM_TRY(coll::reduce(on_host(call), staged[0], count, dtype, op, root));
    return staged.store();
  }
  TM_TRY(call.device->wait(call.deadline));
  const Call host = on_host(call);
  Turn turn(host);
  TM_TRY(announce(turn, Board::Kind::reduce, nbytes, root));
  return reduce_rounds(call, data, count, dtype, op, root);
}

Status all_gather(const Call& call, ConstPiece in, std::span<const Piece> out) {
  const int n = call.size(), rank = call.rank();
  uint64_t total = 0;
  Agreed sizes;
  for (const Piece& piece : out) {
    total += piece.nbytes;
    sizes.add(piece.nbytes);
  }
  if (total <= call.device->staged_bytes()) {
    Staged staged(call);
    for (const Piece& piece : out) staged.add(piece.data, piece.nbytes, false, true);
    staged.add(in.data, in.nbytes, true, false);
    TM_TRY(staged.load());
    std::vector<Piece> images;
    for (int r = 0; r < n; ++r) images.push_back({staged[r], out[r].nbytes});
    TM_TRY(coll::all_gather(on_host(call), {staged[n], in.nbytes}, images));
    return staged.store();
  }
  TM_TRY(copy_own(call, out[rank].data, in.data, in.nbytes));
  TM_TRY(call.device->wait(call.deadline));
  const Call host = on_host(call);
  Turn turn(host);
  TM_TRY(announce(turn, Board::Kind::all_gather, total, -1, sizes.value()));
  Exchange exchange(call);
  for (int i = 1; i < n; ++i) {
    const int from = (rank + n - i) % n;
    if (out[from].nbytes > 0) exchange.receive(from, out[from].data, out[from].nbytes);
  }
  for (int i = 1; i < n && in.nbytes > 0; ++i) exchange.send((rank + i) % n, in.data, in.nbytes);
  return exchange.wait();
}

Status reduce_scatter(const Call& call, std::span<const ConstPiece> in, Piece out, DType dtype, ReduceOp op) {
  const int n = call.size(), rank = call.rank();
  uint64_t total = 0, longest = 0;
  Agreed sizes;
  for (const ConstPiece& piece : in) {
    total += piece.nbytes;
    longest = std::max(longest, piece.nbytes);
    sizes.add(piece.nbytes);
  }
  if (total <= call.device->staged_bytes()) {
    Staged staged(call);
    for (const ConstPiece& piece : in) staged.add(piece.data, piece.nbytes, true, false);
    staged.add(out.data, out.nbytes, false, true);
    TM_TRY(staged.load());
    std::vector<ConstPiece> images;
    for (int r = 0; r < n; ++r) images.push_back({staged[r], in[r].nbytes});
    TM_TRY(coll::reduce_scatter(on_host(call), images, {staged[n], out.nbytes}, dtype, op));
    return staged.store();
  }
  TM_TRY(call.device->wait(call.deadline));
  const Call host = on_host(call);
  Turn turn(host);
  TM_TRY(announce(turn, Board::Kind::reduce_scatter, total, -1, sizes.value()));
  auto part = [](uint64_t begin, uint64_t nbytes) {
    return begin < nbytes ? std::min(kSliceBytes, nbytes - begin) : 0;
  };
  for (uint64_t begin = 0; begin < longest; begin += kSliceBytes) {
    std::vector<ConstPiece> pieces(n);
    for (int r = 0; r < n; ++r)
      if (const uint64_t nbytes = part(begin, in[r].nbytes); nbytes > 0) pieces[r] = {at(in[r].data, begin), nbytes};
    const uint64_t count = pieces[rank].nbytes / item_bytes(dtype);
    TM_TRY(collect(call, pieces, count > 0 ? at(out.data, begin) : nullptr, count, dtype, op).status());
  }
  return {};
}

Status gather(const Call& call, const void* in, uint64_t nbytes, std::span<void* const> out, int root) {
  const int n = call.size(), rank = call.rank();
  const bool is_root = rank == root;
  if (nbytes * static_cast<uint64_t>(n) <= call.device->staged_bytes()) {
    Staged staged(call);
    for (int r = 0; r < n && is_root; ++r) staged.add(out[r], nbytes, false, true);
    staged.add(in, nbytes, true, false);
    TM_TRY(staged.load());
    std::vector<void*> images;
    for (int r = 0; r < n && is_root; ++r) images.push_back(staged[r]);
    TM_TRY(coll::gather(on_host(call), staged[images.size()], nbytes, images, root));
    return staged.store();
  }
  if (is_root) TM_TRY(copy_own(call, out[root], in, nbytes));
  TM_TRY(call.device->wait(call.deadline));
  const Call host = on_host(call);
  Turn turn(host);
  TM_TRY(announce(turn, Board::Kind::gather, nbytes, root));
  Exchange exchange(call);
  if (!is_root) exchange.send(root, in, nbytes);
  for (int r = 0; r < n && is_root; ++r)
    if (r != root) exchange.receive(r, out[r], nbytes);
  return exchange.wait();
}

Status scatter(const Call& call, std::span<const void* const> in, void* out, uint64_t nbytes, int root) {
  const int n = call.size(), rank = call.rank();
  const bool is_root = rank == root;
  if (nbytes * static_cast<uint64_t>(n) <= call.device->staged_bytes()) {
    Staged staged(call);
    for (int r = 0; r < n && is_root; ++r) staged.add(in[r], nbytes, true, false);
    staged.add(out, nbytes, false, true);
    TM_TRY(staged.load());
    std::vector<const void*> images;
    for (int r = 0; r < n && is_root; ++r) images.push_back(staged[r]);
    TM_TRY(coll::scatter(on_host(call), images, staged[images.size()], nbytes, root));
    return staged.store();
  }
  if (is_root) TM_TRY(copy_own(call, out, in[root], nbytes));
  TM_TRY(call.device->wait(call.deadline));
  const Call host = on_host(call);
  Turn turn(host);
  TM_TRY(announce(turn, Board::Kind::scatter, nbytes, root));
  Exchange exchange(call);
  if (!is_root) exchange.receive(root, out, nbytes);
  for (int r = 0; r < n && is_root; ++r)
    if (r != root) exchange.send(r, in[r], nbytes);
  return exchange.wait();
}

// A rank knows its own sizes only: all tell each other how much they move, to agree whether that is little.
Status all_to_all(const Call& call, std::span<const ConstPiece> in, std::span<const Piece> out) {
  const int n = call.size(), rank = call.rank();
  uint64_t total = 0;
  for (const ConstPiece& piece : in) total += piece.nbytes;
  for (const Piece& piece : out) total += piece.nbytes;
  std::vector<uint64_t> totals(n);
  std::vector<Piece> places;
  for (uint64_t& one : totals) places.push_back({&one, sizeof one});
  TM_TRY(coll::all_gather(on_host(call), {&total, sizeof total}, places));
  if (*std::max_element(totals.begin(), totals.end()) <= call.device->staged_bytes()) {
    Staged staged(call);
    for (const ConstPiece& piece : in) staged.add(piece.data, piece.nbytes, true, false);
    for (const Piece& piece : out) staged.add(piece.data, piece.nbytes, false, true);
    TM_TRY(staged.load());
    std::vector<ConstPiece> ins;
    std::vector<Piece> outs;
    for (int r = 0; r < n; ++r) ins.push_back({staged[r], in[r].nbytes});
    for (int r = 0; r < n; ++r) outs.push_back({staged[n + r], out[r].nbytes});
    TM_TRY(coll::all_to_all(on_host(call), ins, outs));
    return staged.store();
  }
  TM_TRY(copy_own(call, out[rank].data, in[rank].data, in[rank].nbytes));
  TM_TRY(call.device->wait(call.deadline));
  Exchange exchange(call);
  for (int i = 1; i < n; ++i) {
    const int from = (rank + n - i) % n;
    exchange.receive(from, out[from].data, out[from].nbytes);
  }
  for (int i = 1; i < n; ++i) exchange.send((rank + i) % n, in[(rank + i) % n].data, in[(rank + i) % n].nbytes);
  return exchange.wait();
}

}  // namespace torch_mooncake::coll::on_device
