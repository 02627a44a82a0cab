// What keeps the beginning of a chain: refresh, and pins with an owner and a time.
#include <map>
#include <random>

#include "pool/donor_fixture.h"
#include "pool/eviction.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

bool there(const Donor& donor, ExtentRef extent) { return donor.describe(extent).is_ok(); }

}  // namespace

TEST_CASE("refresh: the last of a chain goes first, and no earlier one has fewer uses") {
  Turnover lru(100, 1 << 10);
  for (uint32_t i = 0; i < 4; ++i) lru.insert(i, i, 1);  // a chain 0-1-2-3, put first page first
  lru.insert(9, 9, 1);
  for (int i = 0; i < 3; ++i) lru.touch(2);  // a ghost's uses, say
  uint32_t uses = 0;
  for (uint32_t i : {3u, 2u, 1u, 0u}) {
    lru.refresh(i, uses);
    uses = lru.uses(i);
  }
  CHECK(lru.uses(3) == 1);  // a refresh is no use
  CHECK(lru.uses(0) == 4);
  CHECK(lru.check().is_ok());
  std::vector<uint32_t> order;
  while (const auto victim = lru.victim()) {
    order.push_back(*victim);
    lru.evict(*victim, *victim);
  }
  CHECK(order == std::vector<uint32_t>{9, 3, 2, 1, 0});
}

TEST_CASE("a refresh of what is gone, or parked, changes nothing else") {
  auto donor = make_donor(4 * MiB);
  std::vector<ExtentRef> chain;
  for (int i = 0; i < 3; ++i) chain.push_back(put(*donor, "k" + std::to_string(i), MiB));
  REQUIRE(donor->supersede(chain[1]).is_ok());
  REQUIRE(donor->free(chain[1]).is_ok());
  const std::vector<ExtentRef> last_first{chain[2], chain[1], chain[0], {12345, 6}};
  donor->refresh(last_first);
  put(*donor, "x", 2 * MiB);
  put(*donor, "y", MiB);  // evicts one: the chain's last
  CHECK(!there(*donor, chain[2]));
  CHECK(there(*donor, chain[0]));
  check(*donor);
}

TEST_CASE("pins have owners: each ends by its own time, by unpin, or with its session") {
  auto donor = make_donor(4 * MiB);
  const ExtentRef k = put(*donor, "k", MiB);
  auto survives = [&] {  // a turnover of everything else
    for (int i = 0; i < 8; ++i) put(*donor, "f" + std::to_string(i), MiB);
    check(*donor);
    return there(*donor, k);
  };
  CHECK(donor->hint_pin(k, 100, 1));
  CHECK(donor->hint_pin(k, 200, 2));
  CHECK(donor->hint_pin(k, 50, 2));  // the latest time counts
  CHECK(survives());
  donor->unpin(k, 1);
  donor->unpin(k, 7);  // not an owner
  donor->sweep(150);
  CHECK(survives());
  CHECK(donor->hint_pin(k, 1000, 3));
  donor->sweep(250);  // 2's is over
  CHECK(survives());
  auto full = try_reserve(*donor, "whole", 4 * MiB);
  CHECK(full.status().code() == Code::pool_full);
  donor->end_session(3);
  CHECK(!survives());
  CHECK(!donor->hint_pin(k, 1000, 3));  // it is gone, and says so
}

