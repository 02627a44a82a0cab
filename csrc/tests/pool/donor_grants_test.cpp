// Room in advance: extents that a writer has before it says for what.
#include <signal.h>
#include <sys/wait.h>

#include "common/failpoint.h"
#include "pool/donor_fixture.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

constexpr uint64_t kBytes = 64 << 10;

Reservation grant(Donor& donor, SessionId writer, const TxnId& txn = random_id(), uint64_t nbytes = kBytes) {
  auto r = donor.grant(nbytes, writer, txn);
  REQUIRE_MESSAGE(r.is_ok(), r.status().to_string());
  return std::move(r).value();
}

ReserveRequest request(const std::string& key, SessionId writer, uint64_t nbytes = kBytes) {
  ReserveRequest r;
  r.txn = random_id();
  r.key = key;
  r.nbytes = nbytes;
  r.writer = writer;
  r.meta = "meta of " + key;
  return r;
}

}  // namespace

TEST_CASE("a grant is nobody's until it is bound, and then as if it had been reserved") {
  auto donor = make_donor(16 * MiB);
  const Reservation g = grant(*donor, 7);
  CHECK(donor->stats().granted_bytes == kBytes);
  CHECK(donor->stats().used_bytes == 0);
  CHECK(donor->stats().extents == 0);
  CHECK(donor->stats().prepared_bytes == 0);
  CHECK(donor->prepared().empty());
  CHECK(donor->announce_prepared().empty());
  CHECK(donor->keys("", 10).empty());
  check(*donor);

  const ReserveRequest a = request("a", 7);
  CHECK(donor->bind(g.extent, request("a", 8)).code() == Code::invalid_argument);
  CHECK(donor->bind(g.extent, request("a", 7, kBytes - 1)).code() == Code::invalid_argument);
  CHECK(donor->bind(g.extent, request("", 7)).code() == Code::invalid_argument);
  CHECK(donor->bind({g.extent.index, g.extent.generation + 1}, a).code() == Code::key_not_found);
  CHECK(donor->stats().granted_bytes == kBytes);
  REQUIRE(donor->bind(g.extent, a).is_ok());
  CHECK(donor->bind(g.extent, a).is_ok());  // told twice
  CHECK(donor->bind(g.extent, request("b", 7)).code() == Code::key_not_found);
  CHECK(donor->stats().granted_bytes == 0);
  CHECK(donor->stats().prepared_bytes == kBytes);
  REQUIRE(donor->prepared().size() == 1);
  CHECK(donor->prepared()[0] == std::pair<TxnId, std::string>{a.txn, "a"});
  check(*donor);
  REQUIRE(donor->commit(g.extent, {1, 1}, {}).is_ok());
  CHECK(donor->bind(g.extent, a).is_ok());
  auto told = donor->describe(g.extent);
  REQUIRE(told.is_ok());
  CHECK(told->key == "a");
  CHECK(told->meta == "meta of a");
  CHECK(told->pieces.at(0).offset == g.pieces.at(0).offset);
  check(*donor);

  auto next = attach_donor(donor->held());
  REQUIRE(next.is_ok());
  CHECK((*next)->describe(g.extent)->key == "a");
  check(**next);
}

TEST_CASE("grants are a sixteenth of the memory at most, and of what is free") {
  auto donor = make_donor(16 * MiB);
  for (int i = 0; i < 16; ++i) grant(*donor, 7);
  CHECK(donor->grant(kBytes, 7, random_id()).status().code() == Code::pool_full);
  CHECK(donor->grant(0, 7, random_id()).status().code() == Code::invalid_argument);
  CHECK(donor->grant(kBytes, 0, random_id()).status().code() == Code::invalid_argument);
  check(*donor);
  donor->end_session(7);
  CHECK(donor->stats().granted_bytes == 0);
  const ExtentRef all = put(*donor, "all", 16 * MiB);
  CHECK(donor->grant(kBytes, 7, random_id()).status().code() == Code::pool_full);  // nothing is evicted for it
  CHECK(donor->describe(all).is_ok());
  REQUIRE(donor->free(all).is_ok());
  donor->set_quotas({{"", 8 * MiB, 0}});
  CHECK(donor->grant(kBytes, 7, random_id()).status().code() == Code::pool_full);  // whose would it be?
  donor->set_quotas({});
  const Reservation before = grant(*donor, 7), bound = grant(*donor, 7);
  donor->set_quotas({{"", 8 * MiB, 0}});  // and what was granted before is not counted
  CHECK(donor->quotas()[0].used_bytes == 0);
  REQUIRE(donor->bind(bound.extent, request("a", 7)).is_ok());
  CHECK(donor->quotas()[0].used_bytes == kBytes);
  CHECK(donor->give_back(before.extent, 7).is_ok());
  CHECK(donor->quotas()[0].used_bytes == kBytes);
  check(*donor);
}

