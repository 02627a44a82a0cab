// Collectives across hosts: every algorithm, and by host, against a plain model; and the bytes that they send.
#include <doctest/doctest.h>

#include <bit>
#include <cstring>

#include "collectives/reduce.h"
#include "collectives/world.h"

using namespace torch_mooncake;
using namespace torch_mooncake::coll;

namespace {

struct Kind {
  DType dtype;
  ReduceOp op;
};
constexpr Kind kKinds[] = {{DType::f32, ReduceOp::sum},  {DType::f16, ReduceOp::avg},    {DType::bf16, ReduceOp::max},
                           {DType::i32, ReduceOp::bxor}, {DType::u8, ReduceOp::product}, {DType::f64, ReduceOp::min},
                           {DType::i64, ReduceOp::avg}};

// Small whole numbers, so that sums are exact in every type.
double value(int rank, uint64_t i) { return static_cast<double>((i * 3 + rank * 5 + i / 7) % 7 + 1); }

using Bytes = std::vector<std::byte>;

template <typename T>
Bytes packed(const std::vector<double>& values) {
  std::vector<T> typed;
  for (const double v : values)
    typed.push_back(static_cast<T>(static_cast<std::conditional_t<std::is_integral_v<T>, int64_t, T>>(v)));
  Bytes out(typed.size() * sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), typed.data(), out.size());
  return out;
}

Bytes encode(DType dtype, const std::vector<double>& values) {
  switch (dtype) {
    case DType::f32:
      return packed<float>(values);
    case DType::f64:
      return packed<double>(values);
    case DType::i32:
      return packed<int32_t>(values);
    case DType::i64:
      return packed<int64_t>(values);
    case DType::u8:
      return packed<uint8_t>(values);
    default: {
      const Bytes wide = packed<float>(values);
      Bytes out(values.size() * 2);
      store_accumulator(out.data(), wide.data(), values.size(), dtype, ReduceOp::sum, 1);
      return out;
    }
  }
}

Bytes input(DType dtype, int rank, uint64_t n) {
  std::vector<double> values(n);
  for (uint64_t i = 0; i < n; ++i) values[i] = value(rank, i);
  return encode(dtype, values);
}

Bytes reduced(Kind kind, int ranks, uint64_t n) {
  std::vector<double> out(n);
  for (uint64_t i = 0; i < n; ++i) {
    double x = value(0, i);
    for (int r = 1; r < ranks; ++r) {
      const double y = value(r, i);
      switch (kind.op) {
        case ReduceOp::min:
          x = std::min(x, y);
          break;
        case ReduceOp::max:
          x = std::max(x, y);
          break;
        case ReduceOp::product:
          x = static_cast<double>(static_cast<int64_t>(x) * static_cast<int64_t>(y) % 256);
          break;
        case ReduceOp::bxor:
          x = static_cast<double>(static_cast<int64_t>(x) ^ static_cast<int64_t>(y));
          break;
        default:
          x += y;
      }
    }
    if (kind.op == ReduceOp::avg)
      x = kind.dtype == DType::f16 ? static_cast<float>(x) / static_cast<float>(ranks) : x / ranks;
    out[i] = x;
  }
  return encode(kind.dtype, out);
}

Status equal(const Bytes& actual, const Bytes& expected, const char* what) {
  return actual == expected ? Status() : Status(Code::corrupt, what);
}

void check_reductions(World& world, uint64_t n, Kind kind) {
  const int size = world.size();
  CAPTURE(n);
  CAPTURE(size);
  CAPTURE(dtype_name(kind.dtype));
  const auto [dtype, op] = kind;
  const Bytes total = reduced(kind, size, n);
  world.must([&](const Call& call) {
    Bytes data = input(dtype, call.group.rank(), n);
    TM_TRY(all_reduce(call, data.data(), n, dtype, op));
    return equal(data, total, "all_reduce");
  });
  for (const int root : {0, size / 2, size - 1})
    world.must([&](const Call& call) {
      const Bytes before = input(dtype, call.group.rank(), n);
      Bytes data = before;
      TM_TRY(reduce(call, data.data(), n, dtype, op, root));
      return equal(data, call.group.rank() == root ? total : before, "reduce");
    });
  world.must([&](const Call& call) {  // sizes that differ by rank
    std::vector<Bytes> in;
    std::vector<ConstPiece> pieces;
    for (int r = 0; r < size; ++r) in.push_back(input(dtype, call.group.rank(), n + r * 5));
    for (auto& i : in) pieces.push_back({i.data(), i.size()});
    Bytes out(in[call.group.rank()].size());
    TM_TRY(reduce_scatter(call, pieces, {out.data(), out.size()}, dtype, op));
    return equal(out, reduced(kind, size, n + call.group.rank() * 5), "reduce_scatter");
  });
}

