// The pieces that need no sockets: usage, descriptors, cutting into chunks, and the receiving end of streams.
#include <algorithm>
#include <atomic>
#include <thread>

#include "transfer/descriptor.h"
#include "transfer/region_table.h"
#include "transfer/support.h"
#include "transfer/tcp/incoming.h"
#include "transfer/tcp/memory.h"
#include "transfer/usage.h"
#include "transfer/worker.h"

namespace transfer_test {
using namespace torch_mooncake::transfer;

TEST_CASE("usage: no new users after revoke, drained once the last has gone") {
  const std::string a = "a", b = "b";
  Usage usage;
  int drained = 0;
  CHECK(usage.acquire(a));
  CHECK(usage.acquire(b));
  CHECK(usage.acquire(a));
  CHECK(usage.users() == "a, b");
  usage.revoke([&] { ++drained; });
  CHECK(!usage.acquire(a));
  usage.release(a);
  usage.release(b);
  CHECK(drained == 0);
  CHECK(usage.users() == "a");
  usage.release(a);
  CHECK(drained == 1);
  usage.revoke([&] { ++drained; });
  CHECK(drained == 2);
  CHECK(!usage.in_use());
}

TEST_CASE("usage: under many threads nobody is inside after the drain") {
  const std::string who = "worker";
  for (int round = 0; round < 200; ++round) {
    Usage usage;
    std::atomic<bool> gone{false};
    std::atomic<int> late{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&] {
        while (usage.acquire(who)) {
          if (gone) ++late;
          usage.release(who);
        }
      });
    usage.revoke([&] { gone = true; });
    for (auto& thread : threads) thread.join();
    CHECK(gone);
    CHECK(late == 0);
  }
}

TEST_CASE("descriptors: round trip; anything else is a typed error") {
  Descriptor d;
  d.engine[3] = 7;
  d.region = 12;
  d.generation = 0x1234567890abcdef;
  d.nbytes = 1ull << 40;
  d.writable = false;
  d.label = "kv cache";
  d.access = {{AccessKind::segment, "xyz"}, {static_cast<AccessKind>(77), "from the future"}};
  auto bytes = d.encode();
  auto back = must(Descriptor::decode(bytes));
  CHECK(back.engine == d.engine);
  CHECK(back.region == 12);
  CHECK(back.generation == d.generation);
  CHECK(back.nbytes == d.nbytes);
  CHECK(back.readable);
  CHECK(!back.writable);
  CHECK(back.label == "kv cache");
  REQUIRE(back.find(AccessKind::segment) != nullptr);
  CHECK(*back.find(AccessKind::segment) == "xyz");
  CHECK(back.find(AccessKind::process_vm) == nullptr);
  for (size_t n = 0; n < bytes.size(); ++n) {
    auto cut = Descriptor::decode(std::string_view(bytes).substr(0, n));
    REQUIRE(!cut.is_ok());
    CHECK(cut.status().code() == Code::invalid_argument);
  }
  CHECK(Descriptor::decode(bytes + "x").status().code() == Code::invalid_argument);
  bytes[4] = 9;
  auto other = Descriptor::decode(bytes).status();
  CHECK(other.code() == Code::version_mismatch);
  CHECK(other.message().find("9") != std::string::npos);
}

TEST_CASE("region table: 10 000 regions; generations never repeat; quarantine is counted") {
  RegionTable table({});
  std::vector<RegionImplPtr> regions;
  std::vector<uint64_t> generations;
  auto none = [](const RegionImpl&) { return std::vector<AccessRecord>(); };
  for (int i = 0; i < 10'000; ++i) {
    regions.push_back(table.add({.data = &table, .nbytes = 8}, {}, none));
    generations.push_back(regions.back()->generation());
  }
  std::sort(generations.begin(), generations.end());
  CHECK(std::adjacent_find(generations.begin(), generations.end()) == generations.end());
  auto region = regions[5000];
  CHECK(table.find(region->id(), region->generation()) == region);
  CHECK(table.find(region->id(), region->generation() + 2) == nullptr);
  CHECK(*region->generation_word() == region->generation());
  CHECK(table.remove(region));
  CHECK(!table.remove(region));
  CHECK(*region->generation_word() != region->generation());
  CHECK(table.find(region->id(), region->generation()) == nullptr);
  CHECK(table.live_count() == 9999);
  CHECK(table.quarantined_count() == 1);
  table.forget(region);
  CHECK(table.quarantined_count() == 0);
}

