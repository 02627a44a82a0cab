// The directory's index against std::map, and what it takes; the clients' cache of locations.
#include "pool/index.h"

#include <doctest/doctest.h>

#include <map>
#include <random>

#include "pool/location_cache.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

bool same(const IndexEntry& a, const IndexEntry& b) {
  return a.version == b.version && a.kind == b.kind && a.parts == b.parts && a.expires_ns == b.expires_ns &&
         a.spots == b.spots;
}

struct Found : Object {
  explicit Found(std::string key) { info_.key = std::move(key); }
  const ObjectInfo& info() const override { return info_; }
  bool local() const override { return true; }
  ObjectInfo info_;
};

}  // namespace

TEST_CASE("the index does what a map does, whatever comes") {
  std::mt19937_64 rng(5);
  for (const uint64_t keys : {3u, 100u, 20'000u}) {
    Index index;
    std::map<KeyHash, IndexEntry> model;
    for (int i = 0; i < 100'000; ++i) {
      // Few shards, and places close together: long runs of neighbours that move when one of them goes.
      const uint64_t k = rng() % keys;
      const KeyHash hash{k % 3, k % 2 ? k << 40 : ~uint64_t{0} - (k << 50)};
      const auto what = rng() % 10;
      if (what < 5) {
        IndexEntry entry{{1 + rng() % 9, rng()}, rng() % 2 ? Kind::sealed : Kind::named, 1, INT64_MAX, {}};
        if (rng() % 4 == 0) entry.parts = 2;
        if (rng() % 4 == 0) entry.expires_ns = static_cast<int64_t>(rng() % 1000);
        for (uint64_t s = rng() % 3 + (rng() % 8 != 0); s > 0; --s)
          entry.spots.push_back({uint32_t(rng() % 7), uint32_t(rng() % entry.parts), {uint32_t(rng()), rng()}});
        index.set(hash, entry);
        model[hash] = entry;
      } else if (what < 8) {
        index.erase(hash);
        model.erase(hash);
      } else {
        const auto it = model.find(hash);
        const Index::Ref found = index.find(hash);
        REQUIRE(static_cast<bool>(found) == (it != model.end()));
        if (found) REQUIRE(same(found.entry(), it->second));
      }
      REQUIRE(index.size() == model.size());
    }
    size_t n = 0;
    index.for_each([&](const KeyHash& hash, const Index::Ref& e) {
      REQUIRE(same(e.entry(), model.at(hash)));
      ++n;
    });
    CHECK(n == model.size());
    for (const auto& [hash, entry] : model) REQUIRE(index.find(hash));
    for (const auto& [hash, entry] : std::map(model)) index.erase(hash);
    CHECK(index.size() == 0);
    CHECK(index.nbytes() < (1 << 20));  // the memory of what was there is given back
  }
}

TEST_CASE("the index takes at most 80 bytes a key at any size") {
  Index index;
  IndexEntry entry{{1, 1}, Kind::named, 1, INT64_MAX, {{1, 0, {1, 1}}}};
  for (uint64_t i = 1; i <= 400'000; ++i) {
    index.set(hash_key(std::to_string(i)), entry);
    if (i >= 100'000 && i % 10'000 == 0) CHECK(index.nbytes() < i * 80);
  }
}

TEST_CASE("remembered locations are bounded by number and by bytes, and the latest stay") {
  LocationCache cache(100, 1 << 20);
  for (int i = 0; i < 1000; ++i) {
    cache.add({std::make_shared<Found>("k" + std::to_string(i)), nullptr});
    CHECK(cache.size() <= 100);
    CHECK(cache.find("k" + std::to_string(i)));
    if (i > 0) CHECK(cache.find("k0"));  // as it is used again and again
  }
  CHECK_FALSE(cache.find("k500"));
  cache.erase("k0");
  CHECK_FALSE(cache.find("k0"));
  auto replaced = std::make_shared<Found>("k999");
  cache.add({replaced, nullptr});
  CHECK(cache.find("k999")->object == replaced);
  for (int i = 0; i < 100; ++i) {
    auto big = std::make_shared<Found>("b" + std::to_string(i));
    big->info_.meta.assign(100'000, 'm');
    cache.add({big, nullptr});
    CHECK(cache.size() <= 110);
  }
  CHECK(cache.size() < 20);
  auto huge = std::make_shared<Found>("huge");
  huge->info_.meta.assign(1 << 20, 'm');
  cache.add({huge, nullptr});
  CHECK_FALSE(cache.find("huge"));
  cache.clear();
  CHECK(cache.size() == 0);
}
