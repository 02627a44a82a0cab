// Status, ByteReader, failpoints, rate-limited logging, ids.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <set>
#include <string>

#include "common/bytes.h"
#include "common/clock.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "common/random.h"
#include "common/status.h"

using namespace torch_mooncake;

TEST_CASE("status: code, context, errno text, retryability") {
  Status ok;
  CHECK(ok.is_ok());
  CHECK(ok.with("context").is_ok());
  auto s = Status(Code::peer_lost, "gone").with("reading a");
  CHECK(s.code() == Code::peer_lost);
  CHECK(s.message() == "reading a: gone");
  CHECK(s.to_string() == "PEER_LOST: reading a: gone");
  CHECK(s.retryable());
  CHECK_FALSE(Status(Code::auth, "").retryable());
  CHECK(Status::from_errno("open", ENOENT).to_string() == "IO: open: No such file or directory");
  std::set<std::string> names;
  for (int c = 0; c <= static_cast<int>(Code::internal); ++c) names.insert(code_name(static_cast<Code>(c)));
  CHECK(names.size() == static_cast<size_t>(Code::internal) + 1);
  CHECK(names.count("UNKNOWN") == 0);
}

TEST_CASE("bytes: what was put comes back; every truncation fails and none reads past the end") {
  auto id = random_id();
  ByteWriter w;
  w.put(uint8_t{1}).put(uint64_t{1} << 40).put(id).put(std::string_view("hello")).put(-2.5);
  std::string all = w.take();
  auto read = [&](std::string_view in) {
    ByteReader r(in);
    bool same = r.get<uint8_t>() == 1;
    same &= r.get<uint64_t>() == uint64_t{1} << 40;
    same &= r.get_id() == id;
    same &= r.get_string() == "hello";
    same &= r.get<double>() == -2.5;
    CHECK(r.done() == same);
    return r.done();
  };
  CHECK(read(all));
  for (size_t n = 0; n < all.size(); ++n) {
    std::string cut = all.substr(0, n);  // own allocation, so that ASan sees an overrun
    CHECK_FALSE(read(cut));
  }
  ByteReader absurd(
      std::string_view("\xff\xff\xff\xff"
                       "ab",
                       6));
  CHECK(absurd.get_count(1) == 0);
  CHECK_FALSE(absurd.ok());
}

TEST_CASE("failpoints: off, error, nth passage, sleep") {
  CHECK(failpoint("x").is_ok());
  set_failpoints("x=error@2,slow=sleep:20");
  CHECK(failpoint("other").is_ok());
  CHECK(failpoint("x").is_ok());
  CHECK(failpoint("x").code() == Code::io);
  CHECK(failpoint("x").is_ok());
  int64_t start = steady_ns();
  CHECK(failpoint("slow").is_ok());
  CHECK(steady_ns() - start >= 20'000'000);
  set_failpoints("");
  CHECK(failpoint("x").is_ok());
}

static int wait_status(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, WUNTRACED) < 0 && errno == EINTR) {
  }
  return status;
}

TEST_CASE("failpoints: kill, stop, and a typing error, each in a child") {
  auto child = [](const char* spec) {
    pid_t pid = ::fork();
    if (pid == 0) {
      ::freopen("/dev/null", "w", stderr);
      ::signal(SIGABRT, SIG_DFL);
      set_failpoints(spec);
      bool fine = failpoint("p").is_ok();
      ::_exit(fine ? 7 : 8);
    }
    return pid;
  };
  int status = wait_status(child("p=kill"));
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGKILL);
  pid_t stopped = child("p=stop");
  status = wait_status(stopped);
  CHECK(WIFSTOPPED(status));
  ::kill(stopped, SIGCONT);
  status = wait_status(stopped);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 7);
  status = wait_status(child("p=explode"));
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGABRT);
}

TEST_CASE("log: levels, one line a write, cut, Once") {
  int fds[2];
  REQUIRE(::pipe(fds) == 0);
  int saved = ::dup(2);
  ::dup2(fds[1], 2);
  log::set_level(log::Level::warning);
  log::info("rpc", "not seen");
  log::warning("rpc", "seen");
  log::error("pool", std::string(5000, 'x'));
  log::Once once(60'000);
  for (int i = 0; i < 5; ++i) {
    if (once.pass()) log::warning("rpc", "once");
  }
  ::dup2(saved, 2);
  ::close(saved);
  ::close(fds[1]);
  std::string text(16384, '\0');
  text.resize(static_cast<size_t>(::read(fds[0], text.data(), text.size())));
  ::close(fds[0]);
  CHECK(text.find("not seen") == text.npos);
  CHECK(text.find("torch_mooncake.rpc: seen\n") != text.npos);
  CHECK(text.substr(0, 2) == "W ");
  CHECK(text.find("once") == text.rfind("once"));
  CHECK(std::count(text.begin(), text.end(), '\n') == 3);
}

TEST_CASE("random ids differ, hex") {
  CHECK(random_id() != random_id());
  CHECK(to_hex(std::string_view("\x00\xff\x1a", 3)) == "00ff1a");
}
