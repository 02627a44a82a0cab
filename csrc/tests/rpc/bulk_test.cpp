// Bulk frames: integrity at random sizes, windows asked before every write, sinking in the middle, lanes that die.
#include <sys/mman.h>

#include <algorithm>
#include <map>

#include "rpc/helpers.h"

using namespace rpc_test;

namespace {

// Collects each frame under its body. Frame bodies say what to do: "take", "sink", "half" (sink after half),
// "bits" (windows of odd small sizes), "gone" (memory that is not mapped after half).
constexpr uint64_t kNothing = 1 << 20;

class Collector : public BulkHandler {
 public:
  struct Frame {
    std::string bytes;
    Status end;
    bool finished = false;
  };

  std::unique_ptr<BulkReceive> begin(Lane&, std::string_view body, uint64_t payload_bytes) override {
    if (body.substr(0, 4) == "sink") {
      std::lock_guard lock(mutex_);
      ++sunk_;
      return nullptr;
    }
    return std::make_unique<Receive>(*this, std::string(body), payload_bytes);
  }
  std::map<std::string, Frame> frames() {
    std::lock_guard lock(mutex_);
    return frames_;
  }
  size_t finished() {
    std::lock_guard lock(mutex_);
    size_t n = static_cast<size_t>(sunk_);
    for (auto& [body, frame] : frames_) n += frame.finished;
    return n;
  }
  // kNothing bytes of addresses without memory.
  void* nothing() const { return nothing_.get(); }
  std::atomic<int> misuse{0}, unmapped{0};

 private:
  class Receive : public BulkReceive {
   public:
    Receive(Collector& owner, std::string body, uint64_t n) : owner_(owner), body_(std::move(body)), bytes_(n, '?') {}
    size_t windows(uint64_t offset, uint64_t wanted, std::span<iovec> pieces) override {
      if (open_ || offset != placed_ || offset + wanted != bytes_.size() || wanted == 0) ++owner_.misuse;
      if (body_.substr(0, 4) == "gone" && offset >= bytes_.size() / 2) {
        open_ = true;
        pieces[0] = {owner_.nothing(), std::min(wanted, kNothing)};
        return 1;
      }
      bool half = body_.substr(0, 4) == "half" || body_.substr(0, 4) == "gone";
      if (half && offset >= bytes_.size() / 2) return 0;
      uint64_t n = half ? std::min<uint64_t>(wanted, bytes_.size() / 2 - offset + 1) : wanted;
      bool bits = body_.substr(0, 4) == "bits";
      if (bits) n = std::min<uint64_t>(wanted, 1 + random_u64() % 900'000);
      open_ = true;
      size_t count = 0;
      for (uint64_t at = 0; at < n && count < pieces.size();) {
        uint64_t piece = bits ? std::min<uint64_t>(n - at, 1 + random_u64() % 9000) : n;
        pieces[count++] = {bytes_.data() + offset + at, piece};
        at += piece;
      }
      return count;
    }
    void filled(uint64_t n) override {
      if (!open_) ++owner_.misuse;
      open_ = false;
      placed_ += n;
    }
    void unmapped(const Status& why) override {
      if (open_ || why.code() != Code::invalid_argument) ++owner_.misuse;
      ++owner_.unmapped;
    }
    void finish(const Status& status) override {
      if (open_) ++owner_.misuse;
      std::lock_guard lock(owner_.mutex_);
      auto& frame = owner_.frames_[body_];
      if (frame.finished) ++owner_.misuse;
      frame.finished = true;
      frame.end = status;
      frame.bytes = bytes_.substr(0, placed_);
    }

   private:
    Collector& owner_;
    std::string body_, bytes_;
    uint64_t placed_ = 0;
    bool open_ = false;
  };

