#include "collectives/seats.h"

#include <atomic>

#include "tests/collectives/world.h"

namespace torch_mooncake::coll {
namespace {

HubPtr new_hub(const std::string& name) {
  HubOptions options;
  options.token = "secret";
  options.name = name;
  auto hub = Hub::create(options);
  REQUIRE_MESSAGE(hub.is_ok(), hub.status().to_string());
  return *hub;
}

// Ranks in one process, each with a hub of its own. One that is killed loses its connections without a word.
struct Table {
  std::vector<HubPtr> hubs;
  std::vector<SeatsPtr> seats;
  Id128 id{};

  explicit Table(int n) {
    Seating seating;
    seating.group = id = random_id();
    for (int seat = 0; seat < n; ++seat) {
      hubs.push_back(new_hub("rank" + std::to_string(seat)));
      seating.members.push_back(hubs.back()->self());
      seating.active.push_back(1);
      seating.global_ranks.push_back(seat);
    }
    for (int seat = 0; seat < n; ++seat) {
      auto found = Seats::found(hubs[seat], seat, seating);
      REQUIRE_MESSAGE(found.is_ok(), found.status().to_string());
      seats.push_back(*found);
    }
  }
  ~Table() {
    std::vector<std::thread> threads;
    for (auto& one : seats)
      if (one) threads.emplace_back([&] { one->close(Deadline::after_ms(1000)); });
    for (auto& thread : threads) thread.join();
  }

  void kill(int seat) {
    hubs[seat]->engine().close();
    seats[seat]->close(Deadline::after_ms(0));
    seats[seat] = nullptr;
  }

  // fn(seat) on the threads of all who are there.
  template <typename Fn>
  std::vector<Status> each(Fn fn) {
    std::vector<Status> out(seats.size());
    std::vector<std::thread> threads;
    for (size_t seat = 0; seat < seats.size(); ++seat)
      if (seats[seat]) threads.emplace_back([&, seat] { out[seat] = fn(static_cast<int>(seat)); });
    for (auto& thread : threads) thread.join();
    return out;
  }

  std::vector<Status> change(std::vector<int> remove, std::vector<int> admit, int at_least = 1,
                             int64_t timeout_ms = 10'000) {
    return each(
        [&](int seat) { return seats[seat]->change(remove, admit, 7, at_least, Deadline::after_ms(timeout_ms)); });
  }
  // Everybody adds 10^seat.
  std::vector<int> sums() {
    std::vector<int> out(seats.size(), 0);
    const auto statuses = each([&](int seat) {
      Scratch scratch;
      const GroupPtr group = seats[seat]->group();
      int value = 1;
      for (int i = 0; i < seat; ++i) value *= 10;
      Status status = all_reduce({*group, 8, Deadline::after_ms(5000), scratch}, &value, 1, DType::i32, ReduceOp::sum);
      out[seat] = value;
      return status;
    });
    for (const auto& status : statuses) CHECK_MESSAGE(status.is_ok(), status.to_string());
    return out;
  }
  std::string address(int seat) { return hubs[seat]->self().addresses[0]; }

