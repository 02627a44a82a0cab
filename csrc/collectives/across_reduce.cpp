// Messages that reduce.
#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>

#include "collectives/across.h"
#include "collectives/exchange.h"

namespace torch_mooncake::coll::across {
namespace {

constexpr uint64_t kAhead = 2, kWindow = kAhead + 1;  // rounds of slices under way
constexpr size_t kPulls = 3;                          // messages that a rank receives at a time

// Messages to be received, in this order, only a few of them at a time: where all ranks go through the others in the
// order of the ranks before them, every link carries about one flow each way.
class Pulls {
 public:
  explicit Pulls(Exchange& exchange) : exchange_(exchange) {}
  void add(int from, void* to, uint64_t nbytes) { todo_.push_back({from, to, nbytes}); }
  size_t size() const { return todo_.size(); }
  // Until the first `n` of those added have come.
  Status wait(size_t n) {
    for (; come_ < n; ++come_) {
      while (under_way_.size() < kPulls && begun_ < todo_.size()) {
        const auto& [from, to, nbytes] = todo_[begun_++];
        under_way_.push_back(exchange_.receive(from, to, nbytes));
      }
      TM_TRY(exchange_.wait_for(under_way_.front()));
      under_way_.pop_front();
    }
    return {};
  }

 private:
  struct Pull {
    int from;
    void* to;
    uint64_t nbytes;
  };
  Exchange& exchange_;
  std::vector<Pull> todo_;
  std::deque<RequestPtr> under_way_;
  size_t begun_ = 0, come_ = 0;
};

uint64_t line_up(uint64_t nbytes) { return (nbytes + 63) / 64 * 64; }

// Everybody's data, in the order of the ranks; `own` in this one's place.
Status collect_all(const Call& call, Exchange& exchange, uint64_t nbytes, const void* own,
                   std::vector<const void*>& inputs) {
  const int n = call.size(), me = call.rank();
  std::byte* scratch = call.scratch.get(line_up(nbytes) * n);
  inputs.assign(n, own);
  for (int i = 1; i < n; ++i) {
    const int from = (me + n - i) % n;
    std::byte* to = scratch + line_up(nbytes) * i;
    inputs[from] = to;
    exchange.receive(from, to, nbytes);
  }
  return {};
}

Status all_reduce_direct(const Call& call, void* data, uint64_t count, const Reduction& reduction) {
  const int n = call.size(), me = call.rank();
  const uint64_t nbytes = count * reduction.item();
  std::vector<const void*> inputs;
  Exchange exchange(call);
  TM_TRY(collect_all(call, exchange, nbytes, data, inputs));
  for (int i = 1; i < n; ++i) exchange.send((me + i) % n, data, nbytes);
  TM_TRY(exchange.wait());
  reduction.last(data, inputs, count);
  return {};
}

Status reduce_direct(const Call& call, void* data, uint64_t count, const Reduction& reduction, int root) {
  const uint64_t nbytes = count * reduction.item();
  Exchange exchange(call);
  if (call.rank() != root) {
    exchange.send(root, data, nbytes);
    return exchange.wait();
  }
  std::vector<const void*> inputs;
  TM_TRY(collect_all(call, exchange, nbytes, data, inputs));
  TM_TRY(exchange.wait());
  reduction.last(data, inputs, count);
  return {};
}

// Recursive doubling over accumulators (fp32 for fp16 and bf16). With N not a power of two, the ranks beyond the
// largest one hand their part to a partner first and get the result from it. Both ends of a pair add the same two
// numbers, so all ranks end with the same bits.
Status all_reduce_doubling(const Call& call, void* data, uint64_t count, const Reduction& reduction) {
  const int n = call.size(), me = call.rank();
  const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const auto [dtype, op, inputs] = reduction;
  const uint64_t nbytes = count * item_bytes(accumulator_of(dtype));
  std::byte* mine = call.scratch.get(2 * line_up(nbytes));
  std::byte* theirs = mine + line_up(nbytes);
  load_accumulator(mine, data, count, dtype);
  Exchange exchange(call);
  if (me >= core) {
    exchange.send(me - core, mine, nbytes);
    TM_TRY(exchange.wait());
    exchange.receive(me - core, mine, nbytes);
  } else {
    const bool has_extra = me + core < n;
    if (has_extra) {
      TM_TRY(exchange.wait_for(exchange.receive(me + core, theirs, nbytes)));
      accumulate(mine, theirs, count, dtype, op);
    }
    for (int bit = 1; bit < core; bit <<= 1) {
      TM_TRY(Exchange::send_receive(call, me ^ bit, {mine, nbytes}, me ^ bit, {theirs, nbytes}));
      accumulate(mine, theirs, count, dtype, op);
    }
    if (has_extra) exchange.send(me + core, mine, nbytes);
  }
  TM_TRY(exchange.wait());
  store_accumulator(data, mine, count, dtype, op, inputs);
  return {};
}

// A binomial tree over accumulators: children before parents.
Status reduce_tree(const Call& call, void* data, uint64_t count, const Reduction& reduction, int root) {
  const int n = call.size();
  const int me = (call.rank() - root + n) % n;
  const auto [dtype, op, inputs] = reduction;
  const uint64_t nbytes = count * item_bytes(accumulator_of(dtype));
  std::byte* mine = call.scratch.get(2 * line_up(nbytes));
  std::byte* theirs = mine + line_up(nbytes);
  load_accumulator(mine, data, count, dtype);
  for (int bit = 1; bit < n; bit <<= 1) {
    Exchange exchange(call);
    if (me & bit) {
      exchange.send((me - bit + root) % n, mine, nbytes);
      return exchange.wait();
    }
    if (me + bit >= n) continue;
    exchange.receive((me + bit + root) % n, theirs, nbytes);
    TM_TRY(exchange.wait());
    accumulate(mine, theirs, count, dtype, op);
  }
  store_accumulator(data, mine, count, dtype, op, inputs);
  return {};
}

// Rabenseifner: pairs halve what they are responsible for, until every rank has a part of its own; then back. The ranks
// beyond the largest power of two hand their data to a partner first and get the result from it.
Status all_reduce_halving(const Call& call, void* data, uint64_t count, const Reduction& reduction) {
  const int n = call.size(), me = call.rank();
  const int core = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const uint64_t item = reduction.item();
  auto* bytes = static_cast<std::byte*>(data);
  Exchange exchange(call);
  if (me >= core) {
    exchange.send(me - core, data, count * item);
    TM_TRY(exchange.wait());
    exchange.receive(me - core, data, count * item);
    return exchange.wait();
  }
  std::byte* theirs = call.scratch.get(count * item);
  auto add = [&](Part part, bool last) {
    const void* inputs[] = {bytes + part.begin * item, theirs};
    if (last) return reduction.last(bytes + part.begin * item, inputs, part.count);
    reduction.step(bytes + part.begin * item, inputs, part.count);
  };
  auto swap = [&](int with, Part out, void* to, Part in) {
    Exchange pair(call);
    if (in.count > 0) pair.receive(with, to, in.count * item);
    if (out.count > 0) pair.send(with, bytes + out.begin * item, out.count * item);
    return pair.wait();
  };
  if (me + core < n) {
    TM_TRY(exchange.wait_for(exchange.receive(me + core, theirs, count * item)));
    add({0, count}, false);
  }
  Part mine{0, count};
  std::vector<Part> given;  // away, step by step
  for (int bit = core / 2; bit > 0; bit /= 2) {
    const uint64_t half = part_of(mine.count, 0, 2, item).count;
    const Part low{mine.begin, half}, high{mine.begin + half, mine.count - half};
    const bool keeps_low = (me & bit) == 0;
    given.push_back(keeps_low ? high : low);
    mine = keeps_low ? low : high;
    TM_TRY(swap(me ^ bit, given.back(), theirs, mine));
    add(mine, bit == 1);
  }
  for (int bit = 1; bit < core; bit *= 2) {
    const Part back = given.back();
    given.pop_back();
    TM_TRY(swap(me ^ bit, mine, bytes + back.begin * item, back));
    mine = {std::min(mine.begin, back.begin), mine.count + back.count};
  }
  if (me + core < n) exchange.send(me + core, data, count * item);
  return exchange.wait();
}

Status all_reduce_ring(const Call& call, void* data, uint64_t count, const Reduction& reduction) {
  const int n = call.size(), me = call.rank();
  const uint64_t item = reduction.item(), step = kRingBytes / item * n;
  for (uint64_t at = 0; at < count; at += step) {
    auto* bytes = static_cast<std::byte*>(data) + at * item;
    const Round round = round_of(call, bytes, std::min(step, count - at), item);
    Ring ring{n, me, pieces_of(round.parts[0].nbytes), {}, {}};
    TM_TRY(around_ring(&call, ring, round.parts, round.results[me], round.results, reduction));
  }
  return {};
}

Status reduce_scatter_ring(const Call& call, std::span<const ConstPiece> in, Piece out, const Reduction& reduction) {
  uint64_t longest = 0;
  for (const auto& part : in) longest = std::max(longest, part.nbytes);
  return around_ring(&call, {call.size(), call.rank(), pieces_of(longest), {}, {}}, in, out, {}, reduction);
}

Rounds rounds_of(const Call& call, void* data, uint64_t count, uint64_t item) {
  const int n = call.size();
  const uint64_t step = kSliceBytes / item * n;
  Rounds rounds;
  rounds.count = (count + step - 1) / step;
  rounds.own_bytes = part_of(std::min(step, count), 0, n, item).count * item;
  rounds.at = [=, &call](uint64_t k) {
    auto* bytes = static_cast<std::byte*>(data) + k * step * item;
    return round_of(call, bytes, std::min(step, count - k * step), item);
  };
  return rounds;
}

Status reduce_slices(const Call& call, void* data, uint64_t count, const Reduction& reduction, int root) {
  Rounds rounds = rounds_of(call, data, count, reduction.item());
  rounds.wanted_by = root;
  if (call.rank() == root) return in_slices(&call, rounds, reduction);
  std::byte* own = call.scratch.inner().get(kWindow * rounds.own_bytes);  // `data` keeps its content
  rounds.at = [&, at = rounds.at](uint64_t k) {
    Round round = at(k);
    round.own = own + k % kWindow * rounds.own_bytes;
    return round;
  };
  return in_slices(&call, rounds, reduction);
}

Status reduce_scatter_slices(const Call& call, std::span<const ConstPiece> in, Piece out, const Reduction& reduction) {
  uint64_t longest = 0;
  for (const auto& piece : in) longest = std::max(longest, piece.nbytes);
  Rounds rounds;
  rounds.count = (longest + kSliceBytes - 1) / kSliceBytes;
  rounds.own_bytes = std::min(kSliceBytes, out.nbytes);
  rounds.wanted_by = Rounds::kNobody;
  rounds.at = [&](uint64_t k) {
    Round round;
    const uint64_t at = k * kSliceBytes;
    for (const auto& piece : in) {
      const uint64_t nbytes = at < piece.nbytes ? std::min(kSliceBytes, piece.nbytes - at) : 0;
      round.parts.push_back({nbytes > 0 ? static_cast<const std::byte*>(piece.data) + at : nullptr, nbytes});
    }
    if (round.parts[call.rank()].nbytes > 0) round.own = static_cast<std::byte*>(out.data) + at;
    return round;
  };
  return in_slices(&call, rounds, reduction);
}

}  // namespace

Round round_of(const Call& call, std::byte* data, uint64_t count, uint64_t item) {
  Round round;
  for (int r = 0; r < call.size(); ++r) {
    const Part part = part_of(count, r, call.size(), item);
    round.parts.push_back({data + part.begin * item, part.count * item});
    round.results.push_back({data + part.begin * item, part.count * item});
  }
  round.own = static_cast<std::byte*>(round.results[call.rank()].data);
  return round;
}

uint64_t pieces_of(uint64_t nbytes) { return (nbytes + kPieceBytes - 1) / kPieceBytes; }

Status around_ring(const Call* call, const Ring& ring, std::span<const ConstPiece> in, Piece out,
                   std::span<const Piece> results, const Reduction& reduction) {
  const auto [n, me, pieces, is_needed, is_done] = ring;
  const int next = (me + 1) % n, before = (me + n - 1) % n;
  auto part_in = [n = n, me = me](int step) { return (me + 2 * n - 2 - step) % n; };  // what comes in that step
  auto result_in = [n = n, me = me](int step) { return (me + 2 * n - 1 - step) % n; };
  auto needed = [&](int part, uint64_t piece) { return is_needed ? is_needed(part, piece) : Status(); };
  auto done = [&](int part, uint64_t piece) { return is_done ? is_done(part, piece) : Status(); };
  if (call == nullptr) {  // in the same order as those that do more
    for (uint64_t piece = 0; piece < pieces; ++piece) TM_TRY(needed(before, piece));
    for (int step = 0; step < n - 1; ++step)
      for (uint64_t piece = 0; piece < pieces; ++piece) {
        TM_TRY(needed(part_in(step), piece));
        if (step == n - 2) TM_TRY(done(me, piece));
      }
    for (int step = 0; step < n - 1; ++step)
      for (uint64_t piece = 0; piece < pieces; ++piece) TM_TRY(done(result_in(step), piece));
    return {};
  }
  auto nbytes_of = [&in](int part, uint64_t piece) {
    const uint64_t at = piece * kPieceBytes;
    return at < in[part].nbytes ? std::min(kPieceBytes, in[part].nbytes - at) : 0;
  };
  auto own = [&in](int part, uint64_t piece) {
    return static_cast<const std::byte*>(in[part].data) + piece * kPieceBytes;
  };
  std::byte* scratch = call->scratch.get(2 * pieces * kPieceBytes);
  auto room = [scratch, pieces = pieces](int step, uint64_t piece) {
    return scratch + (static_cast<uint64_t>(step % 2) * pieces + piece) * kPieceBytes;
  };
  Exchange exchange(*call);
  std::vector<RequestPtr> coming(pieces), going(pieces), finished;
  auto expect = [&](int step, uint64_t piece) {
    const uint64_t nbytes = nbytes_of(part_in(step), piece);
    coming[piece] = nbytes > 0 ? exchange.receive(before, room(step, piece), nbytes) : nullptr;
  };
  for (uint64_t piece = 0; piece < pieces; ++piece) expect(0, piece);
  for (uint64_t piece = 0; piece < pieces; ++piece) {
    TM_TRY(needed(before, piece));
    if (const uint64_t nbytes = nbytes_of(before, piece); nbytes > 0) exchange.send(next, own(before, piece), nbytes);
  }
  for (int step = 0; step < n - 1; ++step) {
    const int part = part_in(step);
    const bool last = step == n - 2;
    for (int k = 0; k < n - 1 && last && !results.empty(); ++k)
      for (uint64_t piece = 0; piece < pieces; ++piece) {
        const uint64_t nbytes = nbytes_of(result_in(k), piece);
        std::byte* to = static_cast<std::byte*>(results[result_in(k)].data) + piece * kPieceBytes;
        finished.push_back(nbytes > 0 ? exchange.receive(before, to, nbytes) : nullptr);
      }
    for (uint64_t piece = 0; piece < pieces; ++piece) {
      const uint64_t nbytes = nbytes_of(part, piece), count = nbytes / reduction.item();
      std::byte* sum = last ? static_cast<std::byte*>(out.data) + piece * kPieceBytes : room(step, piece);
      TM_TRY(needed(part, piece));
      if (nbytes > 0) {
        TM_TRY(exchange.wait_for(coming[piece]));
        const void* inputs[] = {room(step, piece), own(part, piece)};
        last ? reduction.last(sum, inputs, count) : reduction.step(sum, inputs, count);
      }
      if (going[piece] && !last) TM_TRY(exchange.wait_for(going[piece]));  // its room is where the next one comes
      const bool goes_on = nbytes > 0 && (!last || !results.empty());
      going[piece] = goes_on ? exchange.send(next, sum, nbytes) : nullptr;
      if (last) {
        TM_TRY(done(me, piece));
      } else {
        expect(step + 1, piece);
      }
    }
  }
  for (size_t i = 0; i < finished.size(); ++i) {
    const int step = static_cast<int>(i / pieces), part = result_in(step);
    const uint64_t piece = i % pieces;
    if (finished[i]) {
      TM_TRY(exchange.wait_for(finished[i]));
      if (step < n - 2)
        exchange.send(next, static_cast<std::byte*>(results[part].data) + piece * kPieceBytes, nbytes_of(part, piece));
    }
    TM_TRY(done(part, piece));
  }
  return exchange.wait();
}

Status in_slices(const Call* call, const Rounds& rounds, const Reduction& reduction) {
  auto before = [&](uint64_t k) { return rounds.before && k < rounds.count ? rounds.before(k) : Status(); };
  auto after = [&](uint64_t k) { return rounds.after ? rounds.after(k) : Status(); };
  // Round k is looked at when those up to k + kAhead have been begun, and those before k - kAhead have ended.
  if (call == nullptr) {  // in the same order as those that do more
    for (uint64_t k = 0; k < kAhead; ++k) TM_TRY(before(k));
    for (uint64_t k = 0; k < rounds.count + kAhead; ++k) {
      TM_TRY(before(k + kAhead));
      if (k >= kAhead) TM_TRY(after(k - kAhead));
    }
    return {};
  }
  const int n = call->size(), me = call->rank();
  const uint64_t stride = line_up(rounds.own_bytes);
  std::byte* scratch = call->scratch.get(kWindow * stride * (n - 1));
  struct Flight {
    Round round;
    std::vector<const void*> inputs;
    size_t collected = 0, spread = 0;  // when so many have come
    std::vector<RequestPtr> going;
  };
  Flight flights[2 * kAhead + 1];  // from the beginning of a round to its end
  auto flight_of = [&](uint64_t k) -> Flight& { return flights[k % std::size(flights)]; };
  Exchange exchange(*call);
  Pulls pulls(exchange);
  // An empty part is not sent: its receiver knows that it is empty.
  auto begin = [&](uint64_t k) {
    if (k >= rounds.count) return Status();
    TM_TRY(before(k));
    Flight& flight = flight_of(k);
    flight = {rounds.at(k), std::vector<const void*>(n), 0, 0, {}};
    const auto& parts = flight.round.parts;
    flight.inputs[me] = parts[me].data;
    for (int i = 1; i < n && parts[me].nbytes > 0; ++i) {
      const int from = (me + n - i) % n;
      std::byte* to = scratch + (k % kWindow * (n - 1) + i - 1) * stride;
      flight.inputs[from] = to;
      pulls.add(from, to, parts[me].nbytes);
    }
    flight.collected = pulls.size();
    for (int i = 1; i < n; ++i)
      if (const auto& part = parts[(me + i) % n]; part.nbytes > 0) exchange.send((me + i) % n, part.data, part.nbytes);
    return Status();
  };
  auto spread = [&](Flight& flight) {
    const Round& round = flight.round;
    auto is_wanted_by = [&](int rank) { return rounds.wanted_by == Rounds::kAll || rounds.wanted_by == rank; };
    for (int i = 1; i < n && is_wanted_by(me); ++i) {
      const Piece& to = round.results[(me + n - i) % n];
      if (to.nbytes > 0) pulls.add((me + n - i) % n, to.data, to.nbytes);
    }
    flight.spread = pulls.size();
    for (int i = 1; i < n && round.parts[me].nbytes > 0; ++i)
      if (const int to = (me + i) % n; is_wanted_by(to))
        flight.going.push_back(exchange.send(to, round.own, round.parts[me].nbytes));
  };
  auto finish = [&](uint64_t k) {
    const Flight& flight = flight_of(k);
    TM_TRY(pulls.wait(flight.spread));
    if (rounds.wanted_by >= 0) TM_TRY(exchange.wait_for(flight.going));  // `own` is used again
    return after(k);
  };
  for (uint64_t k = 0; k < kAhead; ++k) TM_TRY(begin(k));
  for (uint64_t k = 0; k < rounds.count + kAhead; ++k) {
    TM_TRY(begin(k + kAhead));
    if (k < rounds.count) {
      Flight& flight = flight_of(k);
      TM_TRY(pulls.wait(flight.collected));
      reduction.last(flight.round.own, flight.inputs, flight.round.parts[me].nbytes / reduction.item());
      spread(flight);
    }
    if (k >= kAhead) TM_TRY(finish(k - kAhead));
  }
  return exchange.wait();
}

Status all_reduce(const Call& call, Algorithm algorithm, void* data, uint64_t count, const Reduction& reduction) {
  switch (algorithm) {
    case Algorithm::direct:
      return all_reduce_direct(call, data, count, reduction);
    case Algorithm::doubling:
      return all_reduce_doubling(call, data, count, reduction);
    case Algorithm::halving:
      return all_reduce_halving(call, data, count, reduction);
    case Algorithm::ring:
      return all_reduce_ring(call, data, count, reduction);
    default:
      return in_slices(&call, rounds_of(call, data, count, reduction.item()), reduction);
  }
}

Status reduce(const Call& call, Algorithm algorithm, void* data, uint64_t count, const Reduction& reduction, int root) {
  if (algorithm == Algorithm::direct) return reduce_direct(call, data, count, reduction, root);
  if (algorithm == Algorithm::tree) return reduce_tree(call, data, count, reduction, root);
  return reduce_slices(call, data, count, reduction, root);
}

Status reduce_scatter(const Call& call, Algorithm algorithm, std::span<const ConstPiece> in, Piece out,
                      const Reduction& reduction) {
  if (algorithm == Algorithm::ring) return reduce_scatter_ring(call, in, out, reduction);
  return reduce_scatter_slices(call, in, out, reduction);
}

}  // namespace torch_mooncake::coll::across
