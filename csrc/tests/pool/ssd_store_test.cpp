// The log on the SSD: what is written is read, what is marked never comes back, and whatever is broken is missing.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <set>

#include "common/random.h"
#include "pool/disk.h"
#include "pool/ssd/store.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::ssd;
using namespace torch_mooncake::pool::test;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t MiB = 1 << 20;

struct Folder : Disk {
  std::string store() const { return path + "/ssd"; }
  std::vector<std::string> segments() const {
    std::vector<std::string> out;
    for (const auto& e : fs::directory_iterator(store()))
      if (e.path().filename().string().starts_with("segment-")) out.push_back(e.path());
    std::sort(out.begin(), out.end());
    return out;
  }
};

std::string value_of(uint64_t id, uint64_t nbytes) {
  std::string out(nbytes, '\0');
  for (uint64_t i = 0; i < nbytes; ++i) out[i] = static_cast<char>(id * 31 + i / 7);
  return out;
}

// A store with the simplest owner: id -> where.
struct Log : Owner {
  explicit Log(const Folder& folder, uint64_t limit = 64 * MiB, uint64_t segment_bytes = 4 * MiB) {
    options.path = folder.store();
    options.limit_bytes = limit;
    options.segment_bytes = segment_bytes;
    options.inbox = std::make_shared<Inbox>();
    options.queue = transfer::IoQueue::shared();
    auto opened = Store::open(options, *this);
    REQUIRE_MESSAGE(opened.is_ok(), opened.status().to_string());
    store = std::move(opened).value();
    for (const Head& h : store->take_found()) {
      REQUIRE(h.record.key == "key" + std::to_string(h.record.name.generation));
      at[h.record.name.generation] = h.spot;  // a later segment's wins
      sizes[h.record.name.generation] = h.record.nbytes;
      store->adopt(h.record.name.generation, h.spot);
    }
    settle();
  }
  ~Log() override { settle(); }

  void settle(int idle_ms = 30) {
    while (options.inbox->wait(idle_ms)) options.inbox->run();
  }
  template <typename Fn>
  void until(Fn&& fn) {
    for (int i = 0; i < 2000 && !fn(); ++i) {
      options.inbox->wait(5);
      options.inbox->run();
    }
    REQUIRE(fn());
  }

  std::optional<Spot> worth_moving(uint64_t id, uint64_t segment) override {
    const auto it = at.find(id);
    return it != at.end() && it->second.segment == segment && hot.count(id) ? std::optional(it->second) : std::nullopt;
  }
  void moving(uint64_t, const Spot&, const Spot&) override {}
  void moved(uint64_t id, const Spot& to, const Status& status) override {
    if (status.is_ok() && at.count(id)) at[id] = to;
  }
  void destroyed(uint64_t segment, const std::vector<uint64_t>&) override {
    std::erase_if(at, [&](const auto& e) { return e.second.segment == segment; });
  }
  void out_of_service() override { ++failures; }

  // nullopt: refused; else whether it was written.
  std::optional<Status> put(uint64_t id, uint64_t nbytes) {
    Record r;
    r.name = {7, id};
    r.key = "key" + std::to_string(id);
    r.label = "label";
    r.meta = std::string(id % 9000, 'm');
    r.nbytes = nbytes;
    r.version = {1, id};
    const std::string value = value_of(id, nbytes);
    const Buffer data = make_buffer(nbytes + kBlock);
    std::memset(data.get(), 0x5a, blocks_of(nbytes) * kBlock);
    std::memcpy(data.get(), value.data(), nbytes);
    std::optional<Status> out;
    auto spot = store->write(id, r, {{data.get(), nbytes < kSlabLimit ? nbytes : blocks_of(nbytes) * kBlock}}, data,
                             [&](const Status& s) { out = s; });
    if (!spot) return out;
    until([&] { return out.has_value(); });
    if (out->is_ok()) {
      at[id] = *spot;
      sizes[id] = nbytes;
    }
    last = *spot;
    return out;
  }
  void put_all(uint64_t id, uint64_t nbytes) {  // waits for room
    for (int i = 0; i < 1000; ++i) {
      if (const auto done = put(id, nbytes)) {
        REQUIRE_MESSAGE(done->is_ok(), done->to_string());
        return;
      }
      settle(2);
    }
    FAIL("no room");
  }
  Status get(uint64_t id) {
    std::optional<Status> out;
    store->read(at.at(id), [&](Result<Loaded> loaded) {
      if (!loaded.is_ok()) {
        out = loaded.status();
        return;
      }
      const std::string value = value_of(id, sizes.at(id));
      const bool same = loaded->head.record.nbytes == value.size() &&
                        std::memcmp(loaded->data, value.data(), value.size()) == 0 &&
                        loaded->head.record.meta == std::string(id % 9000, 'm');
      out = same ? Status{} : Status(Code::internal, "foreign bytes");
    });
    until([&] { return out.has_value(); });
    return *out;
  }
  Status mark(uint64_t id) {
    std::optional<Status> out;
    store->mark({at.at(id)}, [&](const Status& s) { out = s; });
    until([&] { return out.has_value(); });
    if (out->is_ok()) at.erase(id);
    return *out;
  }

