// The client against one real node: verbs, maps, limits.
#include "pool/client.h"

#include <thread>

#include "common/crc32c.h"
#include "pool/node_fixture.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {
Deadline soon(int64_t ms = 10'000) { return Deadline::after_ms(ms); }
}  // namespace

TEST_CASE("put, get, replace, exists, remove, keys, wait, stat") {
  Node node(64 << 20);
  auto a = connect(node), b = connect(node);
  for (size_t nbytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{20'000}, size_t{40'000}, size_t{5'000'001}}) {
    CAPTURE(nbytes);
    const std::string key = "k" + std::to_string(nbytes), value = pattern(nbytes, nbytes);
    const PutOutcome first = put(*a, key, value);
    CHECK(first.stored);
    auto got = get(*b, key);
    REQUIRE_MESSAGE(got.is_ok(), got.status().to_string());
    CHECK(*got == value);
    const PutOutcome second = put(*b, key, pattern(9, nbytes + 3));
    CHECK(second.version > first.version);
    CHECK(*get(*a, key) == pattern(9, nbytes + 3));
  }
  auto object = a->locate("k1", {}, soon());
  REQUIRE(object.is_ok());
  CHECK((*object)->info().meta == "m");
  CHECK((*object)->local());
  const std::vector<std::string> some{"k0", "none", "k4096"};
  CHECK(*a->exists(some, soon()) == std::vector<bool>{true, false, true});
  auto many = a->locate_many(some, soon());
  CHECK(many[0].is_ok());
  CHECK(many[1].status().code() == Code::key_not_found);
  CHECK(a->keys("k4", soon())->size() == 2);
  CHECK(*a->remove("k1", soon()));
  CHECK_FALSE(*b->remove("k1", soon()));
  CHECK(get(*b, "k1").status().code() == Code::key_not_found);
  CHECK(a->keys("", soon())->size() == 5);

  auto late = a->wait("later", {}, Deadline::after_ms(300));
  CHECK(late.status().code() == Code::deadline_exceeded);
  std::thread writer([&] {
    ::usleep(50'000);
    put(*b, "later", "x");
  });
  auto came = a->wait("later", {}, soon());
  writer.join();
  CHECK(came.is_ok());
  auto stats = a->stat(soon());
  CHECK(stats->keys == 6);
  CHECK(stats->nodes[0].is_home);
  CHECK(stats->nodes[0].prepared_bytes == 0);
}

