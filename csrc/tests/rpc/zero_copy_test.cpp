// MSG_ZEROCOPY, forced on over loopback: the data is right, `sent` waits until the kernel has done with the memory, and
// the kernel's report that it copied turns it off for the lane.
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>

#include "common/failpoint.h"
#include "rpc/helpers.h"

using namespace rpc_test;

namespace {

constexpr size_t kFrameBytes = 1 << 20;

struct Forced {
  Forced() { set_failpoints("rpc.zero_copy=error"); }
  ~Forced() { set_failpoints(""); }
};

// Takes every frame into memory of its own.
class Taker : public BulkHandler {
 public:
  std::unique_ptr<BulkReceive> begin(Lane&, std::string_view, uint64_t payload_bytes) override {
    return std::make_unique<Take>(*this, payload_bytes);
  }
  std::vector<std::string> taken() {
    std::lock_guard lock(mutex_);
    return taken_;
  }

 private:
  struct Take : BulkReceive {
    Take(Taker& owner, uint64_t n) : owner(owner), bytes(n, '?') {}
    size_t windows(uint64_t offset, uint64_t wanted, std::span<iovec> pieces) override {
      pieces[0] = {bytes.data() + offset, wanted};
      return 1;
    }
    void filled(uint64_t) override {}
    void unmapped(const Status&) override {}
    void finish(const Status& status) override {
      std::lock_guard lock(owner.mutex_);
      if (status) owner.taken_.push_back(std::move(bytes));
    }
    Taker& owner;
    std::string bytes;
  };
  std::mutex mutex_;
  std::vector<std::string> taken_;
};

std::string zero_copy_of(const Lane& lane) {
  for (auto& [what, value] : lane.tuning())
    if (what == "zero copy") return value;
  return "";
}

std::string random_frame() {
  std::string bytes(kFrameBytes, '\0');
  random_bytes(bytes.data(), bytes.size());
  return bytes;
}

// A session over TCP alone.
SessionPtr connect_far(Endpoint& client, const std::string& address) {
  auto session = client.connect(address, soon()).value();
  REQUIRE_FALSE(session->over_unix());
  return session;
}

EndpointOptions far(const char* name) {
  auto options = named(name);
  options.host_id = "far";
  return options;
}

struct Sent {
  std::atomic<int> ok{0}, failed{0}, taken{0};
  BulkFrame frame(const std::string& bytes) {
    BulkFrame frame;
    frame.body = "frame";
    frame.payload = {{const_cast<char*>(bytes.data()), bytes.size()}};
    frame.sent = [this](const Status& status) { ++(status ? ok : failed); };
    frame.taken = [this] { ++taken; };
    return frame;
  }
};

}  // namespace

TEST_CASE("zero copy: the rule for one host is off, and says so") {
  auto server = make_endpoint(named("server")), client = make_endpoint(far("client"));
  auto session = connect_far(*client, server->listen("tcp://127.0.0.1:0").value());
  CHECK(zero_copy_of(*session->lanes()[0]).find("off: both ends are one host") == 0);
}

TEST_CASE("zero copy: every byte arrives; the kernel's report that it copied turns it off, and frames go on") {
  Forced forced;
  Taker taker;
  auto server = make_endpoint(named("server"), {}, &taker), client = make_endpoint(far("client"));
  auto session = connect_far(*client, server->listen("tcp://127.0.0.1:0").value());
  auto lane = session->lanes()[0];
  CHECK(zero_copy_of(*lane).find("on") == 0);
  Sent sent;
  std::vector<std::string> frames;
  for (int i = 0; i < 8; ++i) frames.push_back(random_frame());
  for (auto& bytes : frames) REQUIRE(lane->send_bulk(sent.frame(bytes)).is_ok());
  CHECK(eventually([&] { return sent.ok == 8 && taker.taken().size() == 8; }));
  CHECK(taker.taken() == frames);
  CHECK(zero_copy_of(*lane).find("off: it was tried, and the kernel reported") == 0);
  REQUIRE(lane->send_bulk(sent.frame(frames[0])).is_ok());
  CHECK(eventually([&] { return sent.ok == 9 && taker.taken().size() == 9; }));
  CHECK(taker.taken().back() == frames[0]);
  CHECK(sent.failed == 0);
}

