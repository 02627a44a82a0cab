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

TEST_CASE("a batch with replicas: each value on as many hosts, and on one when the other is lost") {
  Node a(128 << 20, "host-a");
  Node b(128 << 20, "host-b", a.tcp_address);
  auto here = connect(a), far = connect(a.tcp_address, "host-c");
  REQUIRE(eventually([&] { return here->stat(soon()).value().nodes.size() == 2; }));
  PutOptions two;
  two.replicas = 2;
  uint64_t number = 1;
  std::vector<std::unique_ptr<Values>> all;
  for (Client* writer : {here.get(), far.get()}) {
    for (size_t nbytes : {size_t{0}, size_t{100}, size_t{5000}, size_t{300'000}}) {
      CAPTURE(nbytes);
      const size_t n = nbytes > kInlineLimit ? 20 : 600;
      auto& values =
          *all.emplace_back(std::make_unique<Values>("r" + std::to_string(all.size()) + "/", n, nbytes, number += n));
      for (int again = 0; again < 2; ++again)
        for (auto& outcome : writer->put_many(values.entries, two, soon())) {
          REQUIRE_MESSAGE(outcome.is_ok(), outcome.status().to_string());
          CHECK(outcome->stored);
        }
      check_there(*here, values);
      check_there(*far, values);
      for (auto& object : far->locate_many(values.keys, soon())) CHECK((*object)->info().replicas.size() == 2);
    }
  }
  CHECK(eventually([&] { return stats_of(*here).prepared_bytes == 0 && stats_of(*here, 1).prepared_bytes == 0; }));
  CHECK(stats_of(*here).extents == stats_of(*here, 1).extents);
  // More than there are hosts: refused for each, or as many as there are.
  Values more("m", 10, 5000, number);
  PutOptions three;
  three.replicas = 3;
  for (auto& outcome : here->put_many(more.entries, three, soon())) CHECK(outcome.status().code() == Code::unsupported);
  three.replicas_lenient = true;
  for (auto& outcome : here->put_many(more.entries, three, soon())) CHECK(outcome->stored);
  for (auto& object : here->locate_many(more.keys, soon())) CHECK((*object)->info().replicas.size() == 2);
  // Sealed: what is there is written nowhere again.
  PutOptions sealed = two;
  sealed.kind = Kind::sealed;
  Values some("s", 30, 5000, 1), every("s", 60, 5000, 1);
  for (auto& outcome : here->put_many(some.entries, sealed, soon())) CHECK(outcome->stored);
  auto outcomes = here->put_many(every.entries, sealed, soon());
  for (size_t i = 0; i < outcomes.size(); ++i) CHECK(outcomes[i]->stored == (i >= 30));
  CHECK(stats_of(*here).prepared_bytes == 0);

  b.stop();
  for (auto& values : all) check_there(*here, *values);
  check_there(*here, more);
}

TEST_CASE("a batch with replicas, one host of which is full: nothing half, nothing kept") {
  Node a(128 << 20, "host-a");
  Node b(16 << 20, "host-b", a.tcp_address);
  auto here = connect(a);
  REQUIRE(eventually([&] { return here->stat(soon()).value().nodes.size() == 2; }));
  PutOptions two;
  two.replicas = 2;
  two.pin = Pin::hard;  // so that nothing makes room
  Values values("p", 40, 1 << 20, 1);
  size_t stored = 0;
  const auto outcomes = here->put_many(values.entries, two, soon(3000));
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (outcomes[i].is_ok()) {
      ++stored;
      CHECK((*here->locate(values.keys[i], {}, soon()))->info().replicas.size() == 2);
    } else {
      const Code code = outcomes[i].status().code();
      CHECK_MESSAGE((code == Code::pool_full || code == Code::deadline_exceeded), outcomes[i].status().to_string());
      CHECK_FALSE((*here->exists({&values.keys[i], 1}, soon()))[0]);
    }
  }
  CHECK(stored > 4);
  CHECK(stored < 17);
  CHECK(eventually([&] {
    return stats_of(*here).prepared_bytes == 0 && stats_of(*here, 1).prepared_bytes == 0 &&
           stats_of(*here).extents == stored && stats_of(*here, 1).extents == stored;
  }));
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
