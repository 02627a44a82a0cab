#include "pool/simulation/cluster.h"

#include <algorithm>

#include "common/random.h"

namespace torch_mooncake::pool::sim {
namespace {

constexpr int64_t kLease = 5 * kSecond, kHeartbeatLimit = 5 * kSecond;

HeldSegment copy_of(const HeldSegment& held) {
  auto segment = Segment::adopt(UniqueFd(::dup(held.segment->fd())), held.segment->id());
  if (!segment.is_ok()) world->violation("a held segment cannot be adopted: " + segment.status().to_string());
  return {held.role, held.tag, *segment};
}

}  // namespace

// --- node ---

Node::Node(Host* host, const Shape& shape, std::string leader, Etcd* etcd)
    : host_(host), shape_(shape), leader_(std::move(leader)), etcd_(etcd) {}

void Node::hold(const HeldSegment& segment) { held_.insert_or_assign({segment.role, segment.tag}, copy_of(segment)); }

std::vector<HeldSegment> Node::slot_pages() const {
  std::vector<HeldSegment> pages;
  for (const auto& [key, held] : held_)
    if (held.role == SegmentRole::slots) pages.push_back(held);
  return pages;
}

void Node::start(int64_t when) {
  Process* process = world->process("node@" + host_->id + "." + std::to_string(++incarnation_), host_);
  worker_ = process;
  world->start_at(when, process, [this] { serve(); });
}

void Node::serve() {
  engine_ = std::make_shared<SimEngine>(worker_, "node", "");
  static auto* all = new std::vector<std::shared_ptr<SimEngine>>;  // sessions point at them
  all->push_back(engine_);
  SimEndpoint* endpoint = &engine_->endpoint();
  worker_->on_killed = [endpoint, this] { endpoint->died(host_->lost); };
  DonorOptions donor_options;
  donor_options.limit_bytes = shape_.memory_bytes;
  donor_options.grow_step_bytes = 256 << 10;
  donor_options.max_extents = 256;
  std::vector<HeldSegment> held;
  for (const auto& [key, segment] : held_) held.push_back(copy_of(segment));
  auto donor = held.empty() ? Donor::create(donor_options) : Donor::attach(donor_options, std::move(held));
  if (!donor.is_ok()) return world->violation("a worker cannot start: " + donor.status().to_string());
  for (const HeldSegment& segment : (*donor)->held()) hold(segment);
  (*donor)->on_held_changed([this](const HeldSegment& segment, bool added) {
    if (added) {
      hold(segment);
    } else {
      held_.erase({segment.role, segment.tag});
    }
  });
  NodeServiceOptions options;
  options.node.leader = leader_;
  if (etcd_) options.election = etcd_->client(host_);
  options.bridge_ms = shape_.bridge_ms;
  options.node.host_id = host_->id;
  options.donor = std::move(donor).value();
  options.engine = engine_;
  options.listeners.push_back({UniqueFd(), unix_address()});
  options.listeners.push_back({UniqueFd(), tcp_address()});
  auto service = NodeService::create(std::move(options));
  if (!service.is_ok()) return world->violation("a worker cannot serve: " + service.status().to_string());
  service_ = std::move(service).value().release();
}

void Node::crash(int64_t restart_after) {
  Process* old = worker_;
  service_ = nullptr;
  start(world->now() + restart_after);
  world->kill(old);
}

void Node::stop_gently(int64_t restart_after) {
  NodeService* service = service_;
  if (!service) return;
  service_ = nullptr;
  world->start(worker_, [this, service, restart_after] {
    if (const Status s = service->drain(Deadline::after_ms(3000)); !s.is_ok())
      world->trace("drain", 0, [&] { return s.to_string(); });
    service->close();
    start(world->now() + restart_after);
  });
}

// --- cluster ---

Cluster::Cluster(const Shape& shape) : shape_(shape) {
  if (shape.crowded) lossy();
  std::string leader;
  for (int i = 0; i < shape.hosts; ++i) {
    auto* host = new Host("host" + std::to_string(i), world->between(0, 1000) * kSecond,
                          0.955 + 0.09 * static_cast<double>(world->roll(1000)) / 1000);
    nodes_.push_back(std::make_unique<Node>(host, shape_, leader, shape.election ? &etcd_ : nullptr));
    nodes_.back()->start(world->now());
    if (i == 0 && !shape.election) leader = nodes_[0]->tcp_address();
  }
  world->at_failpoint = [this](std::string_view name) { passed(name); };
}

void Cluster::add_client(Process* process, int host) { clients_.emplace_back(process, host); }

// Every failpoint is a place where the processor may be taken away, or the process may die.
void Cluster::passed(std::string_view name) {
  if (name == "home.expel") return lossy();
  Process* process = world->current()->process;
  if (!healed_ && world->chance(shape_.crash_at_failpoint)) {
    world->trace("dies at", 0, [&] { return std::string(name); });
    for (auto& node : nodes_) {
      if (node->worker() != process) continue;
      rebuilt_ = true;
      node->crash(world->between(10, 1500) * kMs);
    }
    if (shape_.client_crashes) kill_client(process);
  }
  if (!healed_ && shape_.pauses && name.starts_with("client.") && world->chance(0.05)) {
    const int64_t until = world->now() + world->between(100, 9000) * kMs;
    world->trace("stops at", 0,
                 [&] { return std::string(name) + " for " + std::to_string((until - world->now()) / kMs); });
    world->pause(process, until);
    end_silent(process, until - world->now());
    return world->sleep_until(until);
  }
  if (world->chance(shape_.yield_at_failpoint))
    world->sleep_until(world->now() + world->between(1, world->chance(0.1) ? 5000 : 200) * kUs);
}

void Cluster::kill_client(Process* process) {
  const auto it = std::find_if(clients_.begin(), clients_.end(), [&](const auto& c) { return c.first == process; });
  if (it == clients_.end()) return;
  const int host = it->second;
  clients_.erase(it);
  world->at(world->now() + world->between(1, 2000) * kMs, [this, host] { on_killed_client(host); });
  world->kill(process);
}

// The others' heartbeats to that process are not answered for so long.
void Cluster::end_silent(Process* process, int64_t duration) {
  if (duration < kHeartbeatLimit) return;
  std::vector<SimEndpoint*> endpoints;
  for (const auto& [address, endpoint] : network->listeners) endpoints.push_back(endpoint);
  for (SimEndpoint* endpoint : endpoints)
    for (const auto& session : std::vector(endpoint->live())) {
      const auto other = session->other();
      if (!other || (session->process() != process && other->process() != process)) continue;
      const auto& awake = session->process() == process ? other : session;
      world->start_at(world->now() + kHeartbeatLimit + world->between(0, 500) * kMs, awake->process(), [awake] {
        awake->end({Code::peer_lost, "silent"});
      });
    }
}

Process* Cluster::some_process() {
  const auto n = world->roll(nodes_.size() + clients_.size());
  return n < nodes_.size() ? nodes_[n]->worker() : clients_[n - nodes_.size()].first;
}

void Cluster::crash_host(int i) {
  Node& node = *nodes_[static_cast<size_t>(i)];
  world->trace("host lost", static_cast<uint64_t>(i));
  lossy();
  rebuilt_ = true;
  node.lose_memory();
  node.host()->lost = true;
  for (const auto& [process, host] : std::vector(clients_))
    if (host == i) kill_client(process);
  node.crash(world->between(500, 9000) * kMs);
  node.host()->lost = false;
}

// A leader that etcd has given up goes on by its members' word; then one of them has its connection broken, or dies.
void Cluster::lose_etcd_then_member(Host* leader) {
  const int64_t after = world->between(4500, 7500) * kMs;
  etcd_.cut(leader, world->now() + after + world->between(1000, 5000) * kMs);
  Node* member = nodes_[world->roll(nodes_.size())].get();
  if (member->host() == leader) member = (member == nodes_[0].get() ? nodes_[1] : nodes_[0]).get();
  lost_etcd_ = rebuilt_ = true;
  world->trace("etcd is away", 0, [&] { return "for " + leader->id + ", which then loses " + member->host()->id; });
  world->at(world->now() + after, [this, leader, member] {
    if (healed_ || !member->service()) return;
    if (shape_.crashes && world->chance(0.5)) return member->crash(world->between(10, 300) * kMs);
    for (const auto& session : std::vector(member->engine()->endpoint().live()))
      if (const auto other = session->other(); other && other->process()->host == leader)
        for (const auto& side : {session, other})
          world->start_at(world->now(), side->process(), [side] {
            side->end({Code::peer_lost, "the connection broke"}, true);
          });
  });
}

void Cluster::fault() {
  const int i = static_cast<int>(world->roll(nodes_.size()));
  Node& node = *nodes_[static_cast<size_t>(i)];
  if (shape_.election && !lost_etcd_ && world->chance(0.25))
    if (Host* leader = etcd_.leading()) return lose_etcd_then_member(leader);
  if (shape_.election && world->chance(0.15)) {
    rebuilt_ = true;
    const int64_t until = world->now() + world->between(200, world->chance(0.3) ? 9000 : 2000) * kMs;
    const bool all = world->chance(0.5);
    world->trace("etcd is away", 0,
                 [&] { return (all ? "for all" : node.host()->id) + " until " + std::to_string(until / kMs); });
    if (!all) return etcd_.cut(node.host(), until);
    etcd_.down(until);
    if (world->chance(0.5)) world->at(until, [this] { etcd_.restart(); });
    return;
  }
  switch (world->roll(8)) {
    case 0:
      if (!shape_.crashes) return;
      rebuilt_ = true;
      return node.crash(world->between(10, 1500) * kMs);
    case 1:
      if (!shape_.host_crashes || !world->chance(0.5)) return;
      return crash_host(i);
    case 2:
      if (!shape_.client_crashes || clients_.empty()) return;
      return kill_client(clients_[world->roll(clients_.size())].first);
    case 3: {
      if (!shape_.pauses) return;
      Process* process = some_process();
      const int64_t duration = world->between(100, world->chance(0.4) ? 9000 : 2000) * kMs;
      world->trace("paused", 0, [&] { return process->name + " for " + std::to_string(duration / kMs) + " ms"; });
      world->pause(process, world->now() + duration);
      return end_silent(process, duration);
    }
    case 4: {
      if (!shape_.partitions || nodes_.size() < 2) return;
      Host* other = nodes_[(static_cast<size_t>(i) + 1 + world->roll(nodes_.size() - 1)) % nodes_.size()]->host();
      const int64_t duration = world->between(100, world->chance(0.4) ? 9000 : 2000) * kMs;
      world->trace("parted", 0, [&] {
        return node.host()->id + " and " + other->id + " for " + std::to_string(duration / kMs) + " ms";
      });
      network->partition(node.host(), other, world->now() + duration);
      if (duration < kHeartbeatLimit || !node.engine()) return;
      for (const auto& [address, endpoint] : std::map(network->listeners))
        for (const auto& s : std::vector(endpoint->live())) {
          const auto o = s->other();
          if (!o || std::minmax<const Host*>(s->process()->host, o->process()->host) !=
                        std::minmax<const Host*>(node.host(), other))
            continue;
          for (const auto& side : {s, o})
            world->start_at(world->now() + kHeartbeatLimit + world->between(0, 500) * kMs, side->process(), [side] {
              side->end({Code::peer_lost, "silent"}, true);
            });
        }
      return;
    }
    case 5: {
      if (!shape_.breaks || !node.engine()) return;
      const auto& sessions = node.engine()->endpoint().live();
      if (sessions.empty()) return;
      const auto session = sessions[world->roll(sessions.size())];
      world->trace("broken", 0, [&] { return session->self().name + " to " + session->peer().name; });
      const auto other = session->other();
      for (const auto& side : {session, other})
        if (side)
          world->start_at(world->now() + world->between(0, world->chance(0.2) ? 4000 : 100) * kMs, side->process(),
                          [side] {
                            side->end({Code::peer_lost, "the connection broke"}, true);
                          });
      return;
    }
    case 6:  // not the leader's: its clock is the one that leases are judged by
      if (!shape_.jumps || i == 0) return;
      rebuilt_ = true;
      world->trace("jump", static_cast<uint64_t>(i));
      return node.host()->jump(world->now(), world->between(1, 8000) * kMs);
    default:
      if (!shape_.drains || (i == 0 && !shape_.election) || !world->chance(0.5)) return;
      rebuilt_ = true;
      lossy();
      return node.stop_gently(world->between(10, 3000) * kMs);
  }
}

void Cluster::heal() { healed_ = true; }

}  // namespace torch_mooncake::pool::sim