  // A replacement asks until somebody lets it in, meanwhile the others wait for it.
  std::vector<Status> replace(int seat, const std::vector<std::string>& addresses) {
    Result<SeatsPtr> joined(Status(Code::internal, "did not run"));
    const HubPtr hub = new_hub("new rank" + std::to_string(seat));
    std::thread joiner([&] { joined = Seats::join(hub, id, seat, addresses, Deadline::after_ms(10'000)); });
    auto out = change({}, {seat});
    joiner.join();
    REQUIRE_MESSAGE(joined.is_ok(), joined.status().to_string());
    hubs[seat] = hub;
    seats[seat] = *joined;
    return out;
  }
};

void must(const std::vector<Status>& statuses) {
  for (const auto& status : statuses) CHECK_MESSAGE(status.is_ok(), status.to_string());
}

TEST_CASE("seats: survivors go on with their numbers, whoever died") {
  for (int dead : {0, 1, 2}) {
    Table table(3);
    table.sums();
    table.kill(dead);
    must(table.change({}, {}));
    const int powers[] = {1, 10, 100};
    for (int seat = 0; seat < 3; ++seat) {
      if (seat == dead) continue;
      CHECK(table.seats[seat]->seating().sequence == 7);
      CHECK(table.seats[seat]->group()->seats() == 3);
      CHECK(table.sums()[seat] == 111 - powers[dead]);
    }
  }
}

TEST_CASE("seats: a replacement comes in through any survivor, also of rank 0, again and again") {
  Table table(3);
  for (int dead : {0, 2, 0}) {
    table.kill(dead);
    must(table.change({}, {}));
    // The first address is of nobody, the second of somebody who is in no such group.
    const HubPtr stranger = new_hub("stranger");
    const int survivor = (dead + 1) % 3;
    must(table.replace(dead, {"tcp://127.0.0.1:1", stranger->self().addresses[0], table.address(survivor)}));
    CHECK(table.sums() == std::vector<int>(3, 111));
    CHECK(table.seats[dead]->seating().sequence == 7);
    stranger->release();
  }
}

TEST_CASE("seats: deaths and replacements in one step") {
  Table table(4);
  table.kill(1);
  table.kill(3);
  Result<SeatsPtr> joined(Status(Code::internal, "did not run"));
  const HubPtr hub = new_hub("new");
  std::thread joiner([&] { joined = Seats::join(hub, table.id, 3, {table.address(2)}, Deadline::after_ms(10'000)); });
  must(table.change({}, {3}));
  joiner.join();
  REQUIRE(joined.is_ok());
  table.seats[3] = *joined;
  table.hubs[3] = hub;
  CHECK(table.sums()[3] == 1101);
  CHECK(table.seats[0]->seating().active_seats() == std::vector<int>{0, 2, 3});
}

TEST_CASE("seats: who comes in knows who has asked before it") {
  Table table(3);
  table.kill(0);
  table.kill(1);
  std::vector<HubPtr> hubs{new_hub("new0"), new_hub("new1")};
  std::vector<Result<SeatsPtr>> joined(2, Status(Code::internal, "did not run"));
  std::vector<std::thread> joiners;
  for (int seat : {0, 1})
    joiners.emplace_back([&, seat] {
      joined[seat] = Seats::join(hubs[seat], table.id, seat, {table.address(2)}, Deadline::after_ms(20'000));
    });
  while (table.seats[2]->waiting().size() < 2) std::this_thread::yield();
  for (int seat : {0, 1}) {  // the new rank 0 presides over the coming of rank 1
    must(table.change({}, {seat}));
    joiners[seat].join();
    REQUIRE_MESSAGE(joined[seat].is_ok(), joined[seat].status().to_string());
    table.seats[seat] = *joined[seat];
    table.hubs[seat] = hubs[seat];
  }
  CHECK(table.sums() == std::vector<int>(3, 111));
}

TEST_CASE("seats: who presides dies while the others ask") {
  Table table(4);
  table.kill(3);
  std::atomic<int> asked = 0;
  std::vector<std::thread> threads;
  std::vector<Status> statuses(4);
  for (int seat : {1, 2})
    threads.emplace_back([&, seat] {
      ++asked;
      statuses[seat] = table.seats[seat]->change({}, {}, 7, 1, Deadline::after_ms(10'000));
    });
  while (asked < 2) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // most often they wait for rank 0's answer by now
  table.kill(0);
  for (auto& thread : threads) thread.join();
  must(statuses);
  table.seats[3] = nullptr;
  CHECK(table.sums()[1] == 110);
}

TEST_CASE("seats: one that is left out while it lives is told, and the others know its number") {
  Table table(3);
  table.sums();  // all are connected, so that it hears of their good-bye
  std::vector<Status> statuses(3);
  std::vector<std::thread> threads;
  for (int seat : {0, 1})
    threads.emplace_back(
        [&, seat] { statuses[seat] = table.seats[seat]->change({2}, {}, 7, 1, Deadline::after_ms(10'000)); });
  for (auto& thread : threads) thread.join();
  must(statuses);
  const Status out = table.seats[2]->change({}, {}, 7, 1, Deadline::after_ms(10'000));
  CHECK(out.code() == Code::peer_lost);
  CHECK(out.message().find("went on without rank 2") != std::string::npos);
  table.kill(2);
  CHECK(table.sums()[0] == 11);
}

TEST_CASE("seats: too few, nobody agrees, nobody comes: errors that say so, and nothing has changed") {
  Table table(3);
  table.kill(2);
  for (const auto& status : table.change({}, {}, 3)) {
    if (status.is_ok()) continue;  // the dead one's
    CHECK(status.code() == Code::cancelled);
    CHECK(status.message().find("only rank 0, rank 1 would be left, fewer than 3") != std::string::npos);
  }
  CHECK(table.seats[0]->seating().epoch == 0);
  const Status alone = table.seats[0]->change({}, {}, 7, 1, Deadline::after_ms(300));
  CHECK(alone.code() == Code::deadline_exceeded);
  CHECK(alone.message().find("rank 1 did not agree") != std::string::npos);
  const auto none_came = table.change({}, {2}, 1, 500);
  CHECK(none_came[0].message().find("no replacement for rank 2") != std::string::npos);
  CHECK_FALSE(none_came[1].is_ok());
  must(table.change({}, {}));
  CHECK(table.sums()[0] == 11);

  CHECK(table.seats[0]->change({0}, {}, 7, 1, Deadline::after_ms(500)).code() == Code::invalid_argument);
  CHECK(table.seats[0]->change({5}, {}, 7, 1, Deadline::after_ms(500)).code() == Code::invalid_argument);
  const HubPtr hub = new_hub("new");
  CHECK(Seats::join(hub, table.id, 9, {table.address(0)}, Deadline::after_ms(2000)).status().code() ==
        Code::invalid_argument);
  CHECK(Seats::join(hub, random_id(), 1, {table.address(0)}, Deadline::after_ms(300)).status().code() ==
        Code::deadline_exceeded);
  hub->release();
}

TEST_CASE("seats: a change under way ends when it is cancelled") {
  Table table(2);
  Status status;
  std::thread waiting([&] { status = table.seats[0]->change({}, {}, 7, 1, Deadline::after_ms(20'000)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  table.seats[0]->cancel({Code::cancelled, "the process group was aborted"});
  waiting.join();
  CHECK(status.code() == Code::cancelled);
}

TEST_CASE("seats: parts of a group need nobody's word") {
  Table table(4);
  table.sums();
  const Seating all = table.seats[0]->seating();
  for (uint64_t count : {0, 1}) {
    std::vector<SeatsPtr> parts(4);
    must(table.each([&](int seat) -> Status {
      const std::vector<int> ranks = seat % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3};
      Seating seating;
      seating.group = derived_id(all.group, "halves", ranks, count);
      for (int rank : ranks) {
        seating.members.push_back(all.members[rank]);
        seating.global_ranks.push_back(rank);
        seating.active.push_back(1);
      }
      TM_ASSIGN(parts[seat], table.seats[seat]->found_part(seat / 2, std::move(seating)));
      Scratch scratch;
      int value = seat;
      TM_TRY(all_reduce({*parts[seat]->group(), 1, Deadline::after_ms(5000), scratch}, &value, 1, DType::i32,
                        ReduceOp::sum));
      CHECK(value == (seat % 2 == 0 ? 2 : 4));
      parts[seat]->close(Deadline::after_ms(2000));
      return {};
    }));
  }
  CHECK(table.sums()[3] == 1111);
}

}  // namespace
}  // namespace torch_mooncake::coll
