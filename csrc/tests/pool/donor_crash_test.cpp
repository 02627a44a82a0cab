// The worker is killed (SIGKILL, a real child) at every step of every verb; the next one attaches to the same memory.
#include <signal.h>
#include <sys/wait.h>

#include <functional>

#include "common/failpoint.h"
#include "pool/donor_fixture.h"
#include "pool/pin_slots.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

// Runs fn in a child that must be killed by the failpoint.
void die_in(const std::string& spec, const std::function<void()>& fn) {
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    set_failpoints(spec);
    fn();
    ::_exit(1);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(WTERMSIG(status) == SIGKILL);
}

std::unique_ptr<Donor> next_worker(const Donor& dead) {
  auto next = attach_donor(dead.held());
  REQUIRE_MESSAGE(next.is_ok(), next.status().to_string());
  check(**next);
  return std::move(next).value();
}

}  // namespace

TEST_CASE("a reservation that was not published is ignored") {
  for (const char* point : {"donor.publish.record", "donor.publish.fields", "donor.publish.generation"}) {
    for (const bool reused : {false, true}) {
      CAPTURE(point);
      CAPTURE(reused);
      auto donor = make_donor(4 * MiB);
      const ExtentRef kept = put(*donor, "kept", 5000);
      if (reused) {  // the entry had another life before
        const ExtentRef old = put(*donor, "old", MiB);
        REQUIRE(donor->free(old).is_ok());
      }
      die_in(std::string(point) + "=kill", [&] { (void)try_reserve(*donor, "half", MiB); });
      auto next = next_worker(*donor);
      CHECK(next->prepared().empty());
      CHECK(next->stats().extents == 1);
      CHECK(next->stats().used_bytes == 5120);
      CHECK(next->describe(kept)->key == "kept");
      put(*next, "again", 3 * MiB);
      check(*next);
    }
  }
}

TEST_CASE("a failed publication leaves the living donor as it was") {
  auto donor = make_donor(4 * MiB);
  for (const char* point : {"donor.publish.record", "donor.publish.fields", "donor.publish.generation"}) {
    set_failpoints(std::string(point) + "=error");
    CHECK(try_reserve(*donor, "a", MiB).status().code() == Code::io);
    set_failpoints("");
    CHECK(donor->stats().extents == 0);
    CHECK(donor->stats().used_bytes == 0);
    check(*donor);
  }
}

TEST_CASE("a commit is there or not there") {
  for (const char* point : {"donor.commit.fields", "donor.commit.done"}) {
    CAPTURE(point);
    auto donor = make_donor(4 * MiB);
    const TxnId txn = random_id();
    const Reservation r = reserve(*donor, "a", MiB, 0, txn);
    die_in(std::string(point) + "=kill", [&] { (void)donor->commit(r.extent, {2, 9}, 5u); });
    auto next = next_worker(*donor);
    const bool done = std::string(point) == "donor.commit.done";
    CHECK(next->announce().size() == (done ? 1 : 0));
    CHECK(next->prepared().size() == (done ? 0 : 1));
    if (!done) CHECK(next->prepared()[0] == std::pair<TxnId, std::string>{txn, "a"});
    // The home says it again; both end in the same place, with the same pieces.
    CHECK(next->commit(r.extent, {2, 9}, 5u).is_ok());
    REQUIRE(next->announce().size() == 1);
    const Announcement a = next->announce()[0];
    CHECK(a.version == Version{2, 9});
    CHECK(a.crc32c == 5);
    CHECK(a.pieces.at(0).offset == r.pieces.at(0).offset);
    CHECK(a.extent.generation == r.extent.generation);
    check(*next);
  }
}

TEST_CASE("what was on its way out goes out") {
  const struct {
    const char* point;
    std::function<void(Donor&, ExtentRef)> verb;
  } cases[] = {
      {"donor.supersede.word", [](Donor& d, ExtentRef e) { (void)d.supersede(e); }},
      {"donor.retire.word", [](Donor& d, ExtentRef e) { (void)d.free(e); }},
      {"donor.retire.limbo", [](Donor& d, ExtentRef e) { (void)d.free(e); }},
      {"donor.retire.limbo", [](Donor& d, ExtentRef) { (void)try_reserve(d, "big", 4 * MiB); }},
  };
  for (const auto& c : cases) {
    CAPTURE(c.point);
    auto donor = make_donor(4 * MiB);
    const ExtentRef a = put(*donor, "a", MiB);
    die_in(std::string(c.point) + "=kill", [&] { c.verb(*donor, a); });
    auto next = next_worker(*donor);
    CHECK(next->describe(a).status().code() == Code::key_not_found);
    CHECK(next->announce().empty());
    CHECK(next->stats().used_bytes == 0);
    put(*next, "b", 4 * MiB);
    check(*next);
  }
}