  const std::shared_ptr<void> nothing_{mmap(nullptr, kNothing, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
                                       [](void* at) { munmap(at, kNothing); }};
  std::mutex mutex_;
  std::map<std::string, Frame> frames_;
  int sunk_ = 0;
};

struct Payload {
  std::string bytes;
  std::vector<iovec> pieces;
  explicit Payload(size_t n, size_t cuts = 0) : bytes(n, '\0') {
    random_bytes(bytes.data(), n);
    size_t at = 0;
    for (size_t i = 0; i < cuts && at < n; ++i) {
      size_t take = random_u64() % (n - at + 1);
      pieces.push_back({bytes.data() + at, take});
      at += take;
    }
    pieces.push_back({bytes.data() + at, n - at});
  }
};

struct Setup {
  Collector collector;
  std::unique_ptr<Endpoint> server = make_endpoint(named("server"), {}, &collector);
  std::unique_ptr<Endpoint> client = make_endpoint(named("client"));
  SessionPtr session;
  explicit Setup(const std::string& listen, const char* host_id = "") {
    auto options = named("client");
    options.host_id = host_id;
    client = make_endpoint(options);
    session = client->connect(server->listen(listen).value(), soon()).value();
  }
};

}  // namespace

TEST_CASE("bulk: random sizes, pieces and fates over several lanes, among control messages; every byte right") {
  for (const char* listen : {"tcp://127.0.0.1:0", "unix://@tm-bulk-test"}) {
    for (const char* host : {"", "far"}) {
      CAPTURE(listen);
      CAPTURE(host);
      Setup setup(listen, host);
      REQUIRE(setup.session->open_lanes(3, soon()).is_ok());
      auto lanes = setup.session->lanes();
      REQUIRE(lanes.size() == 3);
      const char* fates[] = {"take", "sink", "half", "bits", "take"};
      size_t sizes[] = {0, 1, 31, 4096, 70'000, 1 << 20, 3'000'001};
      std::map<std::string, std::shared_ptr<Payload>> sent;
      std::atomic<int> sent_ok{0}, sent_bad{0};
      const int kFrames = 150;
      for (int i = 0; i < kFrames; ++i) {
        size_t n = sizes[random_u64() % 7];
        auto payload = std::make_shared<Payload>(n, random_u64() % 130);
        std::string body = std::string(fates[i % 5]) + std::to_string(i) + std::string(random_u64() % 3000, 'b');
        sent[body] = payload;
        BulkFrame frame{body, payload->pieces, [&](const Status& s) { ++(s.is_ok() ? sent_ok : sent_bad); }, payload};
        REQUIRE(lanes[random_u64() % 3]->send_bulk(std::move(frame)).is_ok());
        if (i % 10 == 0) REQUIRE(setup.session->call_sync(kEcho, "between", soon())->body == "between");
      }
      REQUIRE(eventually([&] { return sent_ok + sent_bad == kFrames && setup.collector.finished() == kFrames; }));
      CHECK(sent_bad == 0);
      CHECK(setup.collector.misuse == 0);
      for (auto& [body, frame] : setup.collector.frames()) {
        auto& want = sent.at(body)->bytes;
        REQUIRE(frame.end.is_ok());
        if (body.substr(0, 4) == "half") {
          REQUIRE(frame.bytes.size() <= want.size());
          REQUIRE(frame.bytes == want.substr(0, frame.bytes.size()));
        } else {
          REQUIRE(frame.bytes == want);
        }
      }
      for (auto& lane : lanes) CHECK(lane->queued_bytes() == 0);
      lanes.clear();
    }
  }
}

TEST_CASE("bulk: memory that is not mapped ends its frame, on either side, and neither the lane nor other frames") {
  for (const char* listen : {"tcp://127.0.0.1:0", "unix://@tm-bulk-test"}) {
    CAPTURE(listen);
    Setup setup(listen, "far");
    REQUIRE(setup.session->open_lanes(2, soon()).is_ok());
    auto lane = setup.session->lanes().at(1);
    auto payload = std::make_shared<Payload>(3 << 20);
    std::atomic<int> ok{0}, unmapped{0}, bad{0};
    auto sent = [&](const Status& s) { ++(s.is_ok() ? ok : s.code() == Code::invalid_argument ? unmapped : bad); };
    for (int i = 0; i < 8; ++i) {
      for (const char* fate : {"take", "gone"})
        REQUIRE(lane->send_bulk({fate + std::to_string(i), payload->pieces, sent, payload}).is_ok());
      REQUIRE(lane->send_bulk({"never", {{setup.collector.nothing(), 1 << 20}}, sent, nullptr}).is_ok());
    }
    REQUIRE(eventually([&] { return ok + unmapped + bad == 24 && setup.collector.finished() == 16; }));
    CHECK(ok == 16);
    CHECK(unmapped == 8);
    CHECK(setup.collector.unmapped == 8);
    CHECK(setup.collector.misuse == 0);
    for (auto& [body, frame] : setup.collector.frames()) {
      REQUIRE(frame.end.is_ok());
      if (body.substr(0, 4) == "take") REQUIRE(frame.bytes == payload->bytes);
    }
    CHECK(lane->alive());
    CHECK(lane->queued_bytes() == 0);
  }
}

TEST_CASE("bulk: control overtakes a deep queue of bulk frames on lane 0") {
  Setup setup("tcp://127.0.0.1:0", "far");
  auto lane = setup.session->lanes().at(0);
  auto payload = std::make_shared<Payload>(1 << 20);
  std::atomic<int> sent{0};
  for (int i = 0; i < 400; ++i) {
    std::string body = "sink" + std::to_string(i);
    REQUIRE(lane->send_bulk({body, payload->pieces, [&](const Status&) { ++sent; }, payload}).is_ok());
  }
  auto answer = setup.session->call_sync(kEcho, "first", soon());
  int then = sent;
  CHECK(answer.is_ok());
  CHECK(then < 400);  // the answer did not wait for 400 MiB
  CHECK(eventually([&] { return sent == 400; }));
}

TEST_CASE("bulk: the foreground overtakes queued background frames, which still get their share") {
  Setup setup("tcp://127.0.0.1:0", "far");
  REQUIRE(setup.session->open_lanes(2, soon()).is_ok());
  auto lane = setup.session->lanes().at(1);
  auto payload = std::make_shared<Payload>(256 << 10);
  std::mutex mutex;
  std::string order;
  auto send = [&](char name, Priority priority) {
    auto sent = [&, name](const Status&) {
      std::lock_guard lock(mutex);
      order += name;
    };
    REQUIRE(lane->send_bulk({"sink", payload->pieces, sent, payload, priority}).is_ok());
  };
  // Far more than the sockets hold, so that the rest is queued when the foreground comes.
  for (int i = 0; i < 400; ++i) send('b', Priority::background);
  for (int i = 0; i < 100; ++i) send('f', Priority::foreground);
  auto all = [&] {
    std::lock_guard lock(mutex);
    return order.size() == 500;
  };
  REQUIRE(eventually(all));
  auto last_of_foreground = order.rfind('f');
  CHECK(last_of_foreground < 499);
  auto first = order.find('f');
  auto between =
      std::count(order.begin() + static_cast<long>(first), order.begin() + static_cast<long>(last_of_foreground), 'b');
  CHECK(between >= 100 / 9 - 2);  // one in nine
}

TEST_CASE("bulk: a lane killed in the middle ends its frames on both sides, once; the session lives on") {
  Setup setup("tcp://127.0.0.1:0", "far");
  REQUIRE(setup.session->open_lanes(2, soon()).is_ok());
  std::shared_ptr<Lane> lane;
  for (auto& l : setup.session->lanes()) {
    if (l->index() != 0) lane = l;
  }
  std::atomic<int> closed_lanes{0};
  setup.session->on_lane_close(
      [&](Lane& l, const Status& s) { closed_lanes += l.index() != 0 && !s.is_ok() ? 1 : 100; });
  auto payload = std::make_shared<Payload>(16 << 20);
  std::atomic<int> ok{0}, bad{0};
  const int kFrames = 40;
  for (int i = 0; i < kFrames; ++i) {
    auto status = lane->send_bulk(
        {"take" + std::to_string(i), payload->pieces, [&](const Status& s) { ++(s.is_ok() ? ok : bad); }, payload});
    REQUIRE(status.is_ok());
  }
  REQUIRE(eventually([&] { return !setup.collector.frames().empty(); }));
  lane->kill({Code::cancelled, "for the test"});
  CHECK(eventually([&] { return ok + bad == kFrames && closed_lanes == 1; }));
  CHECK(bad > 0);
  CHECK_FALSE(lane->alive());
  CHECK(lane->send_bulk({"take", {}, [&](const Status&) { bad = 1000; }, {}}).code() == Code::cancelled);
  CHECK(setup.session->alive());
  CHECK(setup.session->call_sync(kEcho, "alive", soon())->body == "alive");
  auto back = setup.server->sessions().at(0);
  CHECK(eventually([&] { return back->lanes().size() == 1 && setup.session->lanes().size() == 1; }));
  for (auto& [body, frame] : setup.collector.frames()) {
    CHECK(frame.finished);
    if (frame.end.is_ok()) {
      CHECK(frame.bytes == payload->bytes);
    } else {
      CHECK(frame.end.code() == Code::peer_lost);
      CHECK(frame.bytes == payload->bytes.substr(0, frame.bytes.size()));
    }
  }
  CHECK(setup.collector.misuse == 0);
  CHECK(payload.use_count() == 1);  // nothing keeps it any more
  REQUIRE(setup.session->open_lanes(2, soon()).is_ok());
  CHECK(setup.session->lanes().size() == 2);
}

TEST_CASE("bulk: `sent` may take a lock that the caller of send_bulk holds") {
  Setup setup("tcp://127.0.0.1:0", "far");
  auto lane = setup.session->lanes().at(0);
  std::mutex mutex;
  std::atomic<int> told{0};
  std::lock_guard lock(mutex);
  for (int i = 0; i < 10; ++i) {
    auto sent = [&](const Status&) {
      std::unique_lock inner(mutex, std::try_to_lock);
      ++told;
    };
    REQUIRE(lane->send_bulk({"sink", {}, sent, {}}).is_ok());
  }
  CHECK(eventually([&] { return told == 10; }));
}

TEST_CASE("bulk: a peer that stops reading holds the queue, not the caller, and death releases it") {
  PeerProcess peer("peer process: serves tcp");
  auto options = named("client");
  options.heartbeat_ms = 100;
  options.heartbeat_limit_ms = 1000;
  options.host_id = "far";
  auto client = make_endpoint(options);
  auto session = client->connect(peer.address(), soon()).value();
  auto lane = session->lanes().at(0);
  peer.send(SIGSTOP);
  auto payload = std::make_shared<Payload>(8 << 20);
  std::atomic<int> bad{0}, ok{0};
  for (int i = 0; i < 8; ++i) {
    auto status =
        lane->send_bulk({"sink", payload->pieces, [&](const Status& s) { ++(s.is_ok() ? ok : bad); }, payload});
    REQUIRE(status.is_ok());
  }
  CHECK(lane->queued_bytes() > 0);
  QuietLog quiet;
  CHECK(eventually([&] { return ok + bad == 8 && !session->alive(); }));
  CHECK(bad > 0);
  CHECK(session->status().code() == Code::peer_lost);
  peer.send(SIGCONT);
}

TEST_CASE("peer process: serves tcp" * doctest::skip()) { serve_as_peer("tcp://127.0.0.1:0"); }
