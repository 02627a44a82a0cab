// A pool on simulated hosts: on each a keeper that holds the memory, its worker (the shipped NodeService with its Donor
// and Home), and what may happen to them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pool/node_service.h"
#include "pool/simulation/election.h"
#include "pool/simulation/engine.h"

namespace torch_mooncake::pool::sim {

struct Shape {  // of a run, drawn from its seed
  int hosts = 2;
  uint64_t memory_bytes = 1 << 20;
  bool crowded = false;  // the pool is too small for its values
  double crash_at_failpoint = 0, yield_at_failpoint = 0.1;
  bool crashes = false, host_crashes = false, client_crashes = false, pauses = false, partitions = false,
       breaks = false, jumps = false, drains = false;
  bool election = false;
  int64_t bridge_ms = 0;
};

// One host's node. The leader's is host 0's, or elected in `etcd`.
class Node {
 public:
  Node(Host* host, const Shape& shape, std::string leader, Etcd* etcd);
  std::string unix_address() const { return "unix://" + host_->id + "/node.sock"; }
  std::string tcp_address() const { return "tcp://" + host_->id + ":7400"; }
  void start(int64_t when);  // a worker, with what the keeper holds
  // The worker is gone, and its keeper starts another one.
  void crash(int64_t restart_after);
  void lose_memory() { held_.clear(); }
  // Tells everybody and stops. On a fiber of the worker.
  void stop_gently(int64_t restart_after);

  Host* host() const { return host_; }
  Process* worker() const { return worker_; }  // null: none now
  NodeService* service() const { return service_; }
  SimEngine* engine() const { return engine_.get(); }
  std::vector<HeldSegment> slot_pages() const;
  bool drained = false;

 private:
  void serve();
  void hold(const HeldSegment& segment);

  Host* const host_;
  const Shape& shape_;
  const std::string leader_;
  Etcd* const etcd_;
  std::map<std::pair<SegmentRole, uint64_t>, HeldSegment> held_;
  Process* worker_ = nullptr;
  std::shared_ptr<SimEngine> engine_;
  NodeService* service_ = nullptr;  // never destroyed: a killed worker's is left as it is
  int incarnation_ = 0;
};

class Cluster {
 public:
  explicit Cluster(const Shape& shape);
  const Shape& shape() const { return shape_; }
  Node& node(int i) { return *nodes_[static_cast<size_t>(i)]; }
  int hosts() const { return static_cast<int>(nodes_.size()); }
  Host* leader_host() const { return nodes_[0]->host(); }

  // One thing that goes wrong. What it did to values is in lossy_since().
  void fault();
  void heal();  // no more faults; all that is down comes up
  void crash_host(int i);
  // Values may have been lost since that time (evicted, or with a node), on the world's clock.
  int64_t lossy_since() const { return lossy_since_; }
  void lossy() { lossy_since_ = std::min(lossy_since_, world->now()); }
  bool rebuilt() const { return rebuilt_; }  // a value may have expired early

  // Client processes, to be paused and killed with the others. on_killed_client: start another.
  void add_client(Process* process, int host);
  std::function<void(int host)> on_killed_client;

 private:
  void passed(std::string_view failpoint);
  void lose_etcd_then_member(Host* leader);
  void end_silent(Process* process, int64_t after);
  Process* some_process();
  void kill_client(Process* process);

  const Shape shape_;
  Etcd etcd_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::pair<Process*, int>> clients_;
  int64_t lossy_since_ = INT64_MAX;
  bool rebuilt_ = false, healed_ = false, lost_etcd_ = false;
};

}  // namespace torch_mooncake::pool::sim
