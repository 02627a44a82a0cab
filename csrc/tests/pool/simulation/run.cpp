#include "pool/simulation/run.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>

#include "common/log.h"
#include "common/random.h"
#include "pool/messages.h"
#include "pool/simulation/workload.h"

namespace torch_mooncake::pool::sim {
namespace {

Shape draw_shape() {
  Shape s;
  s.hosts = 1 + static_cast<int>(world->roll(3));
  s.crowded = world->chance(0.5);
  s.memory_bytes = s.crowded ? 140'000 + world->roll(250'000) : 24 << 20;
  s.crash_at_failpoint = world->chance(0.4) ? 0.004 : 0;
  s.yield_at_failpoint = world->chance(0.5) ? 0.05 : 0.3;
  s.crashes = world->chance(0.4);
  s.host_crashes = world->chance(0.15);
  s.client_crashes = world->chance(0.4);
  s.pauses = world->chance(0.5);
  s.partitions = world->chance(0.3);
  s.breaks = world->chance(0.5);
  s.jumps = world->chance(0.15);
  s.drains = world->chance(0.1);
  s.election = s.hosts > 1 && world->chance(0.4);
  if (s.election) s.jumps = false;  // any of them may lead
  s.bridge_ms = world->between(5000, 12'000);
  network->slow = world->chance(0.3) ? 0.05 : 0.005;
  return s;
}

// --- at the end ---

using Extents = std::multimap<std::string, std::string>;  // key to "part, node, extent"

std::string extent_name(uint32_t part, const NodeId& node, ExtentRef e) {
  return "part " + std::to_string(part) + " on " + to_hex({reinterpret_cast<const char*>(node.data()), 4}) + " at " +
         std::to_string(e.index) + "." + std::to_string(e.generation);
}

// What the directory knows is what the donors have.
void compare_directory(Cluster& cluster, const std::vector<std::string>& keys, const rpc::SessionPtr& home) {
  Extents known, there;
  LookupCall call;
  for (const std::string& key : keys) call.keys.push_back({0, key});
  call.timeout_ms = 5000;
  auto reply = home->call_sync(kLookup, encode(call), Deadline::after_ms(6000));
  if (!reply.is_ok()) return world->violation("a last lookup: " + reply.status().to_string());
  auto answer = decode<LookupAnswer>(reply->body);
  if (!answer.is_ok()) return world->violation(answer.status().to_string());
  for (size_t i = 0; i < answer->entries.size(); ++i)
    for (const Place& p : answer->entries[i].places)
      known.emplace(keys[i], extent_name(p.part, p.at.node, p.at.extent));
  for (int i = 0; i < cluster.hosts(); ++i) {
    Donor& donor = cluster.node(i).service()->donor();
    const NodeId id = donor.segments()[0]->id();
    for (const Announcement& a : donor.announce()) there.emplace(a.key, extent_name(a.part, id, a.extent));
  }
  for (const auto& [key, extent] : known)
    if (std::none_of(there.begin(), there.end(), [&](const auto& t) { return t.first == key && t.second == extent; }))
      world->violation("the directory points at nothing: " + key + ", " + extent);
  for (const auto& [key, extent] : there)
    if (std::none_of(known.begin(), known.end(), [&](const auto& t) { return t.first == key && t.second == extent; }))
      world->violation("an orphan: " + key + ", " + extent);
}

void read_everything(Cluster& cluster, History& history, const Workload& work) {
  int homes = 0;
  for (int i = 0; i < cluster.hosts(); ++i) {
    auto* engine = new std::shared_ptr<SimEngine>;
    Process* process = world->process("reader" + std::to_string(i), cluster.node(i).host());
    bool over = false;
    world->start(process, [&, i] {
      *engine = std::make_shared<SimEngine>(process, "client", "");
      ClientOptions options;
      options.node_address = cluster.node(i).unix_address();
      options.host_id = process->host->id;
      options.engine = *engine;
      auto client = Client::connect(options, Deadline::after_ms(10'000));
      if (!client.is_ok()) return world->violation("a last connect: " + client.status().to_string());
      for (const std::string& key : work.keys()) {
        for (;;) {
          const int64_t called = history.stamp();
          auto object = (*client)->locate(key, {}, Deadline::after_ms(10'000));
          if (!object.is_ok()) {
            if (object.status().code() != Code::key_not_found)
              return world->violation("a last look at " + key + ": " + object.status().to_string());
            history.read(key, 0, called);
            break;
          }
          std::string bytes((*object)->info().nbytes, '\0');
          const iovec v{bytes.data(), bytes.size()};
          const Status s = (*client)->read(*object, 0, std::span(&v, 1), Deadline::after_ms(10'000));
          if (s.code() == Code::key_not_found) continue;  // expired meanwhile
          if (!s.is_ok()) return world->violation("a last read of " + key + ": " + s.to_string());
          history.read(key, identify(history, key, bytes), called);
          break;
        }
      }
      auto node = (*engine)->rpc().connect(cluster.node(i).unix_address(), Deadline::after_ms(5000));
      if (!node.is_ok()) return world->violation("a last connect: " + node.status().to_string());
      auto stat = (*node)->call_sync(kStat, encode(Empty{}), Deadline::after_ms(5000));
      auto told = stat.is_ok() ? decode<StatAnswer>(stat->body) : Result<StatAnswer>(stat.status());
      if (!told.is_ok()) return world->violation("a last question: " + told.status().to_string());
      if (told->is_home) {
        ++homes;
        std::vector<std::string> all = work.keys();
        all.insert(all.end(), work.sealed().begin(), work.sealed().end());
        compare_directory(cluster, all, *node);
      }
      (*client)->close();
      over = true;
    });
    while (!over) world->sleep_until(world->now() + 50 * kMs);
  }
  if (homes != 1) world->violation(std::to_string(homes) + " nodes lead");
}

void check_rest(Cluster& cluster) {
  for (int i = 0; i < cluster.hosts(); ++i) {
    NodeService* service = cluster.node(i).service();
    const std::string who = "node " + std::to_string(i) + ": ";
    if (const Status s = service->check(true); !s.is_ok()) return world->violation(who + s.to_string());
    const DonorStats stats = service->donor().stats();
    if (stats.pinned_extents || stats.limbo_extents)
      return world->violation(who + std::to_string(stats.pinned_extents) + " extents are pinned and " +
                              std::to_string(stats.limbo_extents) + " in limbo, with nobody left to use them");
  }
}

void check_running(Cluster& cluster) {
  for (int i = 0; i < cluster.hosts(); ++i)
    if (NodeService* service = cluster.node(i).service())
      world->start(cluster.node(i).worker(), [service, i] {  // in its process, with which it may end
        if (const Status s = service->check(false); !s.is_ok() && s.code() != Code::closed)
          world->violation("node " + std::to_string(i) + ": " + s.to_string());
      });
}

void direct(const RunOptions& options) {
  Cluster& cluster = *new Cluster(draw_shape());
  install(options.mutation, cluster);
  const auto all_serve = [&] {
    for (int i = 0; i < cluster.hosts(); ++i)
      if (!cluster.node(i).service()) return false;
    return true;
  };
  History& history = *new History(cluster.leader_host());
  world->sleep_until(world->now() + world->between(0, 3000) * kMs);
  Workload& work = *new Workload(cluster, history, cluster.hosts() + static_cast<int>(world->roll(3)));
  const int64_t end = world->now() + world->between(4, 14) * kSecond;
  while (world->now() < end) {
    world->sleep_until(world->now() + world->between(30, 2000) * kMs);
    cluster.fault();
    check_running(cluster);
  }
  cluster.heal();
  work.stop();
  // Pauses, partitions and deadlines pass; then the silent are expelled and have come back, reservations are dropped.
  world->sleep_until(world->now() + 14 * kSecond);
  work.wait_idle(world->now() + 20 * kSecond);
  if (!work.idle()) return world->violation("a call does not end");
  world->sleep_until(world->now() + 14 * kSecond);
  if (!all_serve()) return world->violation("a node does not come up");
  read_everything(cluster, history, work);
  if (const std::string wrong = history.check(cluster.lossy_since(), cluster.rebuilt()); !wrong.empty())
    return world->violation(wrong);
  world->sleep_until(world->now() + 3 * kSecond);
  check_rest(cluster);
}

struct Child {
  pid_t pid = -1;
  int fd = -1;
};

Child start(uint64_t seed, const RunOptions& options) {
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) std::abort();
  std::fflush(stdout);
  const pid_t pid = ::fork();
  if (pid != 0) {
    ::close(pipe[1]);
    return {pid, pipe[0]};
  }
  log::set_level(options.verbose ? log::Level::warning : log::Level::off);
  std::vector<std::unique_ptr<std::string>> before;
  for (int i = 0; options.other_heap && i < 5000; ++i)
    before.push_back(std::make_unique<std::string>(static_cast<size_t>(1 + i * 7 % 3000), 'x'));
  auto* w = new World(seed, options.verbose);
  network = new Network;
  w->run([&] { direct(options); });
  std::string result(reinterpret_cast<const char*>(std::array{w->hash()}.data()), sizeof(uint64_t));
  result += w->found();
  if (::write(pipe[1], result.data(), result.size()) < 0) std::abort();
  std::fflush(stdout);
  ::_exit(0);
}

Outcome result_of(const Child& child) {
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = ::read(child.fd, buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<size_t>(n));
  ::close(child.fd);
  int status = 0;
  ::waitpid(child.pid, &status, 0);
  if (WIFSIGNALED(status)) return {"the process died of signal " + std::to_string(WTERMSIG(status)), 0};
  Outcome outcome;
  if (text.size() < sizeof outcome.hash) return {"the run did not report", 0};
  std::memcpy(&outcome.hash, text.data(), sizeof outcome.hash);
  outcome.found = text.substr(sizeof outcome.hash);
  return outcome;
}

}  // namespace

Outcome run_seed(uint64_t seed, const RunOptions& options) { return result_of(start(seed, options)); }

std::vector<Outcome> run_seeds(uint64_t first, int n, const RunOptions& options) {
  const size_t at_once = std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN));
  std::vector<Outcome> out;
  std::deque<Child> running;
  for (int started = 0; static_cast<int>(out.size()) < n;) {
    while (started < n && running.size() < at_once)
      running.push_back(start(first + static_cast<uint64_t>(started++), options));
    out.push_back(result_of(running.front()));
    running.pop_front();
  }
  return out;
}

}  // namespace torch_mooncake::pool::sim
