// Replicas that were lost and are made again, as the home sees it.
#include <doctest/doctest.h>

#include "pool/home_model.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {

struct Three {
  Home home{1, 7};
  ModelDonor donors[3];
  std::map<RequestId, Status> done;
  uint64_t next = 1;
  int held = -1;  // marks to this donor are kept back
  std::vector<SendMark> kept;

  Three() {
    for (uint8_t n : {0, 1, 2}) home.announce(node(n), {});
  }
  void pump() {
    for (auto actions = home.take_actions(); !actions.empty(); actions = home.take_actions())
      for (auto& action : actions) {
        if (auto* send = std::get_if<SendMark>(&action)) {
          if (send->node[0] == held)
            kept.push_back(*send);
          else
            apply(*send);
        } else if (auto* committed = std::get_if<CommitDone>(&action)) {
          done[committed->request] = committed->result.status();
        } else if (auto* removed = std::get_if<RemoveDone>(&action)) {
          done[removed->request] = removed->result.status();
        }
      }
    CHECK(home.check().is_ok());
  }
  void apply(const SendMark& send) {
    const Status s = donors[send.node[0]].apply(send.mark);
    if (send.id) home.mark_done(send.id, s);
  }
  void let_go() {
    held = -1;
    for (const SendMark& send : std::exchange(kept, {})) apply(send);
    pump();
  }
  void put(const std::string& key, uint64_t value, std::vector<int> on, uint64_t ttl_ms = 0) {
    CommitCall c;
    c.head.view = home.view();
    c.head.key = key;
    c.head.txn = txn_of(next);
    c.ttl_ms = ttl_ms;
    for (int d : on)
      c.replicas.push_back({node(uint8_t(d)), donors[d].reserve(key, Kind::named, c.head.txn, 0, 1, value)});
    home.commit(next++, c, INT64_MAX);
    pump();
  }
  // Of the key's first replica, to that donor.
  RequestId copy(const MissingCopy& what, const std::string& key, int to) {
    const ReplicaRef& from = what.from.at(0);
    const TxnId txn = txn_of(1000 + next);
    const uint64_t value = donors[from.node[0]].at(from.extent)->value;
    const ExtentRef extent = donors[to].reserve(key, Kind::named, txn, 0, 1, value);
    donors[to].at(extent)->expires_ms = donors[from.node[0]].at(from.extent)->expires_ms;
    home.add_copy(next, what, {node(uint8_t(to)), extent}, txn, {});
    pump();
    return next++;
  }
  std::vector<MissingCopy> lacks(const std::string& key) const { return home.missing(home.hash(key)); }
  std::vector<int> places(const std::string& key) const {
    std::vector<int> out;
    for (const auto& [part, at] : home.find(key).places) out.push_back(at.node[0]);
    return out;
  }
};

}  // namespace

TEST_CASE("what loses a replica with its donor is told once, and is whole again with a copy") {
  Three t;
  t.put("two", 1, {0, 1});
  t.put("one", 2, {1});
  t.put("gone", 3, {0});
  CHECK(t.home.take_short(9).empty());
  t.home.expel(node(0));
  t.pump();
  REQUIRE(t.home.short_keys() == 1);
  CHECK(t.home.take_short(9) == std::vector{t.home.hash("two")});
  CHECK(t.home.take_short(9).empty());
  const Version version = t.home.find("two").version;
  const auto lacks = t.lacks("two");
  REQUIRE(lacks.size() == 1);
  CHECK(lacks[0].from.size() == 1);
  CHECK(t.done.at(t.copy(lacks[0], "two", 2)).is_ok());
  CHECK(t.places("two") == std::vector{1, 2});
  CHECK(t.home.find("two").version == version);
  CHECK(t.donors[2].extents.begin()->second.a.state == ExtentState::final);
  CHECK(t.donors[2].extents.begin()->second.a.version == version);
  CHECK(t.lacks("two").empty());
  CHECK(t.lacks("one").empty());
  t.home.expel(node(1));
  t.pump();
  CHECK(t.places("two") == std::vector{2});
  CHECK(t.home.find("one").state == Found::State::missing);
}

