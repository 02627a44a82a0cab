// What a node's command line, options, folder and token file may be, and what is said when they are not.
#include <cmath>

#include "memory/host_memory.h"
#include "pool/keeper_fixture.h"
#include "pool/node_args.h"
#include "pool/node_options.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

bool says(const Status& s, Code code, const std::string& text) {
  const bool right = s.code() == code && s.message().find(text) != std::string::npos;
  if (!right) MESSAGE(s.to_string());
  return right;
}

void clear_environment() {
  for (const char* name : {"TM_RUNTIME_DIR", "TM_POOL", "TM_TOKEN", "TM_MEMORY", "TM_SSD", "TM_LINGER_S", "TM_HOST_ID"})
    ::unsetenv(name);
}

}  // namespace

TEST_CASE("sizes") {
  CHECK(parse_bytes("0").value() == 0);
  CHECK(parse_bytes("1073741824").value() == 1ull << 30);
  CHECK(parse_bytes("64G").value() == 64ull << 30);
  CHECK(parse_bytes("512MiB").value() == 512ull << 20);
  CHECK(parse_bytes("1.5t").value() == 3ull << 39);
  CHECK(parse_bytes("4kB").value() == 4096);
  for (const char* bad : {"", "G", "-1G", "64X", "64 G", "64GG", "1e400", "nan", "0x10", "9999999P", "iB"})
    CHECK_MESSAGE(!parse_bytes(bad).is_ok(), bad);
}

TEST_CASE("the command line") {
  clear_environment();
  auto args = parse_node_args({"--runtime-dir", "/r", "--pool=p", "--listen", "tcp://127.0.0.1:0", "--listen",
                               "tcp://[::1]:7400", "--leader", "h:1", "--host-id", "h", "--memory", "64G", "--linger-s",
                               "0.5", "--ready-fd", "7"});
  REQUIRE(args.is_ok());
  const NodeOptions& o = args->options;
  CHECK(o.runtime_dir == "/r");
  CHECK(o.pool == "p");
  CHECK(o.listen == std::vector<std::string>{"tcp://127.0.0.1:0", "tcp://[::1]:7400"});
  CHECK(o.leader == "h:1");
  CHECK(o.host_id == "h");
  CHECK(o.memory_bytes == 64ull << 30);
  CHECK(o.linger_s == 0.5);
  CHECK(o.ready_fd == 7);
  CHECK(parse_node_args({"--linger", "-1"})->options.linger_s == -1);
  ::setenv("TM_SSD", "/a:1G,/b:c:512M", 1);
  CHECK(parse_node_args({})->options.ssd.size() == 2);
  CHECK(parse_node_args({})->options.ssd[1].path == "/b:c");
  CHECK(parse_node_args({})->options.ssd[1].limit_bytes == 512ull << 20);
  CHECK(parse_node_args({"--ssd", "/d:1T"})->options.ssd.size() == 1);  // instead of the environment's
  ::unsetenv("TM_SSD");
  for (const char* wrong : {"", "/a", ":1G", "/a:x", "/a:1G,"}) CHECK(!parse_node_args({"--ssd", wrong}).is_ok());
  CHECK(parse_node_args({"--nonsense", "--help"})->help);
  CHECK(parse_node_args({"--version"})->version);
  CHECK(node_usage().find("--token-file") != std::string::npos);

  CHECK(says(parse_node_args({"--nonsense", "1"}).status(), Code::invalid_argument, "--nonsense: no such option"));
  CHECK(says(parse_node_args({"--nonsense"}).status(), Code::invalid_argument, "--nonsense: no such option"));
  CHECK(says(parse_node_args({"pool"}).status(), Code::invalid_argument, "pool: not an option"));
  CHECK(says(parse_node_args({"--pool"}).status(), Code::invalid_argument, "--pool: a value is missing"));
  CHECK(says(parse_node_args({"--memory"}).status(), Code::invalid_argument, "--memory: a value is missing"));
  CHECK(says(parse_node_args({"--memory", "lots"}).status(), Code::invalid_argument, "--memory"));
  CHECK(says(parse_node_args({"--linger-s", "soon"}).status(), Code::invalid_argument, "--linger-s"));
  CHECK(says(parse_node_args({"--ready-fd", "3x"}).status(), Code::invalid_argument, "--ready-fd"));
  CHECK(says(parse_node_args({"--token-file", "/nowhere"}).status(), Code::invalid_argument, "/nowhere"));
}

TEST_CASE("the environment stands in for what is not given") {
  clear_environment();
  ::setenv("TM_POOL", "envpool", 1);
  ::setenv("TM_MEMORY", "2M", 1);
  ::setenv("TM_TOKEN", "secret-secret-secret", 1);
  auto args = parse_node_args({"--memory", "3M"});
  REQUIRE(args.is_ok());
  CHECK(args->options.pool == "envpool");
  CHECK(args->options.memory_bytes == 3 << 20);
  CHECK(args->options.token == "secret-secret-secret");
  ::setenv("TM_LINGER_S", "long", 1);
  CHECK(says(parse_node_args({}).status(), Code::invalid_argument, "TM_LINGER_S"));
  clear_environment();
}

