// The home's state machine under seeded random schedules, with donors that crash, restart and are expelled, and a home
// that is lost and rebuilt: every named key's history must be linearizable.
#include <doctest/doctest.h>

#include <cstdlib>
#include <deque>
#include <random>
#include <set>

#include "pool/home_model.h"
#include "pool/linearizability.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

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
  // One more replica: its bytes are read now; some steps later the home is told of it, or another home, or none.
  struct Making {
    MissingCopy what;
    std::string key;
    uint32_t parts;
    uint64_t value;
    int64_t expires_ms;
    int to;
  };
  std::vector<Making> making;
  uint64_t copies = 0;
  void copy() {
    if (!making.empty() && roll(2) == 0) {
      const Making m = making.back();
      making.pop_back();
      Donor& d = donors[m.to];
      if (!d.up || d.fenced) return;
      const TxnId txn = txn_of(1'000'000 + next_txn++);
      const ExtentRef extent = d.reserve(m.key, Kind::named, txn, m.what.part, m.parts, m.value);
      d.at(extent)->expires_ms = m.expires_ms;
      home.add_copy(next_request++, m.what, {node(uint8_t(m.to)), extent}, txn, {});
      ++copies;
      return;
    }
    const std::string key = name(int(roll(kKeys)));
    const Found f = home.find(key);
    if (f.state != Found::State::found) return;
    const NodeId leaving = f.places[0].second.node;
    const auto missing = home.missing(home.hash(key), {leaving});
    auto* e = missing.empty() ? nullptr : donors[leaving[0]].at(missing[0].from[0].extent);
    if (e)
      making.push_back({missing[0], key, f.parts, e->value, e->expires_ms, (leaving[0] + 1 + int(roll(2))) % kDonors});
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
    if (roll(12) == 0) {
      copy();
      act();
    }
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