TEST_CASE("a copy of what has been replaced meanwhile is dropped") {
  Three t;
  t.put("k", 1, {0, 1});
  t.home.expel(node(0));
  t.pump();
  const auto lacks = t.lacks("k");
  t.put("k", 2, {1});
  // The bytes were read before that; the extent is not there any more.
  const ExtentRef extent = t.donors[2].reserve("k", Kind::named, txn_of(77), 0, 1, 1);
  t.home.add_copy(500, lacks[0], {node(2), extent}, txn_of(77), {});
  t.pump();
  CHECK(t.done.at(500).code() == Code::key_not_found);
  CHECK(t.donors[2].extents.empty());
  CHECK(t.places("k") == std::vector{1});
}

TEST_CASE("a replace that comes while a copy is marked supersedes the copy too") {
  Three t;
  t.put("k", 1, {0, 1});
  t.home.expel(node(0));
  t.pump();
  t.held = 2;
  const RequestId copy = t.copy(t.lacks("k")[0], "k", 2);
  CHECK_FALSE(t.done.count(copy));
  t.put("k", 2, {1});  // waits for its turn
  CHECK(t.home.find("k").state == Found::State::found);
  t.let_go();
  CHECK(t.done.at(copy).is_ok());
  CHECK(t.donors[2].extents.empty());
  CHECK(t.places("k") == std::vector{1});
}

TEST_CASE("an object that goes while its copy is marked stays gone") {
  Three t;
  t.put("k", 1, {0, 1});
  t.home.expel(node(0));
  t.pump();
  t.held = 2;
  const RequestId copy = t.copy(t.lacks("k")[0], "k", 2);
  t.home.evicted(node(1), "k", t.donors[1].extents.begin()->second.a.extent);
  t.donors[1].extents.clear();
  t.pump();
  CHECK(t.home.find("k").state == Found::State::missing);
  t.let_go();
  CHECK(t.done.at(copy).code() == Code::key_not_found);
  CHECK(t.home.find("k").state == Found::State::missing);
  CHECK(t.donors[2].extents.empty());
  CHECK(t.home.idle());
}

TEST_CASE("the donor of a copy that is lost before its mark: nothing has changed") {
  Three t;
  t.put("k", 1, {0, 1});
  t.home.expel(node(0));
  t.pump();
  t.held = 2;
  const RequestId copy = t.copy(t.lacks("k")[0], "k", 2);
  t.home.expel(node(2));
  t.pump();
  CHECK_FALSE(t.done.at(copy).is_ok());
  CHECK(t.places("k") == std::vector{1});
  CHECK(t.home.idle());
}

TEST_CASE("a home that was lost: another knows from the donors what lacks a replica, and counts copies as such") {
  Three t;
  t.put("k", 1, {0, 1});
  t.put("l", 2, {0, 1, 2});
  auto rebuild = [&](std::vector<int> donors) {
    t.home = Home(t.home.view() + 1, 7);
    for (int n : donors) t.home.expect(node(uint8_t(n)));
    for (int n : donors) t.home.announce(node(uint8_t(n)), t.donors[n].announce());
    t.pump();
  };
  rebuild({1, 2});
  CHECK(t.home.short_keys() == 2);
  CHECK(t.done.at(t.copy(t.lacks("k")[0], "k", 2)).is_ok());
  rebuild({1, 2});
  CHECK(t.home.take_short(9) == std::vector{t.home.hash("l")});
  CHECK(t.places("k").size() == 2);
  t.put("k", 3, {1});
  CHECK(t.donors[2].extents.size() == 1);  // l's
}

