// The allocator against a simple model: random sizes, random order, check() and a byte map after each step.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>

#include "pool/allocator.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

constexpr uint64_t MiB = 1 << 20;

Allocator make(uint64_t limit, uint64_t step = MiB) {
  return Allocator({limit, 0, step, [](uint64_t) { return Status(); }});
}

uint64_t total(const Placement& p) {
  uint64_t sum = 0;
  for (const Piece& piece : p.pieces) sum += piece.nbytes;
  return sum;
}

// The granule-by-granule truth: 64-byte granules of a small segment.
struct Model {
  explicit Model(uint64_t limit) : owner(limit / 64, 0) {}
  std::vector<uint32_t> owner;
  void set(const Placement& p, uint32_t from, uint32_t to) {
    for (const Piece& piece : p.pieces)
      for (uint64_t g = piece.offset / 64; g < (piece.offset + piece.nbytes + 63) / 64; ++g) {
        REQUIRE(owner[g] == from);
        owner[g] = to;
      }
  }
};

uint64_t random_size(std::mt19937_64& rng) {
  switch (rng() % 4) {
    case 0:
      return rng() % 600;
    case 1:
      return rng() % kSlabLimit;
    case 2:
      return kSlabLimit + rng() % (256 << 10);
    default:
      return uint64_t{1} << (rng() % 22);
  }
}

}  // namespace

TEST_CASE("random allocations never overlap, add up, and come back") {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 rng(seed);
    const uint64_t limit = 16 * MiB;
    Allocator a = make(limit);
    Model model(limit);
    std::map<uint32_t, Placement> live;
    uint64_t used = 0;
    uint32_t next = 0;
    for (int step = 0; step < 2500; ++step) {
      if (rng() % 100 < 55) {
        const uint64_t n = random_size(rng);
        const bool fits = a.fits(n);
        auto p = a.allocate(n, next);
        REQUIRE(p.is_ok() == fits);
        if (p.is_ok()) {
          REQUIRE(total(*p) == n);
          REQUIRE(p->pieces.size() <= kMaxPieces);
          if (n >= kSlabLimit)
            for (const Piece& piece : p->pieces) REQUIRE(piece.offset % kPageBytes == 0);
          REQUIRE(Allocator::footprint(*p) == Allocator::footprint(n));
          model.set(*p, 0, next + 1);
          used += Allocator::footprint(n);
          live[next++] = std::move(p).value();
        } else {
          REQUIRE(p.status().code() == Code::pool_full);
        }
      } else if (!live.empty()) {
        auto it = std::next(live.begin(), static_cast<long>(rng() % live.size()));
        model.set(it->second, it->first + 1, 0);
        used -= Allocator::footprint(it->second);
        a.free(it->second);
        live.erase(it);
      }
      REQUIRE(a.used_bytes() == used);
      if (Status s = a.check(); !s) FAIL(s.to_string());
    }
    // Another allocator takes over what is live, and goes on.
    std::vector<Allocator::Claim> claims;
    for (auto& [owner, p] : live) claims.push_back({owner, &p});
    std::shuffle(claims.begin(), claims.end(), rng);
    Allocator b({limit, a.size_bytes(), MiB, [](uint64_t) { return Status(); }});
    REQUIRE(b.rebuild(claims).is_ok());
    REQUIRE(b.used_bytes() == used);
    REQUIRE(b.check().is_ok());
    for (auto& [owner, p] : live) {
      b.free(p);
      if (Status s = b.check(); !s) FAIL(s.to_string());
    }
    REQUIRE(b.used_bytes() == 0);
    REQUIRE(b.free_bytes() == limit);
  }
}

TEST_CASE("more than 90 % of the pool is usable by mixed objects of 4 KiB to 1 GiB, also after long churn") {
  std::mt19937_64 rng(7);
  const uint64_t limit = uint64_t{16} << 30;
  Allocator a = make(limit, 64 * MiB);
  std::vector<Placement> live;
  uint64_t payload = 0;
  auto size = [&] {  // log-uniform
    const double bits = 12 + 18 * std::uniform_real_distribution<double>()(rng);
    return static_cast<uint64_t>(std::exp2(bits));
  };
  double worst = 1, sum = 0;
  int fulls = 0;
  for (int step = 0; step < 60'000; ++step) {
    const uint64_t n = size();
    for (;;) {
      auto p = a.allocate(n, static_cast<uint32_t>(step));
      if (p.is_ok()) {
        payload += n;
        live.push_back(std::move(p).value());
        break;
      }
      if (n <= 64 * MiB) {  // full for a small part of it: how much of the pool holds payload?
        const double usable = static_cast<double>(payload) / static_cast<double>(limit);
        worst = std::min(worst, usable);
        sum += usable;
        ++fulls;
      }
      const size_t victim = rng() % live.size();
      payload -= total(live[victim]);
      a.free(live[victim]);
      live[victim] = std::move(live.back());
      live.pop_back();
    }
  }
  REQUIRE(a.check().is_ok());
  MESSAGE("mean " << sum / fulls << " worst " << worst << " of " << fulls);
  CHECK(fulls > 1000);
  CHECK(sum / fulls > 0.97);
  CHECK(worst > 0.90);
}

