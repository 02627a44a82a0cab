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
  for (const Change& change : home.take_changes()) out.push_back((change.there ? "+" : "-") + change.key);
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
