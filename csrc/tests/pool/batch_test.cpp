// Batches between hosts: over the engine from elsewhere, and through a node that is not the home.
#include <thread>

#include "pool/messages.h"
#include "pool/node_fixture.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {

Deadline soon(int64_t ms = 20'000) { return Deadline::after_ms(ms); }

struct Values {
  Values(const std::string& prefix, size_t n, size_t nbytes, uint64_t number) {
    for (size_t i = 0; i < n; ++i) {
      keys.push_back(prefix + std::to_string(i));
      values.push_back(pattern(number + i, nbytes));
    }
    for (std::string& value : values) iov.push_back({value.data(), value.size()});
    for (size_t i = 0; i < n; ++i) entries.push_back({keys[i], "meta", {&iov[i], 1}});
  }
  std::vector<std::string> keys, values;
  std::vector<iovec> iov;
  std::vector<PutEntry> entries;
};

void check_there(Client& client, const Values& expected) {
  auto found = client.locate_many(expected.keys, soon());
  std::vector<std::string> out;
  std::vector<iovec> iov;
  std::vector<ReadEntry> reads;
  out.reserve(found.size());
  iov.reserve(found.size());
  for (auto& object : found) {
    REQUIRE_MESSAGE(object.is_ok(), object.status().to_string());
    out.emplace_back((*object)->info().nbytes, '\0');
    iov.push_back({out.back().data(), out.back().size()});
    reads.push_back({*object, 0, {&iov.back(), 1}});
  }
  for (const Status& s : client.read_many(reads, soon())) REQUIRE_MESSAGE(s.is_ok(), s.to_string());
  CHECK(out == expected.values);
  std::vector<ObjectPtr> objects;
  for (auto& object : found) objects.push_back(*object);
  auto maps = client.map_many(objects, false, soon());
  for (size_t i = 0; i < maps.size(); ++i) {
    REQUIRE_MESSAGE(maps[i].is_ok(), maps[i].status().to_string());
    CHECK(std::memcmp(maps[i]->data.get(), expected.values[i].data(), maps[i]->nbytes) == 0);
  }
}

}  // namespace

TEST_CASE("batches on the home's host, on a member's, and from one without a node") {
  Node a(64 << 20, "host-a");
  Node b(64 << 20, "host-b", a.tcp_address);
  auto here = connect(a), far = connect(a.tcp_address, "host-c");
  ClientPtr member;
  REQUIRE(eventually([&] {
    ClientOptions options;
    options.node_address = b.unix_address;
    options.host_id = "host-b";
    options.token = "secret";
    auto r = Client::connect(options, soon());
    if (r.is_ok()) member = *r;
    return r.is_ok();
  }));
  uint64_t number = 1;
  for (Client* writer : {here.get(), far.get(), member.get()}) {
    for (size_t nbytes : {size_t{100}, size_t{5000}, size_t{40'000}}) {
      CAPTURE(nbytes);
      const size_t n = nbytes > kInlineLimit ? 70 : 700;
      for (int again = 0; again < 2; ++again) {  // new, then replaced
        Values values("k", n, nbytes, number += n);
        auto outcomes = writer->put_many(values.entries, {}, soon());
        REQUIRE(outcomes.size() == n);
        for (auto& outcome : outcomes) {
          REQUIRE_MESSAGE(outcome.is_ok(), outcome.status().to_string());
          CHECK(outcome->stored);
        }
        for (Client* reader : {here.get(), far.get(), member.get()}) check_there(*reader, values);
      }
      Values values("k", n, nbytes, 0);
      CHECK(*far->exists(values.keys, soon()) == std::vector<bool>(n, true));
      std::vector<RemoveEntry> entries;
      for (const std::string& key : values.keys) entries.push_back({key, {}});
      for (bool there : {true, false})
        for (auto& removed : writer->remove_many(entries, soon())) CHECK(*removed == there);
    }
  }
  for (Client* c : {here.get(), member.get()})
    CHECK(eventually([&] { return stats_of(*c).prepared_bytes == 0 && stats_of(*c, 1).prepared_bytes == 0; }));
}

TEST_CASE("a batch of sealed keys: what is there is neither written nor an error") {
  Node node(64 << 20);
  auto c = connect(node);
  PutOptions sealed;
  sealed.kind = Kind::sealed;
  Values some("s", 50, 40'000, 1), all("s", 100, 40'000, 1);
  for (auto& outcome : c->put_many(some.entries, sealed, soon())) CHECK(outcome->stored);
  const auto before = stats_of(*c);
  auto outcomes = c->put_many(all.entries, sealed, soon());
  for (size_t i = 0; i < outcomes.size(); ++i) CHECK(outcomes[i]->stored == (i >= 50));
  CHECK(stats_of(*c).extents == before.extents + 50);
  check_there(*c, all);
  for (auto& outcome : c->put_many(all.entries, {}, soon()))
    CHECK(outcome.status().code() == Code::invalid_argument);  // sealed: not replaced
  CHECK(stats_of(*c).prepared_bytes == 0);
}

TEST_CASE("a writer that is stopped in a batch: what it reserved stays fenced until it lets go") {
  Node node(64 << 20);
  auto c = connect(node);
  Process writer(
      [&] {
        auto mine = connect(node);
        Values values("late", 20, 1 << 20, 1);
        size_t stored = 0;
        for (auto& outcome : mine->put_many(values.entries, {}, Deadline::after_ms(500))) stored += outcome.is_ok();
        return stored == 0 ? 0 : 1;
      },
      "client.reserved=stop");
  REQUIRE(writer.stopped());
  CHECK(stats_of(*c).prepared_bytes >= (20u << 20));
  CHECK(eventually([&] { return stats_of(*c).prepared_bytes == 0; }));
  CHECK(stats_of(*c).limbo_bytes >= (20u << 20));
  ::kill(writer.pid, SIGCONT);
  CHECK(writer.wait() == 0);
  CHECK(eventually([&] { return stats_of(*c).limbo_bytes == 0; }));
  CHECK(c->keys("", soon())->empty());
}
