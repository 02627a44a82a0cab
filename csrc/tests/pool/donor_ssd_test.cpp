// The donor with an SSD: more is kept than the memory holds, nothing that was removed comes back, and a disk that
// fails costs what was on it and no more.
#include <filesystem>
#include <map>
#include <random>
#include <set>

#include "common/clock.h"
#include "pool/disk.h"
#include "pool/donor_fixture.h"
#include "pool/pin_slots.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {

// What the service does with a donor, and what the home is told.
struct Node {
  explicit Node(uint64_t memory = 16 * MiB, uint64_t disk_bytes = 128 * MiB, uint64_t segment = 4 * MiB)
      : options{memory, MiB, 1 << 12, {{disk.path + "/a", disk_bytes, segment}}} {
    start();
  }
  void start() {  // with new memory
    donor.reset();
    auto made = Donor::create(options);
    REQUIRE_MESSAGE(made.is_ok(), made.status().to_string());
    use(std::move(made).value());
  }
  void restart() {  // the worker
    auto held = adopt_held(donor->held());
    donor.reset();
    auto attached = Donor::attach(options, std::move(held));
    REQUIRE_MESSAGE(attached.is_ok(), attached.status().to_string());
    use(std::move(attached).value());
  }
  void use(std::unique_ptr<Donor> d) {
    donor = std::move(d);
    donor->set_evicted_callback([this](const Announcement& a) { evicted.insert(a.extent.generation); });
    donor->set_tier_callback([this](const Announcement& a) { tiers[a.extent.generation] = a.tier; });
    auto map = donor->segments()[1]->map(Protection::read_write);
    REQUIRE(map.is_ok());
    data = *map;
  }
  template <typename Fn>
  void until(Fn&& fn) {
    const Deadline end = Deadline::after_ms(10'000);
    while (!fn() && !end.expired()) {
      donor->run_completions();
      if (!fn()) ::usleep(300);
    }
    REQUIRE(fn());
  }
  void settle(int ms = 30) {
    for (int i = 0; i < ms; ++i) {
      donor->run_completions();
      ::usleep(1000);
    }
  }
  static char byte_of(uint64_t seed, uint64_t at) { return static_cast<char>(seed * 131 + at / 5 + at * 7); }
  ExtentRef put(const std::string& key, uint64_t nbytes, Kind kind = Kind::named, uint64_t ttl_ms = 0) {
    ReserveRequest request;
    request.txn = random_id();
    request.key = key;
    request.nbytes = nbytes;
    request.kind = kind;
    request.meta = "meta of " + key;
    request.label = "label";
    donor->run_completions();  // the service is woken for them
    Result<Reservation> r = donor->reserve(request);
    until([&] {
      if (!r.is_ok() && r.status().code() == Code::pool_full) r = donor->reserve(request);
      return r.is_ok();
    });
    const uint64_t seed = r->extent.generation;
    uint64_t at = 0;
    for (const Piece& p : r->pieces)
      for (uint64_t i = 0; i < p.nbytes; ++i, ++at)
        data->data[p.offset + i] = static_cast<std::byte>(byte_of(seed, at));
    REQUIRE(donor->commit(r->extent, {1, ++counter}, std::nullopt, ttl_ms, steady_ns()).is_ok());
    REQUIRE(donor->finalize(r->extent).is_ok());
    seeds[key] = seed;
    return r->extent;
  }
  // Reads as a client does: promoted, described, and validated by the word. ok, or what promote() said.
  Status get(ExtentRef ref) {
    std::optional<Status> promoted;
    donor->promote(ref, [&](const Status& s) { promoted = s; });
    until([&] { return promoted.has_value(); });
    if (!promoted->is_ok()) return *promoted;
    auto a = donor->describe(ref);
    if (!a.is_ok()) return a.status();
    REQUIRE(a->extent.generation == ref.generation);
    REQUIRE(a->meta == "meta of " + a->key);
    REQUIRE(a->label == "label");
    const uint64_t seed = seeds.at(a->key);
    uint64_t at = 0;
    for (const Piece& p : a->pieces)
      for (uint64_t i = 0; i < p.nbytes; ++i, ++at)
        if (data->data[p.offset + i] != static_cast<std::byte>(byte_of(seed, at)))
          return {Code::corrupt, a->key + ": foreign bytes at " + std::to_string(at)};
    REQUIRE(at == a->nbytes);
    donor->touch(ref);
    return {};
  }
  void remove(ExtentRef ref) {
    std::optional<Status> done;
    donor->remove(ref, [&](const Status& s) { done = s; });
    until([&] { return done.has_value(); });
  }
  std::map<std::string, Announcement> announced() {
    std::map<std::string, Announcement> out;
    for (Announcement& a : donor->announce()) out.emplace(a.key, a);
    return out;
  }
  Disk disk;
  DonorOptions options;
  std::unique_ptr<Donor> donor;
  MappingPtr data;
  std::map<std::string, uint64_t> seeds;
  std::set<uint64_t> evicted;
  std::map<uint64_t, Tier> tiers;
  uint64_t counter = 0;
};

std::string name(int i) { return "k" + std::to_string(i); }

}  // namespace

