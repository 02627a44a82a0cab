// What the home tells those who observe it.
#include <doctest/doctest.h>

#include "pool/home.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

const NodeId kDonor{1}, kOther{2};

struct Fixture {
  Home home{1, 42};
  uint64_t generation = 0;
  RequestId request = 0;
  Fixture() {
    home.at(1);
    home.announce(kDonor, {});
    home.announce(kOther, {});
  }
  // Does what the home wants done, as donors would.
  void settle() {
    for (auto actions = home.take_actions(); !actions.empty(); actions = home.take_actions())
      for (HomeAction& action : actions)
        if (auto* send = std::get_if<SendMark>(&action); send && send->id) home.mark_done(send->id, {});
  }
  ExtentRef put(const std::string& key, Kind kind = Kind::named, NodeId node = kDonor, uint64_t ttl_ms = 0) {
    CommitCall call;
    call.head.key = key;
    call.head.kind = kind;
    call.head.view = 1;
    call.replicas = {{node, {0, ++generation}}};
    call.ttl_ms = ttl_ms;
    home.commit(++request, call, INT64_MAX);
    settle();
    return call.replicas[0].extent;
  }
};

std::vector<std::string> told(Home& home) {
  std::vector<std::string> out;
  for (const Change& change : home.take_changes())
    out.push_back((change.what == KeyChange::removed  ? "-"
                   : change.what == KeyChange::stored ? "+"
                   : change.tier == Tier::ssd         ? "v"
                                                      : "^") +
                  change.key);
  return out;
}
using Told = std::vector<std::string>;

}  // namespace

TEST_CASE("nothing is kept while nobody observes") {
  Fixture f;
  f.put("a");
  CHECK(told(f.home).empty());
  f.home.observe(true);
  f.put("b");
  f.home.observe(false);
  CHECK(told(f.home).empty());
}

TEST_CASE("stored, replaced, removed, expired, evicted and lost keys are told, once and in order") {
  Fixture f;
  f.home.observe(true);
  f.put("a");
  f.put("a");  // another version: told as there, not as gone in between
  CHECK(told(f.home) == Told{"+a", "+a"});
  f.put("s", Kind::sealed);
  f.put("s", Kind::sealed);  // kept: nothing has changed
  CHECK(told(f.home) == Told{"+s"});
  f.home.remove(++f.request, "a", INT64_MAX);
  f.settle();
  f.home.remove(++f.request, "a", INT64_MAX);  // was not there
  f.settle();
  CHECK(told(f.home) == Told{"-"});
  const ExtentRef e = f.put("e");
  f.home.evicted(kDonor, "e", e);
  CHECK(told(f.home) == Told{"+e", "-"});
  f.put("t", Kind::named, kDonor, 5);
  f.home.tick(1'000'000'000);
  f.settle();
  CHECK(told(f.home) == Told{"+t", "-"});
  f.put("o", Kind::named, kOther);
  f.home.expel(kOther);
  f.settle();
  CHECK(told(f.home) == Told{"+o", "-"});
  CHECK(f.home.check().is_ok());
}

TEST_CASE("a change names its key by the hash that the home goes by") {
  Fixture f;
  f.home.observe(true);
  f.put("a");
  f.home.remove(++f.request, "a", INT64_MAX);
  f.settle();
  const auto changes = f.home.take_changes();
  REQUIRE(changes.size() == 2);
  CHECK(changes[0].hash == f.home.hash("a"));
  CHECK(changes[1].hash == f.home.hash("a"));
  CHECK(changes[0].version.view == 1);
}

TEST_CASE("what a donor brings along is told without a name") {
  Fixture f;
  f.home.observe(true);
  Announced brought;
  brought.key = "k";
  brought.kind = Kind::sealed;
  brought.state = ExtentState::final;
  brought.version = {1, 7};
  brought.extent = {3, 9};
  f.home.announce(NodeId{3}, {brought});
  f.settle();
  CHECK(told(f.home) == Told{"+"});
}

TEST_CASE("a key that goes to an SSD and comes back is told, once each way") {
  Fixture f;
  f.home.observe(true);
  const ExtentRef a = f.put("a");
  CHECK(told(f.home) == Told{"+a"});
  f.home.moved(kDonor, "a", a, Tier::ssd);
  f.home.moved(kDonor, "a", a, Tier::ssd);
  f.home.moved(kOther, "a", a, Tier::dram);  // somebody else's extent
  CHECK(told(f.home) == Told{"va"});
  f.home.moved(kDonor, "a", a, Tier::dram);
  CHECK(told(f.home) == Told{"^a"});
}

TEST_CASE("of several replicas the one in memory counts") {
  Fixture f;
  f.home.observe(true);
  CommitCall call;
  call.head.key = "r";
  call.head.view = 1;
  call.replicas = {{kDonor, {0, 101}}, {kOther, {0, 102}}};
  f.home.commit(++f.request, call, INT64_MAX);
  f.settle();
  f.home.moved(kDonor, "r", {0, 101}, Tier::ssd);
  CHECK(told(f.home) == Told{"+r"});
  SUBCASE("the last one in memory moves") {
    f.home.moved(kOther, "r", {0, 102}, Tier::ssd);
    CHECK(told(f.home) == Told{"vr"});
  }
  SUBCASE("the last one in memory is evicted") {
    f.home.evicted(kOther, "r", {0, 102});
    CHECK(told(f.home) == Told{"v"});
  }
  SUBCASE("the last one in memory is lost with its node") {
    f.home.expel(kOther);
    f.settle();
    CHECK(told(f.home) == Told{"v"});
  }
  SUBCASE("all go: removed, and nothing else") {
    f.home.evicted(kDonor, "r", {0, 101});
    f.home.evicted(kOther, "r", {0, 102});
    CHECK(told(f.home) == Told{"-"});
  }
  CHECK(f.home.check().is_ok());
}

TEST_CASE("an object of several writers is in memory when all its parts are") {
  const Spot here{0, 0, {}, Tier::dram}, there{0, 0, {}, Tier::ssd}, second{0, 1, {}, Tier::dram};
  CHECK(tier_of({here, second}, 2) == Tier::dram);
  CHECK(tier_of({there, second}, 2) == Tier::ssd);
  CHECK(tier_of({there, here, second}, 2) == Tier::dram);
}
