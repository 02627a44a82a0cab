// The home's state machine: its rules one by one.
#include "pool/home.h"

#include <doctest/doctest.h>

#include "pool/home_model.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {

// A home and two donors with no delays.
struct Direct {
  Home home{1, 7};
  ModelDonor donors[2];
  std::map<RequestId, Result<CommitAnswer>> commits;
  std::map<RequestId, Result<bool>> removes;
  std::vector<RequestId> ready;
  int held = -1;  // marks to this donor are kept in `kept`
  std::vector<SendMark> kept;
  uint64_t next = 1;

  Direct() {
    home.announce(node(0), {});
    home.announce(node(1), {});
  }
  void pump() {
    for (;;) {
      auto actions = home.take_actions();
      if (actions.empty()) return;
      for (auto& action : actions) {
        if (auto* send = std::get_if<SendMark>(&action)) {
          if (send->node[0] == held) {
            kept.push_back(*send);
            continue;
          }
          const Status s = donors[send->node[0]].apply(send->mark);
          if (send->id) home.mark_done(send->id, s);
        } else if (auto* done = std::get_if<CommitDone>(&action)) {
          commits.emplace(done->request, done->result);
        } else if (auto* removed = std::get_if<RemoveDone>(&action)) {
          removes.emplace(removed->request, removed->result);
        } else {
          ready.push_back(std::get<Ready>(action).request);
        }
      }
    }
  }
  CommitCall call(const std::string& key, uint64_t value, std::vector<int> on, Kind kind = Kind::named,
                  IfExists if_exists = IfExists::replace, uint32_t part = 0, uint32_t parts = 1, TxnId txn = {}) {
    CommitCall c;
    c.head.view = home.view();
    c.head.key = key;
    c.head.kind = kind;
    c.head.part = part;
    c.head.parts = parts;
    c.head.txn = parts > 1 ? txn : txn_of(next);
    c.if_exists = if_exists;
    for (int d : on)
      c.replicas.push_back({node(uint8_t(d)), donors[d].reserve(key, kind, c.head.txn, part, parts, value)});
    return c;
  }
  RequestId commit(const CommitCall& c, int64_t deadline = INT64_MAX) {
    home.commit(next, c, deadline);
    pump();
    return next++;
  }
  RequestId remove(const std::string& key, std::optional<Version> only = {}) {
    home.remove(next, key, INT64_MAX, only);
    pump();
    return next++;
  }
  // The home is lost, and another learns from the donors.
  void rebuild() {
    home = Home(home.view() + 1, 7);
    for (uint8_t n : {0, 1}) home.expect(node(n));
    for (uint8_t n : {1, 0}) home.announce(node(n), donors[n].announce());
    pump();
  }
  // 0: missing; what find() leads to
  uint64_t value(const std::string& key) {
    const Found f = home.find(key);
    if (f.state != Found::State::found) return 0;
    auto* e = donors[f.places[0].second.node[0]].at(f.places[0].second.extent);
    return e ? e->value : ~0ull;
  }
};

}  // namespace

TEST_CASE("put, replace, keep, error, delete") {
  Direct d;
  auto a = d.commit(d.call("k", 1, {0}));
  REQUIRE(d.commits.at(a).is_ok());
  CHECK(d.commits.at(a)->version == Version{1, 1});
  CHECK(d.value("k") == 1);
  auto b = d.commit(d.call("k", 2, {1}));
  CHECK(d.commits.at(b)->version > d.commits.at(a)->version);
  CHECK(d.value("k") == 2);
  CHECK(d.donors[0].extents.empty());
  CHECK(d.donors[1].extents.begin()->second.a.state == ExtentState::final);
  auto keep = d.commit(d.call("k", 3, {0}, Kind::named, IfExists::keep));
  CHECK_FALSE(d.commits.at(keep)->stored);
  CHECK(d.commits.at(keep)->version == d.commits.at(b)->version);
  auto error = d.commit(d.call("k", 3, {0}, Kind::named, IfExists::error));
  CHECK(d.commits.at(error).status().code() == Code::key_exists);
  CHECK(d.donors[0].extents.empty());  // their parts were dropped
  CHECK(*d.removes.at(d.remove("k")));
  CHECK_FALSE(*d.removes.at(d.remove("k")));
  CHECK(d.home.find("k").state == Found::State::missing);
  CHECK(d.home.idle());
  CHECK(d.home.check().is_ok());
}

