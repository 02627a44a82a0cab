// The home's state machine: its rules one by one, then seeded random schedules with donors that crash, restart and are
// expelled, and a home that is lost and rebuilt; every named key's history must be linearizable.
#include "pool/home.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <random>

#include "pool/linearizability.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {

NodeId node(uint8_t n) {
  NodeId id{};
  id[0] = n;
  return id;
}
TxnId txn_of(uint64_t n) {
  TxnId id{};
  std::memcpy(id.data(), &n, sizeof n);
  return id;
}

// A donor's table as the marks see it. Values are numbers.
struct ModelDonor {
  struct Extent {
    Announced a;
    uint64_t value = 0;
    int64_t expires_ms = INT64_MAX;
  };
  std::map<uint32_t, Extent> extents;
  // What its SSD would bring back at the next start: records that are not marked.
  std::map<uint32_t, Extent> disk;
  bool marks_disk = true;
  uint32_t next = 0;
  uint64_t generation = 1;
  int64_t now_ms = 0;

  ExtentRef reserve(const std::string& key, Kind kind, TxnId txn, uint32_t part, uint32_t parts, uint64_t value) {
    Extent e;
    e.a.key = key;
    e.a.kind = kind;
    e.a.state = ExtentState::prepared;
    e.a.txn = txn;
    e.a.part = part;
    e.a.parts = parts;
    e.a.extent = {next, generation++};
    e.value = value;
    extents[next] = e;
    return extents[next++].a.extent;
  }
  Extent* at(ExtentRef ref) {
    auto it = extents.find(ref.index);
    return it != extents.end() && it->second.a.extent.generation == ref.generation ? &it->second : nullptr;
  }
  Status apply(const Mark& mark) {
    if (mark.what == Mark::What::drop) {
      std::erase_if(extents,
                    [&](auto& e) { return e.second.a.state == ExtentState::prepared && e.second.a.txn == mark.txn; });
      return {};
    }
    Extent* e = at(mark.extent);
    if (!e) return {Code::key_not_found, "gone"};
    if (mark.what == Mark::What::commit) {
      if (e->a.state != ExtentState::prepared)
        return e->a.version == mark.version ? Status{} : Status{Code::invalid_argument, "committed"};
      e->a.version = mark.version;
      e->a.state = ExtentState::committed;
      if (mark.ttl_ms) e->expires_ms = now_ms + int64_t(mark.ttl_ms);
    } else if (mark.what == Mark::What::finalize) {
      if (e->a.state == ExtentState::committed) e->a.state = ExtentState::final;
    } else {
      if (e->a.state == ExtentState::prepared) return {Code::invalid_argument, "prepared"};
      forget(mark.extent.index);  // the word has changed; no pins in this model
    }
    return {};
  }
  // Before it is said to be gone, its record is marked.
  void forget(uint32_t index) {
    extents.erase(index);
    if (marks_disk) disk.erase(index);
  }
  // Out of memory, onto the SSD: it stays what the home knows it by.
  std::optional<Announced> demote(uint32_t index) {
    const auto it = extents.find(index);
    if (it == extents.end() || it->second.a.state != ExtentState::final || disk.count(index)) return {};
    it->second.a.tier = Tier::ssd;
    disk[index] = it->second;
    return it->second.a;
  }
  void recover_disk() { extents.insert(disk.begin(), disk.end()); }
  std::vector<Announced> announce() const {
    std::vector<Announced> out;
    for (const auto& [i, e] : extents) {
      out.push_back(e.a);
      if (e.expires_ms != INT64_MAX) out.back().left_ms = uint64_t(std::max<int64_t>(0, e.expires_ms - now_ms));
    }
    return out;
  }
};

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

// --- random schedules ---

