// What keeps the beginning of a chain: refresh, and pins with an owner and a time.
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