TEST_CASE("zero copy peer" * doctest::skip()) {
  Taker taker;
  serve_as_peer("tcp://127.0.0.1:0", &taker);
}

TEST_CASE("zero copy: a frame the kernel still reads is not sent; when its lane dies it is let go of, failed, once") {
  Forced forced;
  for (bool dies : {false, true}) {
    CAPTURE(dies);
    PeerProcess peer("zero copy peer");
    auto options = far("client");
    options.heartbeat_ms = 0;
    auto client = make_endpoint(options);
    auto session = connect_far(*client, peer.address());
    REQUIRE(session->open_lanes(2, soon()).is_ok());
    auto lanes = session->lanes();
    auto lane = lanes[0]->index() == 0 ? lanes[1] : lanes[0];
    peer.send(SIGSTOP);  // its kernel takes some 100 KiB more
    Sent sent;
    std::string bytes = random_frame();
    REQUIRE(lane->send_bulk(sent.frame(bytes)).is_ok());
    REQUIRE(eventually([&] { return lane->queued_bytes() == 0; }));
    CHECK(eventually([&] { return sent.taken == 1; }));  // the lane wants the next one, a round trip earlier
    ::usleep(100'000);
    CHECK(sent.ok + sent.failed == 0);
    if (dies)
      lane->kill({Code::peer_lost, "killed"});
    else
      peer.send(SIGCONT);
    CHECK(eventually([&] { return sent.ok + sent.failed == 1; }));
    CHECK(sent.failed == (dies ? 1 : 0));
    CHECK(eventually([&] { return lane->alive() != dies; }));
    peer.send(SIGCONT);
    session->close({});
    client->close();
    CHECK(sent.ok + sent.failed == 1);
  }
}

// Memory that is copied from like any other, and whose pages nobody can pin: as that of devices is.
TEST_CASE("zero copy: memory that cannot be pinned is sent by copy, over the same lane") {
  int fd = static_cast<int>(::syscall(SYS_memfd_secret, 0));
  if (fd < 0 || ::ftruncate(fd, kFrameBytes) != 0) {
    MESSAGE("this kernel has no memfd_secret");
    return;
  }
  void* at = ::mmap(nullptr, kFrameBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  REQUIRE(at != MAP_FAILED);
  std::string bytes = random_frame();
  std::memcpy(at, bytes.data(), kFrameBytes);
  Forced forced;
  Taker taker;
  auto server = make_endpoint(named("server"), {}, &taker), client = make_endpoint(far("client"));
  auto session = connect_far(*client, server->listen("tcp://127.0.0.1:0").value());
  auto lane = session->lanes()[0];
  Sent sent;
  auto frame = sent.frame(bytes);
  frame.payload = {{at, kFrameBytes}};
  REQUIRE(lane->send_bulk(std::move(frame)).is_ok());
  CHECK(eventually([&] { return sent.ok == 1 && taker.taken().size() == 1; }));
  CHECK(taker.taken() == std::vector{bytes});
  CHECK(sent.failed == 0);
  CHECK(lane->alive());
  ::munmap(at, kFrameBytes);
}

TEST_CASE("zero copy: while a caller receives for itself, the kernel's reports do not hold up what waits for room") {
  Forced forced;
  PeerProcess peer("zero copy peer");
  auto options = far("client");
  options.heartbeat_ms = 0;
  auto client = make_endpoint(options);
  auto session = connect_far(*client, peer.address());
  auto lane = session->lanes()[0];
  Sent sent;
  std::string bytes(64 << 20, 'z');
  std::atomic<bool> inside{false};
  bool all_went = false;
  std::thread caller([&] {
    (void)session->receive_until(
        [&] {
          inside = true;
          return all_went = sent.ok == 1;
        },
        soon(), steady_ns() + 8'000'000'000);
  });
  CHECK(eventually([&] { return inside.load(); }));
  REQUIRE(lane->send_bulk(sent.frame(bytes)).is_ok());
  caller.join();
  CHECK(all_went);
  CHECK(sent.failed == 0);
}
