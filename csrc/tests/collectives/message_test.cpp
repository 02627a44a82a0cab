#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <numeric>

#include "collectives/world.h"

using namespace torch_mooncake;
using namespace torch_mooncake::coll;

namespace {
std::vector<uint8_t> pattern(size_t n, int seed) {
  std::vector<uint8_t> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(i * 7 + i / 251 + seed);
  return out;
}
constexpr auto kP2p = Channel::p2p;
}  // namespace

TEST_CASE("a message holds what was sent, for every size and both orders of arrival") {
  World world(2);
  for (uint64_t n : {uint64_t{0}, uint64_t{1}, kEagerBytes, kEagerBytes + 1, uint64_t{3} << 20}) {
    for (bool receiver_first : {true, false}) {
      CAPTURE(n);
      CAPTURE(receiver_first);
      auto out = pattern(n, 3);
      std::vector<uint8_t> in(n);
      RequestPtr receive, send;
      auto do_receive = [&] {
        receive = world.groups[1]->receive(0, kP2p, 5, in.data(), n, Deadline::after_ms(10'000));
      };
      auto do_send = [&] { send = world.groups[0]->send(1, kP2p, 5, out.data(), n, Deadline::after_ms(10'000)); };
      if (receiver_first)
        do_receive(), do_send();
      else
        do_send(), do_receive();
      REQUIRE(receive->wait(Deadline::never()).is_ok());
      CHECK(in == out);
      CHECK(receive->peer() == 0);
      REQUIRE(send->wait(Deadline::never()).is_ok());
    }
  }
}

TEST_CASE("tags keep messages apart, and messages of one tag stay in order") {
  World world(2);
  int values[4] = {10, 11, 20, 21};
  const uint64_t tags[4] = {1, 1, 2, 2};
  for (int i = 0; i < 4; ++i) {
    REQUIRE(world.groups[0]
                ->send(1, kP2p, tags[i], &values[i], 4, Deadline::after_ms(5000))
                ->wait(Deadline::never())
                .is_ok());
  }
  int got = 0;
  for (auto [tag, want] : {std::pair{2, 20}, {1, 10}, {2, 21}, {1, 11}}) {
    REQUIRE(world.groups[1]->receive(0, kP2p, tag, &got, 4, Deadline::after_ms(5000))->wait(Deadline::never()).is_ok());
    CHECK(got == want);
  }
}

TEST_CASE("a receive from any source takes what comes and says from whom") {
  World world(3);
  std::vector<int> seen;
  for (int round = 0; round < 2; ++round) {
    int got = 0;
    auto receive = world.groups[0]->receive(kAnySource, kP2p, 0, &got, 4, Deadline::after_ms(5000));
    const int sender = 2 - round;
    int value = 100 + sender;
    REQUIRE(
        world.groups[sender]->send(0, kP2p, 0, &value, 4, Deadline::after_ms(5000))->wait(Deadline::never()).is_ok());
    REQUIRE(receive->wait(Deadline::never()).is_ok());
    CHECK(got == value);
    CHECK(receive->peer() == sender);
  }
}

TEST_CASE("sizes that differ fail on both ends and write nothing") {
  World world(2);
  for (uint64_t sent : {uint64_t{8}, uint64_t{1} << 20}) {
    auto out = pattern(sent, 1);
    std::vector<uint8_t> in(sent / 2, 0xee);
    auto send = world.groups[0]->send(1, kP2p, 0, out.data(), sent, Deadline::after_ms(5000));
    Status status =
        world.groups[1]->receive(0, kP2p, 0, in.data(), in.size(), Deadline::after_ms(5000))->wait(Deadline::never());
    CHECK(status.code() == Code::layout_mismatch);
    CHECK(status.message().find("rank 0") != std::string::npos);
    CHECK(in == std::vector<uint8_t>(sent / 2, 0xee));
    if (sent > kEagerBytes) CHECK(send->wait(Deadline::never()).code() == Code::layout_mismatch);
  }
}

TEST_CASE("unread messages are bounded: senders wait instead of filling the receiver") {
  World world(2);
  const int n = static_cast<int>(2 * kEagerWindow / kEagerBytes);
  const auto out = pattern(kEagerBytes, 9);
  std::vector<RequestPtr> sends;
  for (int i = 0; i < n; ++i)
    sends.push_back(world.groups[0]->send(1, kP2p, 0, out.data(), out.size(), Deadline::after_ms(20'000)));
  int pending = 0;
  for (const auto& send : sends) pending += !send->ended();
  CHECK(pending >= n / 2);
  std::vector<uint8_t> in(out.size());
  for (int i = 0; i < n; ++i) {
    std::fill(in.begin(), in.end(), 0);
    REQUIRE(world.groups[1]
                ->receive(0, kP2p, 0, in.data(), in.size(), Deadline::after_ms(20'000))
                ->wait(Deadline::never())
                .is_ok());
    REQUIRE(in == out);
  }
  REQUIRE(wait_all(sends, Deadline::after_ms(20'000)).is_ok());
}

TEST_CASE("deadlines end both ends, and the message is void afterwards") {
  World world(2);
  std::vector<uint8_t> memory(1 << 20, 1);
  auto receive = world.groups[0]->receive(1, kP2p, 7, memory.data(), 4, Deadline::after_ms(200));
  Status status = receive->wait(Deadline::after_ms(5000));
  CHECK(status.code() == Code::deadline_exceeded);
  CHECK(status.message().find("rank 1") != std::string::npos);
  CHECK(receive->ended());

  auto send = world.groups[0]->send(1, kP2p, 8, memory.data(), memory.size(), Deadline::after_ms(200));
  status = send->wait(Deadline::after_ms(5000));
  CHECK(status.code() == Code::deadline_exceeded);
  CHECK(send->ended());
  // A wait that runs out is not the end of the request.
  receive = world.groups[0]->receive(1, kP2p, 9, memory.data(), 4, Deadline::after_ms(20'000));
  CHECK(receive->wait(Deadline::after_ms(50)).code() == Code::deadline_exceeded);
  CHECK_FALSE(receive->ended());
  int value = 5;
  REQUIRE(world.groups[1]->send(0, kP2p, 9, &value, 4, Deadline::after_ms(5000))->wait(Deadline::never()).is_ok());
  REQUIRE(receive->wait(Deadline::never()).is_ok());
  // The send that timed out cannot be received any more: the next one with its tag is.
  int again = 0;
  REQUIRE(world.groups[0]->send(1, kP2p, 8, &value, 4, Deadline::after_ms(5000))->wait(Deadline::never()).is_ok());
  REQUIRE(world.groups[1]->receive(0, kP2p, 8, &again, 4, Deadline::after_ms(5000))->wait(Deadline::never()).is_ok());
  CHECK(again == 5);
}

TEST_CASE("a lost rank fails what waits for it, everywhere, by name") {
  World world(3);
  std::vector<uint8_t> memory(1 << 20, 1);
  world.must([](const Call& call) { return barrier(call); });
  auto receive = world.groups[0]->receive(2, kP2p, 0, memory.data(), 4, Deadline::after_ms(20'000));
  auto send = world.groups[1]->send(2, kP2p, 0, memory.data(), memory.size(), Deadline::after_ms(20'000));
  auto other = world.groups[0]->receive(1, kP2p, 3, memory.data(), 4, Deadline::after_ms(20'000));
  world.hubs[2]->engine().close();  // as a crash looks to the others
  for (const auto& request : {receive, send}) {
    Status status = request->wait(Deadline::after_ms(5000));
    CHECK(status.code() == Code::peer_lost);
    CHECK(status.message().find("rank 2") != std::string::npos);
  }
  CHECK_FALSE(other->ended());  // between the survivors messages go on
  int value = 1;
  REQUIRE(world.groups[1]->send(0, kP2p, 3, &value, 4, Deadline::after_ms(5000))->wait(Deadline::never()).is_ok());
  REQUIRE(other->wait(Deadline::never()).is_ok());
  for (int rank : {0, 1}) {
    Scratch scratch;
    Status status = barrier({*world.groups[rank], 99, Deadline::after_ms(20'000), scratch});
    CHECK(status.code() == Code::peer_lost);
    CHECK(status.message().find("rank 2") != std::string::npos);
  }
}

TEST_CASE("a rank that leaves in order does not break what does not need it") {
  World world(3);
  world.must([](const Call& call) { return barrier(call); });  // all know each other
  int value = 4;
  REQUIRE(world.groups[2]->send(0, kP2p, 0, &value, 4, Deadline::after_ms(5000))->wait(Deadline::never()).is_ok());
  auto waiting = world.groups[1]->receive(2, kP2p, 0, &value, 4, Deadline::after_ms(20'000));
  world.groups[2]->leave(Deadline::after_ms(2000));
  Status status = waiting->wait(Deadline::after_ms(5000));
  CHECK(status.code() == Code::peer_lost);
  CHECK(status.message().find("has left") != std::string::npos);
  int got = 0;  // what it said before is still there
  REQUIRE(world.groups[0]->receive(2, kP2p, 0, &got, 4, Deadline::after_ms(5000))->wait(Deadline::never()).is_ok());
  CHECK(got == 4);
  CHECK(world.groups[0]->trouble().is_ok());
}

TEST_CASE("arguments that make no sense are refused") {
  World world(2);
  int value = 0;
  for (int peer : {0, 2, -2}) {
    CHECK(world.groups[0]->send(peer, kP2p, 0, &value, 4, Deadline::after_ms(100))->status().code() ==
          Code::invalid_argument);
    CHECK(world.groups[0]->receive(peer, kP2p, 0, &value, 4, Deadline::after_ms(100))->status().code() ==
          Code::invalid_argument);
  }
}

TEST_CASE("what the receiver took before it left has been sent") {
  World world(2);
  auto out = pattern(1 << 20, 1);
  std::vector<uint8_t> in(out.size());
  const auto deadline = Deadline::after_ms(10'000);
  auto send = world.groups[0]->send(1, Channel::collective, 1, out.data(), out.size(), deadline);
  REQUIRE(world.groups[1]->receive(0, Channel::collective, 1, in.data(), in.size(), deadline)->wait(deadline).is_ok());
  world.groups[1]->leave(deadline);  // rank 0 has heard of both when it looks
  const Status status = send->wait(deadline);
  CHECK_MESSAGE(status.is_ok(), status.to_string());
  CHECK(in == out);
}

TEST_CASE("a rank that is stopped before first contact is lost after the silence that is borne, whatever the timeout") {
  // As the kernel answers for a stopped process: the connection is made, and nobody reads.
  UniqueFd stopped(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t nbytes = sizeof address;
  REQUIRE(::bind(stopped.get(), reinterpret_cast<sockaddr*>(&address), nbytes) == 0);
  REQUIRE(::listen(stopped.get(), 16) == 0);
  REQUIRE(::getsockname(stopped.get(), reinterpret_cast<sockaddr*>(&address), &nbytes) == 0);

  HubOptions options;
  options.token = "secret";
  options.heartbeat_limit_ms = 1000;
  auto hub = Hub::create(options);
  REQUIRE(hub.is_ok());
  GroupOptions group;
  group.id = random_id();
  group.members = {(*hub)->self(), (*hub)->self()};
  group.members[1].engine = random_id();
  group.members[1].addresses = {"tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port))};
  auto joined = Group::join(*hub, group);
  REQUIRE(joined.is_ok());
  const int64_t begin = steady_ns();
  int value = 1;
  const RequestPtr send = (*joined)->send(1, kP2p, 5, &value, sizeof value, Deadline::after_ms(60'000));
  const Status status = send->wait(Deadline::never());
  CHECK(status.code() == Code::peer_lost);
  CHECK(status.message().find("rank 1") != std::string::npos);
  CHECK(status.message().find("no answer") != std::string::npos);
  Scratch scratch;
  const Status after = barrier({**joined, 1, Deadline::after_ms(60'000), scratch});
  CHECK(after.message().find("rank 1") != std::string::npos);
  CHECK(steady_ns() - begin < 5'000'000'000);
  (*joined)->leave(Deadline::after_ms(100));
}