TEST_CASE("sealed keys are stored once; the kinds do not mix") {
  Direct d;
  d.commit(d.call("s", 1, {0}, Kind::sealed));
  auto again = d.commit(d.call("s", 1, {1}, Kind::sealed));
  CHECK_FALSE(d.commits.at(again)->stored);
  auto named = d.commit(d.call("s", 2, {1}));
  CHECK(d.commits.at(named).status().code() == Code::invalid_argument);
  CHECK(d.value("s") == 1);
}

TEST_CASE("a reader never finds an old version once its donor has been told, and waits for the flip") {
  Direct d;
  d.commit(d.call("k", 1, {0}));
  d.held = 0;
  auto put = d.commit(d.call("k", 2, {1}));
  CHECK(d.commits.count(put) == 0);
  REQUIRE(d.kept.size() == 1);
  CHECK(d.kept[0].mark.what == Mark::What::supersede);
  CHECK(d.home.find("k").state == Found::State::later);
  d.home.watch(77, "k", false);
  d.held = -1;
  d.home.mark_done(d.kept[0].id, d.donors[0].apply(d.kept[0].mark));
  d.pump();
  CHECK(d.commits.at(put).is_ok());
  CHECK(d.ready == std::vector<RequestId>{77});
  CHECK(d.value("k") == 2);
}

TEST_CASE("a silent donor blocks a replace until it is expelled") {
  Direct d;
  d.commit(d.call("k", 1, {0}));
  d.held = 0;
  auto put = d.commit(d.call("k", 2, {1}));
  auto queued = d.commit(d.call("k", 3, {1}), 1000);
  d.home.tick(2000);
  d.pump();
  CHECK(d.commits.at(queued).status().code() == Code::deadline_exceeded);
  CHECK(d.commits.count(put) == 0);
  d.home.expel(node(0));
  d.pump();
  CHECK(d.commits.at(put).is_ok());
  CHECK(d.value("k") == 2);
  // It returns with its old version: not taken.
  d.held = -1;
  d.home.announce(node(0), d.donors[0].announce());
  d.pump();
  CHECK(d.value("k") == 2);
  CHECK(d.donors[0].extents.empty());
  CHECK(d.home.check().is_ok());
}

TEST_CASE("a donor that refuses the commit aborts it on all donors") {
  Direct d;
  auto c = d.call("k", 1, {0, 1});
  d.donors[1].extents.clear();  // the writer's session ended there
  auto put = d.commit(c);
  CHECK(d.commits.at(put).status().code() == Code::key_not_found);
  CHECK(d.donors[0].extents.empty());
  CHECK(d.home.find("k").state == Found::State::missing);
}

TEST_CASE("parts of several writers appear together or not at all") {
  Direct d;
  TxnId txn = *d.home.begin("k", "step1", 2, 5000, txn_of(900));
  CHECK(*d.home.begin("k", "step1", 2, 5000, txn_of(901)) == txn);
  CHECK_FALSE(d.home.begin("k", "step1", 3, 5000, txn_of(901)).is_ok());
  auto first = d.commit(d.call("k", 1, {0}, Kind::named, IfExists::replace, 0, 2, txn), 5000);
  CHECK(d.home.find("k").state == Found::State::missing);
  auto twice = d.commit(d.call("k", 1, {0}, Kind::named, IfExists::replace, 0, 2, txn), 5000);
  CHECK(d.commits.at(twice).status().code() == Code::key_exists);
  auto second = d.commit(d.call("k", 1, {1}, Kind::named, IfExists::replace, 1, 2, txn), 5000);
  CHECK(d.commits.at(first)->version == d.commits.at(second)->version);
  CHECK(d.home.find("k").parts == 2);

  TxnId late = *d.home.begin("k", "step2", 2, 5000, txn_of(902));
  auto alone = d.commit(d.call("k", 2, {0}, Kind::named, IfExists::replace, 0, 2, late), 5000);
  d.home.tick(6000);
  d.pump();
  CHECK(d.commits.at(alone).status().code() == Code::deadline_exceeded);
  auto straggler = d.commit(d.call("k", 2, {1}, Kind::named, IfExists::replace, 1, 2, late), 9000);
  CHECK(d.commits.at(straggler).status().code() == Code::deadline_exceeded);
  CHECK(d.home.find("k").version == d.commits.at(first)->version);
}