TEST_CASE("options are checked") {
  Folder folder;
  const NodeOptions good = folder.options();
  CHECK(resolve_options(good).is_ok());
  auto bad = [&](auto change) {
    NodeOptions o = good;
    change(o);
    return resolve_options(o).status();
  };
  CHECK(says(bad([](auto& o) { o.runtime_dir = "here"; }), Code::invalid_argument, "absolute"));
  CHECK(says(bad([](auto& o) { o.runtime_dir = "/" + std::string(100, 'x'); }), Code::invalid_argument, "too long"));
  for (const char* pool : {"", "a/b", "..", ".hidden", "a b"})
    CHECK(says(bad([&](auto& o) { o.pool = pool; }), Code::invalid_argument, "pool"));
  CHECK(says(bad([](auto& o) { o.listen = {"carrier-pigeon://x"}; }), Code::unsupported, "carrier-pigeon"));
  CHECK(says(bad([](auto& o) { o.listen = {"tcp://host"}; }), Code::invalid_argument, "tcp://host"));
  CHECK(says(bad([](auto& o) { o.leader = "tcp://h:99999"; }), Code::invalid_argument, "99999"));
  CHECK(says(bad([](auto& o) { o.memory_bytes = 100; }), Code::invalid_argument, "at least 1 MiB"));
  CHECK(says(bad([](auto& o) { o.memory_bytes = 1ull << 55; }), Code::invalid_argument, "this host"));
  CHECK(says(bad([](auto& o) { o.ssd = {{"here", 1 << 30}}; }), Code::invalid_argument, "absolute"));
  CHECK(says(bad([](auto& o) { o.ssd = {{"/a", 1 << 20}}; }), Code::invalid_argument, "64 MiB"));
  CHECK(says(bad([](auto& o) { o.ssd = {{"/a", 1 << 30}, {"/a", 1 << 30}}; }), Code::invalid_argument, "twice"));
  CHECK(says(bad([](auto& o) { o.linger_s = NAN; }), Code::invalid_argument, "linger"));
  CHECK(says(bad([](auto& o) { o.ready_fd = 999; }), Code::invalid_argument, "not open"));
  NodeOptions open = good;
  open.memory_bytes = 0;
  CHECK(resolve_options(open)->memory_bytes == memory_limit() / 4);
}

TEST_CASE("the folder must be ours alone") {
  Folder folder;
  NodeOptions options = folder.options();
  options.runtime_dir = folder.path + "/deep/er";
  REQUIRE(prepare_folder(options).value() == options.runtime_dir + "/p");
  struct stat info;
  REQUIRE(::stat((options.runtime_dir + "/p").c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0700);
  ::chmod(options.runtime_dir.c_str(), 0755);
  CHECK(says(prepare_folder(options).status(), Code::auth, "open to others"));
  ::chmod(options.runtime_dir.c_str(), 0700);
  options.pool = "link";
  REQUIRE(::symlink("/tmp", (options.runtime_dir + "/link").c_str()) == 0);
  CHECK(says(prepare_folder(options).status(), Code::auth, "not a folder"));
  if (::geteuid() == 0) {
    options.pool = "theirs";
    ::mkdir((options.runtime_dir + "/theirs").c_str(), 0700);
    REQUIRE(::chown((options.runtime_dir + "/theirs").c_str(), 12345, 12345) == 0);
    CHECK(says(prepare_folder(options).status(), Code::auth, "belongs to uid 12345"));
  }
}

TEST_CASE("the token file is made once, 0600, and refused when others can read it") {
  Folder folder;
  const std::string path = folder.path + "/token";
  const std::string token = load_or_make_token(path).value();
  CHECK(token.size() == 64);
  CHECK(token.find_first_not_of("0123456789abcdef") == std::string::npos);
  struct stat info;
  REQUIRE(::stat(path.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  CHECK(load_or_make_token(path).value() == token);
  CHECK(!fs::exists(path + ".new"));
  ::chmod(path.c_str(), 0640);
  CHECK(says(load_or_make_token(path).status(), Code::auth, "600"));
  ::chmod(path.c_str(), 0600);
  std::ofstream(path) << "short\n";
  CHECK(says(load_or_make_token(path).status(), Code::auth, "no token"));
  ::unlink(path.c_str());
  REQUIRE(::symlink("/etc/passwd", path.c_str()) == 0);
  CHECK(!load_or_make_token(path).is_ok());
}

TEST_CASE("a keeper that cannot open says why, with its exit code, and leaves no socket") {
  Folder folder;
  NodeOptions bad = folder.options();
  bad.pool = "a/b";
  KeeperProcess usage(bad);
  CHECK(usage.line.starts_with("error INVALID_ARGUMENT: pool \"a/b\""));
  CHECK(usage.wait() == kNodeUsage);

  const int taken = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string other = folder.path + "/taken.sock";
  other.copy(address.sun_path, sizeof address.sun_path - 1);
  REQUIRE(::bind(taken, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(::listen(taken, 1) == 0);
  NodeOptions busy = folder.options();
  busy.listen = {"unix://" + other};
  KeeperProcess failed(busy);
  CHECK(failed.line.starts_with("error IO"));
  CHECK(failed.line.find(other) != std::string::npos);
  CHECK(failed.wait() == kNodeFailed);
  CHECK(!fs::exists(folder.at("node.sock")));
  CHECK(fs::exists(other));
  ::close(taken);

  busy.listen = {"tcp://127.0.0.1:0"};
  KeeperProcess good(busy);
  CHECK(good.ready());
}