TEST_CASE("worker: in order; the last task may stop it; later tasks run on the caller") {
  std::vector<int> order;
  auto worker = std::make_shared<Worker>("tm-test");
  std::atomic<bool> stopped{false};
  for (int i = 0; i < 100; ++i) worker->post([&order, i] { order.push_back(i); });
  worker->post([&, worker]() mutable {
    worker->stop();
    stopped = true;
  });
  while (!stopped) std::this_thread::yield();
  CHECK(order.size() == 100);
  CHECK(std::is_sorted(order.begin(), order.end()));
  std::thread::id ran_on;
  worker->post([&] { ran_on = std::this_thread::get_id(); });
  CHECK(ran_on == std::this_thread::get_id());
}

// A stream into a buffer, which counts its ends.
struct Sink final : Incoming {
  std::atomic<int> completed{0}, quieted{0};
  std::atomic<uint64_t> bytes{0};
  Status why;
  bool enter(RegionImpl&) override { return true; }
  void leave(RegionImpl&) override {}
  void applied(uint64_t n, bool) override { bytes += n; }
  void complete() override { ++completed; }
  void quiet(const Status& status) override {
    why = status;
    ++quieted;
  }
};

// The bytes that a recv may place now; 0: the rest is to be sunk.
size_t room(rpc::BulkReceive& frame, std::byte** first = nullptr) {
  iovec pieces[4];
  size_t total = 0, count = frame.windows(0, 8, pieces);
  for (size_t i = 0; i < count; ++i) total += pieces[i].iov_len;
  if (first && count > 0) *first = static_cast<std::byte*>(pieces[0].iov_base);
  return total;
}

TEST_CASE("incoming: one recv may fill many pieces, and may end anywhere in them") {
  auto stream = std::make_shared<Sink>();
  std::byte buffer[30] = {};
  stream->expect(1);
  Incoming::Frame frame;
  for (size_t i = 0; i < 6; ++i) frame.targets.push_back({buffer + 5 * i, 5, nullptr});
  auto receiver = stream->begin(0, frame, false);
  std::byte* at = nullptr;
  CHECK(room(*receiver, &at) == 20);  // four pieces fit the call
  CHECK(at == buffer);
  receiver->filled(12);
  CHECK(room(*receiver, &at) == 18);
  CHECK(at == buffer + 12);
  receiver->filled(3);  // to the end of a piece
  CHECK(room(*receiver, &at) == 15);
  CHECK(at == buffer + 15);
  receiver->filled(0);
  CHECK(room(*receiver, &at) == 15);
  receiver->filled(15);
  receiver->finish({});
  CHECK(stream->completed == 1);
  CHECK(stream->bytes == 30);
}

TEST_CASE("incoming: a chunk that comes twice is applied once; the earlier lane sinks the rest of its own") {
  auto stream = std::make_shared<Sink>();
  std::byte buffer[8] = {};
  Incoming::Frame target{{{buffer, 8, nullptr}}, {}};
  stream->expect(1);
  auto first = stream->begin(0, target, false);
  std::byte* at = nullptr;
  REQUIRE(room(*first, &at) == 8);
  CHECK(at == buffer);
  first->filled(4);
  auto second = stream->begin(0, target, false);  // re-sent on another lane
  CHECK(room(*first) == 0);                       // the old one has lost it
  first->finish({});
  CHECK(stream->completed == 0);
  REQUIRE(room(*second) == 8);
  second->filled(8);
  second->finish({});
  CHECK(stream->completed == 1);
  CHECK(stream->bytes == 8);
  CHECK(stream->begin(0, target, false) == nullptr);
}

