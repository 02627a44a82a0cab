// What each verb promises, one by one, and what a full pool says.
#include <algorithm>
#include <fstream>

#include "pool/donor_fixture.h"
#include "pool/pin_slots.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

std::shared_ptr<PinPage> pin_page(Donor& donor, SessionId session) {
  auto page = PinPage::open(donor.segments()[0], donor.open_slots(session).value());
  REQUIRE(page.is_ok());
  return *page;
}

}  // namespace

TEST_CASE("bad requests are refused and change nothing") {
  auto donor = make_donor(4 * MiB);
  auto refused = [&](ReserveRequest r) { return donor->reserve(r).status().code() == Code::invalid_argument; };
  ReserveRequest r;
  CHECK(refused(r));  // empty key
  r.key = std::string(kMaxKeyBytes + 1, 'k');
  CHECK(refused(r));
  r.key = "k";
  r.parts = 0;
  CHECK(refused(r));
  r.parts = 2;
  r.part = 2;
  CHECK(refused(r));
  r.part = 1;
  r.meta = std::string(kMaxMetaBytes + 1, 'm');
  CHECK(refused(r));
  r.meta.pop_back();
  CHECK(donor->reserve(r).is_ok());
  CHECK(!Donor::create({0, MiB, 10}).is_ok());
  CHECK(!Donor::create({MiB, MiB, (1u << 30) + 1}).is_ok());
  check(*donor);
  const ExtentRef none{5, 5}, beyond{1u << 31, 1};
  for (const ExtentRef& ref : {none, beyond}) {
    CHECK(donor->commit(ref, {}, {}).code() == Code::key_not_found);
    CHECK(donor->finalize(ref).code() == Code::key_not_found);
    CHECK(donor->supersede(ref).code() == Code::key_not_found);
    CHECK(donor->free(ref).code() == Code::key_not_found);
    CHECK(donor->describe(ref).status().code() == Code::key_not_found);
    CHECK(donor->give_back(ref, 1).code() == Code::key_not_found);
    donor->touch(ref);
    donor->hint_pin(ref, 100);
  }
  check(*donor);
}

