// RDMA over a fake driver: notifications that are counted, an immediate behind the slices of each lane.
#include <algorithm>

#include "transfer/rdma_rails.h"

namespace transfer_test {
namespace {

uint64_t immediates(const Rails& rails) {
  return rails.here->device(0).immediates() + rails.here->device(1).immediates();
}
uint64_t requests(const Rails& rails) { return rails.here->device(0).requests() + rails.here->device(1).requests(); }

}  // namespace

TEST_CASE("the notification of one slice goes with it: one request, no round trip") {
  Rails rails(2, kMiB);
  const uint64_t before = requests(rails), given = immediates(rails);
  for (size_t n : {1, 64, 65, 4096, 65536}) {
    REQUIRE_OK(rails.write(n, {.deadline = soon(), .notify = "there"})->wait());
    CHECK(must(rails.b->next_notification(soon())).data == "there");
  }
  CHECK(requests(rails) - before == 5);
  CHECK(immediates(rails) - given == 5);
}

TEST_CASE("lanes are in no order: a notification comes when the slowest has brought its share") {
  constexpr size_t kBytes = 8 * kMiB;
  Rails rails(2, kBytes);
  for (uint64_t round = 0; round < 12; ++round) {
    CAPTURE(round);
    rails.here->device(round % 2).set_delay_us(5000);
    rails.here->device(1 - round % 2).set_delay_us(0);
    std::memset(rails.target.data, 0, kBytes);
    fill(rails.source.data, kBytes, round);
    const uint64_t given = immediates(rails);
    auto op = rails.write(kBytes, {.deadline = soon(), .notify = "x"});
    must(rails.b->next_notification(soon()));
    REQUIRE(mismatch(rails.target.data, kBytes, round) == kBytes);
    REQUIRE_OK(op->wait());
    CHECK(op->bytes_done() == kBytes);
    CHECK(immediates(rails) - given == 2);  // one of each lane
  }
}

TEST_CASE("lanes fail under notifications: each comes once, after all its bytes, and none is written after it") {
  constexpr size_t kBytes = kMiB;
  constexpr uint64_t kRounds = 60;
  Rails rails(2, kBytes);
  for (uint64_t round = 0; round < kRounds; ++round) {
    CAPTURE(round);
    auto& device = rails.here->device(round % 2);
    if (round % 3 != 2) device.fail_request(static_cast<int>(round % 7), fake_verbs::Outcome::retries_exceeded);
    std::memset(rails.target.data, 0, kBytes);
    fill(rails.source.data, kBytes, round);
    auto op = rails.write(kBytes, {.deadline = soon(), .notify = std::to_string(round)});
    REQUIRE(must(rails.b->next_notification(soon())).data == std::to_string(round));
    REQUIRE(mismatch(rails.target.data, kBytes, round) == kBytes);
    std::memset(rails.target.data, 0xee, kBytes);  // its reader is done with it
    REQUIRE_OK(op->wait());
    if (round % 3 != 2) rails.wait_for_rails(2);
    const auto* data = rails.target.data;
    REQUIRE(std::all_of(data, data + kBytes, [](std::byte byte) { return byte == std::byte{0xee}; }));
  }
  CHECK(rails.b->stats().notifications == kRounds);
}

TEST_CASE("a notification that is taken back is delivered never, and in nobody's way") {
  Rails rails(2, kMiB);
  for (size_t i : {0, 1}) rails.here->device(i).set_hanging(true);
  for (int i = 0; i < 40; ++i) {  // more than may be under way
    auto op = rails.write(kMiB, {.deadline = Deadline::after_ms(50), .notify = "never"});
    if (i % 8 == 7) CHECK(op->wait().code() == Code::deadline_exceeded);
  }
  for (size_t i : {0, 1}) rails.here->device(i).set_hanging(false);
  rails.wait_for_rails(2);
  for (int i = 0; i < 40; ++i) REQUIRE_OK(rails.write(kMiB, {.deadline = soon(), .notify = "now"})->wait());
  for (int i = 0; i < 40; ++i) CHECK(must(rails.b->next_notification(soon())).data == "now");
  CHECK(rails.b->stats().notifications == 40);
}

TEST_CASE("a notification that waits for another's end goes out when that one is cancelled") {
  constexpr int kUnderWay = 32;
  Rails rails(1, kMiB);
  auto& device = rails.here->device(0);
  const uint64_t before = device.immediates();
  device.set_hanging(true);  // so that no completion gives the lane a push
  std::vector<OpPtr> ops;
  for (int i = 0; i <= kUnderWay; ++i) ops.push_back(rails.write(0, {.deadline = soon(), .notify = "n"}));
  CHECK(eventually([&] { return device.immediates() - before == kUnderWay; }, 5000));
  ops.front()->cancel();
  CHECK(ops.front()->wait().code() == Code::cancelled);
  CHECK(eventually([&] { return device.immediates() - before == kUnderWay + 1; }, 5000));
  device.set_hanging(false);
  for (int i = 1; i <= kUnderWay; ++i) REQUIRE_OK(ops[i]->wait());
  // The one that is cancelled may come as well, if its immediate is there before the peer hears that it is taken back.
  for (int i = 1; i <= kUnderWay; ++i) CHECK(must(rails.b->next_notification(soon())).data == "n");
}

}  // namespace transfer_test