TEST_CASE("generations go on where they were: no number twice, over any number of restarts") {
  auto donor = make_donor(4 * MiB);
  uint64_t last = put(*donor, "a", 100).generation;
  for (int i = 0; i < 5; ++i) {
    die_in("donor.publish.generation=kill", [&] { (void)try_reserve(*donor, "x", 100); });
    donor = next_worker(*donor);
    const uint64_t next = put(*donor, "a" + std::to_string(i), 100).generation;
    CHECK(next - last >= 2);  // the dead one's was never handed out again
    CHECK(next - last < 10);
    last = next;
  }
}

TEST_CASE("a damaged record costs its extent, not the pool") {
  auto donor = make_donor(4 * MiB);
  const ExtentRef a = put(*donor, "a", 40'000), b = put(*donor, "b", 40'000), c = put(*donor, "c", 100);
  auto table = donor->segments()[0]->map(Protection::read_write).value();
  auto records = donor->held()[1].segment->map(Protection::read_write).value();
  records->data[table_entry(table->data, b.index).record_offset + 70] ^= std::byte{1};
  auto next = next_worker(*donor);
  CHECK(next->describe(a).is_ok());
  CHECK(next->describe(b).status().code() == Code::key_not_found);
  CHECK(next->describe(c).is_ok());
  const_cast<uint64_t&>(table_entry(table->data, c.index).record_offset) = uint64_t{1} << 60;
  donor = next_worker(*next);
  CHECK(donor->announce().size() == 1);
  // Not a table at all, or not all of it.
  std::memset(table->data, 0, 8);
  CHECK(attach_donor(donor->held()).status().code() == Code::version_mismatch);
  auto held = donor->held();
  held.pop_back();
  CHECK(attach_donor(held).status().code() == Code::invalid_argument);
}

TEST_CASE("pins and unfinished writes of a client outlive the worker, not the client") {
  auto donor = make_donor(4 * MiB);
  const SessionId reader = 11, writer = 12;
  auto lease = donor->slots_for_client(reader);
  auto write_lease = donor->slots_for_client(writer);
  REQUIRE(lease.is_ok());
  const ExtentRef a = put(*donor, "a", MiB);
  auto slots = Segment::adopt(std::move(lease).value(), Id128{}).value();
  auto page = PinPage::open(donor->segments()[0], slots).value();
  REQUIRE(page->pin(a).is_ok());
  const TxnId txn = random_id();
  const Reservation w = reserve(*donor, "w", MiB, writer, txn);

  auto next = next_worker(*donor);
  donor.reset();
  next->sweep(1);
  CHECK(next->stats().pinned_extents == 1);
  CHECK(next->free(a).is_ok());
  next->drop_txn(txn);
  CHECK(next->stats().limbo_bytes == 2 * MiB);
  CHECK(next->stats().fenced_bytes == MiB);
  CHECK(try_reserve(*next, "b", 3 * MiB).status().code() == Code::pool_full);
  check(*next);

  // And a second restart.
  auto third = next_worker(*next);
  next.reset();
  CHECK(third->stats().limbo_bytes == 2 * MiB);
  int released = 0;
  third->on_held_changed([&](const HeldSegment& h, bool added) {
    CHECK(!added);
    CHECK((h.tag == reader || h.tag == writer));
    ++released;
  });
  write_lease = UniqueFd();
  third->sweep(2);
  CHECK(third->stats().limbo_bytes == MiB);
  CHECK(third->stats().fenced_bytes == 0);
  page.reset();
  slots.reset();  // the client is gone: the kernel drops its lock
  third->sweep(3);
  CHECK(released == 2);
  CHECK(third->stats().limbo_bytes == 0);
  CHECK(try_reserve(*third, "b", 4 * MiB).is_ok());
  check(*third);
}