namespace {

constexpr int kDonors = 3, kKeys = 2, kClients = 4;

// What is left out of the protocol, to see that the check finds it.
enum class Mutation {
  none,
  consume_any,   // the removal behind consume is of any version
  forget_ttl,    // donors announce without what is left of it
  stale_clock,   // the home is told the time at its ticks only
  no_supersede,  // donors do not carry out step 3
  blind_cache,   // clients do not look at the word of what they remember
  no_disk_mark,  // what is superseded or evicted is not marked on its donor's SSD
};

struct World {
  explicit World(uint64_t seed, bool losses, Mutation mutation) : rng(seed), losses(losses), mutation(mutation) {
    for (int d = 0; d < kDonors; ++d) {
      home.announce(node(uint8_t(d)), {});
      donors[d].marks_disk = mutation != Mutation::no_disk_mark;
    }
  }
  std::mt19937_64 rng;
  const bool losses;
  const Mutation mutation;
  int64_t now = 0;  // one millisecond a step
  int64_t now_ns() const { return now * 1'000'000; }
  uint64_t view = 1;
  Home home{1, 7};
  struct Donor : ModelDonor {
    bool up = true, fenced = false;
    std::set<uint32_t> stale;  // extents with which it came back after it was expelled
    // A real node drops them before it announces; this one lets the home find out, and is trusted when it has.
    bool unclean() const {
      return std::any_of(stale.begin(), stale.end(), [this](uint32_t i) { return extents.count(i) != 0; });
    }
    std::deque<SendMark> inbox;
  } donors[kDonors];
  struct Client {
    enum class Step { idle, reserved, half, waiting, reading } step = Step::idle;
    size_t op = 0;
    int key = 0;
    uint64_t value = 0;
    CommitCall call;
    std::optional<CommitCall> second;  // of an object in two parts
    RequestId request = 0;
    bool removing = false, consuming = false;
    Version version;
    size_t expiry = SIZE_MAX;  // in the history, of what is being put
    std::vector<std::pair<uint32_t, ReplicaRef>> places;
    uint32_t parts = 1;
    struct Remembered {  // where a value was, of one part, and without a time to live
      ReplicaRef at;
      uint64_t value;
    };
    std::optional<Remembered> remembered[kKeys];
    bool remembers = false;  // what is being read may be
  } clients[kClients];
  std::vector<HistoryOp> history[kKeys];
  uint64_t next_value = 1, next_txn = 1;
  RequestId next_request = 1;

  uint64_t roll(uint64_t n) { return rng() % n; }
  static std::string name(int key) { return "key" + std::to_string(key); }