// Three kinds a call, others the next time.
void check_kinds(World& world, uint64_t n) {
  static size_t turn = 0;
  for (int i = 0; i < 3; ++i) check_reductions(world, n, kKinds[turn++ % std::size(kKinds)]);
}

void check_movements(World& world, uint64_t n) {
  const int size = world.size();
  CAPTURE(n);
  CAPTURE(size);
  world.must([](const Call& call) { return barrier(call); });
  for (const int root : {0, size / 2, size - 1})
    world.must([&](const Call& call) {
      Bytes data = input(DType::i32, call.group.rank(), n);
      TM_TRY(broadcast(call, data.data(), data.size(), root));
      return equal(data, input(DType::i32, root, n), "broadcast");
    });
  for (const bool uneven : {false, true})
    world.must([&](const Call& call) {
      const int me = call.group.rank();
      std::vector<Bytes> out;
      std::vector<Piece> pieces;
      for (int r = 0; r < size; ++r) out.emplace_back((n + (uneven ? r : 0)) * 4);
      for (auto& o : out) pieces.push_back({o.data(), o.size()});
      const Bytes in = input(DType::i32, me, n + (uneven ? me : 0));
      TM_TRY(all_gather(call, {in.data(), in.size()}, pieces));
      for (int r = 0; r < size; ++r) TM_TRY(equal(out[r], input(DType::i32, r, n + (uneven ? r : 0)), "all_gather"));
      return Status();
    });
  world.must([&](const Call& call) {
    const int me = call.group.rank();
    std::vector<Bytes> in, out;
    std::vector<ConstPiece> ins;
    std::vector<Piece> outs;
    for (int r = 0; r < size; ++r) in.push_back(input(DType::u8, me * size + r, n * ((me + r) % 3)));
    for (int r = 0; r < size; ++r) out.emplace_back(n * ((me + r) % 3));
    for (auto& i : in) ins.push_back({i.data(), i.size()});
    for (auto& o : out) outs.push_back({o.data(), o.size()});
    TM_TRY(all_to_all(call, ins, outs));
    for (int r = 0; r < size; ++r) TM_TRY(equal(out[r], input(DType::u8, r * size + me, out[r].size()), "all_to_all"));
    return Status();
  });
}

constexpr uint64_t kSizes[] = {0, 1, 3, 1023, 30'011};
constexpr uint64_t kLarge = (1 << 20) + 1;

// Numbers whose sums are not exact: all ranks have the same bits nevertheless.
void check_same_bits(World& world, uint64_t n) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    std::vector<Bytes> results(world.size());
    world.must([&](const Call& call) {
      const int me = call.group.rank();
      std::vector<double> values(n);
      for (uint64_t i = 0; i < n; ++i) values[i] = 1.0 / static_cast<double>(i % 1000 + static_cast<uint64_t>(me) + 3);
      results[me] = encode(dtype, values);
      return all_reduce(call, results[me].data(), n, dtype, ReduceOp::sum);
    });
    for (int r = 1; r < world.size(); ++r) CHECK(results[r] == results[0]);
  }
}

std::vector<int> apart(int n) { return World::hosts(n, false); }

}  // namespace