TEST_CASE("what a leaving donor alone has") {
  Three t;
  t.put("a", 1, {0});
  t.put("b", 2, {0, 1});
  t.put("c", 3, {1});
  CHECK(t.home.only_on(node(0), {node(0)}) == std::vector{t.home.hash("a")});
  CHECK(t.home.only_on(node(2), {node(2)}).empty());
  const auto lacks = t.home.missing(t.home.hash("a"), {node(0)});
  REQUIRE(lacks.size() == 1);
  CHECK(t.done.at(t.copy(lacks[0], "a", 2)).is_ok());
  CHECK(t.home.only_on(node(0), {node(0)}).empty());
  t.home.expel(node(0));
  t.pump();
  CHECK(t.places("a") == std::vector{2});
}

TEST_CASE("what donors that leave together share is on neither that stays") {
  Three t;
  t.put("both", 1, {0, 1});
  t.put("all", 2, {0, 1, 2});
  t.put("two", 3, {1, 2});
  const std::set<NodeId> leaving{node(0), node(1)};
  const std::vector both{t.home.hash("both")};
  CHECK(t.home.only_on(node(0), leaving) == both);
  CHECK(t.home.only_on(node(1), leaving) == both);
  const auto lacks = t.home.missing(both[0], leaving);
  REQUIRE(lacks.size() == 1);
  CHECK(t.done.at(t.copy(lacks[0], "both", 2)).is_ok());
  for (uint8_t n : {0, 1}) CHECK(t.home.only_on(node(n), leaving).empty());
  for (uint8_t n : {0, 1}) t.home.expel(node(n));
  t.pump();
  for (const char* key : {"both", "all", "two"}) CHECK(t.places(key) == std::vector{2});
}