TEST_CASE("incoming: the later lane waits while the earlier one is inside its recv") {
  auto stream = std::make_shared<Sink>();
  std::byte buffer[8] = {};
  Incoming::Frame target{{{buffer, 8, nullptr}}, {}};
  stream->expect(1);
  auto first = stream->begin(0, target, false);
  REQUIRE(room(*first) == 8);  // inside
  auto second = stream->begin(0, target, false);
  std::atomic<bool> entered{false};
  std::thread lane([&] {
    size_t n = room(*second);
    entered = true;
    second->filled(n);
    second->finish({});
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!entered);
  first->filled(0);
  lane.join();
  CHECK(stream->completed == 1);
  first->finish(Status(Code::peer_lost, "lane died"));
  CHECK(stream->completed == 1);
  CHECK(stream->bytes == 8);
}

TEST_CASE("incoming: stop is quiet when no lane is inside, and refuses all that comes later") {
  auto stream = std::make_shared<Sink>();
  std::byte buffer[8] = {};
  Incoming::Frame target{{{buffer, 8, nullptr}}, {}};
  stream->expect(2);
  auto receiver = stream->begin(1, target, false);
  REQUIRE(room(*receiver) == 8);
  stream->stop({Code::cancelled, "test"});
  CHECK(stream->quieted == 0);
  receiver->filled(3);
  CHECK(stream->quieted == 1);
  CHECK(stream->why.code() == Code::cancelled);
  CHECK(room(*receiver) == 0);
  receiver->finish({});
  CHECK(stream->begin(0, target, false) == nullptr);
  CHECK(stream->completed == 0);
  // Frames before the header are kept; an empty stream is complete at once.
  auto early = std::make_shared<Sink>();
  auto frame = early->begin(0, target, false);
  REQUIRE(frame != nullptr);
  CHECK(room(*frame) == 8);
  frame->filled(8);
  frame->finish({});
  CHECK(early->completed == 0);
  early->expect(1);
  CHECK(early->completed == 1);
  auto empty = std::make_shared<Sink>();
  empty->expect(0);
  CHECK(empty->completed == 1);
}

TEST_CASE("incoming: a chunk cut by a dying lane is not applied") {
  auto stream = std::make_shared<Sink>();
  std::byte buffer[8] = {};
  Incoming::Frame target{{{buffer, 8, nullptr}}, {}};
  stream->expect(1);
  auto first = stream->begin(0, target, false);
  CHECK(room(*first) == 8);
  first->filled(5);
  first->finish(Status(Code::peer_lost, "lane died"));
  CHECK(stream->completed == 0);
  auto second = stream->begin(0, target, false);
  REQUIRE(second != nullptr);
  CHECK(room(*second) == 8);
  second->filled(8);
  second->finish({});
  CHECK(stream->completed == 1);
}

TEST_CASE("frame heads: round trip, and rubbish is refused") {
  FrameHead head{StreamKind::write, 9, 3, 1, {{4, 5, 6}, {7, 8, 9}}};
  auto back = must(FrameHead::decode(head.encode()));
  CHECK(back.stream == 9);
  CHECK(back.chunk == 3);
  CHECK(back.attempt == 1);
  REQUIRE(back.pieces.size() == 2);
  CHECK(back.pieces[1].offset == 8);
  auto bytes = head.encode();
  for (size_t n = 0; n < bytes.size(); ++n) CHECK(!FrameHead::decode(std::string_view(bytes).substr(0, n)).is_ok());
  bytes[0] = 7;
  CHECK(FrameHead::decode(bytes).status().code() == Code::corrupt);
}

}  // namespace transfer_test