TEST_CASE("when a transaction of several writers is over, nothing of it stays reserved at any donor") {
  for (bool complete : {true, false}) {
    Direct d;
    TxnId txn = *d.home.begin("k", "step1", 2, 5000, txn_of(900));
    d.donors[1].reserve("k", Kind::named, txn, 0, 2, 666);  // of a writer that never commits
    auto part = [&](uint32_t i) {
      return d.commit(d.call("k", 1, {0}, Kind::named, IfExists::replace, i, 2, txn), 5000);
    };
    part(0);
    if (complete) CHECK(d.commits.at(part(1)).is_ok());
    d.home.tick(6000);
    d.pump();
    CHECK(d.donors[0].extents.size() == (complete ? 2 : 0));
    CHECK(d.donors[1].extents.empty());
  }
}

TEST_CASE("what a donor that died has reserved for a put that goes on without it is dropped when that is over") {
  Direct d;
  d.commit(d.call("k", 1, {0}));
  d.donors[0].reserve("k", Kind::named, txn_of(d.next), 0, 1, 666);  // it died before it said so
  d.held = 0;
  const auto put = d.commit(d.call("k", 2, {1}));  // it waits for the old version's donor
  CHECK(d.commits.count(put) == 0);
  d.held = -1;
  d.home.announce(node(0), d.donors[0].announce());
  d.pump();
  CHECK(d.commits.at(put).is_ok());
  CHECK(d.value("k") == 2);
  CHECK(d.donors[0].extents.empty());
}

TEST_CASE("what a donor that comes back has reserved for a put that is being undone is dropped when that is over") {
  Direct d;
  d.held = 0;
  const auto put = d.commit(d.call("k", 1, {0, 1}));
  d.held = 1;
  d.home.expel(node(0));
  d.pump();
  CHECK(d.commits.count(put) == 0);  // donor 1 has not taken it back yet
  d.home.announce(node(0), d.donors[0].announce());
  d.pump();
  d.held = -1;
  d.home.announce(node(1), d.donors[1].announce());
  d.pump();
  CHECK_FALSE(d.commits.at(put).is_ok());
  CHECK(d.donors[0].extents.empty());
  CHECK(d.donors[1].extents.empty());
}

TEST_CASE("rebuild: what is PREPARED at a donor that was not of the last view is dropped") {
  Direct d;
  d.donors[0].reserve("k", Kind::named, txn_of(5), 0, 1, 1);
  d.home = Home(2, 7);
  d.home.expect(node(1));
  d.home.announce(node(0), d.donors[0].announce());
  d.home.announce(node(1), {});
  d.pump();
  CHECK(d.home.find("k").state == Found::State::missing);
  CHECK(d.donors[0].extents.empty());
}

TEST_CASE("eviction of one part removes the object; what is left is superseded") {
  Direct d;
  TxnId txn = *d.home.begin("k", "", 2, 5000, txn_of(900));
  d.commit(d.call("k", 1, {0}, Kind::named, IfExists::replace, 0, 2, txn));
  d.commit(d.call("k", 1, {1}, Kind::named, IfExists::replace, 1, 2, txn));
  const ExtentRef gone = d.donors[0].extents.begin()->second.a.extent;
  d.donors[0].extents.clear();
  d.home.evicted(node(0), "k", gone);
  d.pump();
  CHECK(d.home.find("k").state == Found::State::missing);
  CHECK(d.donors[1].extents.empty());
}

