// Batches that meet trouble: late answers, nodes that are gone, a full pool, and messages that would be too long.
#include <thread>

#include "pool/client_impl.h"
#include "pool/node_fixture.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {

constexpr size_t kBytes = 40'000;  // too long to ride inside a message

Deadline soon(int64_t ms = 20'000) { return Deadline::after_ms(ms); }

struct Puts {
  Puts(const std::string& prefix, size_t n, size_t nbytes, std::string meta = "m")
      : value(pattern(n, nbytes)), meta(std::move(meta)), iov{value.data(), nbytes} {
    for (size_t i = 0; i < n; ++i) keys.push_back(prefix + std::to_string(i));
    for (const std::string& key : keys) entries.push_back({key, this->meta, {&iov, 1}});
  }
  std::string value, meta;
  iovec iov;
  std::vector<std::string> keys;
  std::vector<PutEntry> entries;
};

}  // namespace

TEST_CASE("a reservation that is answered too late is given back, though nobody knows where it is") {
  Node node(64 << 20);
  auto c = connect(node);
  put(*c, "before", pattern(1, kBytes));
  const pid_t worker = node.worker();
  Puts batch("k", 20, kBytes);
  ::kill(worker, SIGSTOP);
  REQUIRE(eventually([&] { return state_of(worker) == 'T'; }));
  for (auto& outcome : c->put_many(batch.entries, {}, soon(300)))
    CHECK(outcome.status().code() == Code::deadline_exceeded);
  CHECK(try_put(*c, "single", pattern(2, kBytes), {}, 300).status().code() == Code::deadline_exceeded);
  ::kill(worker, SIGCONT);
  CHECK(eventually([&] {
    const auto s = stats_of(*c);
    return s.reservations >= 21 && s.prepared_bytes == 0 && s.limbo_bytes == 0;
  }));
  CHECK(stats_of(*c).extents == 1);
}

TEST_CASE("metadata as long as it may be, in a batch: no message is too long") {
  Node node(64 << 20);
  auto c = connect(node);
  for (size_t nbytes : {size_t{8}, kBytes}) {
    Puts batch("k", 40, nbytes, std::string(kMaxMetaBytes, 'm'));
    for (auto& outcome : c->put_many(batch.entries, {}, soon()))
      CHECK_MESSAGE(outcome.is_ok(), outcome.status().to_string());
    auto found = c->locate_many({&batch.keys[39], 1}, soon());
    REQUIRE_MESSAGE(found[0].is_ok(), found[0].status().to_string());
    CHECK((*found[0])->info().meta == batch.meta);
  }
}

TEST_CASE("a node that is gone is waited for once in a batch") {
  Node node(64 << 20);
  auto writer = connect(node), reader = connect(node.tcp_address, "host-b");
  Puts batch("k", 8, kBytes);
  for (auto& outcome : writer->put_many(batch.entries, {}, soon())) REQUIRE(outcome.is_ok());
  auto found = reader->locate_many(batch.keys, soon());
  std::vector<std::string> out(found.size(), std::string(kBytes, 0));
  std::vector<iovec> iov;
  for (std::string& o : out) iov.push_back({o.data(), o.size()});
  std::vector<ReadEntry> reads;
  for (size_t i = 0; i < found.size(); ++i) {
    REQUIRE(found[i].is_ok());
    reads.push_back({*found[i], 0, {&iov[i], 1}});
  }
  node.stop();
  const int64_t start_ns = steady_ns();
  std::vector<Status> read, put;
  std::thread reading([&] { read = reader->read_many(reads, soon(120'000)); });
  for (auto& outcome : writer->put_many(batch.entries, {}, soon(120'000))) put.push_back(outcome.status());
  reading.join();
  for (const Status& s : read) CHECK_MESSAGE(s.code() == Code::pool_unavailable, s.to_string());
  for (const Status& s : put) CHECK_MESSAGE(s.code() == Code::pool_unavailable, s.to_string());
  CHECK(steady_ns() - start_ns < 2 * kReconnectMs * 1'000'000);
}

TEST_CASE("a member that evicts more at once than a message holds: all of it is forgotten") {
  constexpr size_t kMany = 80'000;
  static_assert(kMany > kMaxBatch);
  Node leader(16 << 20);
  Node member(64 << 20, "host-b", leader.tcp_address);
  auto there = connect(member, "host-b");
  REQUIRE(eventually([&] { return there->stat(soon())->nodes.size() == 2; }));
  Puts batch("k", kMany, 100);
  for (auto& outcome : there->put_many(batch.entries, {}, soon(60'000)))
    REQUIRE_MESSAGE(outcome.is_ok(), outcome.status().to_string());
  const std::string large = pattern(1, 63 << 20);
  put(*there, "large", large);
  // The directory knows what the node has, and no more.
  CHECK(eventually([&] { return there->stat(soon())->keys < kMany - kMaxBatch; }));
  const auto present = there->exists(batch.keys, soon(60'000));
  REQUIRE(present.is_ok());
  const auto left = static_cast<uint64_t>(std::count(present->begin(), present->end(), true));
  const auto stats = there->stat(soon());
  uint64_t extents = 0;
  for (const auto& node : stats->nodes) extents += node.extents;
  CHECK(stats->keys == left + 1);
  CHECK(extents == left + 1);
  CHECK(*get(*there, "large") == large);
}