  void act() {
    for (auto& action : home.take_actions()) {
      if (auto* send = std::get_if<SendMark>(&action)) {
        donors[send->node[0]].inbox.push_back(*send);
      } else if (auto* done = std::get_if<CommitDone>(&action)) {
        answer(done->request, done->result.is_ok() ? Status{} : done->result.status(),
               done->result.is_ok() && done->result->stored);
      } else if (auto* removed = std::get_if<RemoveDone>(&action)) {
        answer(removed->request, removed->result.is_ok() ? Status{} : removed->result.status(),
               removed->result.is_ok() && *removed->result);
      }
    }
  }
  void answer(RequestId request, const Status& status, bool did) {
    for (Client& c : clients) {
      if (c.step != Client::Step::waiting || c.request != request) continue;
      HistoryOp& op = history[c.key][c.op];
      c.step = Client::Step::idle;
      if (!status.is_ok()) {
        // peer_lost: a donor was lost on the way, it may have been visible; all else: nothing happened.
        if (status.code() != Code::peer_lost) {
          op = {HistoryOp::What::loss, 0, INT64_MAX, INT64_MAX};
          no_expiry(c);
        }
        return;
      }
      op.returned = now;
      if (c.expiry != SIZE_MAX && did) {
        HistoryOp& expiry = history[c.key][c.expiry];
        expiry.returned = expiry.called + (now - op.called);
      }
      if (!did) no_expiry(c);
      if (c.consuming) {
        if (!did) op = {HistoryOp::What::loss, 0, INT64_MAX, INT64_MAX};  // somebody else took or replaced it
        return;
      }
      if (c.removing && !did) op.what = HistoryOp::What::removed_nothing;
      if (!c.removing && !did) op.what = HistoryOp::What::kept;
      return;
    }
  }
  // Nothing of it was stored.
  void no_expiry(Client& c) {
    if (c.expiry != SIZE_MAX) history[c.key][c.expiry] = {HistoryOp::What::loss, 0, INT64_MAX, INT64_MAX};
  }
  // The same value in two parts on two donors. Each writer's part comes by itself.
  bool begin_two(Client& c, uint32_t first) {
    const uint32_t on[] = {first, (first + 1) % kDonors};
    if (!donors[on[0]].up || donors[on[0]].fenced || !donors[on[1]].up || donors[on[1]].fenced) return false;
    auto txn = home.begin(c.call.head.key, std::to_string(next_txn), 2, now_ns() + kPatience, c.call.head.txn);
    REQUIRE(txn.is_ok());
    c.call.head.txn = *txn;
    c.call.head.parts = 2;
    c.second = c.call;
    c.second->head.part = 1;
    CommitCall* calls[] = {&c.call, &*c.second};
    for (uint32_t part = 0; part < 2; ++part)
      calls[part]->replicas = {
          {node(uint8_t(on[part])), donors[on[part]].reserve(c.call.head.key, Kind::named, *txn, part, 2, c.value)}};
    return true;
  }
  // Without asking the home: its donor counts (it was not expelled; one that comes back drops what it had before it
  // counts again), and the word is what it was. That its worker is down does not matter: the memory is there.
  bool read_remembered(Client& c) {
    auto& remembered = c.remembered[c.key];
    if (!remembered || roll(2) == 0) return false;
    Donor& d = donors[remembered->at.node[0]];
    const bool counts = !d.fenced && !d.stale.count(remembered->at.extent.index);
    if (!counts || (!d.at(remembered->at.extent) && mutation != Mutation::blind_cache)) {
      remembered.reset();
      return false;
    }
    ++cache_hits;
    history[c.key].push_back({HistoryOp::What::get, remembered->value, now, now});
    return true;
  }
  uint64_t cache_hits = 0;
  static constexpr int64_t kPatience = 40'000'000;
  void begin(Client& c) {
    c.expiry = SIZE_MAX;
    c.second.reset();
    c.removing = c.consuming = false;
    c.key = int(roll(kKeys));
    c.op = history[c.key].size();
    const auto what = roll(10);
    if (what < 5 && read_remembered(c)) return;
    if (what < 5) {
      const Found found = home.find(name(c.key));
      if (found.state == Found::State::later) return;
      history[c.key].push_back({HistoryOp::What::get, 0, now, INT64_MAX});
      if (found.state == Found::State::missing) {
        history[c.key].back().returned = now;
        return;
      }
      c.places = found.places;
      c.parts = found.parts;
      c.version = found.version;
      c.consuming = roll(3) == 0;
      c.remembers = found.parts == 1 && found.expires_ns == INT64_MAX;
      c.step = Client::Step::reading;
    } else if (what < 9) {
      c.value = next_value++;
      const bool keep = roll(4) == 0;
      history[c.key].push_back({keep ? HistoryOp::What::put_if_absent : HistoryOp::What::put, c.value, now, INT64_MAX});
      c.call = {};
      c.call.head.view = home.view();
      c.call.head.key = name(c.key);
      c.call.head.txn = txn_of(next_txn++);
      c.call.if_exists = keep ? IfExists::keep : IfExists::replace;
      if (roll(3) == 0) c.call.ttl_ms = 1 + roll(60);
      const int first = int(roll(kDonors)), n = 1 + int(roll(2));
      const bool two = roll(4) == 0 && begin_two(c, uint32_t(first));
      for (int i = 0; i < n && !two; ++i) {
        const int d = (first + i) % kDonors;
        if (!donors[d].up || donors[d].fenced) continue;
        c.call.replicas.push_back(
            {node(uint8_t(d)), donors[d].reserve(c.call.head.key, Kind::named, c.call.head.txn, 0, 1, c.value)});
      }
      if (c.call.replicas.empty()) {
        history[c.key].pop_back();
        return;
      }
      if (c.call.ttl_ms) {
        c.expiry = history[c.key].size();
        history[c.key].push_back({HistoryOp::What::expire, c.value, now + int64_t(c.call.ttl_ms), INT64_MAX});
      }
      c.step = Client::Step::reserved;
    } else {
      c.removing = true;
      history[c.key].push_back({HistoryOp::What::remove, 0, now, INT64_MAX});
      c.step = Client::Step::waiting;
      c.request = next_request++;
      home.remove(c.request, name(c.key), INT64_MAX);
    }
  }
  void go_on(Client& c) {
    if (c.step == Client::Step::idle) return begin(c);
    if (c.step == Client::Step::reserved && c.second && roll(8) != 0) {
      c.step = Client::Step::half;
      c.call.head.view = home.view();
      home.commit(next_request++, c.call, now_ns() + kPatience);
    } else if (c.step == Client::Step::reserved || c.step == Client::Step::half) {
      if (roll(8) == 0) {  // the writer dies between reserve and commit: its sessions end
        for (Donor& d : donors) REQUIRE(d.apply({Mark::What::drop, 0, 0, {}, c.call.head.txn, {}, {}}).is_ok());
        history[c.key][c.op] = {HistoryOp::What::loss, 0, INT64_MAX, INT64_MAX};
        no_expiry(c);
        c.step = Client::Step::idle;
        return;
      }
      c.step = Client::Step::waiting;
      c.request = next_request++;
      CommitCall& call = c.second ? *c.second : c.call;
      call.head.view = home.view();
      home.commit(c.request, call, c.second ? now_ns() + kPatience : INT64_MAX);
    } else if (c.step == Client::Step::reading) {
      c.step = Client::Step::idle;
      ModelDonor::Extent* e = nullptr;
      for (uint32_t part = 0; part < c.parts; ++part) {  // one replica of each
        std::vector<ReplicaRef> of_part;
        for (const auto& [p, at] : c.places)
          if (p == part) of_part.push_back(at);
        const ReplicaRef at = of_part[roll(of_part.size())];
        Donor& d = donors[at.node[0]];
        auto* found = d.up && !d.fenced ? d.at(at.extent) : nullptr;
        torn = torn || (found && e && found->value != e->value);
        e = found;
        if (!e) break;
        if (c.remembers) c.remembered[c.key] = {at, e->value};
      }
      if (e && c.consuming) {
        history[c.key][c.op].what = HistoryOp::What::consume;
        history[c.key][c.op].value = e->value;
        c.step = Client::Step::waiting;
        c.request = next_request++;
        const bool any = mutation == Mutation::consume_any;
        home.remove(c.request, name(c.key), INT64_MAX, any ? std::nullopt : std::optional(c.version));
      } else if (e) {  // the word validates
        history[c.key][c.op].value = e->value;
        history[c.key][c.op].returned = now;
      } else {
        history[c.key][c.op] = {HistoryOp::What::loss, 0, INT64_MAX, INT64_MAX};  // would look up again
      }
    }
  }
  void deliver(Donor& d) {
    if (!d.up || d.fenced || d.inbox.empty()) return;
    const SendMark send = d.inbox.front();
    d.inbox.pop_front();
    const bool skipped = mutation == Mutation::no_supersede && send.mark.what == Mark::What::supersede && send.id;
    const Status s = skipped ? Status{} : d.apply(send.mark);
    if (send.id && roll(20) != 0)
      home.mark_done(send.id, s);  // 1 in 20 answers is lost with the session
    else if (send.id)
      restart(int(&d - donors));
  }
  void restart(int i) {  // the worker: memory and table stay, what was on its way to it is lost
    donors[i].up = true;
    donors[i].inbox.clear();
    donors[i].recover_disk();
    if (!donors[i].fenced) home.announce(node(uint8_t(i)), announced(i));
  }
  std::vector<Announced> announced(int i) const {
    auto all = donors[i].announce();
    if (mutation == Mutation::forget_ttl)
      for (Announced& a : all) a.left_ms.reset();
    return all;
  }
  void lose(int key, int64_t since) { history[key].push_back({HistoryOp::What::loss, 0, since, INT64_MAX}); }
  void expel(int i) {
    donors[i].fenced = true;
    donors[i].inbox.clear();
    home.expel(node(uint8_t(i)));
    for (int k = 0; k < kKeys; ++k) lose(k, now);
  }
  void come_back(int i) {
    donors[i].stale.clear();
    if (roll(2) == 0) {
      donors[i].extents.clear();
      donors[i].disk.clear();
    } else {
      for (const auto& [index, e] : donors[i].extents) donors[i].stale.insert(index);
    }
    donors[i].fenced = false;
    donors[i].up = true;
    home.announce(node(uint8_t(i)), announced(i));
  }
  void evict(int i) {
    for (auto& [index, e] : donors[i].extents) {
      if (e.a.state != ExtentState::committed && e.a.state != ExtentState::final) continue;
      const Announced a = e.a;
      lose(a.key.back() - '0', now);
      donors[i].forget(index);
      if (roll(3) == 0) return restart(i);  // the report was lost with the session
      home.evicted(node(uint8_t(i)), a.key, a.extent);
      return;
    }
  }
  void demote(int i) {
    std::vector<uint32_t> all;
    for (const auto& [index, e] : donors[i].extents) all.push_back(index);
    if (all.empty()) return;
    if (const auto a = donors[i].demote(all[roll(all.size())]))
      home.moved(node(uint8_t(i)), a->key, a->extent, a->tier);
  }
  void lose_home() {
    home = Home(++view, 7);
    home.at(now_ns());
    for (Client& c : clients)
      if (c.step == Client::Step::waiting) c.step = Client::Step::idle;  // outcome unknown for ever
    for (int i = 0; i < kDonors; ++i) {
      donors[i].inbox.clear();
      if (!donors[i].fenced && !donors[i].unclean()) home.expect(node(uint8_t(i)));
    }
    std::vector<int> order{0, 1, 2};
    std::shuffle(order.begin(), order.end(), rng);
    pending_announce = order;
  }
  std::vector<int> pending_announce;
  bool torn = false;  // parts of two values were read together