TEST_CASE("the life of an extent") {
  auto donor = make_donor(4 * MiB);
  const Reservation r = reserve(*donor, "a", 100'000);
  CHECK(donor->announce().empty());
  CHECK(donor->keys("", 10).empty());
  CHECK(donor->prepared().size() == 1);
  CHECK(donor->finalize(r.extent).code() == Code::invalid_argument);
  CHECK(donor->supersede(r.extent).code() == Code::invalid_argument);
  CHECK(donor->commit(r.extent, {3, 4}, 99u).is_ok());
  CHECK(donor->prepared().empty());
  auto a = donor->describe(r.extent);
  REQUIRE(a.is_ok());
  CHECK(a->version == Version{3, 4});
  CHECK(a->has_crc);
  CHECK(a->crc32c == 99);
  CHECK(a->label == "label");
  CHECK(a->state == ExtentState::committed);
  CHECK(donor->finalize(r.extent).is_ok());
  CHECK(donor->finalize(r.extent).is_ok());
  CHECK(donor->announce().at(0).state == ExtentState::final);
  put(*donor, "b", 10);
  put(*donor, "ab", 10);
  CHECK(donor->keys("a", 10) == std::vector<std::string>{"a", "ab"});
  CHECK(donor->keys("", 2) == std::vector<std::string>{"a", "ab"});
  CHECK(donor->supersede(r.extent).is_ok());
  CHECK(donor->supersede(r.extent).is_ok());
  CHECK(donor->describe(r.extent).status().code() == Code::key_not_found);
  CHECK(donor->keys("a", 10) == std::vector<std::string>{"ab"});
  CHECK(donor->free(r.extent).is_ok());
  CHECK(donor->free(r.extent).code() == Code::key_not_found);
  check(*donor);
}

TEST_CASE("a time to live stays with the extent: over a restart, not over its reuse") {
  auto donor = make_donor(4 * MiB);
  const Reservation r = reserve(*donor, "a", 100);
  CHECK(donor->commit(r.extent, {1, 1}, {}, 50, 1'000'000'000).is_ok());
  CHECK(donor->commit(r.extent, {1, 1}, {}, 50, 9'000'000'000).is_ok());  // told twice: counted from the first
  CHECK(donor->keys("", 10, 1'049'999'999).size() == 1);
  CHECK(donor->keys("", 10, 1'050'000'000).empty());
  auto next = attach_donor(donor->held());
  REQUIRE(next.is_ok());
  const Announcement a = (*next)->announce().at(0);
  CHECK(a.ttl_ms == 50);
  CHECK(a.committed_ns == 1'000'000'000);
  CHECK((*next)->keys("", 10, 1'050'000'000).empty());
  CHECK((*next)->free(r.extent).is_ok());
  const ExtentRef again = put(**next, "b", 100);
  CHECK(again.index == r.extent.index);
  CHECK((*next)->announce().at(0).ttl_ms == 0);
  CHECK((*next)->keys("", 10, INT64_MAX - 1).size() == 1);
  check(**next);
}

TEST_CASE("objects of 0 bytes are objects") {
  auto donor = make_donor(MiB);
  const Reservation r = reserve(*donor, "empty", 0);
  CHECK(r.pieces.empty());
  CHECK(donor->commit(r.extent, {1, 1}, 0u).is_ok());
  CHECK(donor->describe(r.extent)->nbytes == 0);
  check(*donor);
  auto next = attach_donor(donor->held());
  REQUIRE(next.is_ok());
  CHECK((*next)->announce().at(0).key == "empty");
  CHECK((*next)->free(r.extent).is_ok());
  check(**next);
}

TEST_CASE("a put larger than the pool is pool_full with sizes, and evicts nothing") {
  auto donor = make_donor(4 * MiB);
  for (int i = 0; i < 4; ++i) put(*donor, "k" + std::to_string(i), MiB);
  auto r = try_reserve(*donor, "big", 5 * MiB);
  CHECK(r.status().code() == Code::pool_full);
  CHECK(r.status().retryable());
  CHECK(r.status().message().find("5242880 bytes asked") != std::string::npos);
  CHECK(r.status().message().find("of 4194304") != std::string::npos);
  CHECK(donor->announce().size() == 4);

  // The same if pinned, prepared and hinted extents stand in the way.
  auto page = pin_page(*donor, 1);
  const auto all = donor->announce();
  REQUIRE(page->pin(all[0].extent).is_ok());
  donor->hint_pin(all[1].extent, 1000);
  CHECK(try_reserve(*donor, "big", 3 * MiB).status().code() == Code::pool_full);
  CHECK(donor->announce().size() == 4);
  const Reservation two = reserve(*donor, "two", 2 * MiB);  // takes the other two
  CHECK(donor->announce().size() == 2);
  CHECK(try_reserve(*donor, "one", MiB).status().code() == Code::pool_full);
  donor->sweep(1000);  // the hint is over
  CHECK(try_reserve(*donor, "one", MiB).is_ok());
  CHECK(donor->announce().size() == 1);
  CHECK(donor->describe(all[0].extent).is_ok());
  check(*donor);
}

TEST_CASE("a full extent table evicts an extent, whatever its bytes") {
  auto donor = make_donor(MiB, 3);
  for (int i = 0; i < 3; ++i) put(*donor, "k" + std::to_string(i), 0);
  put(*donor, "k3", 64);
  CHECK(donor->keys("", 10) == std::vector<std::string>{"k1", "k2", "k3"});
  check(*donor);
}

TEST_CASE("a pinned extent that is deleted waits in limbo, unfindable, until it is unpinned") {
  auto donor = make_donor(2 * MiB);
  auto page = pin_page(*donor, 1);
  const ExtentRef ref = put(*donor, "a", MiB);
  const uint32_t slot = page->pin(ref).value();
  CHECK(donor->supersede(ref).is_ok());
  CHECK(!page->valid(ref));
  CHECK(page->pin(ref).status().code() == Code::key_not_found);
  CHECK(donor->free(ref).is_ok());
  CHECK(donor->stats().limbo_bytes == MiB);
  CHECK(donor->announce().empty());
  CHECK(try_reserve(*donor, "b", 2 * MiB).status().code() == Code::pool_full);
  page->unpin(slot);
  CHECK(try_reserve(*donor, "b", 2 * MiB).is_ok());
  CHECK(donor->stats().limbo_bytes == 0);
  check(*donor);
}

TEST_CASE("a reservation dropped under its writer is fenced until it is given back or the writer is gone") {
  auto donor = make_donor(2 * MiB);
  const SessionId writer = 7, other = 8;
  const TxnId txn = random_id();
  const Reservation r = reserve(*donor, "a", MiB, writer, txn);
  const Reservation s = reserve(*donor, "a2", MiB, writer, txn);
  donor->drop_txn(txn);
  CHECK(donor->prepared().empty());
  CHECK(donor->commit(r.extent, {1, 1}, {}).code() == Code::key_not_found);
  CHECK(donor->stats().fenced_bytes == 2 * MiB);
  CHECK(try_reserve(*donor, "b", MiB).status().code() == Code::pool_full);
  CHECK(donor->give_back(r.extent, other).code() == Code::invalid_argument);
  CHECK(donor->give_back(r.extent, writer).is_ok());
  CHECK(donor->stats().fenced_bytes == MiB);
  const Reservation b = reserve(*donor, "b", MiB, other);
  CHECK(b.pieces[0].offset == r.pieces[0].offset);
  CHECK(try_reserve(*donor, "c", MiB).status().code() == Code::pool_full);
  donor->end_session(writer);
  CHECK(donor->stats().fenced_bytes == 0);
  CHECK(try_reserve(*donor, "c", MiB).is_ok());
  // Giving back what is still PREPARED drops it at once.
  CHECK(donor->give_back(b.extent, other).is_ok());
  CHECK(donor->stats().prepared_bytes == MiB);
  check(*donor);
}

TEST_CASE("the end of a session drops what it was writing, and only that") {
  auto donor = make_donor(4 * MiB);
  reserve(*donor, "a", MiB, 1);
  const Reservation b = reserve(*donor, "b", MiB, 2);
  donor->end_session(1);
  REQUIRE(donor->prepared().size() == 1);
  CHECK(donor->prepared()[0].second == "b");
  CHECK(donor->commit(b.extent, {1, 1}, {}).is_ok());
  donor->end_session(2);
  donor->end_session(2);
  CHECK(donor->announce().size() == 1);
  check(*donor);
}

TEST_CASE("a lost connection is not a dead client: its pins and fences last until it lets go of its slot page") {
  auto donor = make_donor(4 * MiB);
  auto lease = donor->slots_for_client(1);
  REQUIRE(lease.is_ok());
  auto page = pin_page(*donor, 1);
  const ExtentRef a = put(*donor, "a", MiB);
  REQUIRE(page->pin(a).is_ok());
  const TxnId txn = random_id();
  reserve(*donor, "w", MiB, 1, txn);
  reserve(*donor, "v", MiB, 2);
  donor->lose_session(1);
  donor->lose_session(2);  // has no slot page: over
  donor->lose_session(3);
  donor->sweep(1);
  CHECK(donor->stats().pinned_extents == 1);
  CHECK(donor->stats().prepared_bytes == MiB);
  donor->drop_txn(txn);
  CHECK(donor->stats().fenced_bytes == MiB);
  lease = UniqueFd();  // the client is dead
  donor->sweep(2);
  CHECK(donor->stats().pinned_extents == 0);
  CHECK(donor->stats().used_bytes == MiB);
  check(*donor);
}

TEST_CASE("slot pages: 8191 pins, then busy; the keeper hears of pages that come and go") {
  auto donor = make_donor(MiB, 1 << 14);
  std::vector<std::pair<SessionId, bool>> heard;
  donor->on_held_changed([&](const HeldSegment& h, bool added) {
    CHECK(h.role == SegmentRole::slots);
    heard.emplace_back(h.tag, added);
  });
  auto page = pin_page(*donor, 5);
  const ExtentRef ref = put(*donor, "a", 64);
  uint32_t last = 0;
  for (uint32_t i = 0; i < kPinSlots - 1; ++i) last = page->pin(ref).value();
  CHECK(page->pin(ref).status().code() == Code::busy);
  page->unpin(last);
  CHECK(page->pin(ref).is_ok());
  CHECK(page->pinned() == kPinSlots - 1);
  CHECK(donor->stats().pinned_extents == 1);
  donor->end_session(5);
  CHECK(donor->stats().pinned_extents == 0);
  CHECK(heard == std::vector<std::pair<SessionId, bool>>{{5, true}, {5, false}});
}

TEST_CASE("keys come in pages, each behind the last one of the page before") {
  auto donor = make_donor(4 * MiB);
  std::vector<std::string> all;
  for (int i = 0; i < 300; ++i) {
    all.push_back("k/" + std::to_string(i * 7919 % 1000));
    put(*donor, all.back(), 100);
    put(*donor, "other/" + std::to_string(i), 100);
  }
  put(*donor, all[5], 200, {1, 2});  // a second version, not superseded yet: named once
  std::sort(all.begin(), all.end());
  for (size_t page : {1, 7, 150, 300, 1000}) {
    std::vector<std::string> got;
    for (;;) {
      const auto some = donor->keys("k/", page, 0, got.empty() ? "" : got.back());
      CHECK(some.size() <= page);
      if (some.empty()) break;
      got.insert(got.end(), some.begin(), some.end());
    }
    CHECK(got == all);
  }
}

TEST_CASE("how many objects a donor can have goes by the memory it lends") {
  auto table_of = [](uint64_t limit) { return (*Donor::create({limit}))->segments()[0]->capacity(); };
  CHECK(table_of(MiB) == kTableHeaderBytes + (size_t{1} << 20) * sizeof(ExtentEntry));
  CHECK(table_of(16 * 1024 * MiB) == kTableHeaderBytes + (size_t{16} << 20) * sizeof(ExtentEntry));
}

TEST_CASE("a million small objects: memory in bounds, and all found again") {
  auto rss_anon_kib = [] {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("RssAnon:")) return std::stoull(line.substr(8));
    FAIL("no RssAnon");
    return 0ull;
  };
  const uint32_t n = 1'000'000;
  auto donor = make_donor(128 * MiB, 1 << 20);
  const auto before = rss_anon_kib();
  for (uint32_t i = 0; i < n; ++i) {
    ReserveRequest request;
    std::memcpy(request.txn.data(), &i, sizeof i);
    request.key = "key/" + std::to_string(i);
    request.nbytes = 64;
    auto r = donor->reserve(request);
    if (!r.is_ok() || !donor->commit(r->extent, {1, i}, {}).is_ok()) FAIL("put " << i);
  }
  const auto anon = (rss_anon_kib() - before) * 1024 / n;
  uint64_t shared = 0;
  for (const HeldSegment& h : donor->held())
    if (h.role != SegmentRole::data) shared += h.segment->size();
  MESSAGE("per extent: " << anon << " B of the worker's own, " << shared / n << " B beside the data");
  CHECK(donor->stats().evictions == 0);
  CHECK(donor->stats().extents == n);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their shadow memory counts too
  CHECK(anon < 128);
#endif
  CHECK(shared / n < 384);
  check(*donor);
  auto next = attach_donor(donor->held());
  REQUIRE(next.is_ok());
  CHECK((*next)->stats().extents == n);
}