TEST_CASE("what was put after a parent keeps it: a parent never goes before its child, pinned or used as they may be") {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 rng(seed);
    auto donor = make_donor(4 * MiB, 200);
    std::map<std::string, std::pair<ExtentRef, std::string>> live;  // key -> extent, parent
    const auto on_evicted = [&](const Announcement& a) {
      for (const auto& [key, entry] : live) REQUIRE((entry.second != a.key || key == a.key));
      live.erase(a.key);
    };
    donor->set_evicted_callback(on_evicted);
    const auto any = [&] { return std::next(live.begin(), static_cast<long>(rng() % live.size()))->first; };
    const auto drop = [&](const std::string& key) {
      REQUIRE(donor->supersede(live.at(key).first).is_ok());
      REQUIRE(donor->free(live.at(key).first).is_ok());
      live.erase(key);
    };
    const auto is_leaf = [&](const std::string& key) {
      return std::none_of(live.begin(), live.end(), [&](const auto& l) { return l.second.second == key; });
    };
    uint64_t counter = 0;
    for (int step = 0; step < 1500; ++step) {
      const auto roll = rng() % 20;
      if (roll < 13 || live.empty()) {
        ReserveRequest request;
        request.txn = random_id();
        request.key = "k" + std::to_string(step);
        request.nbytes = rng() % 4 ? rng() % 30'000 : rng() % (500 << 10);
        if (!live.empty() && rng() % 4) request.parent = any();
        auto r = donor->reserve(request);
        if (!r.is_ok()) {
          REQUIRE(r.status().code() == Code::pool_full);
        } else if (rng() % 8 == 0) {
          donor->drop_txn(request.txn);
        } else {
          if (!request.parent.empty()) REQUIRE(live.count(request.parent));  // also while it was reserved
          const Pin pin = rng() % 12 ? Pin::none : Pin::soft;
          REQUIRE(donor->commit(r->extent, {1, ++counter}, {}, 0, 0, 1, pin).is_ok());
          live[request.key] = {r->extent, request.parent};
        }
      } else if (roll < 16) {
        donor->touch(live.at(any()).first);
      } else if (roll < 17) {
        REQUIRE(donor->hint_pin(live.at(any()).first, step + 50, 1));
      } else if (roll < 18) {
        if (const std::string key = any(); is_leaf(key)) drop(key);
      } else if (roll < 19) {
        donor->sweep(step);
      } else if (rng() % 8 == 0) {
        donor = std::move(attach_donor(donor->held())).value();
        donor->set_evicted_callback(on_evicted);
      }
      check(*donor);
    }
    CHECK(donor->stats().evictions > 0);
    while (!live.empty()) {
      const std::string key = live.begin()->first;
      for (std::string leaf = key; !leaf.empty();) {
        const auto child =
            std::find_if(live.begin(), live.end(), [&](const auto& l) { return l.second.second == leaf; });
        if (child == live.end()) {
          drop(leaf);
          leaf.clear();
        } else {
          leaf = child->first;
        }
      }
    }
    CHECK(donor->stats().used_bytes == 0);
    check(*donor);
  }
}

TEST_CASE("of several versions of a child, each keeps its parent; one that is given up takes no other with it") {
  auto donor = make_donor(4 * MiB);
  const auto child = [&](const std::string& key, const std::string& parent, uint64_t nbytes = 100) {
    ReserveRequest request;
    request.txn = random_id();
    request.key = key;
    request.parent = parent;
    request.nbytes = nbytes;
    auto r = donor->reserve(request);
    return std::pair(request.txn, r);
  };
  put(*donor, "a", 100);
  const auto [first, stored] = child("b", "a");
  REQUIRE(donor->commit(stored->extent, {1, 7}, {}).is_ok());
  const auto [second, other] = child("b", "a");  // replaces it, and is given up
  REQUIRE(other.is_ok());
  donor->drop_txn(second);
  CHECK(child("b", "a", 5 * MiB).second.status().code() == Code::pool_full);  // and so is one that does not fit
  CHECK(child("a", "b").second.status().code() == Code::invalid_argument);    // the stored one still comes after a
  REQUIRE(donor->supersede(stored->extent).is_ok());
  REQUIRE(donor->free(stored->extent).is_ok());
  check(*donor);
  CHECK(child("a", "b").second.is_ok());
}

TEST_CASE("nobody comes after himself") {
  auto donor = make_donor(4 * MiB);
  const auto after = [&](const std::string& key, const std::string& parent) {
    ReserveRequest request;
    request.txn = random_id();
    request.key = key;
    request.parent = parent;
    request.nbytes = 100;
    return donor->reserve(request).status().code();
  };
  CHECK(after("a", "a") == Code::invalid_argument);
  CHECK(after("b", "a") == Code::ok);  // the parent may come later
  CHECK(after("c", "b") == Code::ok);
  CHECK(after("a", "c") == Code::invalid_argument);
  CHECK(after("a", "x") == Code::ok);
  CHECK(after("x", "c") == Code::invalid_argument);
  CHECK(after("c", "b") == Code::ok);
  check(*donor);
}