TEST_CASE("if_exists, sealed keys, labels, limits of arguments") {
  Node node(16 << 20);
  auto c = connect(node);
  for (size_t nbytes : {size_t{10}, size_t{100'000}}) {
    const std::string k = "k" + std::to_string(nbytes), one = pattern(1, nbytes), two = pattern(2, nbytes);
    PutOptions keep, error, sealed;
    keep.if_exists = IfExists::keep;
    error.if_exists = IfExists::error;
    sealed.kind = Kind::sealed;
    CHECK(put(*c, k, one, keep).stored);
    CHECK_FALSE(put(*c, k, two, keep).stored);
    CHECK(try_put(*c, k, two, error).status().code() == Code::key_exists);
    CHECK(*get(*c, k) == one);
    CHECK(try_put(*c, k, two, sealed).status().code() == Code::invalid_argument);
    CHECK(put(*c, "s" + k, one, sealed).stored);
    CHECK_FALSE(put(*c, "s" + k, one, sealed).stored);
    PutOptions label;
    label.label = "v7";
    put(*c, k, two, label);
    GetOptions want;
    want.label = "v7";
    CHECK(c->locate(k, want, soon()).is_ok());
    want.label = "v8";
    CHECK(c->locate(k, want, soon()).status().code() == Code::key_not_found);
  }
  CHECK(try_put(*c, "", "x").status().code() == Code::invalid_argument);
  CHECK(try_put(*c, std::string(2000, 'k'), "x").status().code() == Code::invalid_argument);
  PutOptions two;
  two.replicas = 2;
  CHECK(try_put(*c, "r", "x", two).status().code() == Code::unsupported);
  two.replicas_lenient = true;
  CHECK(try_put(*c, "r", "x", two).is_ok());
  CHECK(stats_of(*c).prepared_bytes == 0);
}

TEST_CASE("maps: private ones do not reach the pool; they outlive replacement, close and the client") {
  Node node(64 << 20);
  MappedObject kept, readable;
  const std::string one = pattern(1, 3 << 20), two = pattern(2, 3 << 20);
  {
    auto c = connect(node);
    put(*c, "k", one);
    auto object = *c->locate("k", {}, soon());
    auto mine = c->map(object, false, soon());
    REQUIRE_MESSAGE(mine.is_ok(), mine.status().to_string());
    CHECK(mine->zero_copy);
    std::memset(mine->data.get(), 0xff, 1 << 20);
    CHECK(*get(*c, "k") == one);
    readable = *c->map(object, true, soon());
    CHECK(readable.zero_copy);
    put(*c, "k", two);
    CHECK(c->map(object, true, soon()).status().code() == Code::key_not_found);
    kept = *mine;
    c->close();
    CHECK(c->locate("k", {}, soon()).status().code() == Code::closed);
  }
  auto other = connect(node);
  CHECK(stats_of(*other).limbo_bytes >= (3u << 20));
  CHECK(std::memcmp(kept.data.get() + (1 << 20), one.data() + (1 << 20), 2 << 20) == 0);
  CHECK(std::memcmp(readable.data.get(), one.data(), one.size()) == 0);
  kept = {};
  readable = {};
  CHECK(eventually([&] { return stats_of(*other).limbo_bytes == 0 && stats_of(*other).pinned == 0; }));
}

TEST_CASE("a forked child reads its inherited maps, whatever the parent lets go; its own end unpins nothing") {
  Node node(32 << 20);
  auto c = connect(node);
  const std::string value = pattern(1, 2 << 20);
  put(*c, "k", value);
  auto mine = *c->map(*c->locate("k", {}, soon()), true, soon());
  auto kept = *c->map(*c->locate("k", {}, soon()), false, soon());
  int go[2];
  REQUIRE(::pipe2(go, O_CLOEXEC) == 0);
  {
    Process child([&] {
      kept = {};  // unmaps here; the parent's pin stays
      char byte = 0;
      if (::read(go[0], &byte, 1) != 1) return 2;
      if (c->locate("k", {}, soon()).status().code() != Code::forked) return 3;
      return std::memcmp(mine.data.get(), value.data(), value.size()) == 0 ? 0 : 1;
    });
    mine = {};
    put(*c, "k", "new");
    for (int i = 0; i < 40; ++i) put(*c, "f" + std::to_string(i), pattern(uint64_t(i), 2 << 20));
    CHECK(std::memcmp(kept.data.get(), value.data(), value.size()) == 0);
    CHECK(::write(go[1], "x", 1) == 1);
    CHECK(child.wait() == 0);
  }
  ::close(go[0]);
  ::close(go[1]);
  kept = {};
  CHECK(eventually([&] { return stats_of(*c).limbo_bytes == 0 && stats_of(*c).pinned == 0; }));
}

TEST_CASE("the budget of maps is half the memory, then copies") {
  Node node(16 << 20);
  auto c = connect(node);
  put(*c, "a", pattern(1, 5 << 20));
  put(*c, "b", pattern(2, 5 << 20));
  auto a = c->map(*c->locate("a", {}, soon()), false, soon());
  auto b = c->map(*c->locate("b", {}, soon()), false, soon());
  CHECK(a->zero_copy);
  CHECK_FALSE(b->zero_copy);
  CHECK(std::memcmp(b->data.get(), pattern(2, 5 << 20).data(), 5 << 20) == 0);
  auto stats = c->stat(soon());
  CHECK(stats->client_maps == 1);
  CHECK(stats->client_mapped_bytes == (5u << 20));
}

TEST_CASE("an object in many pieces is stitched") {
  Node node(8 << 20);
  auto c = connect(node);
  for (int i = 0; i < 16; ++i) put(*c, "f" + std::to_string(i), pattern(uint64_t(i), 500'000));
  for (int i = 0; i < 16; i += 2) CHECK(*c->remove("f" + std::to_string(i), soon()));
  const std::string value = pattern(77, 3 << 20);
  put(*c, "big", value);
  auto object = *c->locate("big", {}, soon());
  CHECK(object->info().replicas[0].pieces.size() > 1);
  for (bool read_only : {false, true}) {
    auto m = c->map(object, read_only, soon());
    REQUIRE(m.is_ok());
    CHECK(m->zero_copy);
    CHECK(std::memcmp(m->data.get(), value.data(), value.size()) == 0);
  }
  CHECK(*get(*c, "big") == value);
  std::string part(1000, 0);
  const iovec v{part.data(), part.size()};
  CHECK(c->read(object, 499'000, std::span(&v, 1), soon()).is_ok());
  CHECK(part == value.substr(499'000, 1000));
  CHECK(c->read(object, value.size() - 10, std::span(&v, 1), soon()).code() == Code::out_of_bounds);
}

TEST_CASE("a full pool: too large fails at once with sizes; pinned makes the writer wait, then fails or goes on") {
  Node node(8 << 20);
  auto c = connect(node);
  const Status large = try_put(*c, "large", pattern(1, 9 << 20)).status();
  CHECK(large.code() == Code::pool_full);
  CHECK(large.message().find(std::to_string(9 << 20)) != std::string::npos);
  CHECK(large.message().find(std::to_string(8 << 20)) != std::string::npos);
  put(*c, "k", pattern(1, 3 << 20));
  auto pinned = *c->map(*c->locate("k", {}, soon()), true, soon());
  CHECK(try_put(*c, "b", pattern(2, 7 << 20), {}, 300).status().code() == Code::pool_full);
  CHECK(get(*c, "k").is_ok());
  std::thread unpin([&] {
    ::usleep(200'000);
    pinned = {};
  });
  CHECK(try_put(*c, "b", pattern(2, 7 << 20)).is_ok());
  unpin.join();
  CHECK(*get(*c, "b") == pattern(2, 7 << 20));
  CHECK(get(*c, "k").status().code() == Code::key_not_found);  // evicted
}

TEST_CASE("puts of one size have their room in advance, which goes back when it is not used, or is needed") {
  Node node(64 << 20);
  auto c = connect(node);
  const auto granted = [&] { return stats_of(*c).granted_bytes; };
  constexpr size_t kBytes = 100'000;
  for (uint64_t i = 0; i < 100; ++i) put(*c, "k" + std::to_string(i % 10), pattern(i, kBytes));
  CHECK(granted() > 0);
  CHECK(granted() <= (4 << 20));
  for (uint64_t i = 90; i < 100; ++i) CHECK(*get(*c, "k" + std::to_string(i % 10)) == pattern(i, kBytes));
  CHECK((*c->locate("k3", {}, soon()))->info().meta == "m");
  CHECK(stats_of(*c).prepared_bytes == 0);
  CHECK(eventually([&] { return granted() == 0; }));  // a second later
  CHECK(eventually([&] { return stats_of(*c).extents == 10 && stats_of(*c).limbo_bytes == 0; }));

  PutOptions keep, labelled;
  keep.if_exists = IfExists::keep;
  labelled.label = "v2";
  for (int i = 0; i < 3; ++i) put(*c, "a", pattern(1, kBytes), labelled);
  CHECK(granted() > 0);
  CHECK_FALSE(put(*c, "a", pattern(2, kBytes), keep).stored);
  GetOptions want;
  want.label = "v2";
  CHECK(c->locate("a", want, soon()).is_ok());
  put(*c, "b", pattern(1, kBytes + 1));  // of another size
  CHECK(eventually([&] { return granted() == 0; }, 500));

  for (int i = 0; i < 3; ++i) put(*c, "a", pattern(1, kBytes));
  CHECK(granted() > 0);
  node.kill_worker();  // with what it had granted; a put at that moment may have an unknown outcome
  REQUIRE(eventually([&] { return try_put(*c, "a", pattern(0, kBytes)).is_ok(); }));
  for (uint64_t i = 0; i < 5; ++i) {
    put(*c, "a", pattern(i, kBytes));
    CHECK(*get(*c, "a") == pattern(i, kBytes));
  }
  for (int i = 0; i < 3; ++i) put(*c, "a", pattern(1, kBytes));
  CHECK(granted() > 0);
  const std::string all = pattern(9, 63 << 20);
  put(*c, "all", all);  // needs what is granted
  CHECK(*get(*c, "all") == all);
  {
    auto other = connect(node);
    for (int i = 0; i < 3; ++i) put(*other, "o", pattern(1, kBytes / 2));
  }
  CHECK(eventually([&] { return granted() == 0; }, 900));
}

TEST_CASE("a client that has room in advance is killed at each step of a put") {
  Node node(32 << 20);
  auto c = connect(node);
  for (const char* point :
       {"client.reserved=kill@5", "client.copy=kill@5", "client.written=kill@5", "client.committed=kill@5"}) {
    CAPTURE(std::string(point));
    Process writer(
        [&] {
          auto mine = connect(node);
          for (uint64_t i = 1; i <= 5; ++i) put(*mine, "k", pattern(i, 100'000));
          return 1;
        },
        point);
    CHECK(writer.wait() == -SIGKILL);
    const bool done = std::string(point).starts_with("client.committed");
    CHECK(*get(*c, "k") == pattern(done ? 5 : 4, 100'000));
    CHECK(eventually([&] {
      const auto n = stats_of(*c);
      return n.extents == 1 && n.granted_bytes == 0 && n.limbo_bytes == 0;
    }));
  }
}

TEST_CASE("a writer stopped inside its copy to room that it has in advance: that is nobody else's while it lives") {
  constexpr size_t kBytes = 1 << 20;
  for (const bool worker_killed : {false, true}) {
    CAPTURE(worker_killed);
    Node node(64 << 20);
    auto c = connect(node);
    Process writer(
        [&] {
          auto mine = connect(node);
          for (uint64_t i = 1; i <= 4; ++i) put(*mine, "w", pattern(i, kBytes));
          (void)try_put(*mine, "w", pattern(5, kBytes));  // whatever comes of it
          return 0;
        },
        "client.reserved=stop@5");
    REQUIRE(writer.stopped());
    CHECK(stats_of(*c).granted_bytes > 0);
    if (worker_killed) {
      node.kill_worker();
      CHECK(eventually([&] { return c->stat(soon()).is_ok() && stats_of(*c).fenced_bytes >= kBytes; }));
    } else {
      ::usleep(6'500'000);  // its connection is given up
      CHECK(stats_of(*c).granted_bytes >= kBytes);
    }
    for (uint64_t i = 0; i < 80; ++i) put(*c, "f" + std::to_string(i), pattern(i, kBytes));
    ::kill(writer.pid, SIGCONT);
    CHECK(writer.wait() == 0);
    for (uint64_t i = 0; i < 80; ++i)
      if (auto got = get(*c, "f" + std::to_string(i)); got.is_ok()) CHECK(*got == pattern(i, kBytes));
    if (auto got = get(*c, "w"); got.is_ok()) CHECK((*got == pattern(4, kBytes) || *got == pattern(5, kBytes)));
    CHECK(eventually([&] {
      const auto n = stats_of(*c);
      return n.limbo_bytes == 0 && n.prepared_bytes == 0;
    }));
  }
}

TEST_CASE("checksums are verified on every way to read") {
  Node node(32 << 20);
  auto c = connect(node);
  PutOptions sum;
  sum.checksum = true;
  for (size_t nbytes : {size_t{100}, size_t{2'000'000}}) {
    const std::string key = "k" + std::to_string(nbytes), value = pattern(3, nbytes);
    put(*c, key, value, sum);
    auto object = *c->locate(key, {}, soon());
    CHECK(object->info().has_crc);
    CHECK(object->info().crc32c == crc32c(value.data(), value.size()));
    CHECK(*get(*c, key) == value);
    CHECK(c->map(object, false, soon()).is_ok());
    // Someone scribbles over the pool's memory.
    auto readable = c->map(object, true, soon());
    if (!readable->zero_copy) continue;
    const std::string path = "/proc/" + std::to_string(node.worker()) + "/mem";
    std::ifstream table("/proc/" + std::to_string(node.worker()) + "/maps");
    unsigned long base = 0;
    for (std::string line; std::getline(table, line);)
      if (line.find("tm-pool") != std::string::npos && line.find("rw-s") != std::string::npos)
        base = std::stoul(line.substr(0, line.find('-')), nullptr, 16);
    REQUIRE(base != 0);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0);
    CHECK(::pwrite(fd, "X", 1, static_cast<off_t>(base + object->info().replicas[0].pieces[0].offset)) == 1);
    ::close(fd);
    CHECK(get(*c, key).status().code() == Code::corrupt);
    CHECK(c->map(object, false, soon()).status().code() == Code::corrupt);
  }
}

TEST_CASE("several writers of one object: all parts or none") {
  Node node(32 << 20);
  auto a = connect(node), b = connect(node);
  PutOptions part;
  part.label = "step5";
  part.parts = 2;
  Result<PutOutcome> first(Code::internal, ""), second(Code::internal, "");
  std::thread other([&] { first = try_put(*a, "w", pattern(1, 300'000), part); });
  ::usleep(100'000);
  CHECK_FALSE((*b->exists(std::vector<std::string>{"w"}, soon()))[0]);
  PutOptions rest = part;
  rest.part = 1;
  second = try_put(*b, "w", pattern(2, 8192), rest);
  other.join();
  REQUIRE_MESSAGE(first.is_ok(), first.status().to_string());
  REQUIRE(second.is_ok());
  CHECK(first->version == second->version);
  CHECK(*get(*a, "w") == pattern(1, 300'000) + pattern(2, 8192));
  part.label = "step6";
  CHECK(try_put(*a, "w", pattern(3, 1000), part, 700).status().code() == Code::deadline_exceeded);
  CHECK(*get(*b, "w") == pattern(1, 300'000) + pattern(2, 8192));
  CHECK(eventually([&] { return stats_of(*a).prepared_bytes == 0 && stats_of(*a).limbo_bytes == 0; }));
}

TEST_CASE("readers and writers of one key at once: every read is one whole version, never an older one") {
  Node node(64 << 20);
  constexpr int kWriters = 2, kReaders = 2, kRounds = 150;
  auto check = connect(node);
  put(*check, "k", pattern(0, 700'000));
  std::vector<std::unique_ptr<Process>> all;
  for (int w = 0; w < kWriters; ++w)
    all.push_back(std::make_unique<Process>([&] {
      auto c = connect(node);
      for (int i = 1; i <= kRounds; ++i) put(*c, "k", pattern(uint64_t(i), 700'000 - 8 * size_t(i)));
      return 0;
    }));
  for (int r = 0; r < kReaders; ++r)
    all.push_back(std::make_unique<Process>([&, r] {
      auto c = connect(node);
      Version last;
      for (int i = 0; i < kRounds; ++i) {
        auto object = c->locate("k", {}, soon());
        if (!object.is_ok()) return 10;
        if ((*object)->info().version < last) return 11;
        last = (*object)->info().version;
        const size_t n = (*object)->info().nbytes;
        std::string seen(n, 0);
        if (r == 0) {
          const iovec v{seen.data(), n};
          if (!c->read(*object, 0, std::span(&v, 1), soon()).is_ok()) continue;
        } else {
          auto m = c->map(*object, i % 2 == 0, soon());
          if (!m.is_ok()) continue;
          ::usleep(500);
          std::memcpy(seen.data(), m->data.get(), n);
        }
        uint64_t word = 0;
        std::memcpy(&word, seen.data(), 8);
        if (seen != pattern(word >> 32, n) || n != 700'000 - 8 * (word >> 32)) return 12;
      }
      return 0;
    }));
  for (auto& p : all) CHECK(p->wait() == 0);
  CHECK(eventually([&] { return stats_of(*check).extents == 1 && stats_of(*check).pinned == 0; }));
}