TEST_CASE("rebuild: FINAL is served at once, the rest and all writes wait; the higher of two versions wins") {
  ModelDonor donors[2];
  auto stored = [&](int d, const char* key, uint64_t value, Version v, ExtentState state, TxnId txn) {
    auto ref = donors[d].reserve(key, Kind::named, txn, 0, 1, value);
    donors[d].at(ref)->a.version = v;
    donors[d].at(ref)->a.state = state;
  };
  stored(0, "final", 1, {1, 1}, ExtentState::final, txn_of(1));
  stored(0, "flip", 2, {1, 2}, ExtentState::final, txn_of(2));
  stored(1, "flip", 3, {1, 3}, ExtentState::committed, txn_of(3));
  donors[0].reserve("never", Kind::named, txn_of(4), 0, 1, 4);
  Direct d;
  d.home = Home(2, 7);
  d.donors[0] = donors[0];
  d.donors[1] = donors[1];
  d.home.expect(node(0));
  d.home.expect(node(1));
  d.home.announce(node(0), d.donors[0].announce());
  d.pump();
  CHECK_FALSE(d.home.complete());
  CHECK(d.value("final") == 1);
  CHECK(d.home.find("unknown").state == Found::State::later);
  auto put = d.commit(d.call("final", 9, {0}));
  CHECK(d.commits.count(put) == 0);
  d.home.announce(node(1), d.donors[1].announce());
  d.pump();
  CHECK(d.commits.at(put).is_ok());
  CHECK(d.value("final") == 9);
  CHECK(d.value("flip") == 3);
  CHECK(d.home.find("unknown").state == Found::State::missing);
  CHECK(d.home.find("never").state == Found::State::missing);
  CHECK(d.donors[0].extents.size() == 1);  // the new "final"; the loser of "flip" and the PREPARED one are gone
  CHECK(d.home.check().is_ok());
}

TEST_CASE("rebuild completes a transaction that has a COMMITTED replica") {
  Direct d;
  auto a = d.donors[0].reserve("k", Kind::named, txn_of(5), 0, 1, 1);
  d.donors[0].at(a)->a.version = {1, 4};
  d.donors[0].at(a)->a.state = ExtentState::committed;
  d.donors[1].reserve("k", Kind::named, txn_of(5), 0, 1, 1);
  d.rebuild();
  CHECK(d.home.find("k").version == Version{1, 4});
  CHECK(d.home.find("k").places.size() == 2);
  CHECK(d.donors[1].extents.begin()->second.a.state == ExtentState::final);
}

TEST_CASE("rebuild: of several writers nothing PREPARED counts, as one of them may have been replaced half-way") {
  for (bool replaced_committed : {true, false}) {
    Direct d;
    d.commit(d.call("k", 9, {0}));  // the value before
    TxnId txn = *d.home.begin("k", "step1", 2, 5000, txn_of(900));
    d.donors[0].reserve("k", Kind::named, txn, 0, 2, 666);  // a stopped writer of part 0 has written half of this
    auto stored = [&](int on, uint32_t part, bool committed) {
      auto* e = d.donors[on].at(d.donors[on].reserve("k", Kind::named, txn, part, 2, 1));
      if (!committed) return;
      e->a.version = {1, 40};
      e->a.state = ExtentState::committed;
    };
    stored(1, 0, replaced_committed);  // its replacement
    stored(1, 1, true);
    d.rebuild();
    auto found = d.home.find("k");
    REQUIRE(found.state == Found::State::found);
    for (auto& [part, place] : found.places)
      CHECK(d.donors[place.node[0]].at(place.extent)->value == (replaced_committed ? 1 : 9));
    CHECK(found.parts == (replaced_committed ? 2 : 1));
    for (auto& donor : d.donors)
      for (auto& [index, e] : donor.extents) CHECK(e.value != 666);
  }
}

TEST_CASE("removal of one version: told true once, and never for another version") {
  Direct d;
  const Version first = d.commits.at(d.commit(d.call("k", 1, {0})))->version;
  const Version second = d.commits.at(d.commit(d.call("k", 2, {0})))->version;
  CHECK_FALSE(*d.removes.at(d.remove("k", first)));
  CHECK(d.value("k") == 2);
  CHECK(*d.removes.at(d.remove("k", second)));
  CHECK_FALSE(*d.removes.at(d.remove("k", second)));
  CHECK(d.home.find("k").state == Found::State::missing);
}

