// The pool's messages: what was encoded is decoded, and no bytes whatever make a decoder accept what is out of bounds.
#include <doctest/doctest.h>

#include <random>

#include "pool/batch_messages.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

CommitCall sample_commit() {
  CommitCall c;
  c.head.view = 7;
  c.head.shard = 99;
  c.head.key = "policy/wq";
  c.head.kind = Kind::sealed;
  c.head.part = 1;
  c.head.parts = 3;
  c.head.timeout_ms = 1234;
  c.if_exists = IfExists::keep;
  c.replicas = {{{1, 2, 3}, {5, 6}}, {{9}, {7, 8}}};
  c.crc32c = 0xdeadbeef;
  return c;
}
LookupAnswer sample_lookup() {
  LookupAnswer a;
  a.view = 3;
  a.entries.resize(2);
  LookupEntry& e = a.entries[1];
  e.found = true;
  e.version = {4, 5};
  e.parts = 2;
  e.places.resize(2);
  e.places[1].part = 1;
  e.places[1].at = {{7}, {8, 9}};
  e.places[1].description = Description{10, "meta", "label", 11u, {{0, 4096, 10}}, {}, {}};
  return a;
}
View sample_view() {
  View v;
  v.number = 12;
  v.seed = 13;
  v.home = {1};
  v.nodes.push_back({{1}, {2}, "host", {"unix:///a", "tcp://b:1"}, 100, 50});
  return v;
}

// Messages about many keys; their texts are views of these.
BatchHead sample_head() {
  return {3, Kind::sealed, IfExists::keep, "v1", "parent", 500, Pin::soft, true, {1, 2, 3}, 1000};
}
ReserveManyCall sample_reserve_many() { return {sample_head(), 77, {{1, "a", "meta", 10}, {4095, "bb", "", 0}}}; }
PutManyCall sample_put_many() {
  PutManyCall c{sample_head(), {}};
  c.items.push_back({0, 1, "a", {{{1}, {2, 3}}, {{4}, {5, 6}}}, 7u, {}, {}});
  c.items.push_back({5, 2, "b", {}, {}, "meta", "data"});
  return c;
}
RemoveManyCall sample_remove_many() { return {3, 1000, {{1, "a", {}}, {2, "b", Version{4, 5}}}, Pin::hard}; }

template <typename T>
void check_cut_and_flipped(const std::string& body) {
  for (size_t n = 0; n < body.size(); ++n) CHECK_FALSE(decode<T>(body.substr(0, n)).is_ok());
  CHECK_FALSE(decode<T>(body + "x").is_ok());
  std::mt19937 rng(1);
  for (int i = 0; i < 20'000; ++i) {
    std::string bad = body;
    for (int flips = 0; flips < 1 + i % 3; ++flips) bad[rng() % bad.size()] = static_cast<char>(rng());
    auto r = decode<T>(bad);  // the sanitizers watch
    if (r.is_ok()) CHECK(decode<T>(encode(*r)).is_ok());
  }
}

}  // namespace

TEST_CASE("round trips") {
  auto c = decode<CommitCall>(encode(sample_commit()));
  REQUIRE(c.is_ok());
  CHECK(c->head.key == "policy/wq");
  CHECK(c->head.kind == Kind::sealed);
  CHECK(c->head.parts == 3);
  CHECK(c->if_exists == IfExists::keep);
  CHECK(c->replicas[1].extent.generation == 8);
  CHECK(c->crc32c == 0xdeadbeef);
  auto a = decode<LookupAnswer>(encode(sample_lookup()));
  REQUIRE(a.is_ok());
  CHECK_FALSE(a->entries[0].found);
  CHECK(a->entries[1].version == Version{4, 5});
  CHECK_FALSE(a->entries[1].places[0].description);
  CHECK(a->entries[1].places[1].description->pieces[0].offset == 4096);
  auto v = decode<View>(encode(sample_view()));
  REQUIRE(v.is_ok());
  CHECK(v->nodes[0].addresses[1] == "tcp://b:1");
  CHECK(v->find({1})->used_bytes == 50);
  CHECK(v->find({5}) == nullptr);
  const std::string body = encode(sample_put_many());
  auto p = decode<PutManyCall>(body);
  REQUIRE(p.is_ok());
  CHECK(p->head.label == "v1");
  CHECK(p->head.kind == Kind::sealed);
  CHECK(p->items[0].replicas[1].extent.generation == 6);
  CHECK(p->items[0].crc32c == 7u);
  CHECK(p->items[1].key == "b");
  CHECK(p->items[1].meta == "meta");
  CHECK(p->items[1].data == "data");
  CHECK(txn_of(p->head.txn, 0) == p->head.txn);
  CHECK(txn_of(p->head.txn, 1) != txn_of(p->head.txn, 2));
  PutManyAnswer outcomes{{{Code::ok, "", {{1, 2}, false}}, {Code::pool_full, "no room", {}}}};
  auto o = decode<PutManyAnswer>(encode(outcomes));
  REQUIRE(o.is_ok());
  CHECK(o->items[0].answer.version == Version{1, 2});
  CHECK(o->items[1].code == Code::pool_full);
  CHECK(o->items[1].message == "no room");
  Mark mark{Mark::What::supersede, 4, 5, {6, 7}, {8}, {9, 10}, {}};
  mark.binding = Binding{3, 64, Kind::sealed, "k", "meta", "label", "parent"};
  CHECK(decode<Mark>(encode(mark))->binding->parent == "parent");
  CHECK(decode<Mark>(encode(mark))->binding->kind == Kind::sealed);
  CHECK(decode<Mark>(encode(mark))->extent.generation == 7);
}

