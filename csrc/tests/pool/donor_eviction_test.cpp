// Eviction by the donor: exact amounts, the right victims, contiguity, and order kept over a restart.
#include <random>
#include <set>

#include "pool/donor_fixture.h"
#include "pool/pin_slots.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

TEST_CASE("exactly as many bytes as needed: without the last victim it would not have fitted") {
  std::mt19937_64 rng(1);
  const uint64_t limit = 32 * MiB;
  auto donor = make_donor(limit);
  std::vector<uint64_t> gone;
  donor->set_evicted_callback([&](const Announcement& a) { gone.push_back((a.nbytes + 4095) / 4096 * 4096); });
  uint64_t evicted_total = 0, put_total = 0;
  for (int i = 0; i < 4000; ++i) {
    const uint64_t n = kSlabLimit + rng() % MiB;
    const uint64_t need = (n + 4095) / 4096 * 4096;
    const uint64_t free = limit - donor->stats().used_bytes;
    gone.clear();
    put(*donor, "k" + std::to_string(i), n);
    uint64_t sum = 0;
    for (uint64_t g : gone) sum += g;
    put_total += need;
    evicted_total += sum;
    if (gone.empty()) {
      REQUIRE(need <= free);
    } else {
      REQUIRE(free + sum - gone.back() < need);
      REQUIRE(free + sum >= need);
    }
  }
  check(*donor);
  CHECK(donor->stats().evictions > 3000);
  CHECK(put_total - evicted_total == donor->stats().used_bytes);
}

TEST_CASE("objects of one small size replace each other one for one") {
  auto donor = make_donor(MiB);
  int i = 0;
  while (donor->stats().evictions == 0) put(*donor, "k" + std::to_string(i++), 4096);
  CHECK(i == 257);
  for (int k = 0; k < 1000; ++k) put(*donor, "k" + std::to_string(i++), 4096);
  CHECK(donor->stats().evictions == 1001);
  check(*donor);
}

TEST_CASE("the least valuable goes first: used ones stay") {
  auto donor = make_donor(8 * MiB);
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 8; ++i) refs.push_back(put(*donor, "k" + std::to_string(i), MiB));
  donor->touch(refs[0]);
  put(*donor, "new1", MiB);
  put(*donor, "new2", MiB);
  CHECK(donor->describe(refs[0]).is_ok());
  CHECK(!donor->describe(refs[1]).is_ok());
  CHECK(!donor->describe(refs[2]).is_ok());
  CHECK(donor->describe(refs[3]).is_ok());

  // A new worker goes on in the same order.
  auto next = attach_donor(donor->held());
  REQUIRE(next.is_ok());
  put(**next, "new3", MiB);
  CHECK((*next)->describe(refs[0]).is_ok());
  CHECK(!(*next)->describe(refs[3]).is_ok());
  CHECK((*next)->describe(refs[4]).is_ok());
  check(**next);
}

TEST_CASE("pinned extents step aside and come back in their old place") {
  auto donor = make_donor(4 * MiB);
  auto page = PinPage::open(donor->segments()[0], donor->open_slots(1).value()).value();
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 4; ++i) refs.push_back(put(*donor, "k" + std::to_string(i), MiB));
  const uint32_t slot = page->pin(refs[0]).value();
  put(*donor, "new1", MiB);
  CHECK(donor->describe(refs[0]).is_ok());
  CHECK(!donor->describe(refs[1]).is_ok());
  page->unpin(slot);
  put(*donor, "new2", MiB);
  CHECK(!donor->describe(refs[0]).is_ok());
  CHECK(donor->describe(refs[2]).is_ok());
  check(*donor);
}

TEST_CASE("a big object finds room among small ones without flushing the pool") {
  std::mt19937_64 rng(5);
  const uint64_t limit = 64 * MiB, big = 16 * MiB;
  for (uint64_t small : {uint64_t{32} << 10, uint64_t{4} << 10, uint64_t{100} << 10}) {
    CAPTURE(small);
    auto donor = make_donor(limit);
    std::vector<ExtentRef> refs;
    for (int i = 0; donor->stats().evictions == 0; ++i) refs.push_back(put(*donor, "k" + std::to_string(i), small));
    for (int i = 0; i < 20'000; ++i) donor->touch(refs[rng() % refs.size()]);  // age and address have nothing in common
    uint64_t evicted = 0;
    donor->set_evicted_callback([&](const Announcement& a) { evicted += a.nbytes; });
    const Reservation r = reserve(*donor, "big", big);
    CHECK(r.pieces.size() <= kMaxPieces);
    CHECK(evicted >= big - MiB);
    CHECK(evicted <= 2 * big + MiB);
    check(*donor);
  }
}

TEST_CASE("a new size of small objects takes over slabs a slab at a time") {
  auto donor = make_donor(16 * MiB);
  std::mt19937_64 rng(5);
  std::vector<ExtentRef> refs;
  for (int i = 0; donor->stats().evictions == 0; ++i) refs.push_back(put(*donor, "a" + std::to_string(i), 4096));
  for (int i = 0; i < 20'000; ++i) donor->touch(refs[rng() % refs.size()]);
  uint64_t evicted = 0;
  donor->set_evicted_callback([&](const Announcement& a) { evicted += a.nbytes; });
  put(*donor, "b", 8192);
  CHECK(evicted <= 256 << 10);
  for (int i = 0; i < 100; ++i) put(*donor, "b" + std::to_string(i), 8192);
  CHECK(evicted <= MiB + (256 << 10));
  check(*donor);
}

TEST_CASE("soft pins go when nothing else is left, the least valuable first; hard ones never") {
  auto donor = make_donor(8 * MiB);
  std::vector<std::string> gone;
  donor->set_evicted_callback([&](const Announcement& a) { gone.push_back(a.key); });
  const auto pinned = [&](const std::string& key, Pin pin) {
    const ExtentRef ref = put(*donor, key, MiB);
    donor->set_pin(ref, pin, [](const Status& s) { REQUIRE(s.is_ok()); });
    return ref;
  };
  const ExtentRef hard = pinned("hard", Pin::hard);
  pinned("soft1", Pin::soft);
  const ExtentRef used = pinned("soft2", Pin::soft);
  for (int i = 0; i < 5; ++i) donor->touch(put(*donor, "k" + std::to_string(i), MiB));
  donor->touch(used);
  SUBCASE("in this worker") {}
  SUBCASE("in the next") {
    donor = std::move(attach_donor(donor->held())).value();
    donor->set_evicted_callback([&](const Announcement& a) { gone.push_back(a.key); });
  }
  CHECK(donor->stats().hard_pinned_bytes == MiB);
  CHECK(donor->stats().soft_pinned_bytes == 2 * MiB);
  put(*donor, "big", 5 * MiB);
  CHECK(gone == std::vector<std::string>{"k0", "k1", "k2", "k3", "k4"});
  put(*donor, "next", 6 * MiB);
  CHECK(std::vector(gone.begin() + 5, gone.end()) == std::vector<std::string>{"big", "soft1"});
  const Status full = try_reserve(*donor, "more", 8 * MiB).status();
  CHECK(full.code() == Code::pool_full);
  CHECK(full.message().find("1048576 bytes are pinned hard") != std::string::npos);
  donor->set_pin(hard, Pin::none, [](const Status& s) { REQUIRE(s.is_ok()); });
  CHECK(try_reserve(*donor, "more", 8 * MiB).is_ok());
  check(*donor);
}
