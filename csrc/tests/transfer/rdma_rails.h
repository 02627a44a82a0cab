// Two engines over the fake NICs of rdma: for tests of that transport.
#pragma once

#include "transfer/support.h"

namespace transfer_test {

using fake_verbs::FakeDriver;

inline constexpr size_t kMiB = 1 << 20;

// a writes to and reads from b, over `rails` devices each.
struct Rails {
  std::shared_ptr<FakeDriver> here, there;
  EnginePtr a, b;
  PeerPtr peer;
  Memory source, target;
  RegionPtr local, region;
  RemoteRegionPtr remote;

  Rails(int rails, size_t nbytes, uint64_t max_mr_nbytes = 8 << 20, const std::string& settings = "")
      : here(std::make_shared<FakeDriver>(rails, max_mr_nbytes)),
        there(std::make_shared<FakeDriver>(rails, max_mr_nbytes)),
        a(must(Engine::create(options_over(here, "a", settings)))),
        b(must(Engine::create(options_over(there, "b", settings)))),
        source(Way::rdma, nbytes),
        target(Way::rdma, nbytes) {
    peer = must(a->connect(b->addresses().front(), soon()));
    local = source.register_in(*a);
    region = target.register_in(*b);
    remote = must(peer->open(region->descriptor(), soon()));
    wait_for_rails(rails);
  }
  ~Rails() {
    a->close();
    b->close();
    remote.reset();
    peer.reset();
    a.reset();
    b.reset();
    for (auto& driver : {here, there})
      for (size_t i = 0; i < driver->count(); ++i) CHECK(driver->device(i).pairs() == 0);
  }
  int rails_up() const {
    int up = 0;
    for (auto& lane : a->stats().lanes) up += lane.transport == "rdma" && lane.alive;
    return up;
  }
  void wait_for_rails(int n, Deadline deadline = soon(5000)) {
    while (rails_up() != n && !deadline.expired()) usleep(1000);
    REQUIRE(rails_up() == n);
  }
  std::vector<uint64_t> sent() const {
    std::vector<uint64_t> out;
    for (auto& lane : a->stats().lanes)
      if (lane.transport == "rdma") out.push_back(lane.bytes_sent);
    return out;
  }
  OpPtr write(size_t n, OpOptions options = {.deadline = soon()}) {
    return must(a->write({{local, 0, remote, 0, n}}, std::move(options)));
  }
  OpPtr read(size_t n, OpOptions options = {.deadline = soon()}) {
    return must(a->read({{local, 0, remote, 0, n}}, std::move(options)));
  }
};

}  // namespace transfer_test