TEST_CASE("cut, lengthened and flipped bytes") {
  check_cut_and_flipped<CommitCall>(encode(sample_commit()));
  check_cut_and_flipped<LookupAnswer>(encode(sample_lookup()));
  check_cut_and_flipped<View>(encode(sample_view()));
  check_cut_and_flipped<ReserveManyCall>(encode(sample_reserve_many()));
  check_cut_and_flipped<PutManyCall>(encode(sample_put_many()));
  check_cut_and_flipped<RemoveManyCall>(encode(sample_remove_many()));
  check_cut_and_flipped<ExistsCall>(encode(ExistsCall{3, 1000, {"a", "bb", ""}, true}));
  check_cut_and_flipped<BeatAnswer>(encode(BeatAnswer{sample_view(), {{"kv/", 1 << 20, 7}}}));
  check_cut_and_flipped<EventsAnswer>(
      encode(EventsAnswer{1, 2, false, {{{3}, "k", KeyChange::moved, Kind::sealed, {4, 5}, Tier::ssd}}}));
}

TEST_CASE("random bytes to every decoder") {
  std::mt19937 rng(2);
  for (int i = 0; i < 20'000; ++i) {
    std::string body(rng() % 200, '\0');
    for (char& c : body) c = static_cast<char>(rng() % 8 ? rng() % 4 : rng());
    if (!body.empty()) body[0] = static_cast<char>(kMessageFormat);
    (void)decode<AttachRequest>(body).is_ok();
    (void)decode<AttachAnswer>(body).is_ok();
    (void)decode<JoinRequest>(body).is_ok();
    (void)decode<AnnounceRequest>(body).is_ok();
    (void)decode<BeatAnswer>(body).is_ok();
    (void)decode<EvictedReport>(body).is_ok();
    (void)decode<ReserveCall>(body).is_ok();
    (void)decode<PutManyCall>(body).is_ok();
    (void)decode<PutManyAnswer>(body).is_ok();
    (void)decode<ReserveManyCall>(body).is_ok();
    (void)decode<ReserveManyAnswer>(body).is_ok();
    (void)decode<RemoveManyCall>(body).is_ok();
    (void)decode<RemoveManyAnswer>(body).is_ok();
    (void)decode<ExistsCall>(body).is_ok();
    (void)decode<ExistsAnswer>(body).is_ok();
    (void)decode<TouchCall>(body).is_ok();
    (void)decode<LookupCall>(body).is_ok();
    (void)decode<DescribeAnswer>(body).is_ok();
    (void)decode<KeysAnswer>(body).is_ok();
    (void)decode<QuotaCall>(body).is_ok();
    (void)decode<EventsAnswer>(body).is_ok();
  }
}

TEST_CASE("limits") {
  CommitCall c = sample_commit();
  c.head.key = std::string(kMaxKeyBytes + 1, 'k');
  CHECK(decode<CommitCall>(encode(c)).status().code() == Code::invalid_argument);
  c = sample_commit();
  c.if_exists = static_cast<IfExists>(9);
  CHECK_FALSE(decode<CommitCall>(encode(c)).is_ok());
  Description d;
  d.pieces.resize(kMaxPieces + 1);
  DescribeAnswer many;
  many.descriptions = {d};
  CHECK_FALSE(decode<DescribeAnswer>(encode(many)).is_ok());
  // Numbers of parts make vectors.
  LookupAnswer found = sample_lookup();
  for (uint32_t parts : {0u, static_cast<uint32_t>(kMaxParts) + 1, UINT32_MAX}) {
    found.entries[1].parts = parts;
    CHECK_FALSE(decode<LookupAnswer>(encode(found)).is_ok());
  }
  Announced one;
  one.key = "k";
  for (const auto& [part, parts] : {std::pair{0u, 0u}, {1u, 1u}, {0u, UINT32_MAX}}) {
    one.part = part;
    one.parts = parts;
    CHECK_FALSE(decode<AnnounceRequest>(encode(AnnounceRequest{1, {1}, {one}, true, true})).is_ok());
  }
  one.part = 2;
  one.parts = 3;
  CHECK(decode<AnnounceRequest>(encode(AnnounceRequest{1, {1}, {one}, true, true})).is_ok());
  std::string old = encode(sample_view());
  old[0] = 1;
  CHECK(decode<View>(old).status().code() == Code::version_mismatch);
  // A count that the rest of the message cannot hold allocates nothing.
  ByteWriter absurd;
  absurd.put(kMessageFormat).put<uint64_t>(1).put<uint32_t>(0xffffffff);
  CHECK_FALSE(decode<LookupCall>(absurd.take()).is_ok());
}