TEST_CASE("three times the memory: all of it is served, also by the next worker") {
  Node node(16 * MiB, 128 * MiB, 8 * MiB);
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 48; ++i) {
    refs.push_back(node.put(name(i), MiB - 4096 * (i % 3) - i));
    check(*node.donor);
  }
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 48; ++i) {
      const Status s = node.get(refs[i]);
      CHECK_MESSAGE(s.is_ok(), i, ": ", s.to_string());
      check(*node.donor);
    }
    node.restart();
    check(*node.donor);
    CHECK(node.donor->announce().size() == 48);
    CHECK(node.donor->keys("", SIZE_MAX, 0).size() == 48);
  }
  CHECK(node.evicted.empty());
  const SsdStats s = node.donor->stats().ssd;
  CHECK(s.records >= 32);
  CHECK(s.dropped == 0);
  CHECK(s.errors == 0);
  CHECK(s.used_bytes <= s.limit_bytes);
}

TEST_CASE("small objects, which share pages, too") {
  Node node(4 * MiB, 64 * MiB, 4 * MiB);
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 3000; ++i) refs.push_back(node.put(name(i), 2000 + i % 700));
  check(*node.donor);
  for (int i = 0; i < 3000; i += 7) CHECK(node.get(refs[i]).is_ok());
  refs.push_back(node.put(name(9999), 2 * MiB));  // takes whole pages
  CHECK(node.get(refs.back()).is_ok());
  check(*node.donor);
  CHECK(node.evicted.empty());
}

TEST_CASE("several gets of one key share a read; a promoted copy is an extent of its own") {
  Node node;
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 40; ++i) refs.push_back(node.put(name(i), MiB));
  REQUIRE(node.donor->only_on_ssd(refs[0]) == MiB);
  CHECK(node.donor->describe(refs[0]).status().code() == Code::busy);
  CHECK(node.tiers[refs[0].generation] == Tier::ssd);
  int done = 0;
  for (int i = 0; i < 5; ++i) node.donor->promote(refs[0], [&](const Status& s) { done += s.is_ok(); });
  node.until([&] { return done == 5; });
  CHECK(node.donor->stats().ssd.promotions == 1);
  CHECK(node.tiers[refs[0].generation] == Tier::dram);
  auto a = node.donor->describe(refs[0]);
  REQUIRE(a.is_ok());
  REQUIRE(a->copy.has_value());
  CHECK(node.donor->describe(*a->copy).status().code() == Code::key_not_found);  // not by that name
  CHECK(table_entry(node.donor->segments()[0]->map(Protection::read_only).value()->data, a->copy->index).generation ==
        a->copy->generation);
  check(*node.donor);
  node.restart();
  check(*node.donor);
  CHECK(node.announced().at("k0").extent.generation == refs[0].generation);
  CHECK(node.donor->describe(refs[0]).is_ok());  // still in memory
}

TEST_CASE("superseded on the SSD: acknowledged when it is durable, and never there again") {
  Quiet quiet;
  for (const bool promoted : {false, true}) {
    Node node;
    std::vector<ExtentRef> refs;
    for (int i = 0; i < 40; ++i) refs.push_back(node.put(name(i), MiB));
    REQUIRE(node.donor->only_on_ssd(refs[1]));
    if (promoted) REQUIRE(node.get(refs[1]).is_ok());
    set_failpoints("ssd.mark=sleep:100");
    int acknowledged = 0;
    node.donor->remove(refs[1], [&](const Status& s) { acknowledged += s.is_ok(); });
    node.donor->remove(refs[1], [&](const Status& s) { acknowledged += s.is_ok(); });  // the home asks again
    CHECK(acknowledged == 0);
    CHECK(node.donor->describe(refs[1]).status().code() == Code::key_not_found);
    node.until([&] { return acknowledged == 2; });
    node.restart();
    CHECK(node.announced().count("k1") == 0);
    CHECK(node.announced().size() == 39);
    check(*node.donor);
  }
}

