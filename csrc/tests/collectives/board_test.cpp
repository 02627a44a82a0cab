// Small collectives between ranks of one host: through shared memory, without a message after the first.
#include "collectives/board.h"

#include <doctest/doctest.h>
#include <unistd.h>

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
    for (auto& lane : hub->engine().stats().lanes) sum += lane.bytes_sent;
  return sum;
}

}  // namespace

TEST_CASE("board: thousands in a row, also where ranks outnumber cores") {
  for (int size : {2, 3, 9}) {
    World world(size);
    for (const auto& status : trains(world, size > 4 ? 300 : 3000)) REQUIRE_MESSAGE(status.is_ok(), status.to_string());
    CHECK(world.groups[0]->board() != nullptr);
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
  CHECK(bytes_sent(world) - before < 2000);  // heartbeats
}

TEST_CASE("board: hosts of their own have none") {
  World world(2, {"tcp"}, false);
  CHECK(world.groups[0]->board() == nullptr);
  for (const auto& status : trains(world, 50)) REQUIRE(status.is_ok());
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
    for (const auto& status : statuses) told += status.code() == Code::layout_mismatch || !status.is_ok();
    CHECK(told >= 2);
    CHECK(std::any_of(statuses.begin(), statuses.end(),
                      [](const Status& s) { return s.message().find(" is in ") != std::string::npos; }));
    CHECK(steady_ns() - begin < 10'000'000'000);
  }
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
