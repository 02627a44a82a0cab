#include "transfer/metrics.h"

#include <algorithm>
#include <bit>

namespace torch_mooncake::transfer {
namespace {

// Threads take the shards in turn.
unsigned thread_number() {
  static std::atomic<unsigned> next{0};
  thread_local const unsigned number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

int class_of(uint64_t nbytes) {
  int i = 0;
  while (nbytes > OpStats::kClassBytes[i]) ++i;
  return i;
}

// The first bucket whose bound the latency does not exceed.
int bucket_of(int64_t latency_ns) {
  auto ns = static_cast<uint64_t>(std::max<int64_t>(latency_ns, 1));
  int bits = std::bit_width(ns - 1);  // 2^bits is the least power of two >= ns
  return std::clamp(bits - OpStats::kFirstBucketLog2Ns, 0, OpStats::kBuckets - 1);
}

}  // namespace

Metrics::~Metrics() {
  for (auto& shard : shards_)
    for (auto& table : shard.tables) delete table.load();
}

Metrics::Shard& Metrics::mine() { return shards_[thread_number() % kShards]; }

Metrics::Table& Metrics::table(std::string_view transport) {
  auto it = std::find(kTransports.begin(), kTransports.end(), transport);
  size_t index = it == kTransports.end() ? kTransports.size() - 1 : it - kTransports.begin();
  auto& slot = mine().tables[index];
  if (Table* known = slot.load(std::memory_order_acquire)) return *known;
  auto made = std::make_unique<Table>();
  Table* none = nullptr;
  if (!slot.compare_exchange_strong(none, made.get(), std::memory_order_acq_rel)) return *none;
  return *made.release();
}

void Metrics::op_ended(bool write, std::string_view transport, uint64_t nbytes, int64_t latency_ns, OpState outcome) {
  add(mine().outcomes[write][static_cast<int>(outcome) - static_cast<int>(OpState::done)], 1);
  if (outcome != OpState::done) return;
  auto& histogram = table(transport).ops[write][class_of(nbytes)];
  add(histogram.buckets[bucket_of(latency_ns)], 1);
  add(histogram.sum_ns, std::max<int64_t>(latency_ns, 0));
  add(histogram.nbytes, nbytes);
}

void Metrics::bytes(std::string_view transport, uint64_t sent, uint64_t received) {
  if (sent == 0 && received == 0) return;
  auto& counters = table(transport);
  add(counters.sent, sent);
  add(counters.received, received);
}

void Metrics::read(EngineStats& out) const {
  uint64_t ended = 0, begun = 0;
  for (int write = 0; write < kDirections; ++write) {
    auto& outcomes = write ? out.writes : out.reads;
    uint64_t* counts[kOutcomes] = {&outcomes.done, &outcomes.failed, &outcomes.timeout, &outcomes.cancelled};
    for (auto& shard : shards_)
      for (int i = 0; i < kOutcomes; ++i) *counts[i] += shard.outcomes[write][i].load(std::memory_order_relaxed);
    ended += outcomes.done + outcomes.failed + outcomes.timeout + outcomes.cancelled;
  }
  for (auto& shard : shards_) {
    begun += shard.begun.load(std::memory_order_relaxed);
    out.resent_slices += shard.resent.load(std::memory_order_relaxed);
    out.failovers += shard.failovers.load(std::memory_order_relaxed);
  }
  out.ops = ended;
  out.ops_failed = ended - out.reads.done - out.writes.done;
  out.ops_in_flight = begun > ended ? begun - ended : 0;
  for (size_t t = 0; t < kTransports.size(); ++t) {
    std::vector<std::array<OpStats, kClasses>> sums(kDirections);  // (as an array it crashes clang 14)
    uint64_t sent = 0, received = 0;
    for (auto& shard : shards_) {
      const Table* table = shard.tables[t].load(std::memory_order_acquire);
      if (table == nullptr) continue;
      sent += table->sent.load(std::memory_order_relaxed);
      received += table->received.load(std::memory_order_relaxed);
      for (int write = 0; write < kDirections; ++write) {
        for (int c = 0; c < kClasses; ++c) {
          auto& from = table->ops[write][c];
          auto& to = sums[write][c];
          for (int b = 0; b < kBuckets; ++b) to.latency[b] += from.buckets[b].load(std::memory_order_relaxed);
          to.latency_sum_ns += from.sum_ns.load(std::memory_order_relaxed);
          to.nbytes += from.nbytes.load(std::memory_order_relaxed);
        }
      }
    }
    std::string name(kTransports[t]);
    if (sent) out.bytes_sent[name] = sent;
    if (received) out.bytes_received[name] = received;
    for (int write = 0; write < kDirections; ++write) {
      for (int c = 0; c < kClasses; ++c) {
        auto& sum = sums[write][c];
        for (auto n : sum.latency) sum.ops += n;
        if (sum.ops == 0) continue;
        sum.direction = write ? "write" : "read";
        sum.transport = name;
        sum.up_to_nbytes = OpStats::kClassBytes[c];
        out.latencies.push_back(std::move(sum));
      }
    }
  }
}

}  // namespace torch_mooncake::transfer