TEST_CASE("a slab class holds what it says: small objects waste under an eighth") {
  for (uint64_t n = 1; n < kSlabLimit; ++n) {
    const uint64_t cell = Allocator::footprint(n);
    REQUIRE(cell >= n);
    REQUIRE(cell % 64 == 0);
    REQUIRE((cell - n < 64 || cell - n <= n / 8));
  }
  CHECK(Allocator::footprint(0) == 0);
  CHECK(Allocator::footprint(4096) == 4096);
  CHECK(Allocator::footprint(kSlabLimit) == kSlabLimit);
  CHECK(Allocator::footprint(kSlabLimit + 1) == kSlabLimit + kPageBytes);
}

TEST_CASE("scattered free pages are pieced together, up to the limit of pieces") {
  Allocator a = make(4 * MiB, 4 * MiB);
  std::vector<Placement> blocks;
  for (uint32_t i = 0; i < 128; ++i) blocks.push_back(a.allocate(32 << 10, i).value());
  CHECK(!a.allocate(1, 0).is_ok());
  for (size_t i = 0; i < blocks.size(); i += 2) a.free(blocks[i]);  // 64 holes of 32 KiB
  CHECK(a.free_bytes() == 2 * MiB);
  CHECK(!a.fits(2 * MiB, 63));
  auto p = a.allocate(2 * MiB - 100, 1);
  REQUIRE(p.is_ok());
  CHECK(p->pieces.size() == 64);
  CHECK(total(*p) == 2 * MiB - 100);
  CHECK(a.check().is_ok());
  a.free(*p);
  CHECK(a.free_bytes() == 2 * MiB);
}

TEST_CASE("when the host gives no more memory, the allocator lives with what it has") {
  uint64_t host = 3 * MiB;
  Allocator a(
      {8 * MiB, 0, MiB, [&](uint64_t size) { return size <= host ? Status() : Status(Code::pool_full, "host"); }});
  auto p = a.allocate(2 * MiB, 1).value();
  CHECK(a.size_bytes() == 2 * MiB);
  CHECK(!a.allocate(2 * MiB, 2).is_ok());
  CHECK(a.check().is_ok());
  CHECK(!a.fits(2 * MiB));
  CHECK(a.fits(0));
  host = 8 * MiB;
  a.lift_ceiling();
  CHECK(a.check().is_ok());
  auto q = a.allocate(6 * MiB, 2);
  REQUIRE(q.is_ok());
  a.free(p);
  a.free(*q);
  CHECK(a.check().is_ok());
  CHECK(a.free_bytes() == 8 * MiB);
  // An error that is no shortage is told as it is.
  Allocator broken({MiB, 0, MiB, [](uint64_t) { return Status(Code::io, "fallocate"); }});
  CHECK(broken.allocate(MiB, 1).status().code() == Code::io);
  CHECK(broken.allocate(10, 1).status().code() == Code::io);
  CHECK(broken.check().is_ok());
}

TEST_CASE("rebuild refuses claims that overlap or lie outside") {
  Allocator a({4 * MiB, 4 * MiB, MiB, [](uint64_t) { return Status(); }});
  Placement one{{{0, 0, MiB}}, kNoSlab}, two{{{0, MiB - kPageBytes, MiB}}, kNoSlab},
      out{{{0, 4 * MiB, 1 << 16}}, kNoSlab};
  Placement cell{{{0, 64, 64}}, 0};
  using Claims = std::vector<Allocator::Claim>;
  CHECK(a.rebuild(Claims{{1, &one}, {2, &two}}).code() == Code::corrupt);
  CHECK(a.rebuild(Claims{{1, &out}}).code() == Code::corrupt);
  CHECK(a.rebuild(Claims{{1, &one}, {2, &cell}}).code() == Code::corrupt);
  CHECK(a.rebuild(Claims{{1, &cell}, {2, &cell}}).code() == Code::corrupt);
  CHECK(a.rebuild(Claims{{1, &one}}).is_ok());
  CHECK(a.check().is_ok());
}
