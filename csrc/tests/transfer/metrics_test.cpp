// Counters: the right bucket, nothing lost between threads, outcomes apart.
#include "transfer/metrics.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <numeric>
#include <thread>

#include "transfer/support.h"

using namespace torch_mooncake;
using transfer::Metrics;

namespace {

EngineStats read(const Metrics& metrics) {
  EngineStats out;
  metrics.read(out);
  return out;
}

int bucket_of(int64_t latency_ns) {
  Metrics metrics;
  metrics.op_began();
  metrics.op_ended(true, "tcp", 1, latency_ns, OpState::done);
  const auto latency = read(metrics).latencies.at(0).latency;
  return static_cast<int>(std::find(latency.begin(), latency.end(), 1) - latency.begin());
}

}  // namespace

TEST_CASE("a latency lands in the first bucket whose bound it does not exceed") {
  const int last = OpStats::kBuckets - 1;
  for (int64_t ns : {-5, 0, 1, 255, 256}) CHECK(bucket_of(ns) == 0);
  for (int i = 1; i < last; ++i) {
    int64_t bound = int64_t{1} << (OpStats::kFirstBucketLog2Ns + i);
    CHECK(bucket_of(bound) == i);
    CHECK(bucket_of(bound / 2 + 1) == i);
    CHECK(bucket_of(bound + 1) == i + 1);
  }
  CHECK(bucket_of(INT64_MAX) == last);
}

TEST_CASE("direction, transport and size class are kept apart; strange transports are mixed") {
  Metrics metrics;
  for (uint64_t nbytes : {uint64_t{0}, uint64_t{4096}, uint64_t{4097}, uint64_t{1} << 40})
    for (bool write : {false, true}) metrics.op_ended(write, "shm", nbytes, 1000, OpState::done);
  metrics.op_ended(true, "shm+tcp", 10, 1000, OpState::done);
  metrics.op_ended(true, "", 10, 1000, OpState::done);
  auto stats = read(metrics);
  REQUIRE(stats.latencies.size() == 7);
  for (auto& s : stats.latencies) {
    CHECK(s.ops == (s.up_to_nbytes == 4096 ? 2 : 1));
    CHECK(s.latency_sum_ns == 1000 * s.ops);
    CHECK((s.transport == "shm" || (s.transport == "mixed" && s.direction == "write" && s.nbytes == 20)));
  }
  metrics.bytes("rdma", 5, 0);
  metrics.bytes("rdma", 5, 7);
  metrics.bytes("rdma", 0, 0);
  CHECK(read(metrics).bytes_sent.at("rdma") == 10);
  CHECK(read(metrics).bytes_received.at("rdma") == 7);
}

TEST_CASE("threads add up, and what began and has not ended is in flight") {
  Metrics metrics;
  constexpr int kThreads = 12, kOps = 5000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kOps; ++i) {
        metrics.op_began();
        metrics.op_ended(t % 2, "tcp", 100, i, static_cast<OpState>(1 + i % 4));
      }
      metrics.op_began();
    });
  for (auto& thread : threads) thread.join();
  auto stats = read(metrics);
  CHECK(stats.ops == kThreads * kOps);
  CHECK(stats.ops_in_flight == kThreads);
  CHECK(stats.ops_failed == kThreads * kOps / 4 * 3);
  for (auto* outcomes : {&stats.reads, &stats.writes})
    for (auto n : {outcomes->done, outcomes->failed, outcomes->timeout, outcomes->cancelled})
      CHECK(n == kThreads / 2 * kOps / 4);
  uint64_t counted = 0;
  for (auto& s : stats.latencies) counted += std::accumulate(s.latency.begin(), s.latency.end(), uint64_t{0});
  CHECK(counted == kThreads * kOps / 4);
  auto began = steady_ns();
  for (int i = 0; i < 1'000'000; ++i) metrics.op_ended(true, "process_vm", 4096, i, OpState::done);
  std::printf("one op counted in %.1f ns\n", static_cast<double>(steady_ns() - began) / 1e6);
}

TEST_CASE("an engine counts its ops by outcome, and its lanes are in the statistics") {
  using namespace transfer_test;
  for (Way way : kWays) {
    CAPTURE(name_of(way));
    Pair pair(way);
    Memory source(local_of(way), 8192), target(way, 8192);
    auto local = source.register_in(*pair.a);
    auto region = target.register_in(*pair.b);
    auto remote = pair.open(region);
    for (int i = 0; i < 3; ++i) REQUIRE_OK(must(pair.a->write({{local, 0, remote, 0, 8192}}, {}))->wait());
    REQUIRE_OK(must(pair.a->read({{local, 0, remote, 0, 100}}, {}))->wait());
    REQUIRE_OK(pair.b->deregister(region, soon()));
    CHECK(!must(pair.a->read({{local, 0, remote, 0, 100}}, {}))->wait().is_ok());
    auto stats = pair.a->stats();
    CHECK(stats.writes.done == 3);
    CHECK(stats.reads.done == 1);
    CHECK(stats.reads.failed == 1);
    CHECK(stats.ops == 5);
    CHECK(stats.ops_in_flight == 0);
    REQUIRE(stats.latencies.size() == 2);
    for (auto& s : stats.latencies) CHECK(s.transport == name_of(way));
    if (way == Way::tcp || way == Way::unix_socket) {
      REQUIRE(stats.lanes.size() >= 2);
      uint64_t sent = 0;
      for (auto& lane : stats.lanes) {
        sent += lane.bytes_sent;
        CHECK(lane.peer.find("b (pid ") == 0);
      }
      CHECK(sent >= 3 * 8192);
    }
  }
}