TEST_CASE("a copy of what expires, expires with it") {
  Three t;
  t.put("k", 1, {0, 1}, 1000);
  t.home.expel(node(0));
  t.pump();
  t.home.at(400'000'000);
  CHECK(t.done.at(t.copy(t.lacks("k")[0], "k", 2)).is_ok());
  CHECK(t.donors[2].extents.begin()->second.expires_ms == 1000);
  t.home.tick(1'000'000'000);
  t.pump();
  CHECK(t.home.find("k").state == Found::State::missing);
  CHECK(t.donors[1].extents.empty());
  CHECK(t.donors[2].extents.empty());
}

TEST_CASE("a pin is of all replicas, of those that are made later, and of what a rebuilt home finds") {
  Three t;
  t.put("k", 1, {0, 1});
  const auto pins = [&](int donor) {
    std::vector<Pin> out;
    for (const auto& [index, e] : t.donors[donor].extents) out.push_back(e.a.pin);
    return out;
  };
  t.home.pin(t.next, "k", Pin::hard, INT64_MAX);
  t.pump();
  CHECK(t.done.at(t.next++).is_ok());
  CHECK(t.home.find("k").pin == Pin::hard);
  CHECK(pins(0) == std::vector{Pin::hard});
  CHECK(pins(1) == std::vector{Pin::hard});
  t.home.expel(node(0));
  t.pump();
  CHECK(t.done.at(t.copy(t.lacks("k").at(0), "k", 2)).is_ok());
  CHECK(pins(2) == std::vector{Pin::hard});

  Home rebuilt{2, 7};
  for (uint8_t n : {1, 2}) rebuilt.expect(node(n));
  for (uint8_t n : {1, 2}) {
    std::vector<Announced> all;
    for (const auto& [index, e] : t.donors[n].extents) all.push_back(e.a);
    rebuilt.announce(node(n), all);
  }
  CHECK(rebuilt.find("k").pin == Pin::hard);

  t.put("k", 2, {1, 2});  // a pin is of a version
  CHECK(t.home.find("k").pin == Pin::none);
  t.home.pin(t.next, "nobody", Pin::soft, INT64_MAX);
  t.pump();
  CHECK(t.done.at(t.next++).is_ok());
}

TEST_CASE("what becomes of a granted extent goes to its donor with the commit") {
  Three t;
  CommitCall c;
  c.head.view = t.home.view();
  c.head.key = "k";
  c.head.txn = txn_of(t.next);
  c.replicas = {{node(1), t.donors[1].reserve("k", Kind::named, c.head.txn, 0, 1, 1)}};
  c.binding = Binding{7, 64, Kind::named, "k", "meta", "label", "parent"};
  t.held = 1;
  t.home.commit(t.next, c, INT64_MAX);
  t.pump();
  REQUIRE(t.kept.size() == 1);
  REQUIRE(t.kept[0].mark.binding);
  CHECK(t.kept[0].mark.txn == c.head.txn);
  CHECK(t.kept[0].mark.binding->meta == "meta");
  CHECK(t.kept[0].mark.binding->writer == 7);
  t.let_go();
  CHECK(t.done.at(t.next).is_ok());
  const auto refused = [&](const CommitCall& call) {
    t.home.commit(++t.next, call, INT64_MAX);
    t.pump();
    return t.done.at(t.next).code() == Code::invalid_argument;
  };
  CommitCall two = c, other = c, kind = c;
  two.replicas.push_back({node(2), {}});
  other.binding->key = "another";
  kind.binding->kind = Kind::sealed;
  CHECK(refused(two));
  CHECK(refused(other));
  CHECK(refused(kind));
}

TEST_CASE("a pin waits for a donor that is silent, and is taken back where one refuses") {
  Three t;
  t.put("k", 1, {0, 1});
  t.held = 1;
  t.home.pin(t.next, "k", Pin::hard, INT64_MAX);
  t.pump();
  CHECK(!t.done.count(t.next));
  CHECK(t.home.find("k").state == Found::State::found);  // reads go on
  CHECK(t.home.find("k").pin == Pin::none);
  SUBCASE("it answers") {
    t.let_go();
    CHECK(t.home.find("k").pin == Pin::hard);
  }
  SUBCASE("it is expelled") {
    t.home.expel(node(1));
    t.pump();
    CHECK(t.home.find("k").pin == Pin::hard);
  }
  SUBCASE("it has no room") {
    REQUIRE(t.kept.size() == 1);
    t.home.mark_done(t.kept[0].id, {Code::pool_full, "no room to bring it back"});
    t.kept.clear();
    t.home.pin(t.next + 1, "k", Pin::soft, INT64_MAX);
    t.pump();
    CHECK(!t.done.count(t.next));  // nobody is told, nor is the next pin sent, before it is taken back
    REQUIRE(t.kept.size() == 1);
    CHECK(t.kept[0].mark.pin == Pin::none);
    SUBCASE("and takes it back") { t.held = -1, t.home.mark_done(std::exchange(t.kept, {})[0].id, {}); }
    SUBCASE("and is expelled") { t.held = -1, t.home.expel(node(1)); }
    t.pump();
    CHECK(t.done.at(t.next).code() == Code::pool_full);
    CHECK(t.done.at(t.next + 1).is_ok());
    CHECK(t.home.find("k").pin == Pin::soft);
    CHECK(t.donors[0].extents.begin()->second.a.pin == Pin::soft);
    return;
  }
  SUBCASE("it has no room, and nobody pins it after that") {
    t.home.mark_done(std::exchange(t.kept, {}).at(0).id, {Code::pool_full, "no room to bring it back"});
    t.held = -1;
    t.pump();
    t.let_go();
    CHECK(t.done.at(t.next).code() == Code::pool_full);
    CHECK(t.home.find("k").pin == Pin::none);
    CHECK(t.donors[0].extents.begin()->second.a.pin == Pin::none);
    return;
  }
  CHECK(t.done.at(t.next).is_ok());
  CHECK(t.donors[0].extents.begin()->second.a.pin == Pin::hard);
}
