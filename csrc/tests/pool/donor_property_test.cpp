// The donor against a simple model: random verbs, check() after each, the same again after a restart of the worker.
#include <map>
#include <random>
#include <set>

#include "pool/donor_fixture.h"
#include "pool/pin_slots.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

struct Known {
  ExtentRef ref;
  std::string key;
  uint64_t nbytes;
  TxnId txn;
  SessionId writer;
  Version version;
  std::vector<Piece> pieces;
  enum { prepared, ready, superseded } state;
  Pin pin = Pin::none;
};

struct Pinned {
  std::shared_ptr<PinPage> page;
  std::map<uint64_t, uint32_t> slots;  // generation -> slot
  std::map<uint64_t, std::vector<Piece>> pieces;
};

bool overlap(const std::vector<Piece>& a, const std::vector<Piece>& b) {
  for (const Piece& x : a)
    for (const Piece& y : b)
      if (x.offset < y.offset + y.nbytes && y.offset < x.offset + x.nbytes) return true;
  return false;
}

uint64_t random_size(std::mt19937_64& rng) {
  const auto roll = rng() % 20;
  if (roll == 0) return 0;
  if (roll < 10) return rng() % kSlabLimit;
  if (roll < 19) return rng() % (400 << 10);
  return rng() % (3 * MiB);
}

}  // namespace