TEST_CASE("superseded while it is being written or read") {
  Node node;
  for (int i = 0; i < 16; ++i) node.put(name(i), MiB);
  // Writes are under way now, ahead of need.
  auto all = node.announced();
  size_t left = all.size();
  for (auto& [key, a] : all) node.donor->remove(a.extent, [&](const Status&) { --left; });
  node.until([&] { return left == 0 && node.donor->stats().used_bytes == 0; });
  check(*node.donor);
  CHECK(node.donor->stats().used_bytes == 0);
  node.restart();
  CHECK(node.donor->announce().empty());

  std::vector<ExtentRef> refs;
  for (int i = 0; i < 40; ++i) refs.push_back(node.put(name(i), MiB));
  std::optional<Status> got;
  node.donor->promote(refs[0], [&](const Status& s) { got = s; });
  node.remove(refs[0]);
  node.until([&] { return got.has_value(); });
  CHECK(got->code() == Code::key_not_found);
  node.until([&] { return node.announced().count("k0") == 0; });
  check(*node.donor);
  node.restart();
  CHECK(node.announced().count("k0") == 0);
}

TEST_CASE("with new memory: sealed objects are there again, named, removed and expired ones are not") {
  Node node;
  std::map<std::string, ExtentRef> refs;
  for (int i = 0; i < 60; ++i) refs[name(i)] = node.put(name(i), MiB, i % 2 ? Kind::named : Kind::sealed);
  node.remove(refs["k0"]);
  node.start();
  check(*node.donor);
  const auto there = node.announced();
  CHECK(there.size() >= 20);
  CHECK(there.count("k0") == 0);
  for (const auto& [key, a] : there) {
    CHECK(a.kind == Kind::sealed);
    CHECK(a.tier == Tier::ssd);
    CHECK(node.get(a.extent).is_ok());
  }
  node.remove(there.at("k2").extent);  // consumed, say
  node.restart();
  CHECK(node.announced().count("k2") == 0);
  CHECK(node.announced().size() == there.size() - 1);
  node.start();
  CHECK(node.announced().count("k2") == 0);
  CHECK(node.get(node.announced().at("k4").extent).is_ok());
}

TEST_CASE("time to live goes along") {
  Node node;
  node.put("short", MiB, Kind::sealed, 3'600'000);
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 40; ++i) refs.push_back(node.put(name(i), MiB));
  auto a = node.announced().at("short");
  CHECK(a.tier == Tier::ssd);
  CHECK(a.ttl_ms == 3'600'000);
  CHECK(a.committed_ns > 0);
  CHECK(node.donor->keys("short", 10, a.committed_ns + int64_t{3'600'001} * 1'000'000).empty());
  CHECK(node.donor->keys("short", 10, a.committed_ns).size() == 1);
  node.start();
  CHECK(node.announced().at("short").committed_ns == a.committed_ns);  // the same boot, the same clock
}

TEST_CASE("a scan does not flush the disk: once it is full, what was used once is not written") {
  Node node(16 * MiB, 64 * MiB, 4 * MiB);
  std::vector<ExtentRef> hot;
  for (int i = 0; i < 30; ++i) {
    hot.push_back(node.put("hot" + name(i), MiB, Kind::sealed));
    node.donor->touch(hot.back());
  }
  for (int i = 0; i < 400; ++i) node.put("scan" + name(i), MiB, Kind::sealed);
  int left = 0;
  for (ExtentRef ref : hot) left += !node.evicted.count(ref.generation);
  CHECK(left == 30);
  CHECK(node.donor->stats().ssd.refused > 300);
  // What is used again and again gets there all the same.
  for (int i = 0; i < 60; ++i) {
    const ExtentRef ref = node.put("new" + name(i), MiB, Kind::sealed);
    node.donor->touch(ref);
    node.donor->touch(ref);
  }
  node.until([&] { return node.donor->stats().ssd.reclaimed > 0; });
  CHECK(node.donor->stats().ssd.used_bytes <= 64 * MiB);
  check(*node.donor);
}

TEST_CASE("what is read again before its segment goes, stays") {
  Node node(8 * MiB, 64 * MiB, 4 * MiB);
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 50; ++i) refs.push_back(node.put(name(i), MiB, Kind::sealed));
  for (int i = 0; i < 150; ++i) {
    const ExtentRef ref = node.put("other" + name(i), MiB, Kind::sealed);
    node.donor->touch(ref);
    CHECK(node.get(refs[3]).is_ok());
  }
  CHECK(node.evicted.count(refs[3].generation) == 0);
  CHECK(node.evicted.size() > 50);
  check(*node.donor);
}

