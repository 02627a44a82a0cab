// A world of ranks for tests: each with a hub (engine, sockets, threads) of its own, run by a thread of this process.
#pragma once

#include <doctest/doctest.h>

#include <functional>
#include <thread>
#include <vector>

#include "collectives/collectives.h"
#include "common/random.h"

namespace torch_mooncake::coll {

struct World {
  std::vector<HubPtr> hubs;
  std::vector<GroupPtr> groups;
  std::vector<Scratch> scratch;
  int64_t timeout_ms = 20'000;

  explicit World(int n, std::vector<std::string> transports = {"local", "shm", "tcp"}, bool one_host = true)
      : World(hosts(n, one_host), "", std::move(transports)) {}
  // host_of[r]: the number of rank r's host; `algorithms`: what Algorithms::parse() takes.
  explicit World(const std::vector<int>& host_of, std::string_view algorithms = "",
                 std::vector<std::string> transports = {"local", "shm", "tcp"})
      : scratch(host_of.size()) {
    const int n = static_cast<int>(host_of.size());
    HubOptions options;
    options.token = "secret";
    options.transports = std::move(transports);
    GroupOptions group;
    group.id = random_id();
    group.algorithms = Algorithms::parse(algorithms).value();
    for (int rank = 0; rank < n; ++rank) {
      options.name = "rank" + std::to_string(rank);
      options.host_id = "host" + std::to_string(host_of[rank]);
      auto hub = Hub::create(options);
      REQUIRE_MESSAGE(hub.is_ok(), hub.status().to_string());
      hubs.push_back(*hub);
      group.members.push_back((*hub)->self());
    }
    for (int rank = 0; rank < n; ++rank) {
      group.rank = rank;
      auto joined = Group::join(hubs[rank], group);
      REQUIRE_MESSAGE(joined.is_ok(), joined.status().to_string());
      groups.push_back(*joined);
    }
  }
  static std::vector<int> hosts(int n, bool one) {
    std::vector<int> out(n);
    for (int rank = 0; rank < n && !one; ++rank) out[rank] = rank;
    return out;
  }
  ~World() {
    each([](Group& group) { group.leave(Deadline::after_ms(2000)); });
  }

  int size() const { return static_cast<int>(groups.size()); }

  // Runs fn on all ranks at once.
  void each(const std::function<void(Group&)>& fn) {
    std::vector<std::thread> threads;
    for (auto& group : groups) threads.emplace_back([&, group] { fn(*group); });
    for (auto& thread : threads) thread.join();
  }

  // One collective on all ranks; returns how it went on each.
  std::vector<Status> collective(const std::function<Status(const Call&)>& fn) {
    ++sequence;
    std::vector<Status> out(groups.size());
    each([&](Group& group) {
      const int rank = group.rank();
      out[rank] = fn(Call{group, sequence, Deadline::after_ms(timeout_ms), scratch[rank]});
    });
    return out;
  }
  void must(const std::function<Status(const Call&)>& fn) {
    for (const auto& status : collective(fn)) REQUIRE_MESSAGE(status.is_ok(), status.to_string());
  }

  uint64_t sequence = 0;
};

}  // namespace torch_mooncake::coll
