// The node as users get it: the real executable, its real service, real clients, real kills.
#include <spawn.h>

#include <cstring>

#include "pool/client.h"
#include "pool/keeper_fixture.h"

extern char** environ;

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

// The executable, started as tm.init() starts it.
struct Node {
  explicit Node(const Folder& f, std::vector<std::string> more = {}) : folder(f) {
    int pipe[2];
    REQUIRE(::pipe2(pipe, O_CLOEXEC) == 0);
    std::vector<std::string> args{TM_NODE_EXECUTABLE, "--runtime-dir", f.path,       "--pool", "p",
                                  "--memory",         "64M",           "--ready-fd", "3"};
    args.insert(args.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipe[1], 3);
    posix_spawn_file_actions_addopen(&actions, 2, (f.path + "/stderr").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    REQUIRE(::posix_spawn(&pid, TM_NODE_EXECUTABLE, &actions, nullptr, argv.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(pipe[1]);
    char text[4096];
    for (ssize_t n; (n = ::read(pipe[0], text, sizeof text)) > 0;) line.append(text, static_cast<size_t>(n));
    ::close(pipe[0]);
  }
  ~Node() {
    if (pid > 0) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  pid_t worker() const { return child_of(pid); }
  int wait(int64_t ms = 20'000) {
    int status = 0;
    if (!eventually([&] { return ::waitpid(pid, &status, WNOHANG) == pid; }, ms)) return -1000;
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  ClientOptions client_options() const {
    ClientOptions o;
    o.node_address = "unix://" + folder.at("node.sock");
    std::ifstream(folder.at("token")) >> o.token;
    return o;
  }
  ClientPtr connect() const {
    auto client = Client::connect(client_options(), Deadline::after_s(20));
    REQUIRE_MESSAGE(client.is_ok(), client.status().to_string());
    return *client;
  }
  const Folder& folder;
  pid_t pid = -1;
  std::string line;
};

Status put(Client& client, const std::string& key, std::string value) {
  const iovec data{value.data(), value.size()};
  return client.put(key, "m", {&data, 1}, {}, Deadline::after_s(20)).status();
}

Result<std::string> get(Client& client, const std::string& key) {
  TM_ASSIGN(ObjectPtr object, client.locate(key, {}, Deadline::after_s(20)));
  std::string out(object->info().nbytes, 0);
  const iovec into{out.data(), out.size()};
  TM_TRY(client.read(object, 0, {&into, 1}, Deadline::after_s(20)));
  return out;
}

uint64_t rss_anon_kib(pid_t pid) {
  std::istringstream status(proc_file(pid, "status"));
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssAnon:")) return std::stoull(line.substr(8));
  return UINT64_MAX;
}

const std::string kBig(3 << 20, 'x');

}  // namespace

TEST_CASE("SIGKILL of the worker: sessions are lost, new ones see the old objects") {
  Folder folder;
  Node node(folder);
  REQUIRE_MESSAGE(node.line.starts_with("ready unix://"), node.line);
  auto client = node.connect();
  for (int round = 0; round < 3; ++round) {
    const std::string n = std::to_string(round);
    REQUIRE(put(*client, "small" + n, "value" + n).is_ok());
    REQUIRE(put(*client, "big" + n, kBig + n).is_ok());
    const pid_t worker = node.worker();
    REQUIRE(worker > 0);
    ::kill(worker, SIGKILL);
    CHECK(eventually([&] { return !client->alive(); }, 3'000));
    client->close();
    client = node.connect();
    CHECK(node.worker() != worker);
    for (int old = 0; old <= round; ++old) {
      const std::string o = std::to_string(old);
      auto small = get(*client, "small" + o);
      REQUIRE_MESSAGE(small.is_ok(), small.status().to_string());
      CHECK(*small == "value" + o);
      auto big = get(*client, "big" + o);
      REQUIRE_MESSAGE(big.is_ok(), big.status().to_string());
      CHECK(*big == kBig + o);
    }
  }
}

TEST_CASE("SIGKILL of the keeper: nothing runs, and the next start is a new pool") {
  Folder folder;
  auto node = std::make_unique<Node>(folder);
  REQUIRE(node->line.starts_with("ready "));
  auto client = node->connect();
  REQUIRE(put(*client, "a", "1").is_ok());
  const pid_t worker = node->worker();
  ::kill(node->pid, SIGKILL);
  CHECK(node->wait() == -SIGKILL);
  CHECK(eventually([&] { return !alive(worker); }));
  CHECK(eventually([&] { return !client->alive(); }));
  client->close();
  Node next(folder);
  REQUIRE_MESSAGE(next.line.starts_with("ready "), next.line);
  client = next.connect();
  CHECK(get(*client, "a").status().code() == Code::key_not_found);
  REQUIRE(put(*client, "a", "2").is_ok());
  CHECK(get(*client, "a").value() == "2");
}

TEST_CASE("a wrong token is an auth error; garbage is closed; the node goes on") {
  Folder folder;
  Node node(folder, {"--listen", "tcp://127.0.0.1:0"});
  REQUIRE_MESSAGE(node.line.starts_with("ready "), node.line);
  CHECK(node.line.find(" tcp://127.0.0.1:") != std::string::npos);
  auto client = node.connect();
  REQUIRE(put(*client, "a", "1").is_ok());
  ClientOptions wrong = node.client_options();
  wrong.token = "not the token";
  auto refused = Client::connect(wrong, Deadline::after_s(10));
  REQUIRE(!refused.is_ok());
  CHECK(refused.status().code() == Code::auth);
  for (const std::string& garbage :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11), std::string(600, '\xff')}) {
    const int fd = connect_to(folder.at("node.sock"));
    REQUIRE(fd >= 0);
    (void)::send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL);
    char rest[4096];
    pollfd p{fd, POLLIN, 0};
    bool closed = false;
    while (!closed && ::poll(&p, 1, 5'000) > 0) closed = ::recv(fd, rest, sizeof rest, 0) <= 0;
    CHECK(closed);
    ::close(fd);
  }
  CHECK(client->alive());
  CHECK(get(*client, "a").value() == "1");
}

TEST_CASE("SIGTERM drains; linger 0 ends the node with its last client") {
  Folder folder;
  {
    Node node(folder);
    auto client = node.connect();
    REQUIRE(put(*client, "a", "1").is_ok());
    const pid_t worker = node.worker();
    ::kill(node.pid, SIGTERM);
    CHECK(node.wait() == kNodeOk);
    CHECK(!alive(worker));
    CHECK(!fs::exists(folder.at("node.sock")));
  }
  Node node(folder, {"--linger-s", "0"});
  auto one = node.connect();
  auto two = node.connect();
  one->close();
  CHECK(get(*two, "none").status().code() == Code::key_not_found);
  two->close();
  CHECK(node.wait() == kNodeOk);
}

TEST_CASE("idle: under 20 MB of its own memory, and hardly any CPU") {
  Folder folder;
  Node node(folder);
  auto client = node.connect();
  const pid_t worker = node.worker();
  const uint64_t rss = rss_anon_kib(node.pid) + rss_anon_kib(worker);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their own memory counts, too
  CHECK(rss < 20 * 1024);
#else
  CHECK(rss > 0);
#endif
  const uint64_t before = cpu_ticks(node.pid) + cpu_ticks(worker);
  ::usleep(2'000'000);
  CHECK(cpu_ticks(node.pid) + cpu_ticks(worker) - before <= 2);
}

TEST_CASE("the command line of the executable") {
  auto run = [](const std::string& args) {
    const int status = std::system((std::string(TM_NODE_EXECUTABLE) + " " + args + " >/dev/null 2>&1").c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  CHECK(run("--help") == kNodeOk);
  CHECK(run("--version") == kNodeOk);
  CHECK(run("--nonsense") == kNodeUsage);
  CHECK(run("--runtime-dir relative") == kNodeUsage);
  Folder folder;
  Node node(folder);
  REQUIRE(node.line.starts_with("ready "));
  CHECK(run("--runtime-dir " + folder.path + " --pool p") == kNodeAlreadyRunning);
}
