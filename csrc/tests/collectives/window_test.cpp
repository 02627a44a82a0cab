#include "collectives/window.h"

#include <doctest/doctest.h>

#include "collectives/world.h"

using namespace torch_mooncake;
using namespace torch_mooncake::coll;

namespace {
struct Windows {
  World& world;
  std::vector<std::vector<int>> memory;  // by rank
  std::vector<WindowPtr> windows;

  Windows(World& w, std::function<size_t(int)> count) : world(w), memory(w.size()), windows(w.size()) {
    world.must([&](const Call& call) {
      const int rank = call.group.rank();
      memory[rank].assign(count(rank), -1);
      auto opened = Window::open(call, memory[rank].data(), memory[rank].size() * sizeof(int));
      TM_TRY(opened.status());
      windows[rank] = *opened;
      return Status();
    });
  }
  void close() {
    world.must([&](const Call& call) { return windows[call.group.rank()]->close(call); });
  }
};

Deadline soon() { return Deadline::after_ms(10'000); }
void ok(const Status& status) { REQUIRE_MESSAGE(status.is_ok(), status.to_string()); }
}  // namespace

TEST_CASE("what was put before a signal is there when the signal is") {
  for (bool one_host : {true, false}) {
    World world(3, {"local", "shm", "tcp"}, one_host);
    constexpr int kBlock = 40'000, kRounds = 20;
    Windows shown(world, [](int) { return kBlock * 3; });
    for (int round = 0; round < kRounds; ++round) {
      world.each([&](Group& group) {
        const int rank = group.rank(), size = group.size();
        const std::vector<int> mine(kBlock, round * 100 + rank);
        for (int to = 0; to < size; ++to) {
          auto put = shown.windows[rank]->put(to, rank * kBlock * 4, mine.data(), kBlock * 4, soon());
          if (to != rank) ok(shown.windows[rank]->signal(to, soon())->wait(soon()));
          ok(put->wait(soon()));
        }
        for (int from = 0; from < size; ++from) {
          if (from != rank) ok(shown.windows[rank]->wait_signal(from, soon())->wait(soon()));
          const int* block = shown.memory[rank].data() + from * kBlock;
          CHECK(std::count(block, block + kBlock, round * 100 + from) == kBlock);
        }
      });
      world.must([](const Call& call) { return barrier(call); });
    }
    shown.close();
  }
}

TEST_CASE("sizes differ by rank, and a put beyond them is refused before anything is sent") {
  World world(3);
  Windows shown(world, [](int rank) { return rank * 8; });
  const std::vector<int> data(64, 7);
  auto& window = *shown.windows[0];
  CHECK(window.nbytes(0) == 0);
  CHECK(window.nbytes(2) == 64);
  ok(window.put(2, 32, data.data(), 32, soon())->wait(soon()));
  CHECK(std::count(shown.memory[2].begin(), shown.memory[2].end(), 7) == 8);
  for (uint64_t offset : {uint64_t{0}, uint64_t{33}, uint64_t{65}, ~uint64_t{0}})
    CHECK(window.put(2, offset, data.data(), offset == 0 ? 65 : 32, soon())->wait(soon()).code() ==
          Code::out_of_bounds);
  CHECK(window.put(0, 0, data.data(), 4, soon())->wait(soon()).code() == Code::out_of_bounds);
  CHECK(window.put(3, 0, data.data(), 4, soon())->wait(soon()).code() == Code::invalid_argument);
  ok(window.put(1, 32, data.data(), 0, soon())->wait(soon()));
  ok(window.signal(2, soon())->wait(soon()));  // refused puts are none
  ok(shown.windows[2]->wait_signal(0, soon())->wait(soon()));
  shown.close();
  CHECK(window.put(2, 0, data.data(), 4, soon())->wait(soon()).code() == Code::closed);
  CHECK(window.signal(2, soon())->wait(soon()).code() == Code::closed);
}

TEST_CASE("signals are counted, by rank and by window") {
  World world(3);
  Windows one(world, [](int) { return 4; }), two(world, [](int) { return 4; });
  for (int i = 0; i < 3; ++i) ok(one.windows[1]->signal(0, soon())->wait(soon()));
  ok(two.windows[2]->signal(0, soon())->wait(soon()));
  for (int i = 0; i < 3; ++i) ok(one.windows[0]->wait_signal(1, soon())->wait(soon()));
  const Deadline now = Deadline::after_ms(50);
  CHECK(one.windows[0]->wait_signal(1, now)->wait(soon()).code() == Code::deadline_exceeded);
  CHECK(one.windows[0]->wait_signal(2, now)->wait(soon()).code() == Code::deadline_exceeded);
  ok(two.windows[0]->wait_signal(2, soon())->wait(soon()));
  one.close();
  two.close();
}

TEST_CASE("a rank that is gone fails puts and waits, by name") {
  World world(2);
  Windows shown(world, [](int) { return 4; });
  const int value = 1;
  world.groups[1]->leave(soon());
  auto put = shown.windows[0]->put(1, 0, &value, sizeof value, soon());
  const Status status = put->wait(soon());
  CHECK(status.code() == Code::peer_lost);
  CHECK_MESSAGE(status.message().find("rank 1") != std::string::npos, status.to_string());
  CHECK(shown.windows[0]->signal(1, soon())->wait(soon()).code() == Code::peer_lost);
  CHECK(shown.windows[0]->wait_signal(1, soon())->wait(soon()).code() == Code::peer_lost);
}
