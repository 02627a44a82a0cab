// Clients that put, get, map, take, remove and wait, and remember what they were told. Every value says in all its
// words which one it is, so that any byte that is read can be traced to its put.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "pool/client.h"
#include "pool/linearizability.h"
#include "pool/simulation/cluster.h"

namespace torch_mooncake::pool::sim {

// What was done to the named keys, and what came of it; values are numbers from 1. Times are of the leader's clock, by
// which values expire.
class History {
 public:
  struct Value {
    std::string key;
    uint64_t nbytes = 0;  // of one part
    uint32_t parts = 1;
    bool never_stored = false;  // its put said so
  };
  explicit History(Host* leader) : leader_(leader) {}
  int64_t stamp() const { return leader_->clock(world->now()); }
  int64_t stamp_of(int64_t when) const { return leader_->clock(when); }
  uint64_t new_value(const std::string& key, uint64_t nbytes, uint32_t parts);
  const Value& value(uint64_t number) const { return values_.at(number - 1); }
  void never_stored(uint64_t number) { values_.at(number - 1).never_stored = true; }

  size_t add(const std::string& key, test::HistoryOp op);
  test::HistoryOp& at(const std::string& key, size_t i) { return ops_[key][i]; }
  void erase(const std::string& key, size_t i) { ops_[key][i].called = INT64_MAX; }
  void read(const std::string& key, uint64_t value, int64_t called);  // 0: missing
  // Empty: linearizable, if whatever was lost was lost after `lossy_since` (of the world's clock).
  // `early`: values may have expired before their time.
  std::string check(int64_t lossy_since, bool early) const;

 private:
  Host* const leader_;
  std::vector<Value> values_;
  std::map<std::string, std::vector<test::HistoryOp>> ops_;
};

std::string make_bytes(uint64_t number, uint32_t part, uint64_t nbytes);
// The number of the value of which these are all bytes, all parts; 0 and a violation if they are of none.
uint64_t identify(const History& history, const std::string& key, std::string_view bytes);

class Workload {
 public:
  Workload(Cluster& cluster, History& history, int clients);
  void stop() { stopping_ = true; }
  bool idle() const { return running_ == 0; }
  void wait_idle(int64_t until);
  // One more read of everything by somebody of each host, when all is quiet.
  void read_all();
  const std::vector<std::string>& keys() const { return keys_; }
  const std::vector<std::string>& sealed() const { return sealed_; }

 private:
  struct Round {  // one object of two writers
    std::string key, group;
    uint64_t value = 0;
    size_t op = 0;
    int started = 0, stored = 0, refused = 0;
  };
  void start_client(int host);
  void client(int host, Process* process);
  void user(const ClientPtr& client, Process* process);
  void act(Client& client);
  void put(Client& client, const std::string& key);
  void put_part(Client& client, const std::string& key);
  void put_sealed(Client& client, const std::string& key);
  void get(Client& client, const std::string& key, bool consume, bool wait);
  void hold(Client& client, const std::string& key);
  void get_sealed(Client& client, const std::string& key);
  void remove(Client& client, const std::string& key);
  void exists(Client& client, const std::string& key);
  void list(Client& client);
  uint64_t some_size();
  Deadline some_deadline();
  void begin(int64_t timeout_ms);
  void in_time(const char* what);

  Cluster& cluster_;
  History& history_;
  std::vector<std::string> keys_, sealed_;
  uint64_t usual_size_ = 0;  // of most puts; 0: of none
  std::map<std::string, Round> rounds_;
  bool stopping_ = false;
  int running_ = 0;
  std::map<Process*, int> users_;
};

}  // namespace torch_mooncake::pool::sim
