// Nodes and clients that die, stop and come back; two nodes as two hosts.
#include <thread>

#include "pool/messages.h"
#include "pool/node_fixture.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {

Deadline soon(int64_t ms = 15'000) { return Deadline::after_ms(ms); }

std::string value(Client& client, const std::string& key) {
  auto got = get(client, key);
  REQUIRE_MESSAGE(got.is_ok(), key << ": " << got.status().to_string());
  return *got;
}

bool is_local(Client& client, const std::string& key) {
  auto object = client.locate(key, {}, soon());
  REQUIRE_MESSAGE(object.is_ok(), object.status().to_string());
  return (*object)->local();
}

bool at_rest(Client& client) {
  auto s = client.stat(soon());
  if (!s.is_ok()) return false;
  for (const auto& n : s->nodes)
    if (n.prepared_bytes || n.limbo_bytes || n.pinned) return false;
  return true;
}

}  // namespace

TEST_CASE("a worker killed: objects, pins and sessions survive, calls go on by themselves") {
  Node node(64 << 20);
  auto c = connect(node);
  const std::string big = pattern(1, 2 << 20);
  put(*c, "big", big);
  put(*c, "small", "hello");
  PutOptions sealed;
  sealed.kind = Kind::sealed;
  put(*c, "sealed", pattern(2, 100'000), sealed);
  auto mapped = *c->map(*c->locate("big", {}, soon()), true, soon());
  for (int round = 0; round < 3; ++round) {
    node.kill_worker();
    CHECK((value(*c, "small") == "hello"));
    CHECK((value(*c, "big") == big));
    CHECK((value(*c, "sealed") == pattern(2, 100'000)));
    put(*c, "after", pattern(uint64_t(round), 50'000));
    CHECK((value(*c, "after") == pattern(uint64_t(round), 50'000)));
    const Version before = (*c->locate("small", {}, soon()))->info().version;
    CHECK(put(*c, "small", "hello").version > before);
  }
  put(*c, "big", "replaced");
  for (int i = 0; i < 40; ++i) put(*c, "fill" + std::to_string(i), pattern(uint64_t(i), 3 << 20));
  CHECK(std::memcmp(mapped.data.get(), big.data(), big.size()) == 0);  // the old session's pin still counts
  mapped = {};
  CHECK(eventually([&] { return at_rest(*c); }));
}

TEST_CASE("a worker killed at each step of a commit: the put took effect wholly or not at all") {
  for (const char* point : {"node.commit=kill@3", "node.committed=kill@3", "node.supersede=kill@2",
                            "node.superseded=kill@2", "home.commit=kill@3"}) {
    CAPTURE(std::string(point));
    Node node(32 << 20, "host-a", "", point);  // armed in every worker: each dies at its own passage
    auto c = connect(node);
    uint64_t last = 0;
    for (uint64_t i = 1; i <= 6; ++i) {
      auto r = try_put(*c, "k", pattern(i, 60'000));
      auto got = get(*c, "k");
      if (!got.is_ok()) {
        CHECK(got.status().code() == Code::key_not_found);
        CHECK(last == 0);
        CHECK_FALSE(r.is_ok());
        continue;
      }
      uint64_t word = 0;
      std::memcpy(&word, got->data(), 8);
      const uint64_t seen = word >> 32;
      CHECK(*got == pattern(seen, 60'000));
      CHECK((seen == i || (!r.is_ok() && seen == last)));
      last = seen;
    }
  }
}

TEST_CASE("a client killed at each step of a put leaves nothing behind") {
  Node node(32 << 20);
  auto c = connect(node);
  put(*c, "k", pattern(1, 3 << 20));
  for (const char* point :
       {"client.reserved=kill", "client.copy=kill", "client.written=kill", "client.committed=kill"}) {
    CAPTURE(std::string(point));
    Process writer(
        [&] {
          auto mine = connect(node);
          return try_put(*mine, "k", pattern(2, 3 << 20)).is_ok() ? 0 : 1;
        },
        point);
    CHECK(writer.wait() == -SIGKILL);
    const bool done = std::string(point).starts_with("client.committed");
    CHECK((value(*c, "k") == pattern(done ? 2 : 1, 3 << 20)));
    CHECK(eventually([&] { return at_rest(*c) && stats_of(*c).extents == 1; }));
  }
}

TEST_CASE("a writer stopped inside its copy: its extent is reused by nobody until it lets go; no object changes") {
  constexpr size_t kBytes = 8 << 20;
  Node node(32 << 20);
  auto c = connect(node);
  Process writer(
      [&] {
        auto mine = connect(node);
        auto r = try_put(*mine, "late", pattern(666, kBytes), {}, 1500);
        return r.status().code() == Code::deadline_exceeded || r.status().code() == Code::key_not_found ? 0 : 1;
      },
      "client.reserved=stop");
  REQUIRE(writer.stopped());
  CHECK(stats_of(*c).prepared_bytes >= kBytes);
  // Timed out by the node: in limbo, fenced, while the process lives, also beyond the silence limit of its connection.
  CHECK(eventually([&] { return stats_of(*c).prepared_bytes == 0; }));
  ::usleep(6'500'000);
  CHECK(stats_of(*c).limbo_bytes >= kBytes);
  std::vector<std::string> keys;
  for (int i = 0; i < 30; ++i) {
    keys.push_back("f" + std::to_string(i));
    put(*c, keys.back(), pattern(uint64_t(i), 1 << 20));
  }
  ::kill(writer.pid, SIGCONT);
  CHECK(writer.wait() == 0);
  int left = 0;
  for (int i = 0; i < 30; ++i) {
    auto got = get(*c, keys[size_t(i)]);
    if (!got.is_ok()) {
      CHECK(got.status().code() == Code::key_not_found);
      continue;
    }
    ++left;
    CHECK(*got == pattern(uint64_t(i), 1 << 20));
  }
  CHECK(left >= 20);
  CHECK(get(*c, "late").status().code() == Code::key_not_found);
  CHECK(eventually([&] { return at_rest(*c); }));
}

TEST_CASE("the node gone: calls end in bounded time; wrong token: auth") {
  auto node = std::make_unique<Node>(16 << 20);
  auto c = connect(*node);
  put(*c, "k", "v");
  ClientOptions wrong;
  wrong.node_address = node->tcp_address;
  wrong.token = "guess";
  wrong.host_id = "host-z";
  CHECK(Client::connect(wrong, soon()).status().code() == Code::auth);
  CHECK((value(*c, "k") == "v"));
  node->stop();
  const int64_t before = steady_ns();
  // What it looked up before it may still read, for as long as a node that fell silent counts (view_ttl: 1 s).
  CHECK(eventually([&] { return get(*c, "k", 2000).status().code() == Code::pool_unavailable; }));
  CHECK_FALSE(try_put(*c, "k", pattern(1, 100'000), {}, 2000).is_ok());
  CHECK((steady_ns() - before) / 1'000'000 < 8000);
  CHECK_FALSE(c->alive());
}

TEST_CASE("a client on another host: everything over the engine") {
  Node node(32 << 20);
  auto here = connect(node), far = connect(node.tcp_address, "host-b");
  for (size_t nbytes : {size_t{0}, size_t{100}, size_t{30'000}, size_t{3'000'000}}) {
    CAPTURE(nbytes);
    const std::string key = "k" + std::to_string(nbytes);
    put(*far, key, pattern(5, nbytes));
    CHECK((value(*here, key) == pattern(5, nbytes)));
    auto object = *far->locate(key, {}, soon());
    CHECK_FALSE(object->local());
    CHECK((value(*far, key) == pattern(5, nbytes)));
    auto copy = far->map(object, false, soon());
    REQUIRE_MESSAGE(copy.is_ok(), copy.status().to_string());
    CHECK_FALSE(copy->zero_copy);
    CHECK(std::memcmp(copy->data.get(), pattern(5, nbytes).data(), nbytes) == 0);
    put(*here, key, pattern(6, nbytes));
    std::string out(nbytes, 0);
    const iovec v{out.data(), out.size()};
    const Status again = nbytes ? far->read(object, 0, std::span(&v, 1), soon()) : Status{};
    if (nbytes <= kInlineLimit) {  // came along with its location
      CHECK(again.is_ok());
      CHECK(out == pattern(5, nbytes));
    } else {
      CHECK(again.code() == Code::key_not_found);
    }
  }
  CHECK(eventually([&] { return at_rest(*here); }));
}

TEST_CASE("two nodes: local placement, replicas on both, reads from either, removal everywhere") {
  Node a(64 << 20, "host-a");
  Node b(64 << 20, "host-b", a.tcp_address);
  auto ca = connect(a, "host-a");
  std::shared_ptr<Client> cb;
  REQUIRE(eventually([&] {
    ClientOptions options;
    options.node_address = b.unix_address;
    options.host_id = "host-b";
    options.token = "secret";
    auto r = Client::connect(options, soon());
    if (r.is_ok()) cb = *r;
    return r.is_ok();
  }));
  for (size_t nbytes : {size_t{10}, size_t{2'000'000}}) {
    const std::string k = std::to_string(nbytes);
    put(*ca, "a" + k, pattern(1, nbytes));
    put(*cb, "b" + k, pattern(2, nbytes));
    CHECK(is_local(*ca, "a" + k));
    CHECK(is_local(*cb, "b" + k));
    CHECK_FALSE(is_local(*ca, "b" + k));
    CHECK((value(*ca, "b" + k) == pattern(2, nbytes)));
    CHECK((value(*cb, "a" + k) == pattern(1, nbytes)));
    put(*cb, "a" + k, pattern(3, nbytes));  // moves to b
    CHECK((value(*ca, "a" + k) == pattern(3, nbytes)));
    CHECK(is_local(*cb, "a" + k));
    PutOptions two;
    two.replicas = 2;
    put(*ca, "r" + k, pattern(4, nbytes), two);
    CHECK((*ca->locate("r" + k, {}, soon()))->info().replicas.size() == 2);
    CHECK(is_local(*ca, "r" + k));
    CHECK(is_local(*cb, "r" + k));
    two.replicas = 3;
    CHECK(try_put(*ca, "x", "x", two).status().code() == Code::unsupported);
  }
  CHECK(ca->keys("", soon())->size() == 6);
  CHECK(cb->keys("r", soon())->size() == 2);
  const auto all = ca->keys("", soon());
  for (const auto& k : *all) CHECK(*cb->remove(k, soon()));
  CHECK(ca->keys("", soon())->empty());
  CHECK(eventually([&] { return at_rest(*ca); }));
  auto stats = ca->stat(soon());
  CHECK(stats->nodes.size() == 2);
  CHECK(stats->nodes[0].extents + stats->nodes[1].extents == 0);

  // The member's worker dies and comes back with everything; then the leader's.
  put(*cb, "b", pattern(8, 1 << 20));
  put(*ca, "a", pattern(9, 1 << 20));
  b.kill_worker();
  CHECK((value(*ca, "b") == pattern(8, 1 << 20)));
  put(*ca, "b", pattern(10, 1 << 20));
  CHECK((value(*cb, "b") == pattern(10, 1 << 20)));
  put(*cb, "b", pattern(11, 1 << 20));
  a.kill_worker();
  CHECK((value(*cb, "b") == pattern(11, 1 << 20)));
  CHECK((value(*cb, "a") == pattern(9, 1 << 20)));
  put(*cb, "a", pattern(12, 1 << 20));
  CHECK((value(*ca, "a") == pattern(12, 1 << 20)));
}

TEST_CASE("a host lost: replicas serve on, the rest is missing, and a replace waits for its expulsion only") {
  Node a(64 << 20, "host-a");
  auto b = std::make_unique<Node>(64 << 20, "host-b", a.tcp_address);
  auto ca = connect(a, "host-a");
  REQUIRE(eventually([&] { return ca->stat(soon()).is_ok() && ca->stat(soon())->nodes.size() == 2; }));
  {
    auto cb = connect(*b, "host-b");
    put(*cb, "only-b", pattern(1, 100'000));
    PutOptions two;
    two.replicas = 2;
    put(*cb, "both", pattern(2, 100'000), two);
  }
  b->stop();
  CHECK((value(*ca, "both") == pattern(2, 100'000)));
  const int64_t before = steady_ns();
  put(*ca, "only-b", pattern(3, 100'000));  // its old version must be expelled first
  CHECK((steady_ns() - before) / 1'000'000 < 12'000);
  CHECK((value(*ca, "only-b") == pattern(3, 100'000)));
  CHECK((value(*ca, "both") == pattern(2, 100'000)));
  CHECK(ca->stat(soon())->nodes.size() == 1);
}

TEST_CASE("a node that was stopped beyond its lease returns without its named past") {
  Node a(32 << 20, "host-a");
  Node b(32 << 20, "host-b", a.tcp_address);
  auto ca = connect(a, "host-a");
  REQUIRE(eventually([&] { return ca->stat(soon()).is_ok() && ca->stat(soon())->nodes.size() == 2; }));
  auto cb = connect(b, "host-b");
  PutOptions sealed;
  sealed.kind = Kind::sealed;
  put(*cb, "named", pattern(1, 200'000));
  put(*cb, "sealed", pattern(2, 200'000), sealed);
  const pid_t worker = b.worker();
  ::kill(worker, SIGSTOP);
  put(*ca, "named", pattern(3, 200'000));
  CHECK((value(*ca, "named") == pattern(3, 200'000)));
  ::kill(worker, SIGCONT);
  CHECK((value(*cb, "named") == pattern(3, 200'000)));
  REQUIRE(eventually([&] { return ca->stat(soon()).is_ok() && ca->stat(soon())->nodes.size() == 2; }, 20'000));
  CHECK((value(*ca, "sealed") == pattern(2, 200'000)));
  CHECK((value(*cb, "named") == pattern(3, 200'000)));
  CHECK(ca->keys("", soon())->size() == 2);
}

TEST_CASE("a node that leaves moves what it has, though a writer of it is stopped") {
  Node a(32 << 20, "host-a");
  Node b(32 << 20, "host-b", a.tcp_address);
  auto ca = connect(a, "host-a");
  auto cb = connect(b, "host-b");
  for (uint64_t i = 0; i < 5; ++i) put(*cb, "k" + std::to_string(i), pattern(i, 100'000));
  Process writer(
      [&] {
        auto mine = connect(b, "host-b");
        return try_put(*mine, "late", pattern(9, 1 << 20)).is_ok() ? 0 : 1;
      },
      "client.reserved=stop");
  REQUIRE(writer.stopped());
  b.leave();
  for (uint64_t i = 0; i < 5; ++i) CHECK((value(*ca, "k" + std::to_string(i)) == pattern(i, 100'000)));
}

TEST_CASE("a node that leaves while its leader starts again moves what it has") {
  Node a(32 << 20, "host-a");
  Node b(32 << 20, "host-b", a.tcp_address);
  auto ca = connect(a, "host-a");
  auto cb = connect(b, "host-b");
  for (uint64_t i = 0; i < 5; ++i) put(*cb, "k" + std::to_string(i), pattern(i, 100'000));
  a.kill_worker();
  b.leave();
  for (uint64_t i = 0; i < 5; ++i) CHECK((value(*ca, "k" + std::to_string(i)) == pattern(i, 100'000)));
}
