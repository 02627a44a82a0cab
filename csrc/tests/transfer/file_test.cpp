// Files below the engine: every way of asking the kernel, every alignment, and everything it may answer.
#include "transfer/file/file.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <thread>

#include "common/failpoint.h"
#include "transfer/support.h"

namespace transfer_test {

using namespace torch_mooncake::transfer;

namespace {

// A folder that goes with the test: on a disk, or in memory.
struct Folder {
  std::string path;
  explicit Folder(const char* where) {
    path = std::string(where) + "/tm-file-test-XXXXXX";
    REQUIRE(mkdtemp(path.data()) != nullptr);
  }
  ~Folder() { REQUIRE(std::system(("rm -rf " + path).c_str()) == 0); }
  std::string operator/(const char* name) const { return path + "/" + name; }
};
const char* const kPlaces[] = {"/var/tmp", "/dev/shm"};

std::vector<std::shared_ptr<IoQueue>> queues() {
  std::vector<std::shared_ptr<IoQueue>> out{make_thread_queue()};
  auto uring = make_uring_queue();
  if (uring)
    out.push_back(*uring);
  else
    MESSAGE("no io_uring here: " << uring.status().to_string());
  return out;
}

// One move, waited for.
struct Moved {
  std::mutex mutex;
  std::condition_variable cv;
  std::atomic<bool> over{false};
  bool rested = false;
  Status status;
  uint64_t progress = 0;
  MovePtr move;

  Status wait() {
    std::unique_lock lock(mutex);
    REQUIRE(cv.wait_for(lock, std::chrono::seconds(20), [&] { return over.load(); }));
    return status;
  }
  bool rests(int ms = 20'000) {
    std::unique_lock lock(mutex);
    return cv.wait_for(lock, std::chrono::milliseconds(ms), [&] { return rested; });
  }
};

std::shared_ptr<Moved> start(Backing& backing, Direction direction, std::vector<HostPiece> pieces) {
  auto moved = std::make_shared<Moved>();
  MoveRequest request;
  request.direction = direction;
  request.pieces = std::move(pieces);
  request.progress = [moved](uint64_t n) {
    std::lock_guard lock(moved->mutex);
    moved->progress += n;
  };
  request.done = [moved](const Status& status) {
    std::lock_guard lock(moved->mutex);
    CHECK(!moved->over);
    moved->over = true;
    moved->status = status;
    moved->cv.notify_all();
  };
  request.keep = std::shared_ptr<void>(nullptr, [moved](void*) {
    std::lock_guard lock(moved->mutex);
    moved->rested = true;
    moved->cv.notify_all();
  });
  moved->move = backing.move(std::move(request));
  moved->move->start();
  return moved;
}

Status move(Backing& backing, Direction direction, std::vector<HostPiece> pieces) {
  auto moved = start(backing, direction, std::move(pieces));
  Status status = moved->wait();
  CHECK(moved->rests());
  return status;
}

// The file as the page cache shows it to others.
std::vector<std::byte> contents(const std::string& path, uint64_t offset, size_t n) {
  std::vector<std::byte> out(n);
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  REQUIRE(pread(fd, out.data(), n, static_cast<off_t>(offset)) == static_cast<ssize_t>(n));
  close(fd);
  return out;
}

struct Buffer {
  std::byte* base;
  size_t nbytes;
  explicit Buffer(size_t n)
      : base(static_cast<std::byte*>(std::aligned_alloc(4096, (n + 8191) / 4096 * 4096))), nbytes(n) {
    std::memset(base, 0, n);
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(base); }
};

// Answers as a kernel may that is having a bad day: short results, interruptions.
class Stingy final : public IoQueue {
 public:
  explicit Stingy(std::shared_ptr<IoQueue> real) : real_(std::move(real)) {}
  const char* name() const override { return "stingy"; }
  void submit(std::vector<IoRequest> requests) override {
    for (auto& r : requests) {
      unsigned n = count_++;
      if (n % 5 == 1 || n % 5 == 2) {
        r.nbytes = 0;  // nothing happens, and then the answer:
        r.done = [done = std::move(r.done), n](int64_t) { done(n % 5 == 1 ? -EINTR : -EAGAIN); };
      } else if (n % 5 == 3 && r.nbytes > 8192) {
        r.nbytes = 4096;
      } else if (n % 5 == 4 && r.cached && r.nbytes > 1) {
        r.nbytes = 1 + r.nbytes / 3;
      }
    }
    real_->submit(std::move(requests));
  }