TEST_CASE("random verbs: nothing is lost, shared, torn or reused while somebody may touch it") {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 rng(seed);
    auto donor = make_donor(12 * MiB, 600);
    std::map<uint64_t, Known> live;  // by generation
    std::set<uint64_t> generations;  // all ever seen
    std::map<SessionId, Pinned> sessions;
    SessionId next_session = 1;
    uint64_t counter = 0;
    auto on_evicted = [&](const Announcement& a) {
      const auto it = live.find(a.extent.generation);
      REQUIRE(it != live.end());
      REQUIRE(it->second.state == Known::ready);  // never prepared ones
      REQUIRE(it->second.pin != Pin::hard);
      REQUIRE(a.key == it->second.key);
      for (auto& [id, session] : sessions) REQUIRE(!session.slots.count(a.extent.generation));  // never pinned ones
      live.erase(it);
    };
    donor->set_evicted_callback(on_evicted);
    auto open_session = [&] {
      auto slots = donor->open_slots(next_session);
      REQUIRE(slots.is_ok());
      auto page = PinPage::open(donor->segments()[0], *slots);
      REQUIRE(page.is_ok());
      sessions[next_session++].page = *page;
    };
    if (seed % 2) donor->set_quotas({{"k1", 2 * MiB, 0}, {"k12", MiB, 0}});
    open_session();
    auto pick = [&](auto want) -> Known* {
      std::vector<Known*> fit;
      for (auto& [g, k] : live)
        if (want(k)) fit.push_back(&k);
      return fit.empty() ? nullptr : fit[rng() % fit.size()];
    };
    auto forget = [&](const Known& k) { live.erase(uint64_t{k.ref.generation}); };

    for (int step = 0; step < 3000; ++step) {
      const auto roll = rng() % 100;
      if (roll < 35) {
        const uint64_t n = random_size(rng);
        const SessionId writer = rng() % 3 ? std::next(sessions.begin(), rng() % sessions.size())->first : 0;
        Known* sibling = rng() % 4 == 0 ? pick([](const Known& k) { return k.state == Known::prepared; }) : nullptr;
        const TxnId txn = sibling ? sibling->txn : random_id();
        const std::string key = "k" + std::to_string(rng() % 50);
        auto r = try_reserve(*donor, key, n, writer, txn);
        if (writer != 0 && rng() % 4 == 0) {  // or a grant, which is bound, given back, or neither
          if (r.is_ok()) REQUIRE(donor->give_back(r->extent, writer).is_ok());
          auto granted = donor->grant(n, writer, random_id());
          if (!granted.is_ok()) continue;
          REQUIRE(generations.insert(granted->extent.generation).second);
          for (auto& [g, k] : live) REQUIRE(!overlap(k.pieces, granted->pieces));
          const auto what = rng() % 4;
          if (what == 0) REQUIRE(donor->give_back(granted->extent, writer).is_ok());
          if (what <= 1) continue;
          ReserveRequest request;
          request.txn = txn;
          request.key = key;
          request.nbytes = n;
          request.writer = writer;
          request.meta = "meta of " + key;
          const Status bound = donor->bind(granted->extent, request);
          if (bound.is_ok()) {
            live[granted->extent.generation] = {granted->extent, key, n, txn, writer, {}, granted->pieces,
                                                Known::prepared};
          } else {
            REQUIRE(Donor::over_quota(bound));
          }
          check(*donor);
          continue;
        }
        if (r.is_ok()) {
          REQUIRE(generations.insert(r->extent.generation).second);  // never repeats
          uint64_t sum = 0;
          for (const Piece& p : r->pieces) sum += p.nbytes;
          REQUIRE(sum == n);
          for (auto& [g, k] : live) REQUIRE(!overlap(k.pieces, r->pieces));
          for (auto& [id, s] : sessions)
            for (auto& [g, pieces] : s.pieces) REQUIRE(!overlap(pieces, r->pieces));
          live[r->extent.generation] = {r->extent, key, n, txn, writer, {}, r->pieces, Known::prepared};
        } else {
          REQUIRE(r.status().code() == Code::pool_full);
          if (!Donor::over_quota(r.status()))
            REQUIRE(r.status().message().find(std::to_string(n) + " bytes asked") != std::string::npos);
        }
      } else if (roll < 55) {
        if (Known* k = pick([](const Known& x) { return x.state == Known::prepared; })) {
          k->version = {1, ++counter};
          k->pin = rng() % 8 ? Pin::none : rng() % 2 ? Pin::soft : Pin::hard;
          REQUIRE(donor->commit(k->ref, k->version, std::nullopt, 0, 0, 1, k->pin).is_ok());
          REQUIRE(donor->commit(k->ref, k->version, std::nullopt).is_ok());     // told twice
          REQUIRE(!donor->commit(k->ref, {2, counter}, std::nullopt).is_ok());  // told otherwise
          k->state = Known::ready;
        }
      } else if (roll < 60) {
        if (Known* k = pick([](const Known& x) { return x.state == Known::ready; })) {
          REQUIRE(donor->supersede(k->ref).is_ok());
          REQUIRE(donor->describe(k->ref).status().code() == Code::key_not_found);
          k->state = Known::superseded;
        }
      } else if (roll < 66) {
        if (Known* k = pick([](const Known& x) { return x.state != Known::prepared; })) {
          REQUIRE(donor->free(k->ref).is_ok());
          forget(*k);
        }
      } else if (roll < 69) {
        if (Known* k = pick([](const Known& x) { return x.state == Known::prepared; })) {
          const TxnId txn = k->txn;
          donor->drop_txn(txn);
          for (auto it = live.begin(); it != live.end();) {
            const bool dropped = it->second.state == Known::prepared && it->second.txn == txn;
            if (dropped && it->second.writer) {  // fenced: its writer may still write
              auto& s = sessions[it->second.writer];
              s.pieces[it->first] = it->second.pieces;
            }
            it = dropped ? live.erase(it) : std::next(it);
          }
        }
      } else if (roll < 73) {
        if (Known* k = pick([](const Known& x) { return x.state == Known::ready; })) {
          k->pin = rng() % 4 ? Pin::none : rng() % 2 ? Pin::soft : Pin::hard;
          Status pinned(Code::internal, "not told");
          donor->set_pin(k->ref, k->pin, [&](const Status& s) { pinned = s; });
          REQUIRE(pinned.is_ok());
        }
      } else if (roll < 80) {
        if (Known* k = pick([](const Known& x) { return x.state == Known::ready; })) donor->touch(k->ref);
      } else if (roll < 86) {
        if (Known* k = pick([](const Known& x) { return x.state != Known::superseded; })) {
          auto& s = std::next(sessions.begin(), rng() % sessions.size())->second;
          if (!s.slots.count(k->ref.generation)) {
            auto slot = s.page->pin(k->ref);
            REQUIRE(slot.is_ok());
            s.slots[k->ref.generation] = *slot;
            s.pieces[k->ref.generation] = k->pieces;
          }
        }
      } else if (roll < 91) {
        auto& s = std::next(sessions.begin(), rng() % sessions.size())->second;
        if (!s.slots.empty()) {
          const auto pin = std::next(s.slots.begin(), rng() % s.slots.size());
          s.page->unpin(pin->second);
          s.pieces.erase(pin->first);
          s.slots.erase(pin);
        }
      } else if (roll < 94) {
        if (sessions.size() < 5) open_session();
      } else if (roll < 96 && sessions.size() > 1) {
        const auto s = std::next(sessions.begin(), rng() % sessions.size());
        const SessionId id = s->first;
        sessions.erase(s);
        donor->end_session(id);
        std::erase_if(live, [&](const auto& k) { return k.second.state == Known::prepared && k.second.writer == id; });
      } else if (roll < 98) {
        donor->sweep(step);
      } else if (step % 3 == 0) {
        // The worker dies. Its sessions die with it in this model: their clients hold no lock.
        auto next = attach_donor(donor->held());
        REQUIRE_MESSAGE(next.is_ok(), next.status().to_string());
        donor = std::move(next).value();
        donor->set_evicted_callback(on_evicted);
        sessions.clear();
        std::erase_if(live, [](const auto& k) { return k.second.state == Known::superseded; });
        donor->sweep(step);
        std::set<TxnId> open;
        for (auto& [g, k] : live)
          if (k.state == Known::prepared && k.writer != 0) open.insert(k.txn);
        // sweep() ended the old sessions, and with them what they were writing
        std::erase_if(live, [](const auto& k) { return k.second.state == Known::prepared && k.second.writer != 0; });
        open_session();
      }
      for (const Quota& quota : donor->quotas()) REQUIRE(quota.used_bytes <= quota.limit_bytes);
      check(*donor);
    }

    std::set<uint64_t> announced;
    for (const Announcement& a : donor->announce()) {
      announced.insert(a.extent.generation);
      const Known& k = live.at(a.extent.generation);
      CHECK(a.key == k.key);
      CHECK(a.nbytes == k.nbytes);
      CHECK(a.version == k.version);
      CHECK(a.meta == "meta of " + k.key);
      CHECK(a.txn == k.txn);
      CHECK(a.pin == k.pin);
    }
    for (auto& [g, k] : live) CHECK(announced.count(g) == (k.state == Known::ready));

    // At rest: everything goes, nothing stays.
    for (auto& [id, s] : sessions) donor->end_session(id);
    std::erase_if(live, [](const auto& k) { return k.second.state == Known::prepared && k.second.writer != 0; });
    for (auto& [g, k] : live) CHECK(donor->free(k.ref).is_ok());
    check(*donor);
    const DonorStats s = donor->stats();
    CHECK(s.used_bytes == 0);
    CHECK(s.extents == 0);
    CHECK(s.limbo_extents == 0);
    CHECK(s.prepared_extents == 0);
    CHECK(s.pinned_extents == 0);
    CHECK(donor->prepared().empty());
  }
}