TEST_CASE("what is not used goes back: given back, abandoned, or with its session") {
  auto donor = make_donor(16 * MiB);
  const TxnId txn = random_id();
  const Reservation one = grant(*donor, 7), two = grant(*donor, 7, txn), three = grant(*donor, 8, txn);
  CHECK(donor->give_back(one.extent, 8).code() == Code::invalid_argument);
  CHECK(donor->give_back(one.extent, 7).is_ok());
  CHECK(donor->stats().granted_bytes == 2 * kBytes);
  donor->abandon(txn, 7);
  CHECK(donor->stats().granted_bytes == kBytes);
  CHECK(donor->bind(two.extent, request("late", 7)).code() == Code::key_not_found);
  donor->end_session(7);
  CHECK(donor->bind(three.extent, request("c", 8)).is_ok());
  donor->end_session(8);
  CHECK(donor->stats().prepared_bytes == 0);
  CHECK(donor->stats().used_bytes == 0);
  check(*donor);
}

TEST_CASE("a node that leaves ends its grants; what is bound goes on") {
  auto donor = make_donor(16 * MiB);
  const Reservation bound = grant(*donor, 7), free = grant(*donor, 7);
  const ReserveRequest a = request("a", 7);
  REQUIRE(donor->bind(bound.extent, a).is_ok());
  donor->end_grants();
  CHECK(donor->bind(free.extent, request("b", 7)).code() == Code::key_not_found);
  CHECK(donor->bind(bound.extent, a).is_ok());
  CHECK(donor->commit(bound.extent, {1, 1}, {}).is_ok());
  CHECK(donor->stats().granted_bytes == 0);
  CHECK(donor->stats().fenced_bytes == kBytes);
  CHECK(donor->give_back(free.extent, 7).is_ok());
  CHECK(donor->stats().fenced_bytes == 0);
  check(*donor);
}

TEST_CASE("a grant ends with the worker; its memory is fenced while its writer may still write") {
  auto donor = make_donor(16 * MiB);
  auto lease = donor->slots_for_client(7);
  REQUIRE(lease.is_ok());
  const Reservation g = grant(*donor, 7);
  auto next = attach_donor(donor->held()).value();
  donor.reset();
  CHECK(next->stats().granted_bytes == 0);
  CHECK(next->stats().fenced_bytes == kBytes);
  CHECK(next->bind(g.extent, request("a", 7)).code() == Code::key_not_found);
  check(*next);
  lease = UniqueFd();  // the client is gone
  next->sweep(1);
  CHECK(next->stats().used_bytes == 0);
  check(*next);
}

TEST_CASE("a worker killed while it binds: the extent is granted no more, and nobody's") {
  for (const char* point : {"donor.rebind", "donor.rebind.record"}) {
    CAPTURE(point);
    auto donor = make_donor(16 * MiB);
    const ExtentRef kept = put(*donor, "kept", 5000);
    const Reservation g = grant(*donor, 7);
    const pid_t pid = ::fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      set_failpoints(std::string(point) + "=kill");
      (void)donor->bind(g.extent, request("a", 7));
      ::_exit(1);
    }
    int status = 0;
    REQUIRE(::waitpid(pid, &status, 0) == pid);
    REQUIRE(WIFSIGNALED(status));
    auto next = attach_donor(donor->held()).value();
    next->sweep(1);
    CHECK(next->prepared().empty());
    CHECK(next->stats().extents == 1);
    CHECK(next->stats().used_bytes == 5120);
    CHECK(next->describe(kept)->key == "kept");
    put(*next, "again", 15 * MiB);
    check(*next);
  }
}

TEST_CASE("quotas and parents hold for what was granted") {
  auto donor = make_donor(16 * MiB);
  donor->set_quotas({{"q/", 2 * kBytes, 0}});
  const ExtentRef old = put(*donor, "q/old", kBytes);
  put(*donor, "q/new", kBytes);
  const Reservation g = grant(*donor, 7);
  REQUIRE(donor->bind(g.extent, request("q/k", 7)).is_ok());
  CHECK(donor->describe(old).status().code() == Code::key_not_found);  // within the quota
  CHECK(donor->quotas()[0].used_bytes == 2 * kBytes);
  check(*donor);

  const Reservation child = grant(*donor, 7);
  ReserveRequest after = request("child", 7);
  after.parent = "q/k";
  REQUIRE(donor->bind(child.extent, after).is_ok());
  REQUIRE(donor->commit(g.extent, {1, 2}, {}).is_ok());
  REQUIRE(donor->commit(child.extent, {1, 3}, {}).is_ok());
  const Reservation third = grant(*donor, 7);
  ReserveRequest wrong = request("q/k", 7);
  wrong.parent = "child";
  CHECK(donor->bind(third.extent, wrong).code() == Code::invalid_argument);  // it comes before that one
  // Both others of the prefix are in the way, and only one of them may go.
  const Reservation more = grant(*donor, 7), most = grant(*donor, 7);
  REQUIRE(donor->bind(more.extent, request("q/more", 7)).is_ok());
  CHECK(donor->describe(g.extent).is_ok());
  const Status full = donor->bind(most.extent, request("q/most", 7));
  CHECK(Donor::over_quota(full));
  CHECK(donor->stats().granted_bytes == 2 * kBytes);
  check(*donor);
}