TEST_CASE("hosts: every algorithm between ranks on hosts of their own") {
  const char* kReducing[] = {"all_reduce=direct,reduce=direct,reduce_scatter=slices", "all_reduce=slices,reduce=slices",
                             "all_reduce=doubling,reduce=tree", "all_reduce=halving",
                             "all_reduce=ring,reduce_scatter=ring"};
  const char* kMoving[] = {"broadcast=tree,all_gather=direct", "broadcast=chain,all_gather=ring", "all_gather=bruck"};
  for (int n = 2; n <= 9; ++n) {
    for (const char* algorithms : kReducing) {
      CAPTURE(algorithms);
      World world(apart(n), algorithms, {"tcp"});
      for (const uint64_t size : kSizes) check_kinds(world, size);
      check_same_bits(world, 30'011);
      if (n == 3 || n == 4) check_reductions(world, kLarge, kKinds[n % std::size(kKinds)]);
    }
    for (const char* algorithms : kMoving) {
      CAPTURE(algorithms);
      World world(apart(n), algorithms, {"tcp"});
      for (const uint64_t size : kSizes) check_movements(world, size);
      if (n == 3 || n == 4) check_movements(world, kLarge);
    }
  }
}

TEST_CASE("hosts: by host, even and uneven, in any order of ranks") {
  const std::vector<int> kLayouts[] = {{0, 0, 1, 1},    {0, 1, 0, 1},       {0, 0, 0, 1},
                                       {0, 1, 1, 1, 1}, {0, 1, 1, 2, 2, 2}, {2, 0, 1, 0, 2, 1, 0}};
  for (const auto& layout : kLayouts) {
    for (const char* algorithms :
         {"", "all_reduce=slices,broadcast=tree,reduce=tree", "all_reduce=ring", "all_reduce=halving,reduce=direct"}) {
      CAPTURE(algorithms);
      World world(layout, algorithms);
      REQUIRE(world.groups[0]->topology().nested());
      for (const uint64_t size : {uint64_t{0}, uint64_t{1}, uint64_t{3}, uint64_t{1023}, uint64_t{70'011}}) {
        check_movements(world, size);
        check_kinds(world, size);
      }
      check_same_bits(world, 100'001);
      if (layout.size() > 4) continue;
      check_movements(world, kLarge);
      check_reductions(world, kLarge, kKinds[1]);
    }
  }
}

TEST_CASE("hosts: by host without shared slots, and flat on one host") {
  World world({0, 0, 1, 1, 1});
  for (auto& group : world.groups)  // nobody can show anything
    for (int rank = 0; rank < 5; ++rank)
      for (uint8_t which : {0, 1}) group->on_board(static_cast<uint32_t>(rank), which, random_id(), UniqueFd());
  for (const uint64_t n : {uint64_t{1}, uint64_t{70'011}, kLarge}) {
    check_movements(world, n);
    check_reductions(world, n, kKinds[0]);
  }
  CHECK(world.groups[0]->explain().find("\"within_host\": \"messages\"") != std::string::npos);

  World flat({0, 0, 0},
             "all_reduce=flat/ring,broadcast=flat/chain,all_gather=flat/bruck,reduce=flat/tree,"
             "reduce_scatter=flat/ring,all_to_all=flat/direct,barrier=flat/auto");
  for (const uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{70'011}}) {
    check_movements(flat, n);
    check_reductions(flat, n, kKinds[1]);
  }
  CHECK(flat.groups[0]->traffic().shown == 0);
  CHECK(flat.groups[0]->traffic().within_host.sent > 0);
}

// ---- bytes

namespace {

struct Sent {
  std::vector<uint64_t> to_hosts, from_hosts, shown;  // by rank
  uint64_t all() const {
    uint64_t sum = 0;
    for (const uint64_t n : to_hosts) sum += n;
    return sum;
  }
};

Sent counted(World& world, const std::function<Status(const Call&)>& fn) {
  auto now = [&] {
    Sent sent;
    for (auto& group : world.groups) {
      sent.to_hosts.push_back(group->traffic().to_hosts.sent);
      sent.from_hosts.push_back(group->traffic().to_hosts.received);
      sent.shown.push_back(group->traffic().shown);
    }
    return sent;
  };
  const Sent before = now();
  world.must(fn);
  Sent after = now();
  for (size_t r = 0; r < before.shown.size(); ++r) {
    after.to_hosts[r] -= before.to_hosts[r];
    after.from_hosts[r] -= before.from_hosts[r];
    after.shown[r] -= before.shown[r];
  }
  return after;
}

// All of the collectives over `nbytes` (of each rank's part: all_gather, reduce_scatter, all_to_all).
struct Traces {
  Sent all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all;
};

Traces trace(World& world, uint64_t nbytes, int root) {
  const int n = world.size();
  std::vector<Bytes> in(n), out(n);
  for (auto& data : in) data.resize(nbytes * static_cast<uint64_t>(n));
  for (auto& data : out) data.resize(nbytes * static_cast<uint64_t>(n));
  auto parts = [&](Bytes& data) {
    std::vector<Piece> pieces;
    for (int r = 0; r < n; ++r) pieces.push_back({data.data() + nbytes * static_cast<uint64_t>(r), nbytes});
    return pieces;
  };
  auto constant = [&](Bytes& data) {
    std::vector<ConstPiece> pieces;
    for (const Piece& piece : parts(data)) pieces.push_back({piece.data, piece.nbytes});
    return pieces;
  };
  Traces traces;
  traces.all_reduce = counted(world, [&](const Call& call) {
    return all_reduce(call, in[call.group.rank()].data(), nbytes / 4, DType::f32, ReduceOp::sum);
  });
  traces.reduce = counted(world, [&](const Call& call) {
    return reduce(call, in[call.group.rank()].data(), nbytes / 4, DType::f32, ReduceOp::sum, root);
  });
  traces.broadcast =
      counted(world, [&](const Call& call) { return broadcast(call, in[call.group.rank()].data(), nbytes, root); });
  traces.all_gather = counted(world, [&](const Call& call) {
    return all_gather(call, {in[call.group.rank()].data(), nbytes}, parts(out[call.group.rank()]));
  });
  traces.reduce_scatter = counted(world, [&](const Call& call) {
    return reduce_scatter(call, constant(in[call.group.rank()]), {out[call.group.rank()].data(), nbytes}, DType::f32,
                          ReduceOp::sum);
  });
  traces.all_to_all = counted(world, [&](const Call& call) {
    return all_to_all(call, constant(in[call.group.rank()]), parts(out[call.group.rank()]));
  });
  return traces;
}

}  // namespace

TEST_CASE("hosts: every rank sends what the algorithm must, to the byte") {
  for (const uint64_t n : {uint64_t{2}, uint64_t{3}, uint64_t{4}, uint64_t{8}}) {
    CAPTURE(n);
    const uint64_t nbytes = n * 64 * 1200;  // divides into lines of the cache
    const int root = static_cast<int>(n) - 1;
    for (const char* algorithms : {"all_reduce=slices", "all_reduce=ring,all_gather=ring,reduce_scatter=ring",
                                   "all_reduce=halving,all_gather=bruck"}) {
      const bool power = std::has_single_bit(n);
      if (std::string_view(algorithms).find("halving") != std::string_view::npos && !power) continue;
      CAPTURE(algorithms);
      World world(apart(static_cast<int>(n)), algorithms, {"tcp"});
      const Traces traces = trace(world, nbytes, root);
      CHECK(traces.all_reduce.to_hosts == std::vector<uint64_t>(n, 2 * (n - 1) * nbytes / n));
      CHECK(traces.all_reduce.from_hosts == traces.all_reduce.to_hosts);
      CHECK(traces.all_gather.to_hosts == std::vector<uint64_t>(n, (n - 1) * nbytes));
      CHECK(traces.all_gather.from_hosts == std::vector<uint64_t>(n, (n - 1) * nbytes));
      CHECK(traces.reduce_scatter.to_hosts == std::vector<uint64_t>(n, (n - 1) * nbytes));
      CHECK(traces.all_to_all.to_hosts == std::vector<uint64_t>(n, (n - 1) * nbytes));
      CHECK(traces.broadcast.all() == (n - 1) * nbytes);
      std::vector<uint64_t> chain(n, nbytes);  // the last one of the chain, before the root, sends nothing
      chain[n - 2] = 0;
      CHECK(traces.broadcast.to_hosts == chain);
      std::vector<uint64_t> slices(n, nbytes);
      slices[n - 1] = (n - 1) * nbytes / n;
      CHECK(traces.reduce.to_hosts == slices);
    }
    // Little data: everything in one step, or the fewest steps.
    World direct(apart(static_cast<int>(n)), "all_reduce=direct,reduce=direct,broadcast=tree", {"tcp"});
    Traces traces = trace(direct, 64, root);
    CHECK(traces.all_reduce.to_hosts == std::vector<uint64_t>(n, (n - 1) * 64));
    CHECK(traces.reduce.all() == (n - 1) * 64);
    CHECK(traces.broadcast.all() == (n - 1) * 64);
    World doubling(apart(static_cast<int>(n)), "all_reduce=doubling,reduce=tree,all_gather=bruck", {"tcp"});
    traces = trace(doubling, 64, root);
    const uint64_t core = std::bit_floor(n);
    CHECK(traces.all_reduce.all() == (core * static_cast<uint64_t>(std::countr_zero(core)) + 2 * (n - core)) * 64);
    CHECK(traces.reduce.all() == (n - 1) * 64);
    CHECK(traces.all_gather.to_hosts == std::vector<uint64_t>(n, (n - 1) * 64));
  }
}

TEST_CASE("hosts: by host no byte enters or leaves a host twice") {
  const std::vector<int> kLayouts[] = {{0, 0, 1, 1}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1}, {0, 1, 0, 1, 1, 2, 2, 0}};
  for (const auto& layout : kLayouts) {
    for (const char* algorithms : {"all_reduce=slices", "all_reduce=ring"}) {
      World world(layout, algorithms);
      const auto& topology = world.groups[0]->topology();
      const auto hosts = topology.hosts().size();
      const uint64_t n = layout.size(), nbytes = 64 * 12 * 1000;
      const int root = static_cast<int>(n) - 1;
      const Traces traces = trace(world, nbytes, root);
      auto of_host = [&](const std::vector<uint64_t>& by_rank, size_t host) {
        uint64_t sum = 0;
        for (const int rank : topology.hosts()[host]) sum += by_rank[rank];
        return sum;
      };
      for (size_t host = 0; host < hosts; ++host) {
        CAPTURE(host);
        const uint64_t here = topology.hosts()[host].size();
        CHECK(of_host(traces.all_reduce.to_hosts, host) == 2 * (hosts - 1) * nbytes / hosts);
        CHECK(of_host(traces.all_reduce.from_hosts, host) == 2 * (hosts - 1) * nbytes / hosts);
        CHECK(of_host(traces.all_gather.to_hosts, host) == here * (hosts - 1) * nbytes);
        CHECK(of_host(traces.all_gather.from_hosts, host) == (n - here) * nbytes);
        CHECK(of_host(traces.reduce_scatter.to_hosts, host) == (n - here) * nbytes);
        CHECK(of_host(traces.reduce_scatter.from_hosts, host) == here * (hosts - 1) * nbytes);
        CHECK(of_host(traces.all_to_all.to_hosts, host) == here * (n - here) * nbytes);
        const bool has_root = topology.host_of(root) == static_cast<int>(host);
        CHECK(of_host(traces.broadcast.from_hosts, host) == (has_root ? 0 : nbytes));
        CHECK(of_host(traces.reduce.to_hosts, host) == (has_root ? (hosts - 1) * nbytes / hosts : nbytes));
      }
      const Traces little = trace(world, 64, root);
      CHECK(little.broadcast.all() == (hosts - 1) * 64);
      CHECK(little.all_gather.all() == n * (hosts - 1) * 64);
      CHECK(little.reduce.all() == (hosts - 1) * 64);
    }
  }
}

TEST_CASE("hosts: on one host every rank shows its data once, and sends no message") {
  for (const uint64_t n : {uint64_t{2}, uint64_t{3}, uint64_t{4}}) {
    World world(static_cast<int>(n));
    (void)trace(world, 64, 0);
    const uint64_t nbytes = n * (n - 1) * 64 * 1000;
    const Traces traces = trace(world, nbytes, 0);
    CHECK(traces.all_reduce.shown == std::vector<uint64_t>(n, nbytes));  // (N-1)/N of it to be reduced, 1/N reduced
    CHECK(traces.all_gather.shown == std::vector<uint64_t>(n, nbytes));
    CHECK(traces.reduce_scatter.shown == std::vector<uint64_t>(n, (n - 1) * nbytes));
    CHECK(traces.all_to_all.shown == std::vector<uint64_t>(n, (n - 1) * nbytes));
    std::vector<uint64_t> root(n);
    root[0] = nbytes;
    CHECK(traces.broadcast.shown == root);
    CHECK(traces.all_reduce.all() == 0);
  }
}

TEST_CASE("hosts: what explain() says") {
  World world({0, 0, 1}, "all_reduce=ring");
  const std::string text = world.groups[2]->explain();
  for (const char* part :
       {"\"rank\": 2", "\"ranks_of_hosts\": [[0, 1], [2]]", "\"within_host\": \"alone\"",
        "\"asked_for\": \"all_reduce=ring\"",
        "\"all_reduce\": [{\"up_to_bytes\": null, \"algorithm\": \"ring\", \"by_host\": true, \"why\": \"asked for\"}]",
        "\"broadcast\": [{\"up_to_bytes\": 65536, \"algorithm\": \"tree\"", "\"to_hosts\": {\"sent\": 0"})
    CHECK_MESSAGE(text.find(part) != std::string::npos, part << " in " << text);
  world.must([](const Call& call) { return barrier(call); });
  CHECK(world.groups[0]->explain().find("\"within_host\": \"board\"") != std::string::npos);
}

TEST_CASE("hosts: a rank that leaves fails all others by name, also those who do not wait for it themselves") {
  World world({0, 0, 1, 1});
  world.must([](const Call& call) { return barrier(call); });
  const auto statuses = world.collective([](const Call& call) {
    if (call.group.rank() == 2) {
      call.group.leave(Deadline::after_ms(2000));
      return Status();
    }
    std::vector<float> data(1'000'000);
    Status status = all_reduce(call, data.data(), data.size(), DType::f32, ReduceOp::sum);
    call.group.give_up(status);
    return status;
  });
  for (const int rank : {0, 1, 3}) {
    CHECK_FALSE(statuses[rank].is_ok());
    CHECK_MESSAGE(statuses[rank].message().find("rank 2") != std::string::npos, statuses[rank].to_string());
  }
}