TEST_CASE("a disk that cannot be read or written costs what is on it") {
  Quiet quiet;
  Node node;
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 40; ++i) refs.push_back(node.put(name(i), MiB));
  set_failpoints("ssd.record.read=error@1");
  CHECK(node.get(refs[0]).code() == Code::key_not_found);
  node.until([&] { return node.evicted.count(refs[0].generation) == 1; });  // told when it is marked
  CHECK(node.get(refs[1]).is_ok());
  CHECK(node.donor->stats().ssd.errors == 1);
  set_failpoints("ssd.record.write=error,ssd.mark=error");
  for (int i = 100; i < 140; ++i) node.put(name(i), MiB);
  node.until([&] { return node.donor->stats().ssd.out_of_service == 1; });
  set_failpoints("");
  CHECK(node.donor->stats().ssd.out_of_service == 1);
  CHECK(node.donor->stats().ssd.records == 0);
  check(*node.donor);
  for (int i = 140; i < 180; ++i) node.put(name(i), MiB);  // without a disk
  check(*node.donor);
  node.restart();  // and it stays out while that memory lives, whatever it says now
  CHECK(node.donor->stats().ssd.out_of_service == 1);
  for (const auto& [key, a] : node.announced()) CHECK(a.tier == Tier::dram);
  check(*node.donor);
}

