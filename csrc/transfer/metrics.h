// Counters of one engine, cheap enough for ops of a few microseconds: relaxed adds on a shard that few threads share.
//
// Safe from any thread; nothing locks. read() adds the shards up: each number is exact once its writers are done, and
// numbers that belong together may be one op apart while they are not.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string_view>

#include "transfer/engine.h"

namespace torch_mooncake::transfer {

class Metrics {
 public:
  Metrics() = default;
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void op_began() { add(mine().begun, 1); }
  // `transport`: what carried it; "" or several joined by "+" count as "mixed".
  void op_ended(bool write, std::string_view transport, uint64_t nbytes, int64_t latency_ns, OpState outcome);
  // Payload bytes that this process sent, or applied.
  void bytes(std::string_view transport, uint64_t sent, uint64_t received);
  void resent(uint64_t slices) { add(mine().resent, slices); }
  // A lane or rail was taken out while its peer lives; its work goes elsewhere.
  void failover() { add(mine().failovers, 1); }

  void read(EngineStats& out) const;

 private:
  static constexpr std::array<std::string_view, 11> kTransports = {
      "local", "shm", "process_vm", "unix", "tcp", "file", "cuda", "cuda_ipc", "staged", "rdma", "mixed"};
  static constexpr int kShards = 8, kDirections = 2, kOutcomes = 4;
  static constexpr int kClasses = OpStats::kClassBytes.size(), kBuckets = OpStats::kBuckets;
  using Counter = std::atomic<uint64_t>;

  struct Histogram {
    std::array<Counter, kBuckets> buckets{};
    Counter sum_ns{0}, nbytes{0};
  };
  // What one transport did; made when it is first used.
  struct Table {
    std::array<std::array<Histogram, kClasses>, kDirections> ops;
    Counter sent{0}, received{0};
  };
  struct alignas(64) Shard {
    std::array<std::atomic<Table*>, kTransports.size()> tables{};
    std::array<std::array<Counter, kOutcomes>, kDirections> outcomes{};
    Counter begun{0}, resent{0}, failovers{0};
  };

  static void add(Counter& counter, uint64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }
  Shard& mine();
  Table& table(std::string_view transport);

  std::array<Shard, kShards> shards_;
};

}  // namespace torch_mooncake::transfer
