#include "collectives/by_host.h"

#include <algorithm>
#include <cstring>

#include "collectives/across.h"
#include "collectives/exchange.h"
#include "memory/copy.h"

namespace torch_mooncake::coll::by_host {
namespace {

using across::kSliceBytes;
using across::Rounds;

// The teams of one collective. `between`: this rank and those it carries a share together with.
struct Teams {
  const Topology& topology;
  const Team& host;
  const int place, carriers;
  Team between;

  // `root`: of little data, on its own host instead of the first rank there.
  explicit Teams(const Call& call, bool little, int root = -1)
      : topology(call.group.topology()),
        host(topology.host()),
        place(host.me),
        carriers(topology.carriers()),
        between(topology.across(little || place >= carriers ? 0 : place, little ? root : -1)) {}
  bool carries() const { return between.me >= 0; }
};

uint64_t part_at(uint64_t at, uint64_t nbytes) { return at < nbytes ? std::min(kSliceBytes, nbytes - at) : 0; }
uint64_t line_up(uint64_t nbytes) { return (nbytes + 63) / 64 * 64; }

// The carriers' shares of a round, by place on the host; the others have none.
std::vector<Piece> shares_of(const Teams& teams, std::byte* data, uint64_t count, uint64_t item) {
  std::vector<Piece> shares(teams.host.size(), {data, 0});
  for (int place = 0; place < teams.carriers; ++place) {
    const Part part = part_of(count, place, teams.carriers, item);
    shares[place] = {data + part.begin * item, part.count * item};
  }
  return shares;
}

std::vector<ConstPiece> constant(std::span<const Piece> pieces) {
  std::vector<ConstPiece> out;
  for (const Piece& piece : pieces) out.push_back({piece.data, piece.nbytes});
  return out;
}

// Adds what the ranks of the host have, share by share; ours into `out`.
Status add_within(const Call& call, const Teams& teams, std::span<const Piece> shares, void* out,
                  const Reduction& reduction) {
  const Piece own{out, shares[teams.place].nbytes};
  if (teams.host.size() == 1) {
    if (out != shares[0].data && own.nbytes > 0) copy_bytes(out, shares[0].data, own.nbytes);
    return {};
  }
  return coll::reduce_scatter(call, constant(shares), own, reduction.dtype, reduction.partial());
}

Status share_within(const Call& call, const Teams& teams, std::span<const Piece> shares) {
  if (teams.host.size() == 1) return {};
  return coll::all_gather(call, {shares[teams.place].data, shares[teams.place].nbytes}, shares);
}

// One ring for each share; what a piece of it needs within the hosts is done when its turn comes.
Status ring_all_reduce(const Call& call, std::byte* data, uint64_t count, const Reduction& reduction) {
  const Teams teams(call, false);
  const Call between = call.among(teams.between), within = between.among(teams.host);
  const uint64_t item = reduction.item();
  const int hosts = static_cast<int>(teams.topology.hosts().size());
  const uint64_t step = across::kRingBytes / item * static_cast<uint64_t>(hosts * teams.carriers);
  for (uint64_t at = 0; at < count; at += step) {
    const auto shares = shares_of(teams, data + at * item, std::min(step, count - at), item);
    auto pieces = [&](int part_number, uint64_t number) {  // of all shares
      std::vector<Piece> out = shares;
      for (Piece& piece : out) {
        const Part part = part_of(piece.nbytes / item, part_number, hosts, item);
        const uint64_t begin = std::min(number * across::kPieceBytes, part.count * item);
        piece = {static_cast<std::byte*>(piece.data) + part.begin * item + begin,
                 std::min(across::kPieceBytes, part.count * item - begin)};
      }
      return out;
    };
    across::Ring ring{hosts,
                      teams.topology.host_of(call.rank()),
                      across::pieces_of(part_of(shares[0].nbytes / item, 0, hosts, item).count * item),
                      {},
                      {}};
    ring.is_needed = [&](int part, uint64_t number) {
      const auto all = pieces(part, number);
      return add_within(within, teams, all, all[teams.place].data, reduction);
    };
    ring.is_done = [&](int part, uint64_t number) { return share_within(within, teams, pieces(part, number)); };
    if (!teams.carries()) {
      TM_TRY(across::around_ring(nullptr, ring, {}, {}, {}, reduction));
      continue;
    }
    const Piece own = shares[teams.place];
    const auto round = across::round_of(between, static_cast<std::byte*>(own.data), own.nbytes / item, item);
    TM_TRY(across::around_ring(&between, ring, round.parts, round.results[ring.me], round.results, reduction));
  }
  return {};
}

}  // namespace

Status barrier(const Call& call) {
  const Teams teams(call, true);
  const Call between = call.among(teams.between), within = between.among(teams.host);
  TM_TRY(coll::barrier(within));
  if (teams.carries()) TM_TRY(coll::barrier(between));
  return coll::barrier(within);
}

Status broadcast(const Call& call, Algorithm algorithm, void* data, uint64_t nbytes, int root) {
  if (nbytes == 0) return {};
  const Teams teams(call, true, root);
  const Call between = call.among(teams.between), within = between.among(teams.host);
  const int host = teams.topology.host_of(call.rank());
  const int first = teams.topology.place_of(teams.between.ranks[host]);  // who has the data on this host
  auto pass_on = [&](uint64_t at, uint64_t n) {
    return coll::broadcast(within, static_cast<std::byte*>(data) + at, n, first);
  };
  if (teams.carries())
    return across::broadcast(between, algorithm, data, nbytes, teams.topology.host_of(root), pass_on);
  const uint64_t step = across::piece_bytes(algorithm, nbytes);
  for (uint64_t at = 0; at < nbytes; at += step) TM_TRY(pass_on(at, std::min(step, nbytes - at)));
  return {};
}

Status all_reduce(const Call& call, Algorithm algorithm, void* data, uint64_t count, DType dtype, ReduceOp op) {
  const Reduction reduction{dtype, op, static_cast<uint64_t>(call.size())};
  const uint64_t item = reduction.item(), nbytes = count * item;
  const Teams teams(call, nbytes <= kLittleBytes);
  const Call between = call.among(teams.between), within = between.among(teams.host);
  if (nbytes <= kLittleBytes) {
    const Reduction wide{accumulator_of(dtype), op, reduction.inputs};
    std::byte* sum = call.scratch.get(count * wide.item());
    load_accumulator(sum, data, count, dtype);
    TM_TRY(coll::reduce(within, sum, count, wide.dtype, wide.partial(), 0));
    if (teams.carries()) TM_TRY(across::all_reduce(between, algorithm, sum, count, wide));
    TM_TRY(coll::broadcast(within, sum, count * wide.item(), 0));
    store_accumulator(data, sum, count, dtype, reduction.partial(), 1);
    return {};
  }
  const int hosts = teams.between.size();
  auto* bytes = static_cast<std::byte*>(data);
  if (algorithm == Algorithm::ring) return ring_all_reduce(call, bytes, count, reduction);
  if (algorithm != Algorithm::slices) {
    const auto shares = shares_of(teams, bytes, count, item);
    const Piece own = shares[teams.place];
    TM_TRY(add_within(within, teams, shares, own.data, reduction));
    if (own.nbytes > 0) TM_TRY(across::all_reduce(between, algorithm, own.data, own.nbytes / item, reduction));
    return share_within(within, teams, shares);
  }
  const uint64_t step = kSliceBytes / item * static_cast<uint64_t>(hosts * teams.carriers);
  auto shares = [&](uint64_t k) {
    return shares_of(teams, bytes + k * step * item, std::min(step, count - k * step), item);
  };
  Rounds rounds;
  rounds.count = (count + step - 1) / step;
  rounds.own_bytes = kSliceBytes;
  rounds.before = [&](uint64_t k) {
    const auto all = shares(k);
    return add_within(within, teams, all, all[teams.place].data, reduction);
  };
  rounds.at = [&](uint64_t k) {
    const Piece own = shares(k)[teams.place];
    return across::round_of(between, static_cast<std::byte*>(own.data), own.nbytes / item, item);
  };
  rounds.after = [&](uint64_t k) { return share_within(within, teams, shares(k)); };
  return across::in_slices(teams.carries() ? &between : nullptr, rounds, reduction);
}

Status reduce(const Call& call, Algorithm algorithm, void* data, uint64_t count, DType dtype, ReduceOp op, int root) {
  const Reduction reduction{dtype, op, static_cast<uint64_t>(call.size())};
  const uint64_t item = reduction.item();
  const bool little = count * item <= kLittleBytes;
  const Teams teams(call, little, root);
  const Call between = call.among(teams.between), within = between.among(teams.host);
  const int root_host = teams.topology.host_of(root), root_place = teams.topology.place_of(root);
  const bool is_root_host = teams.topology.host_of(call.rank()) == root_host;
  if (little) {
    const Reduction wide{accumulator_of(dtype), op, reduction.inputs};
    std::byte* sum = call.scratch.get(count * wide.item());
    load_accumulator(sum, data, count, dtype);
    TM_TRY(coll::reduce(within, sum, count, wide.dtype, wide.partial(), is_root_host ? root_place : 0));
    if (teams.carries()) TM_TRY(across::reduce(between, algorithm, sum, count, wide, root_host));
    if (call.rank() == root) store_accumulator(data, sum, count, dtype, reduction.partial(), 1);
    return {};
  }
  const uint64_t step = 4 * kSliceBytes / item * static_cast<uint64_t>(teams.between.size() * teams.carriers);
  for (uint64_t at = 0; at < count; at += step) {
    auto* bytes = static_cast<std::byte*>(data) + at * item;
    const auto shares = shares_of(teams, bytes, std::min(step, count - at), item);
    const Piece own = shares[teams.place];
    // In place at the root only, whose own share the others have read when the step within the host ends.
    std::byte* sum = call.rank() == root ? static_cast<std::byte*>(own.data) : call.scratch.get(own.nbytes);
    TM_TRY(add_within(within, teams, shares, sum, reduction));
    if (own.nbytes > 0) TM_TRY(across::reduce(between, algorithm, sum, own.nbytes / item, reduction, root_host));
    if (!is_root_host) continue;
    Exchange exchange(within);
    for (int place = 0; place < teams.host.size(); ++place) {
      if (call.rank() == root && place != root_place && shares[place].nbytes > 0)
        exchange.receive(place, shares[place].data, shares[place].nbytes);
      if (call.rank() != root && place == teams.place && own.nbytes > 0) exchange.send(root_place, sum, own.nbytes);
    }
    TM_TRY(exchange.wait());
  }
  return {};
}

// Little: the first rank of each host has all of its host's blocks, then those of all, then everybody has them.
static Status all_gather_little(const Call& call, ConstPiece in, std::span<const Piece> out) {
  const Teams teams(call, true);
  const Call between = call.among(teams.between), within = between.among(teams.host);
  const auto& hosts = teams.topology.hosts();
  uint64_t total = 0;
  std::vector<uint64_t> begins;  // of the hosts' blocks, one behind the other
  for (const auto& ranks : hosts) {
    begins.push_back(total);
    for (int rank : ranks) total += out[rank].nbytes;
  }
  begins.push_back(total);
  const int mine = teams.topology.host_of(call.rank());
  std::byte* all = call.scratch.get(total);
  std::vector<Piece> blocks;
  for (uint64_t at = begins[mine]; int rank : teams.host.ranks) {
    blocks.push_back({all + at, out[rank].nbytes});
    at += out[rank].nbytes;
  }
  if (blocks.size() > 1)
    TM_TRY(coll::all_gather(within, in, blocks));
  else if (in.nbytes > 0)
    std::memcpy(blocks[0].data, in.data, in.nbytes);
  if (teams.carries()) {
    std::vector<Piece> wholes;
    for (size_t host = 0; host < hosts.size(); ++host)
      wholes.push_back({all + begins[host], begins[host + 1] - begins[host]});
    TM_TRY(coll::all_gather(between, {wholes[mine].data, wholes[mine].nbytes}, wholes));
  }
  TM_TRY(coll::broadcast(within, all, total, 0));
  for (size_t host = 0; host < hosts.size(); ++host) {
    for (uint64_t at = begins[host]; int rank : hosts[host]) {
      if (out[rank].nbytes > 0 && (rank != call.rank() || out[rank].data != in.data))
        std::memcpy(out[rank].data, all + at, out[rank].nbytes);
      at += out[rank].nbytes;
    }
  }
  return {};
}

// Much: every rank sends its block to one rank of each other host; what has come is shown within the host, slice by
// slice, while the next ones come.
Status all_gather(const Call& call, ConstPiece in, std::span<const Piece> out) {
  uint64_t longest = 0, total = 0;
  for (const Piece& piece : out) {
    longest = std::max(longest, piece.nbytes);
    total += piece.nbytes;
  }
  if (total <= kLittleBytes) return all_gather_little(call, in, out);
  const Teams teams(call, false);
  const Call step = call.among(teams.topology.all()), within = step.among(teams.host);
  const auto& hosts = teams.topology.hosts();
  const int n = static_cast<int>(hosts.size()), mine = teams.topology.host_of(call.rank()), local = teams.host.size();
  auto slice = [&](int rank, uint64_t at) {
    return Piece{static_cast<std::byte*>(out[rank].data) + at, part_at(at, out[rank].nbytes)};
  };
  Exchange exchange(step);
  std::vector<RequestPtr> coming[2];
  auto start = [&](uint64_t at, std::vector<RequestPtr>& requests) {
    requests.clear();
    for (int i = 1; i < n; ++i)  // from all ranks of the hosts before us
      for (size_t there = teams.place; there < hosts[(mine + n - i) % n].size(); there += static_cast<size_t>(local)) {
        const int rank = hosts[(mine + n - i) % n][there];
        if (const Piece to = slice(rank, at); to.nbytes > 0)
          requests.push_back(exchange.receive(rank, to.data, to.nbytes));
      }
    const uint64_t nbytes = part_at(at, in.nbytes);
    for (int i = 1; i < n && nbytes > 0; ++i) {
      const auto& ranks = hosts[(mine + i) % n];
      exchange.send(ranks[teams.place % ranks.size()], static_cast<const std::byte*>(in.data) + at, nbytes);
    }
  };
  // Blocks of one host, as many at a time as there are ranks here.
  auto show = [&](int host, uint64_t at) {
    for (size_t first = 0; first < hosts[host].size() && local > 1; first += static_cast<size_t>(local)) {
      std::vector<Piece> pieces(local, {nullptr, 0});
      for (size_t i = 0; i < pieces.size() && first + i < hosts[host].size(); ++i)
        pieces[i] = slice(hosts[host][first + i], at);
      const Piece own = pieces[teams.place];
      TM_TRY(coll::all_gather(within, {own.data, own.nbytes}, pieces));
    }
    return Status();
  };
  if (out[call.rank()].data != in.data && in.nbytes > 0) copy_bytes(out[call.rank()].data, in.data, in.nbytes);
  start(0, coming[0]);
  for (uint64_t at = 0, k = 0; at < longest; at += kSliceBytes, ++k) {
    if (at + kSliceBytes < longest) start(at + kSliceBytes, coming[(k + 1) % 2]);
    TM_TRY(show(mine, at));
    TM_TRY(exchange.wait_for(coming[k % 2]));
    for (int host = 0; host < n; ++host)
      if (host != mine) TM_TRY(show(host, at));
  }
  return exchange.wait();
}

// Within each host the ranks add what they have for the ranks of every host: each of those gets one sum from each host.
Status reduce_scatter(const Call& call, std::span<const ConstPiece> in, Piece out, DType dtype, ReduceOp op) {
  const Reduction reduction{dtype, op, static_cast<uint64_t>(call.size())};
  uint64_t longest = 0;
  for (const ConstPiece& piece : in) longest = std::max(longest, piece.nbytes);
  const Teams teams(call, false);
  const Call step = call.among(teams.topology.all()), within = step.among(teams.host);
  const auto& hosts = teams.topology.hosts();
  const int n = static_cast<int>(hosts.size()), mine = teams.topology.host_of(call.rank());
  const auto local = static_cast<size_t>(teams.host.size());
  // Room for two slices, of: the sums that we send, ours among them; the sums that come.
  const uint64_t stride = std::min(line_up(longest), kSliceBytes);
  uint64_t sums = 0;
  for (const auto& ranks : hosts) sums += (ranks.size() + local - 1) / local;
  const uint64_t rooms = sums + static_cast<uint64_t>(n);
  std::byte* scratch = call.scratch.get(2 * rooms * stride);
  struct Flight {
    std::vector<RequestPtr> coming;
    std::vector<const void*> inputs;  // by host
  };
  Flight flights[2];
  std::vector<RequestPtr> going[2];
  Exchange exchange(step);
  auto start = [&](uint64_t k) {
    const uint64_t at = k * kSliceBytes;
    std::byte* room = scratch + k % 2 * rooms * stride;
    Flight& flight = flights[k % 2];
    flight = {{}, std::vector<const void*>(n)};
    if (!going[k % 2].empty()) TM_TRY(exchange.wait_for(going[k % 2]));  // their rooms are used again
    going[k % 2].clear();
    if (const uint64_t nbytes = part_at(at, out.nbytes); nbytes > 0) {
      for (int i = 1; i < n; ++i) {
        const int host = (mine + n - i) % n;
        flight.inputs[host] = room;
        flight.coming.push_back(exchange.receive(hosts[host][teams.place % hosts[host].size()], room, nbytes));
        room += stride;
      }
    }
    for (int i = 1; i <= n; ++i) {  // our own host last
      const int host = (mine + i) % n;
      for (size_t first = 0; first < hosts[host].size(); first += local) {
        std::vector<ConstPiece> pieces(local, {nullptr, 0});
        for (size_t j = 0; j < local && first + j < hosts[host].size(); ++j) {
          const ConstPiece& piece = in[hosts[host][first + j]];
          if (const uint64_t nbytes = part_at(at, piece.nbytes); nbytes > 0)
            pieces[j] = {static_cast<const std::byte*>(piece.data) + at, nbytes};
        }
        const ConstPiece own = pieces[teams.place];
        if (local > 1) {
          TM_TRY(coll::reduce_scatter(within, pieces, {room, own.nbytes}, dtype, reduction.partial()));
        } else if (own.nbytes > 0) {
          std::memcpy(room, own.data, own.nbytes);
        }
        if (own.nbytes == 0) continue;
        if (host == mine)
          flight.inputs[mine] = room;
        else
          going[k % 2].push_back(
              exchange.send(hosts[host][first + static_cast<size_t>(teams.place)], room, own.nbytes));
        room += stride;
      }
    }
    return Status();
  };
  const uint64_t count = (longest + kSliceBytes - 1) / kSliceBytes;
  if (count > 0) TM_TRY(start(0));
  for (uint64_t k = 0; k < count; ++k) {
    if (k + 1 < count) TM_TRY(start(k + 1));
    Flight& flight = flights[k % 2];
    TM_TRY(exchange.wait_for(flight.coming));
    const uint64_t at = k * kSliceBytes;
    reduction.last(static_cast<std::byte*>(out.data) + at, flight.inputs, part_at(at, out.nbytes) / reduction.item());
  }
  return exchange.wait();
}

}  // namespace torch_mooncake::coll::by_host