  StoreOptions options;
  std::unique_ptr<Store> store;
  std::map<uint64_t, Spot> at;
  std::map<uint64_t, uint64_t> sizes;
  std::set<uint64_t> hot;
  Spot last;
  int failures = 0;
};

void flip(const std::string& path, uint64_t offset) {
  const int fd = ::open(path.c_str(), O_RDWR);
  char byte = 0;
  REQUIRE(::pread(fd, &byte, 1, static_cast<off_t>(offset)) == 1);
  byte ^= 0x10;
  REQUIRE(::pwrite(fd, &byte, 1, static_cast<off_t>(offset)) == 1);
  ::close(fd);
}

}  // namespace

TEST_CASE("what is written is read: all sizes, in this process and the next") {
  Folder folder;
  const std::vector<uint64_t> sizes{0, 1, 63, 4096, 32767, 32768, 32769, 65536, 1 << 20, (1 << 20) + 1, 3 << 20};
  {
    Log log(folder);
    for (size_t i = 0; i < sizes.size(); ++i) log.put_all(i + 1, sizes[i]);
    for (size_t i = 0; i < sizes.size(); ++i) CHECK(log.get(i + 1).is_ok());
    CHECK(log.store->check().is_ok());
  }
  for (int round = 0; round < 3; ++round) {
    Log log(folder);
    CHECK(log.at.size() == sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) CHECK(log.get(i + 1).is_ok());
    CHECK(log.store->stats().errors == 0);
  }
}

TEST_CASE("what is marked never comes back; marks outlive the rewriting of their file") {
  Folder folder;
  {
    Log log(folder);
    for (uint64_t id = 1; id <= 400; ++id) log.put_all(id, 100);
    for (uint64_t id = 1; id <= 300; ++id) REQUIRE(log.mark(id).is_ok());  // a block each: the file is written anew
  }
  for (int round = 0; round < 2; ++round) {
    Log log(folder);
    CHECK(log.at.size() == 100);
    CHECK(log.at.begin()->first == 301);
  }
}

TEST_CASE("marks of segments that are no more are forgotten") {
  Folder folder;
  const Id128 id{7};
  {
    auto marks = ssd::Marks::create(folder.path, id);
    REQUIRE(marks.is_ok());
    const ssd::Spot spots[] = {{1, 5, 1}, {1, 6, 1}, {2, 5, 1}};
    REQUIRE((*marks)->append(spots).is_ok());
  }
  for (uint64_t expected : {3, 1}) {
    auto marks = ssd::Marks::open(folder.path, id);
    REQUIRE(marks.is_ok());
    CHECK((*marks)->size() == expected);
    REQUIRE((*marks)->keep_only({2, 3}).is_ok());
    CHECK((*marks)->marked({2, 5, 1}));
    CHECK_FALSE((*marks)->marked({1, 5, 1}));
  }
}