  void pass() {
    ++now;
    for (Donor& d : donors) d.now_ms = now;
    if (mutation != Mutation::stale_clock) home.at(now_ns());
  }
  void step() {
    pass();
    const auto what = roll(100);
    if (what < 45) {
      go_on(clients[roll(kClients)]);
    } else if (what < 87) {
      deliver(donors[roll(kDonors)]);
    } else if (what < 90) {
      const int i = int(roll(kDonors));
      if (donors[i].up && !donors[i].fenced) demote(i);
    } else if (what < 92) {
      restart(int(roll(kDonors)));
    } else if (what < 93) {
      donors[roll(kDonors)].up = false;
    } else if (what < 94 && losses) {
      const int i = int(roll(kDonors));
      if (donors[i].fenced)
        come_back(i);
      else
        expel(i);
    } else if (what < 95 && losses) {
      const int i = int(roll(kDonors));
      if (donors[i].up && !donors[i].fenced) evict(i);
    } else if (what < 96 && roll(2) == 0) {
      lose_home();
    } else if (!pending_announce.empty()) {
      const int i = pending_announce.back();
      pending_announce.pop_back();
      if (!donors[i].fenced) restart(i);
    } else {
      home.tick(now_ns());
    }
    act();
  }
  void settle() {
    for (int i = 0; i < kDonors; ++i)
      if (donors[i].fenced) come_back(i);
    for (int i = 0; i < kDonors; ++i)
      if (!home.knows(node(uint8_t(i))) || !donors[i].up) restart(i);
    act();
    for (int n = 0; n < 2000 && !home.idle(); ++n) {
      for (Donor& d : donors) deliver(d);
      act();
      pass();
      home.tick(now_ns());
      act();
    }
    for (int n = 0; n < 200; ++n) {
      for (Donor& d : donors) deliver(d);
      act();
    }
  }
};

int seeds(int standard) {
  const char* text = std::getenv("TM_SEEDS");
  return text ? std::atoi(text) : standard;
}

// What went wrong; empty: nothing.
std::string violation(uint64_t seed, bool losses, Mutation mutation = Mutation::none) {
  World w(seed, losses, mutation);
  for (int i = 0; i < 220; ++i) {
    w.step();
    if (const Status s = w.home.check(); !s.is_ok()) return "step " + std::to_string(i) + ": " + s.to_string();
  }
  w.settle();
  if (!w.home.idle()) return "operations hang";
  if (w.torn) return "parts of two values were read as one";
  for (int k = 0; k < kKeys; ++k) {
    // A last read by everybody: what the directory says must be there, and nothing else may be left.
    w.pass();
    w.home.tick(w.now_ns());
    w.act();
    for (int n = 0; n < 200; ++n) {
      for (auto& d : w.donors) w.deliver(d);
      w.act();
    }
    const Found found = w.home.find(World::name(k));
    if (found.state == Found::State::later) return "the last read hangs";
    HistoryOp last{HistoryOp::What::get, 0, w.now, w.now};
    size_t left = 0;
    for (auto& d : w.donors)
      for (auto& [i, e] : d.extents) left += e.a.key == World::name(k) && e.a.state != ExtentState::prepared;
    if (found.state == Found::State::found) {
      auto* e = w.donors[found.places[0].second.node[0]].at(found.places[0].second.extent);
      if (!e) return "the directory points at nothing";
      last.value = e->value;
    }
    if (left != found.places.size()) return std::to_string(left) + " extents of " + std::to_string(found.places.size());
    w.history[k].push_back(last);
    std::erase_if(w.history[k], [](const HistoryOp& op) {
      return op.called == INT64_MAX || (op.what == HistoryOp::What::get && op.returned == INT64_MAX);
    });
    if (!LinearizabilityCheck(w.history[k]).holds()) return "key " + std::to_string(k) + " is not linearizable";
  }
  return "";
}

void run(uint64_t seed, bool losses) {
  const std::string what = violation(seed, losses);
  CHECK_MESSAGE(what.empty(), "seed ", seed, ": ", what);
}

}  // namespace