TEST_CASE("a full queue drops what would be written, and blocks nobody") {
  Quiet quiet;
  Node node;
  set_failpoints("ssd.record.write=sleep:1500");
  const int64_t begin = steady_ns();
  for (int i = 0; i < 40; ++i) node.put(name(i), MiB);
  CHECK(steady_ns() - begin < 8'000'000'000);
  CHECK(node.donor->stats().ssd.dropped > 0);
  set_failpoints("");
}

TEST_CASE("pinned extents are written, and stay until they are let go") {
  Node node;
  const ExtentRef ref = node.put("pinned", MiB);
  auto slots = node.donor->open_slots(1);
  auto page = PinPage::open(node.donor->segments()[0], *slots);
  auto pin = (*page)->pin(ref);
  REQUIRE(pin.is_ok());
  for (int i = 0; i < 40; ++i) node.put(name(i), MiB);
  CHECK_FALSE(node.donor->only_on_ssd(ref));
  CHECK((*page)->valid(ref));
  (*page)->unpin(*pin);
  for (int i = 40; i < 80; ++i) node.put(name(i), MiB);
  CHECK(node.donor->only_on_ssd(ref));
  CHECK_FALSE((*page)->valid(ref));
  CHECK(node.get(ref).is_ok());
  check(*node.donor);
}

TEST_CASE("a pin on what is on the SSD brings it back and keeps it") {
  Node node;
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 40; ++i) refs.push_back(node.put(name(i), MiB));
  REQUIRE(node.donor->only_on_ssd(refs[0]));
  CHECK(node.donor->hint_pin(refs[0], steady_ns() + 60'000'000'000, 5));
  node.until([&] { return node.donor->describe(refs[0]).is_ok(); });
  for (int i = 40; i < 80; ++i) node.put(name(i), MiB);
  CHECK(node.donor->describe(refs[0]).is_ok());
  node.donor->unpin(refs[0], 5);
  for (int i = 80; i < 120; ++i) node.put(name(i), MiB);
  CHECK(node.donor->only_on_ssd(refs[0]));
  check(*node.donor);
}

TEST_CASE("pins bring back a quarter of the memory at once, and the rest is refused") {
  Node node;
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 40; ++i) refs.push_back(node.put(name(i), MiB));
  for (int i = 0; i < 8; ++i) {
    REQUIRE(node.donor->only_on_ssd(refs[i]));
    CHECK(node.donor->hint_pin(refs[i], steady_ns() + 60'000'000'000, 5) == (i < 4));
    CHECK(node.donor->hint_pin(refs[0], steady_ns() + 60'000'000'000, 6));  // is on its way
  }
  check(*node.donor);
  node.until([&] { return node.donor->describe(refs[3]).is_ok() && node.donor->describe(refs[0]).is_ok(); });
  CHECK(node.donor->hint_pin(refs[4], steady_ns() + 60'000'000'000, 5));
  node.until([&] { return node.donor->describe(refs[4]).is_ok(); });
  node.donor->end_session(5);
  node.donor->end_session(6);
  check(*node.donor);
}

TEST_CASE("an extent that was pinned and removed leaves nothing to the next of its number") {
  Node node;
  std::vector<ExtentRef> refs;
  for (int i = 0; i < 12; ++i) refs.push_back(node.put(name(i), MiB));
  for (const ExtentRef& ref : refs) REQUIRE(node.donor->hint_pin(ref, steady_ns() + 60'000'000'000, 5));
  std::vector<ExtentRef> others;
  for (int i = 12; i < 24; ++i) others.push_back(node.put(name(i), MiB));  // eviction comes by
  for (const auto* list : {&refs, &others})
    for (const ExtentRef& ref : *list) node.donor->remove(ref, [](const Status&) {});
  std::set<uint32_t> again;
  for (int i = 24; i < 80; ++i) {
    again.insert(node.put(name(i), MiB).index);
    if (i < 38) continue;  // the memory fills up, and its oldest are set aside for the disk
    node.donor->sweep(steady_ns());
    check(*node.donor);
  }
  CHECK(std::any_of(refs.begin(), refs.end(), [&](const ExtentRef& ref) { return again.count(ref.index) != 0; }));
}

TEST_CASE("random verbs and restarts: nothing foreign, nothing removed, all that was not said to be gone") {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 rng(seed);
    Node node(8 * MiB, 64 * MiB, 2 * MiB);
    // As a home would know it: where each key is. There may be two copies of a sealed one.
    struct Known {
      Kind kind;
      std::vector<ExtentRef> refs;
    };
    std::map<std::string, Known> live;
    std::set<std::string> removed;
    int next = 0;
    auto forget_evicted = [&] {
      for (auto& [key, known] : live)
        std::erase_if(known.refs, [&](ExtentRef r) { return node.evicted.count(r.generation) != 0; });
      std::erase_if(live, [](const auto& k) { return k.second.refs.empty(); });
      node.evicted.clear();
    };
    auto any = [&] { return std::next(live.begin(), static_cast<long>(rng() % live.size())); };
    auto compare = [&](bool new_memory, bool settled) {
      std::map<std::string, std::vector<ExtentRef>> there;
      for (const Announcement& a : node.donor->announce()) {
        CHECK_MESSAGE(removed.count(a.key) == 0, a.key, " came back");
        CHECK((!new_memory || a.kind == Kind::sealed));
        there[a.key].push_back(a.extent);
      }
      for (auto& [key, known] : live) {
        if (!new_memory && settled) CHECK_MESSAGE(there.count(key) == 1, key, " is lost");
        known.refs = there[key];
      }
      for (const auto& [key, refs] : there) CHECK_MESSAGE((refs.empty() || live.count(key) == 1), key, " was gone");
      std::erase_if(live, [](const auto& k) { return k.second.refs.empty(); });
    };
    for (int step = 0; step < 500; ++step) {
      const auto roll = rng() % 100;
      forget_evicted();
      if (roll < 45 || live.empty()) {
        const Kind kind = rng() % 2 ? Kind::sealed : Kind::named;
        const std::string key = name(next++);
        const uint64_t n = rng() % 4 ? rng() % (700 << 10) : rng() % 40'000;
        live[key] = {kind, {node.put(key, n, kind)}};
      } else if (roll < 65) {
        const ExtentRef ref = any()->second.refs[0];
        const Status s = node.get(ref);
        CHECK_MESSAGE((s.is_ok() || s.code() == Code::key_not_found), s.to_string());
        if (!s.is_ok()) node.until([&] { return node.evicted.count(ref.generation) != 0; });
      } else if (roll < 75) {
        const auto it = any();
        size_t left = it->second.refs.size();
        for (ExtentRef ref : it->second.refs) node.donor->remove(ref, [&](const Status&) { --left; });
        if (rng() % 2) node.donor->run_completions();
        node.until([&] { return left == 0; });
        removed.insert(it->first);
        live.erase(it);
      } else if (roll < 88) {
        node.donor->touch(any()->second.refs[0]);
      } else if (roll < 96) {
        node.donor->run_completions();
      } else if (roll < 98) {
        node.donor->sweep(steady_ns());
      } else if (roll < 99) {
        const bool settled = rng() % 2 == 0;  // else what was being reclaimed is gone, and nobody was told
        if (settled) node.settle(300);
        forget_evicted();
        node.restart();
        compare(false, settled);
      } else {
        node.start();
        compare(true, false);
      }
      check(*node.donor);
    }
    // At rest everything goes, nothing stays.
    forget_evicted();
    for (const auto& [key, known] : live)
      for (ExtentRef ref : known.refs) node.remove(ref);
    node.settle();
    check(*node.donor);
    const DonorStats s = node.donor->stats();
    CHECK(s.used_bytes == 0);
    CHECK(s.limbo_extents == 0);
    CHECK(s.prepared_extents == 0);
    CHECK(s.ssd.records == 0);
    node.restart();
    CHECK(node.donor->announce().empty());
  }
}
