// Nodes with SSDs, in processes of their own: read from another host, and what becomes of an expelled one's disk.
#include "pool/disk.h"
#include "pool/node_fixture.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {

constexpr size_t kBytes = 1 << 20;

std::string key_of(int i) { return "key" + std::to_string(i); }

// Of a worker that is killed in the middle of a commit nobody can say what became of it: a sealed key is put again.
void put_sealed(Client& client, const std::string& key, const std::string& value) {
  PutOptions sealed;
  sealed.kind = Kind::sealed;
  auto done = try_put(client, key, value, sealed);
  for (int again = 0; again < 3 && done.status().message().starts_with("outcome unknown"); ++again)
    done = try_put(client, key, value, sealed);
  REQUIRE_MESSAGE(done.is_ok(), key, ": ", done.status().to_string());
}

SsdStats ssd_of(Client& client) {
  SsdStats sum;
  const auto stats = client.stat(Deadline::after_ms(10'000));
  REQUIRE(stats.is_ok());
  for (const auto& node : stats->nodes) {
    sum.records += node.ssd.records;
    sum.promotions += node.ssd.promotions;
    sum.errors += node.ssd.errors + node.ssd.corrupt;
  }
  return sum;
}

}  // namespace

TEST_CASE("a member's SSD: read from another host; expelled and back, its named objects stay dropped") {
  Disk disk;
  Node leader(16 << 20);
  Node member(16 << 20, "host-b", leader.tcp_address, "", disk.path + "/m");
  auto there = connect(member, "host-b");
  auto here = connect(leader);
  REQUIRE(eventually([&] { return here->stat(Deadline::after_ms(5000))->nodes.size() == 2; }));
  for (int i = 0; i < 40; ++i) put(*there, key_of(i), pattern(i, kBytes));
  CHECK(ssd_of(*here).records > 10);
  int served = 0;
  for (int i = 0; i < 40; ++i) {
    auto got = get(*here, key_of(i));
    if (!got.is_ok()) {
      CHECK_MESSAGE(got.status().code() == Code::key_not_found, got.status().to_string());
      continue;  // it went to the leader, which has no disk, and was evicted there
    }
    CHECK(*got == pattern(i, kBytes));
    ++served;
  }
  CHECK(served >= 24);
  CHECK(ssd_of(*here).promotions > 5);
  CHECK(ssd_of(*here).errors == 0);

  // Which of them are on the member, found by what is missing when it is gone.
  const pid_t worker = member.worker();
  ::kill(worker, SIGSTOP);
  REQUIRE(eventually([&] { return here->stat(Deadline::after_ms(5000))->nodes.size() == 1; }, 20'000));
  std::vector<int> gone;
  for (int i = 0; i < 40; ++i)
    if (get(*here, key_of(i)).status().code() == Code::key_not_found) gone.push_back(i);
  REQUIRE(gone.size() >= 10);
  put(*here, key_of(gone[0]), pattern(1000, kBytes));
  ::kill(worker, SIGCONT);
  REQUIRE(eventually([&] { return here->stat(Deadline::after_ms(5000))->nodes.size() == 2; }, 20'000));
  for (int round = 0; round < 2; ++round) {
    CHECK(*get(*here, key_of(gone[0])) == pattern(1000, kBytes));
    for (size_t i = 1; i < gone.size(); ++i) CHECK(get(*here, key_of(gone[i])).status().code() == Code::key_not_found);
    if (round == 1) break;
    member.kill_worker();  // the next one finds nothing either, and is trusted by a home that is rebuilt
    leader.kill_worker();
    REQUIRE(eventually(
        [&] {
          return here->stat(Deadline::after_ms(5000)).is_ok() &&
                 here->stat(Deadline::after_ms(5000))->nodes.size() == 2;
        },
        20'000));
  }
}

TEST_CASE("killed at each step on the way to the disk and back: the next worker serves what there was") {
  for (const std::string point :
       {"ssd.record.write=kill@20", "ssd.seal=kill@4", "ssd.record.read=kill@12", "ssd.mark=kill@2"}) {
    CAPTURE(point);
    Disk disk;
    Node node(16 << 20, "host-a", "", point, disk.path + "/n");
    auto client = connect(node);
    const pid_t first = node.worker();
    for (int i = 0; i < 48; ++i) put_sealed(*client, key_of(i), pattern(i, kBytes));
    for (int i = 0; i < 48; i += 8) REQUIRE(client->remove(key_of(i), Deadline::after_ms(20'000)).is_ok());
    int lost = 0;
    for (int i = 0; i < 48; ++i) {
      auto got = get(*client, key_of(i));
      if (i % 8 == 0) {
        CHECK(got.status().code() == Code::key_not_found);
      } else if (got.is_ok()) {
        CHECK(*got == pattern(i, kBytes));
      } else {
        CHECK_MESSAGE(got.status().code() == Code::key_not_found, got.status().to_string());
        ++lost;
      }
    }
    CHECK(node.worker() != first);  // it was
    CHECK(lost <= 8);               // what was being written when it was killed, at most
  }
}
