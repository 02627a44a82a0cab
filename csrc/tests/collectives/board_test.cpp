// Small collectives between ranks of one host: through shared memory, without a message after the first.
#include "collectives/board.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "collectives/world.h"

using namespace torch_mooncake;
using namespace torch_mooncake::coll;

namespace {

// `n` all-reduces in a row on each rank by a thread of its own; what is wrong, by rank.
std::vector<Status> trains(World& world, int n) {
  std::vector<Status> out(world.size());
  world.each([&](Group& group) {
    const int rank = group.rank();
    for (int i = 0; i < n && out[rank].is_ok(); ++i) {
      const Call call{group, static_cast<uint64_t>(1000 + i), Deadline::after_ms(20'000), world.scratch[rank]};
      const uint64_t count = 1 + static_cast<uint64_t>(i * 37 % 1500);
      std::vector<int64_t> data(count);
      for (uint64_t k = 0; k < count; ++k) data[k] = static_cast<int64_t>(k) + 1000 * rank + i;
      out[rank] = all_reduce(call, data.data(), count, DType::i64, ReduceOp::sum);
      const int64_t size = group.size();
      for (uint64_t k = 0; k < count && out[rank].is_ok(); ++k)
        if (data[k] != size * (static_cast<int64_t>(k) + i) + 1000 * size * (size - 1) / 2)
          out[rank] = Status(Code::corrupt, "all_reduce " + std::to_string(i));
    }
  });
  return out;
}

uint64_t bytes_sent(World& world) {
  uint64_t sum = 0;
  for (auto& hub : world.hubs)
    for (auto& session : hub->engine().rpc().sessions())
      for (auto& lane : session->lanes()) sum += lane->bytes_sent();
  return sum;
}

}  // namespace

TEST_CASE("board: thousands in a row, also where ranks outnumber cores") {
  for (int size : {2, 3, 9}) {
    World world(size);
    for (const auto& status : trains(world, size > 4 ? 300 : 3000)) REQUIRE_MESSAGE(status.is_ok(), status.to_string());
    CHECK(world.groups[0]->board(Board::kSmall) != nullptr);
  }
}

TEST_CASE("board: small collectives send no message") {
  World world(3);
  world.must([](const Call& call) { return barrier(call); });
  const uint64_t before = bytes_sent(world);
  for (const auto& status : trains(world, 500)) REQUIRE(status.is_ok());
  for (int i = 0; i < 100; ++i)
    world.must([](const Call& call) {
      uint64_t x = 7;
      TM_TRY(broadcast(call, &x, sizeof x, 1));
      return barrier(call);
    });
  CHECK(bytes_sent(world) - before < 20'000);  // heartbeats; by messages it would be millions
}

TEST_CASE("board: hosts of their own have none") {
  World world(2, {"tcp"}, false);
  CHECK(world.groups[0]->board(Board::kSmall) == nullptr);
  for (const auto& status : trains(world, 50)) REQUIRE(status.is_ok());
}

TEST_CASE("board: where one rank's segment cannot be had, all go by messages") {
  for (bool both : {true, false}) {
    World world(3);
    if (both) world.groups[2]->board(Board::kSmall)->arrived(0, random_id(), UniqueFd());
    world.groups[2]->board(Board::kLarge)->arrived(0, random_id(), UniqueFd());
    world.must([](const Call& call) { return barrier(call); });
    const uint64_t before = bytes_sent(world);
    for (const auto& status : trains(world, 50)) REQUIRE(status.is_ok());
    CHECK((bytes_sent(world) - before > 50'000) == both);
    world.must([](const Call& call) {
      const int me = call.group.rank();
      std::vector<int> data(100'000, me);
      TM_TRY(all_reduce(call, data.data(), data.size(), DType::i32, ReduceOp::sum));
      if (data != std::vector<int>(100'000, 3)) return Status(Code::corrupt, "all_reduce");
      std::vector<int> in(90'000, me), out(90'000);
      std::vector<ConstPiece> ins;
      std::vector<Piece> outs;
      for (int r = 0; r < 3; ++r)
        ins.push_back({&in[30'000 * r], 120'000}), outs.push_back({&out[30'000 * r], 120'000});
      TM_TRY(all_to_all(call, ins, outs));
      for (int r = 0; r < 3; ++r)
        if (out[30'000 * r] != r || out[30'000 * r + 29'999] != r) return Status(Code::corrupt, "all_to_all");
      return Status();
    });
  }
}

TEST_CASE(
    "board: an all_to_all of a large piece of one pair among small ones, and sizes that two sides see differently") {
  World world(3);
  for (uint64_t large : {uint64_t{10}, uint64_t{300'000}}) {
    world.must([&](const Call& call) {
      const int me = call.group.rank();
      auto size = [&](int from, int to) { return from == 1 && to == 2 ? large : static_cast<uint64_t>(from + to); };
      std::vector<std::vector<uint8_t>> in, out;
      std::vector<ConstPiece> ins;
      std::vector<Piece> outs;
      for (int r = 0; r < 3; ++r) in.emplace_back(size(me, r), static_cast<uint8_t>(10 * me + r));
      for (int r = 0; r < 3; ++r) out.emplace_back(size(r, me));
      for (int r = 0; r < 3; ++r)
        ins.push_back({in[r].data(), in[r].size()}), outs.push_back({out[r].data(), out[r].size()});
      TM_TRY(all_to_all(call, ins, outs));
      for (int r = 0; r < 3; ++r)
        if (out[r] != std::vector<uint8_t>(size(r, me), static_cast<uint8_t>(10 * r + me)))
          return Status(Code::corrupt, "all_to_all");
      return Status();
    });
  }
  const auto statuses = world.collective([&](const Call& call) {
    std::vector<uint8_t> in(300), out(300);
    std::vector<ConstPiece> ins(3, {in.data(), 100});
    std::vector<Piece> outs(3, {out.data(), 100});
    if (call.group.rank() == 0) outs[2].nbytes = 99;
    Status status = all_to_all(call, ins, outs);
    if (!status.is_ok()) call.group.give_up(status);
    return status;
  });
  CHECK(statuses[0].code() == Code::layout_mismatch);
  CHECK(statuses[0].message().find("rank 2 sends 100 bytes, where 99 are expected") != std::string::npos);
}

TEST_CASE("board: a root does not run away from ranks that are behind") {
  World world(3);
  std::atomic<int> sent{0};
  world.each([&](Group& group) {
    for (int i = 0; i < 40; ++i) {
      const Call call{group, static_cast<uint64_t>(i + 1), Deadline::after_ms(20'000), world.scratch[group.rank()]};
      int value = group.rank() == 0 ? i : -1;
      if (group.rank() == 2 && i % 10 == 5) ::usleep(20'000);
      if (Status s = broadcast(call, &value, sizeof value, 0); !s.is_ok() || value != i) return;
      if (group.rank() == 2) ++sent;
    }
  });
  CHECK(sent == 40);
}

TEST_CASE("board: ranks in different collectives, or of different sizes, are told") {
  for (int what = 0; what < 4; ++what) {
    CAPTURE(what);
    World world(3);
    world.must([](const Call& call) { return barrier(call); });
    const int64_t begin = steady_ns();
    const auto statuses = world.collective([&](const Call& call) {
      std::vector<float> data(100'000, 1);
      Status status;
      if (call.group.rank() != 1) {
        status = all_reduce(call, data.data(), 100, DType::f32, ReduceOp::sum);
      } else if (what == 0) {
        status = all_reduce(call, data.data(), 101, DType::f32, ReduceOp::sum);
      } else if (what == 1) {
        status = barrier(call);
      } else if (what == 2) {
        status = all_reduce(call, data.data(), data.size(), DType::f32, ReduceOp::sum);  // a large one
      } else {
        std::vector<void*> out{&data[0], &data[100], &data[200]};
        status = gather(call, data.data(), 400, out, 1);
      }
      if (!status.is_ok()) call.group.give_up(status);
      return status;
    });
    int told = 0;
    for (const auto& status : statuses) told += !status.is_ok();
    CHECK(told >= 2);
    CHECK(std::any_of(statuses.begin(), statuses.end(),
                      [](const Status& s) { return s.message().find(" is in ") != std::string::npos; }));
    CHECK(steady_ns() - begin < 10'000'000'000);
  }
}

namespace {

// A collective in which rank 0 is mistaken about sizes: which ranks are told. The others' calls end in bounded time.
std::vector<Status> differing(World& world, const std::function<Status(const Call&)>& fn) {
  world.must([](const Call& call) { return barrier(call); });
  const int64_t begin = steady_ns();
  auto statuses = world.collective([&](const Call& call) {
    Status status = fn(call);
    if (!status.is_ok()) call.group.give_up(status);
    return status;
  });
  CHECK(steady_ns() - begin < 10'000'000'000);
  return statuses;
}

}  // namespace

TEST_CASE("board: sizes that differ are told, large beside large and small beside large, from root and leaf") {
  constexpr uint64_t kSmall = 1 << 10, kLarge = 512 << 10;
  struct Case {
    const char* name;
    uint64_t first, others;  // bytes on rank 0, and elsewhere
    std::function<Status(const Call&, std::byte*, uint64_t)> run;
  };
  auto all = [](const Call& c, std::byte* data, uint64_t n) {
    return all_reduce(c, data, n / 4, DType::f32, ReduceOp::sum);
  };
  auto cast = [](const Call& c, std::byte* data, uint64_t n) { return broadcast(c, data, n, 0); };
  auto to_root = [](const Call& c, std::byte* data, uint64_t n) {
    return reduce(c, data, n / 4, DType::f32, ReduceOp::sum, 0);
  };
  auto from_root = [](const Call& c, std::byte* data, uint64_t n) {
    std::vector<const void*> in(3, data);
    return scatter(c, in, data + kLarge, n, 0);
  };
  auto collect = [](const Call& c, std::byte* data, uint64_t n) {
    std::vector<void*> out(3, data + kLarge);
    return gather(c, data, n, out, 0);
  };
  for (const Case& it : {Case{"all_reduce, large", kLarge, kLarge / 2, all},
                         {"all_reduce", kSmall, kLarge, all},
                         {"all_reduce, nothing", 0, kSmall, all},
                         {"broadcast, large", kLarge / 2, kLarge, cast},
                         {"broadcast", kSmall, kLarge, cast},
                         {"broadcast, leaf", kLarge, kSmall, cast},
                         {"reduce", kLarge, kSmall, to_root},
                         {"scatter", kSmall, kLarge, from_root},
                         {"gather", kLarge, kSmall, collect}}) {
    CAPTURE(it.name);
    World world(3);
    const auto statuses = differing(world, [&](const Call& call) {
      std::vector<std::byte> data(2 * kLarge);
      return it.run(call, data.data(), call.group.rank() == 0 ? it.first : it.others);
    });
    CHECK(std::any_of(statuses.begin(), statuses.end(),
                      [](const Status& s) { return s.code() == Code::layout_mismatch; }));
  }
  // Lists of sizes of which the sums, or the own entries, agree.
  for (bool gathers : {true, false}) {
    World world(3);
    const auto statuses = differing(world, [&](const Call& call) {
      const int me = call.group.rank();
      std::vector<float> data(100'000), out(100'000);
      std::vector<uint64_t> sizes{64, 128, 64};
      if (me == 0) sizes = gathers ? std::vector<uint64_t>{64, 128, 100'000} : std::vector<uint64_t>{64, 64, 128};
      std::vector<Piece> pieces;
      std::vector<ConstPiece> ins;
      for (uint64_t n : sizes) pieces.push_back({out.data(), n}), ins.push_back({data.data(), n});
      return gathers ? all_gather(call, {data.data(), sizes[me]}, pieces)
                     : reduce_scatter(call, ins, pieces[me], DType::f32, ReduceOp::sum);
    });
    CHECK(std::any_of(statuses.begin(), statuses.end(),
                      [](const Status& s) { return s.code() == Code::layout_mismatch; }));
  }
}

TEST_CASE("board: who does not come to the first collective is named") {
  World world(3);
  world.timeout_ms = 300;
  std::string awaited;
  const auto statuses = world.collective([&](const Call& call) {
    if (call.group.rank() != 0) {
      ::usleep(150'000);
      if (call.group.rank() == 1) awaited = world.groups[0]->awaited();
      return Status();
    }
    Status status = barrier(call);
    call.group.give_up(status);
    return status;
  });
  CHECK(awaited == "rank 1, rank 2");
  CHECK(statuses[0].message().find("rank 1, rank 2") != std::string::npos);
}

TEST_CASE("board: a rank that left before the first collective, and lives on in another group, is missed at once") {
  World world(2);
  GroupOptions other;
  other.id = random_id();
  other.members = {world.hubs[1]->self()};
  auto alone = Group::join(world.hubs[1], other);  // so that the hub stays
  REQUIRE(alone.is_ok());
  world.groups[1]->leave(Deadline::after_ms(2000));
  Scratch scratch;
  const int64_t begin = steady_ns();
  const Status status = barrier({*world.groups[0], 1, Deadline::after_ms(20'000), scratch});
  CHECK(status.code() == Code::peer_lost);
  CHECK(status.message().find("rank 1 has left the group") != std::string::npos);
  CHECK(steady_ns() - begin < 5'000'000'000);
  (*alone)->leave(Deadline::after_ms(2000));
}

TEST_CASE("board: a forked child does not write where its parent does") {
  World world(2);
  world.must([](const Call& call) { return barrier(call); });
  const pid_t child = ::fork();
  if (child == 0) {
    Scratch scratch;
    const Status status = barrier({*world.groups[0], 99, Deadline::after_ms(2000), scratch});
    ::_exit(status.code() == Code::forked ? 0 : 1);
  }
  int ended = -1;
  REQUIRE(::waitpid(child, &ended, 0) == child);
  CHECK(ended == 0);
  world.must([](const Call& call) { return barrier(call); });
}

TEST_CASE("board: a rank that never comes is named; the others' wait ends when one gives up") {
  World world(3);
  world.must([](const Call& call) { return barrier(call); });
  world.timeout_ms = 300;
  std::string awaited;
  const auto statuses = world.collective([&](const Call& call) {
    if (call.group.rank() == 1) {
      ::usleep(150'000);
      awaited = world.groups[0]->awaited();
      return Status();
    }
    float x = 1;
    Status status = all_reduce(call, &x, 1, DType::f32, ReduceOp::sum);
    call.group.give_up(status);
    return status;
  });
  CHECK(awaited == "rank 1");
  for (int rank : {0, 2}) {
    CHECK_FALSE(statuses[rank].is_ok());
    CHECK((statuses[rank].message().find("rank 1") != std::string::npos ||
           statuses[rank].message().find("gave up") != std::string::npos));
  }
}

TEST_CASE("board: waiting ends when the awaited rank leaves, or the group is aborted") {
  for (bool leaves : {true, false}) {
    World world(2);
    world.must([](const Call& call) { return barrier(call); });
    const int64_t begin = steady_ns();
    const auto statuses = world.collective([&](const Call& call) {
      if (call.group.rank() == 1) {
        ::usleep(100'000);
        if (leaves) {
          call.group.leave(Deadline::after_ms(2000));
        } else {
          world.groups[0]->abort({Code::cancelled, "aborted"});
        }
        return Status();
      }
      return barrier(call);
    });
    CHECK(statuses[0].code() == (leaves ? Code::peer_lost : Code::cancelled));
    CHECK(steady_ns() - begin < 5'000'000'000);
  }
}