TEST_CASE("the oldest segment goes first, hot records move, what is lost is told; the limit is kept") {
  Folder folder;
  {
    Log log(folder, 12 * MiB, MiB);
    log.hot = {1, 40};
    for (uint64_t id = 1; id <= 120; ++id) {
      log.put_all(id, 200 << 10);
      REQUIRE(log.store->check().is_ok());
      uint64_t disk = 0;
      for (const auto& path : folder.segments()) disk += fs::file_size(path);
      REQUIRE(disk <= 12 * MiB);
    }
    log.settle();
    CHECK(log.store->stats().moved >= 2);
    CHECK(log.at.count(1) + log.at.count(40) == 2);
    CHECK(log.at.count(2) == 0);
    CHECK(log.at.count(120) == 1);
    for (const auto& [id, spot] : std::map(log.at)) CHECK(log.get(id).is_ok());
    CHECK(log.store->stats().reclaimed > 10);
  }
  Log log(folder, 12 * MiB, MiB);
  CHECK(log.at.count(1) + log.at.count(40) == 2);
  for (const auto& [id, spot] : std::map(log.at)) CHECK(log.get(id).is_ok());
}

TEST_CASE("flipped bits and torn tails: the record is dropped, the error counted, the rest is served") {
  Quiet quiet;
  Folder folder;
  Spot in_data, in_head;
  {
    Log log(folder);
    for (uint64_t id = 1; id <= 30; ++id) log.put_all(id, 300 << 10);
    in_data = log.at.at(3);
    in_head = log.last;
    flip(segment_path(folder.store(), in_data.segment), in_data.offset() + 100'000);
    CHECK(log.get(3).code() == Code::corrupt);
    CHECK(log.store->stats().corrupt == 1);
    CHECK(log.get(4).is_ok());
  }
  {
    Log log(folder);
    CHECK(log.at.size() == 30);
    CHECK(log.get(3).code() == Code::corrupt);
    CHECK(log.get(2).is_ok());
  }
  // The index of a sealed segment: it is gone through instead.
  const auto path = segment_path(folder.store(), in_data.segment);
  flip(path, 4 * MiB - 2 * kBlock + 10);
  {
    Log log(folder);
    CHECK(log.at.size() == 30);
    CHECK(log.store->stats().errors == 1);
  }
  // Its header: nothing in it counts.
  flip(path, 20);
  {
    Log log(folder);
    CHECK(log.at.size() < 30);
    CHECK(log.at.count(3) == 0);
    CHECK(log.store->stats().errors == 1);
    for (const auto& [id, spot] : std::map(log.at)) CHECK(log.get(id).is_ok());
  }
  // A file that was cut off.
  REQUIRE(::truncate(segment_path(folder.store(), in_head.segment).c_str(), MiB) == 0);
  Log log(folder);
  CHECK(log.at.count(30) == 0);
  log.put_all(31, 1000);
  CHECK(log.get(31).is_ok());
}

TEST_CASE("a damaged mark: nothing of the store is trusted") {
  Quiet quiet;
  Folder folder;
  {
    Log log(folder);
    for (uint64_t id = 1; id <= 10; ++id) log.put_all(id, 1000);
    REQUIRE(log.mark(1).is_ok());
  }
  flip(folder.store() + "/marks", 50);
  Log log(folder);
  CHECK(log.at.empty());
  CHECK(log.store->stats().errors == 1);
  log.put_all(1, 1000);
}

TEST_CASE("killed at every step: what was acknowledged before holds") {
  for (const char* point : {"ssd.record.write", "ssd.write", "ssd.sync", "ssd.seal", "ssd.footer", "ssd.mark",
                            "ssd.reclaim", "ssd.allocate"}) {
    for (int at : {1, 3, 9}) {
      CAPTURE(point);
      CAPTURE(at);
      Folder folder;
      int pipe[2];
      REQUIRE(::pipe(pipe) == 0);
      const pid_t pid = ::fork();
      if (pid == 0) {
        log::set_level(log::Level::off);
        Log log(folder, 12 * MiB, MiB);
        set_failpoints(std::string(point) + "=kill@" + std::to_string(at));
        for (uint64_t id = 1; id <= 100; ++id) {
          log.put_all(id, 180 << 10);
          const auto tell = [&](int64_t what) {
            if (::write(pipe[1], &what, sizeof what) < 0) ::_exit(1);
          };
          tell(static_cast<int64_t>(id));
          if (id % 3 == 0 && log.at.count(id - 1) && log.mark(id - 1).is_ok()) tell(-static_cast<int64_t>(id - 1));
        }
        ::_exit(0);
      }
      ::close(pipe[1]);
      std::set<uint64_t> written, marked;
      for (int64_t told; ::read(pipe[0], &told, sizeof told) == sizeof told;)
        told > 0 ? written.insert(static_cast<uint64_t>(told)) : marked.insert(static_cast<uint64_t>(-told));
      ::close(pipe[0]);
      int status = 0;
      ::waitpid(pid, &status, 0);
      CHECK(WIFSIGNALED(status));  // every one of these steps was taken so often
      Log log(folder, 12 * MiB, MiB);
      for (uint64_t id : marked) CHECK(log.at.count(id) == 0);
      // What was written is there, but for the oldest, whose segments were needed, and what was about to be marked.
      const uint64_t newest = written.empty() ? 0 : *written.rbegin();
      for (uint64_t id : written)
        if (id + 30 > newest && !marked.count(id) && id + 1 < newest)
          CHECK_MESSAGE((log.at.count(id) && log.get(id).is_ok()), id);
      for (const auto& [id, spot] : std::map(log.at)) {
        const Status s = log.get(id);
        CHECK_MESSAGE((s.is_ok() || s.code() == Code::corrupt), s.to_string());  // corrupt: it was being written
      }
      CHECK(log.store->check().is_ok());
      log.put_all(1000, 180 << 10);
      CHECK(log.get(1000).is_ok());
    }
  }
}

TEST_CASE("a full disk: the log does with what it has") {
  Quiet quiet;
  Folder folder;
  Log log(folder, 64 * MiB, MiB);
  for (uint64_t id = 1; id <= 20; ++id) log.put_all(id, 180 << 10);
  set_failpoints("ssd.allocate=error");
  for (uint64_t id = 21; id <= 60; ++id) log.put_all(id, 180 << 10);
  CHECK(log.store->stats().errors > 0);
  CHECK(log.store->stats().used_bytes <= 8 * MiB);
  CHECK(log.failures == 0);
  CHECK(log.at.count(1) == 0);
  CHECK(log.get(60).is_ok());
}

TEST_CASE("a disk that fails is taken out of service, once, and is empty at the next start") {
  Quiet quiet;
  Folder folder;
  {
    Log log(folder);
    log.put_all(1, 1000);
    set_failpoints("ssd.record.write=error");
    int refused = 0;
    for (int i = 0; i < 20; ++i) {
      const auto done = log.put(10 + static_cast<uint64_t>(i), 1000);
      if (!done) ++refused;
      if (done) CHECK(done->code() == Code::io);
    }
    CHECK(refused == 12);  // eight errors in a row
    CHECK(log.failures == 1);
    CHECK(log.store->stats().out_of_service);
    CHECK(log.get(1).code() == Code::io);
    std::optional<Status> marked;
    log.store->mark({log.at.at(1)}, [&](const Status& s) { marked = s; });
    CHECK(marked->is_ok());
    log.settle();
  }
  set_failpoints("");
  Log log(folder);
  CHECK(log.at.empty());
}

TEST_CASE("a mark that cannot be written takes the disk out of service before it is acknowledged") {
  Quiet quiet;
  Folder folder;
  Log log(folder);
  log.put_all(1, 1000);
  set_failpoints("ssd.mark=error");
  int failures_before = -1;
  log.store->mark({log.at.at(1)}, [&](const Status&) { failures_before = log.failures; });
  log.until([&] { return failures_before >= 0; });
  CHECK(failures_before == 1);
}

TEST_CASE("an error now and then costs one record") {
  Quiet quiet;
  Folder folder;
  Log log(folder);
  log.put_all(1, 50'000);
  set_failpoints("ssd.record.write=error@1");
  CHECK(log.put(2, 50'000)->code() == Code::io);
  log.put_all(3, 50'000);
  set_failpoints("ssd.record.read=error@1");
  CHECK(log.get(1).code() == Code::io);
  CHECK(log.get(1).is_ok());
  CHECK(log.get(3).is_ok());
  CHECK(log.store->stats().errors == 2);
  CHECK_FALSE(log.store->out_of_service());
}

TEST_CASE("a folder belongs to one process") {
  Quiet quiet;
  Folder folder;
  Log log(folder);
  const pid_t pid = ::fork();
  if (pid == 0) {
    Opened other;
    auto opened = open_folder(folder.store(), MiB);
    ::_exit(opened.status().code() == Code::busy ? 0 : 1);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  CHECK(status == 0);
}
