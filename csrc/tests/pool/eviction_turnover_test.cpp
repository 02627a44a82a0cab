// The turnover policy against its definition, and the promise that parents outlive their children.
#include <doctest/doctest.h>

#include <bit>
#include <map>
#include <random>

#include "pool/eviction.h"

using namespace torch_mooncake;
using torch_mooncake::pool::Turnover;

TEST_CASE("the victim is always the one with the smallest last use + capacity * log2(uses)") {
  std::mt19937_64 rng(3);
  const uint64_t capacity = 200;
  Turnover lru(capacity, 1 << 16);
  struct Known {
    uint64_t last_use, uses;
  };
  std::map<uint32_t, Known> model;
  uint64_t now = 0;
  uint32_t next = 0;
  std::vector<uint32_t> parked;
  for (int step = 0; step < 20'000; ++step) {
    const auto roll = rng() % 10;
    if (roll < 3 || model.empty()) {
      lru.insert(next, next * 0x9e3779b97f4a7c15 + 1, 1);
      model[next++] = {++now, 1};
    } else {
      auto it = std::next(model.begin(), static_cast<long>(rng() % model.size()));
      if (roll < 9) {
        lru.touch(it->first);
        it->second = {++now, it->second.uses + 1};
      } else if (rng() % 2) {
        lru.remove(it->first);
        model.erase(it);
      }
    }
    while (model.size() > 150) {
      auto best = model.end();
      uint64_t best_score = UINT64_MAX;
      for (auto it = model.begin(); it != model.end(); ++it) {
        const uint64_t score = it->second.last_use + capacity * (std::bit_width(it->second.uses) - 1);
        if (score < best_score) best = it, best_score = score;
      }
      const uint32_t victim = lru.victim().value();  // of equals, any
      REQUIRE(model.at(victim).last_use + capacity * (std::bit_width(model.at(victim).uses) - 1) == best_score);
      best = model.find(victim);
      if (rng() % 3 == 0) {  // step aside and come back: nothing changes
        lru.park(best->first);
        REQUIRE(lru.victim() != best->first);
        lru.unpark(best->first);
        REQUIRE(lru.victim() == best->first);
      }
      lru.remove(best->first);
      model.erase(best);
    }
    if (Status s = lru.check(); !s) FAIL(s.to_string());
  }
}

TEST_CASE("uses of evicted keys are remembered for four capacities") {
  Turnover lru(10, 1 << 10);
  lru.insert(0, 77, 1);
  for (int i = 0; i < 7; ++i) lru.touch(0);
  lru.evict(0, 77);
  lru.insert(1, 77, 1);
  CHECK(lru.uses(1) == 9);
  lru.evict(1, 77);
  for (uint32_t i = 0; i < 41; ++i) {
    lru.insert(2, 1000 + i, 1);
    lru.evict(2, 1000 + i);
  }
  lru.insert(1, 77, 1);
  CHECK(lru.uses(1) == 1);
}

TEST_CASE("of more than a million members the uses are remembered as well") {
  const uint32_t n = 3 << 20;
  Turnover lru(n, n);
  auto hash = [](uint32_t i) { return (i + 1) * 0x9e3779b97f4a7c15; };
  for (uint32_t i = 0; i < n; ++i) lru.insert(i, hash(i), 1);
  for (uint32_t i = 0; i < n; ++i) lru.touch(i);
  for (uint32_t i = 0; i < n; ++i) lru.evict(i, hash(i));
  uint32_t remembered = 0;
  for (uint32_t i = 0; i < n; ++i) {
    lru.insert(i, hash(i), 1);
    remembered += lru.uses(i) == 3;
  }
  CHECK(remembered > n / 10 * 8);  // four to a bucket: some buckets get more than they hold
  CHECK(lru.size() == n);
}

TEST_CASE("prefix chains touched tail first: a parent never goes before its child") {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 rng(seed);
    const size_t capacity = 120;
    Turnover lru(capacity, 1 << 16);
    // A tree of pages; a request walks a root-to-node path and touches it tail first.
    std::vector<int> parent{-1};
    std::vector<int> children{0};
    std::vector<bool> in{false};
    size_t resident = 0;
    auto hash = [](uint32_t n) { return (n + 1) * 0x9e3779b97f4a7c15; };
    for (int request = 0; request < 3000; ++request) {
      int node = static_cast<int>(rng() % parent.size());
      if (rng() % 2) {
        for (uint64_t depth = 1 + rng() % 6; depth > 0; --depth) {
          parent.push_back(node);
          in.push_back(false);
          node = static_cast<int>(parent.size()) - 1;
        }
      }
      for (int n = node; n >= 0; n = parent[static_cast<size_t>(n)]) {
        const auto id = static_cast<uint32_t>(n);
        if (in[id]) {
          lru.touch(id);
        } else {
          lru.insert(id, hash(id), 1);
          in[id] = true;
          ++resident;
        }
      }
      while (resident > capacity) {
        const uint32_t victim = lru.victim().value();
        for (size_t child = 0; child < parent.size(); ++child)
          if (parent[child] == static_cast<int>(victim)) REQUIRE(!in[child]);
        lru.evict(victim, hash(victim));
        in[victim] = false;
        --resident;
      }
    }
    CHECK(lru.check().is_ok());
  }
}