 private:
  const std::shared_ptr<IoQueue> real_;
  std::atomic<unsigned> count_{0};
};

// Holds everything back until it is let go: a disk that hangs.
class Hanging final : public IoQueue {
 public:
  explicit Hanging(std::shared_ptr<IoQueue> real) : real_(std::move(real)) {}
  const char* name() const override { return "hanging"; }
  void submit(std::vector<IoRequest> requests) override {
    std::lock_guard lock(mutex_);
    for (auto& r : requests) held_.push_back(std::move(r));
  }
  size_t let_go() {
    std::vector<IoRequest> all;
    {
      std::lock_guard lock(mutex_);
      all.swap(held_);
    }
    size_t n = all.size();
    real_->submit(std::move(all));
    return n;
  }

 private:
  const std::shared_ptr<IoQueue> real_;
  std::mutex mutex_;
  std::vector<IoRequest> held_;
};

}  // namespace

TEST_CASE("a thread may end while the kernel works on what it has asked for") {
  for (auto* place : kPlaces) {
    CAPTURE(place);
    Folder folder(place);
    constexpr size_t kBytes = 48 << 20;
    for (auto& queue : queues()) {
      CAPTURE(queue->name());
      auto file = must(File::open(
          {.path = folder / queue->name(), .fd = -1, .nbytes = kBytes, .writable = true, .create = true}, queue));
      Buffer source(kBytes), target(kBytes);
      fill(source.base, kBytes, 3);
      std::shared_ptr<Moved> moved;
      std::thread([&] { moved = start(*file, Direction::write, {{source.base, 0, kBytes}}); }).join();
      REQUIRE_OK(moved->wait());
      std::thread([&] { moved = start(*file, Direction::read, {{target.base, 0, kBytes}}); }).join();
      REQUIRE_OK(moved->wait());
      CHECK(mismatch(target.base, kBytes, 3) == kBytes);
    }
  }
}

TEST_CASE("file: sizes, offsets and alignments, written and read back") {
  for (auto* place : kPlaces) {
    CAPTURE(place);
    Folder folder(place);
    for (auto& real : queues())
      for (auto& queue : {real, std::shared_ptr<IoQueue>(std::make_shared<Stingy>(real))}) {
        CAPTURE(queue->name());
        constexpr uint64_t kSize = (1 << 20) + (1 << 18) + 777;
        auto path = folder / "data";
        auto file = must(File::open({.path = path, .nbytes = kSize, .writable = true, .create = true}, queue));
        CHECK(file->nbytes() == kSize);
        CHECK(file->direct() == (std::string(place) == "/var/tmp"));
        Buffer ours(kSize + 64);
        uint64_t seed = 100;
        for (uint64_t offset : {0, 1, 511, 512, 4095, 4096, 8192 + 77})
          for (uint64_t n :
               {0, 1, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537, (1 << 20) + 1, (1 << 20) + 100'000})
            for (size_t at : {0, 1, 512}) {
              if (at != 0 && offset % 511 != 0) continue;
              CAPTURE(offset);
              CAPTURE(n);
              CAPTURE(at);
              std::vector<std::byte> around = contents(path, 0, kSize);
              fill(ours.base + at, n, ++seed);
              REQUIRE_OK(move(*file, Direction::write, {{ours.base + at, offset, n}}));
              auto after = contents(path, 0, kSize);
              REQUIRE(mismatch(after.data() + offset, n, seed) == n);
              REQUIRE(std::memcmp(after.data(), around.data(), offset) == 0);
              REQUIRE(std::memcmp(after.data() + offset + n, around.data() + offset + n, kSize - offset - n) == 0);
              std::memset(ours.base, 0, at + n + 32);
              REQUIRE_OK(move(*file, Direction::read, {{ours.base + at, offset, n}}));
              REQUIRE(mismatch(ours.base + at, n, seed) == n);
              REQUIRE(all_zero(ours.base, at));
              REQUIRE(all_zero(ours.base + at + n, 32));
            }
        struct stat st {};
        REQUIRE(stat(path.c_str(), &st) == 0);
        CHECK(st.st_size == kSize);
        REQUIRE(unlink(path.c_str()) == 0);
      }
  }
}

TEST_CASE("file: many pieces, side by side in the file or not") {
  for (auto* place : kPlaces) {
    Folder folder(place);
    for (auto& queue : queues()) {
      CAPTURE(queue->name());
      constexpr size_t kPages = 1000, kPage = 4096 + 512;
      auto file = must(
          File::open({.path = folder / "pages", .nbytes = kPages * kPage, .writable = true, .create = true}, queue));
      Buffer source(kPages * kPage), target(kPages * kPage);
      fill(source.base, source.nbytes, 3);
      std::vector<HostPiece> write, read;
      for (size_t i = 0; i < kPages; ++i) {
        size_t to = (i * 7) % kPages;
        write.push_back({source.base + to * kPage, i * kPage, kPage});  // in a row in the file
        read.push_back({target.base + i * kPage, ((i * 7) % kPages) * kPage, kPage});
      }
      REQUIRE_OK(move(*file, Direction::write, write));
      auto moved = start(*file, Direction::read, read);
      REQUIRE_OK(moved->wait());
      CHECK(moved->progress == kPages * kPage);
      for (size_t i = 0; i < kPages; ++i) {
        size_t at = (i * 7) % kPages;
        REQUIRE(std::memcmp(target.base + i * kPage, source.base + (at * 7) % kPages * kPage, kPage) == 0);
      }
    }
  }
}

TEST_CASE("file: beyond 4 GiB of a sparse one; what was never written is zero") {
  for (auto& queue : queues()) {
    Folder folder("/var/tmp");
    constexpr uint64_t kFar = (uint64_t{5} << 30) + 123;
    auto file = must(
        File::open({.path = folder / "sparse", .nbytes = kFar + 100'000, .writable = true, .create = true}, queue));
    Buffer ours(100'000);
    fill(ours.base, ours.nbytes, 9);
    REQUIRE_OK(move(*file, Direction::write, {{ours.base, kFar, ours.nbytes}}));
    std::memset(ours.base, 1, ours.nbytes);
    REQUIRE_OK(move(*file, Direction::read, {{ours.base, kFar, ours.nbytes}}));
    CHECK(mismatch(ours.base, ours.nbytes, 9) == ours.nbytes);
    REQUIRE_OK(move(*file, Direction::read, {{ours.base, kFar - 200'000, ours.nbytes}}));
    CHECK(all_zero(ours.base, ours.nbytes));
    struct stat st {};
    REQUIRE(stat((folder / "sparse").c_str(), &st) == 0);
    CHECK(st.st_blocks * 512 < 1 << 20);
  }
}

TEST_CASE("file: a disk that fails, ends or fills up gives a typed error") {
  signal(SIGXFSZ, SIG_IGN);
  for (auto* place : kPlaces) {
    CAPTURE(place);
    Folder folder(place);
    for (auto& queue : queues()) {
      CAPTURE(queue->name());
      constexpr uint64_t kSize = 8 << 20;
      auto path = folder / "data";
      auto file = must(File::open({.path = path, .nbytes = kSize, .writable = true, .create = true}, queue));
      Buffer ours(kSize);
      set_failpoints("transfer.file=error@3");
      Status status = move(*file, Direction::read, {{ours.base, 0, kSize}});
      set_failpoints("");
      CHECK(status.code() == Code::io);
      CHECK(status.message().find(path) != std::string::npos);

      // Cut short behind our back.
      REQUIRE(truncate(path.c_str(), (5 << 20) + 100) == 0);
      for (uint64_t n : {kSize, kSize - 1}) {
        status = move(*file, Direction::read, {{ours.base, 0, n}});
        CHECK(status.code() == Code::out_of_bounds);
        CHECK(status.message().find("ends at byte " + std::to_string((5 << 20) + 100)) != std::string::npos);
      }
      REQUIRE_OK(move(*file, Direction::read, {{ours.base, 0, (5 << 20) + 100}}));

      // A file may not grow beyond the limit: as a full disk, with another number.
      rlimit before{}, small{};
      REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
      small = before;
      small.rlim_cur = 6 << 20;
      REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
      auto moved = start(*file, Direction::write, {{ours.base, 0, kSize}});
      status = moved->wait();
      REQUIRE(setrlimit(RLIMIT_FSIZE, &before) == 0);
      CHECK(status.code() == Code::io);
      CHECK(status.message().find("File too large") != std::string::npos);
      CHECK(moved->progress <= 6 << 20);
      REQUIRE(unlink(path.c_str()) == 0);
    }
  }
}

TEST_CASE("file: what cannot be opened says why") {
  Folder folder("/var/tmp");
  auto queue = make_thread_queue();
  auto code = [&](FileOptions options) { return File::open(options, queue).status().code(); };
  CHECK(code({.path = folder / "none"}) == Code::io);
  CHECK(code({.path = folder.path}) == Code::invalid_argument);
  CHECK(code({.path = folder / "none", .create = true}) == Code::invalid_argument);
  REQUIRE(mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK(code({.path = folder / "pipe"}) == Code::invalid_argument);
  CHECK(code({.path = "/dev/null"}) == Code::invalid_argument);
  int fd = open((folder / "small").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  REQUIRE(write(fd, "hello", 5) == 5);
  CHECK(code({.path = folder / "small", .nbytes = 6}) == Code::out_of_bounds);
  CHECK(code({.path = folder / "small", .fd = fd}) == Code::invalid_argument);
  close(fd);
  CHECK(must(File::open({.path = folder / "small"}, queue))->nbytes() == 5);
  // A file that has no name any more, by its descriptor.
  fd = open((folder / "small").c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(unlink((folder / "small").c_str()) == 0);
  auto file = must(File::open({.path = "small", .fd = fd, .nbytes = 10'000, .writable = true}, queue));
  close(fd);
  CHECK(file->direct());
  Buffer ours(10'000);
  fill(ours.base, 10'000, 4);
  REQUIRE_OK(move(*file, Direction::write, {{ours.base, 0, 10'000}}));
  std::memset(ours.base, 0, 10'000);
  REQUIRE_OK(move(*file, Direction::read, {{ours.base, 0, 10'000}}));
  CHECK(mismatch(ours.base, 10'000, 4) == 10'000);
}

TEST_CASE("file: a move that is stopped while the disk hangs ends at once, and nothing lands later") {
  Folder folder("/var/tmp");
  auto hanging = std::make_shared<Hanging>(make_thread_queue());
  constexpr size_t kBytes = 64 << 20;
  auto file = must(File::open({.path = folder / "data", .nbytes = kBytes, .writable = true, .create = true},
                              std::shared_ptr<IoQueue>(hanging)));
  Buffer ours(kBytes);
  std::memset(ours.base, 7, kBytes);
  const Status why(Code::deadline_exceeded, "too late");

  auto read = start(*file, Direction::read, {{ours.base, 0, kBytes}});
  read->move->stop(why);
  CHECK(read->wait().code() == Code::deadline_exceeded);
  CHECK(!read->rests(20));  // the kernel still has the requests
  while (hanging->let_go() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(read->rests());
  CHECK(std::all_of(ours.base, ours.base + kBytes, [](std::byte b) { return b == std::byte{7}; }));

  // A write from aligned memory is read by the disk: it ends when that is over, or when it is given up.
  auto write = start(*file, Direction::write, {{ours.base, 0, kBytes}});
  write->move->stop(why);
  CHECK(!write->over);
  write->move->abandon();
  CHECK(write->wait().code() == Code::deadline_exceeded);
  CHECK(!write->rests(20));
  // One that is bounced ends at once.
  auto bounced = start(*file, Direction::write, {{ours.base + 1, 0, kBytes - 4096}});
  bounced->move->stop(why);
  CHECK(bounced->over);
  while (hanging->let_go() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(write->rests());
  CHECK(bounced->rests());
}

TEST_CASE("file: moves of one file take turns") {
  Folder folder("/var/tmp");
  auto hanging = std::make_shared<Hanging>(make_thread_queue());
  auto file = must(File::open({.path = folder / "data", .nbytes = 256 << 20, .writable = true, .create = true},
                              std::shared_ptr<IoQueue>(hanging)));
  Buffer big(64 << 20), small(4096);
  auto long_one = start(*file, Direction::read, {{big.base, 0, 64 << 20}});
  auto short_one = start(*file, Direction::read, {{small.base, 200 << 20, 4096}});
  CHECK(hanging->let_go() == File::kMostInFlight);
  // The long one still has half to go when the short one is through.
  for (auto until = soon(5000); !short_one->over && !until.expired(); hanging->let_go()) std::this_thread::yield();
  CHECK(short_one->over);
  while (!long_one->over) {
    hanging->let_go();
    std::this_thread::yield();
  }
  CHECK(long_one->rests());
}

TEST_CASE("file: where seccomp forbids io_uring, threads take its place and say so") {
  pid_t pid = fork();
  if (pid == 0) {
    sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    sock_fprog program{4, code};
    bool ok = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
    ok = ok && file_io_choice() == "threads (io_uring_setup: Operation not permitted)";
    ok = ok && std::string(IoQueue::shared()->name()) == "threads";
    _exit(ok ? 0 : 1);
  }
  int state = 0;
  REQUIRE(waitpid(pid, &state, 0) == pid);
  CHECK(state == 0);
}

TEST_CASE("file: queues leave neither threads nor descriptors behind") {
  { auto warm = queues(); }
  auto before = count_resources();
  for (int i = 0; i < 20; ++i) {
    Folder folder("/dev/shm");
    for (auto& queue : queues()) {
      auto file = must(File::open({.path = folder / "x", .nbytes = 1 << 20, .writable = true, .create = true}, queue));
      Buffer ours(1 << 20);
      REQUIRE_OK(move(*file, Direction::write, {{ours.base, 0, 1 << 20}}));
    }
  }
  Counts after = count_resources();
  for (auto until = soon(8000); (after.fds > before.fds || after.threads > before.threads) && !until.expired();)
    after = count_resources();
  CHECK(after.fds <= before.fds);
  CHECK(after.threads <= before.threads);
}

}  // namespace transfer_test