TEST_CASE("the checker finds a stale read") {
  using What = HistoryOp::What;
  std::vector<HistoryOp> good{
      {What::put, 1, 1, 2}, {What::put, 2, 3, INT64_MAX}, {What::get, 1, 4, 5}, {What::get, 2, 6, 7}};
  CHECK(LinearizabilityCheck(good).holds());
  auto bad = good;
  bad.push_back({What::get, 1, 8, 9});
  CHECK_FALSE(LinearizabilityCheck(bad).holds());
  std::vector<HistoryOp> resurrected{
      {What::put, 1, 1, 2}, {What::loss, 0, 3, INT64_MAX}, {What::get, 0, 4, 5}, {What::get, 1, 6, 7}};
  CHECK_FALSE(LinearizabilityCheck(resurrected).holds());
}

TEST_CASE("random schedules: crashes and a lost home, nothing evicted") {
  for (int seed = 1; seed <= seeds(1500); ++seed) run(uint64_t(seed), false);
}

TEST_CASE("random schedules: with evictions and expelled donors") {
  for (int seed = 1; seed <= seeds(1500); ++seed) run(uint64_t(seed) + 1'000'000, true);
}

TEST_CASE("a step left out is found within 1000 seeds") {
  auto found_at = [](Mutation mutation, const char* what) {
    for (uint64_t seed = 1; seed <= 1000; ++seed)
      if (violation(seed, false, mutation).find(what) != std::string::npos) return seed;
    return uint64_t{0};
  };
  CHECK(found_at(Mutation::consume_any, "not linearizable") > 0);
  CHECK(found_at(Mutation::forget_ttl, "not linearizable") > 0);
  CHECK(found_at(Mutation::stale_clock, "not linearizable") > 0);
  CHECK(found_at(Mutation::no_supersede, "not linearizable") > 0);
  CHECK(found_at(Mutation::blind_cache, "not linearizable") > 0);
  CHECK(found_at(Mutation::no_disk_mark, "not linearizable") > 0);
}