TEST_CASE("what has a time to live is missing from that instant on, and its extents go at the next tick") {
  constexpr int64_t ms = 1'000'000;
  Direct d;
  d.home.at(1000 * ms);
  auto put = [&](uint64_t value, uint64_t ttl_ms, IfExists if_exists = IfExists::replace) {
    auto c = d.call("k", value, {0, 1}, Kind::named, if_exists);
    c.ttl_ms = ttl_ms;
    CHECK(d.commits.at(d.commit(c))->stored);
  };
  put(1, 50);
  d.home.at(1049 * ms);
  CHECK(d.value("k") == 1);
  CHECK(d.home.find("k").expires_ns == 1050 * ms);
  d.home.at(1050 * ms);
  CHECK(d.home.find("k").state == Found::State::missing);
  CHECK_FALSE(*d.removes.at(d.remove("k")));
  CHECK(d.donors[0].extents.size() == 1);
  d.held = 0;  // also while a donor has not answered
  d.home.tick(1051 * ms);
  d.pump();
  CHECK(d.donors[1].extents.empty());
  CHECK(d.home.find("k").state == Found::State::missing);
  d.held = -1;
  d.home.mark_done(d.kept[0].id, d.donors[0].apply(d.kept[0].mark));
  d.pump();
  CHECK(d.donors[0].extents.empty());
  CHECK(d.home.keys() == 0);
  CHECK(d.home.idle());

  put(2, 50);
  d.home.at(2000 * ms);  // expired, not reclaimed: a new put does not keep it, and takes it along
  put(3, 0, IfExists::keep);
  CHECK(d.value("k") == 3);
  CHECK(d.donors[0].extents.size() == 1);
  d.home.tick(9000 * ms);
  d.pump();
  CHECK(d.value("k") == 3);
  put(4, 50);
  put(5, 500);
  d.home.tick(9100 * ms);  // the time of the version before is not this one's
  d.pump();
  CHECK(d.value("k") == 5);
  CHECK(d.home.check().is_ok());
}

TEST_CASE("a rebuilt home goes by the earliest of its donors' clocks") {
  Direct d;
  d.donors[0].now_ms = d.donors[1].now_ms = 100;
  auto c = d.call("k", 1, {0, 1});
  c.ttl_ms = 50;
  d.commit(c);
  d.donors[0].now_ms = 120;
  d.donors[1].now_ms = 130;
  d.home = Home(2, 7);
  d.home.at(5'000'000'000);
  d.home.expect(node(0));
  d.home.expect(node(1));
  d.home.announce(node(0), d.donors[0].announce());
  CHECK(d.value("k") == 1);  // FINAL
  d.home.at(5'030'000'000);
  CHECK(d.home.find("k").state == Found::State::later);  // there may be a newer one at the other
  d.home.announce(node(1), d.donors[1].announce());
  CHECK(d.home.find("k").state == Found::State::missing);
  d.home.tick(5'031'000'000);
  d.pump();
  CHECK(d.donors[0].extents.empty());
  CHECK(d.donors[1].extents.empty());
  CHECK(d.home.check().is_ok());
}

TEST_CASE("many keys of two donors are there after a rebuild, with every copy, and the younger of two versions") {
  Direct d;
  constexpr int kKeys = 600;
  const std::vector<std::vector<int>> on{{0}, {1}, {0, 1}};
  auto key = [](int i) { return "k" + std::to_string(i); };
  for (int i = 0; i < kKeys; ++i)
    d.commit(d.call(key(i), static_cast<uint64_t>(i) + 1, on[static_cast<size_t>(i % 3)]));
  std::vector<ExtentRef> old;
  for (int i : {0, 300}) {  // of the donor that is heard last: its replacement was not over
    old.push_back(d.donors[0].reserve(key(i), Kind::named, txn_of(900'000), 0, 1, 77));
    d.donors[0].at(old.back())->a.version = {0, 1};
    d.donors[0].at(old.back())->a.state = ExtentState::committed;
  }
  d.rebuild();
  REQUIRE(d.home.complete());
  CHECK(d.home.keys() == kKeys);
  for (int i = 0; i < kKeys; ++i) {
    CHECK(d.value(key(i)) == static_cast<uint64_t>(i) + 1);
    CHECK(d.home.find(key(i)).places.size() == on[static_cast<size_t>(i % 3)].size());
  }
  for (ExtentRef extent : old) CHECK(d.donors[0].at(extent) == nullptr);
  CHECK(d.home.check().is_ok());
}
