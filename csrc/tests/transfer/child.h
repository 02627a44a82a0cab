// Another process with an engine of its own, told what to do line by line. It is this test's binary run again, so that
// it starts without our threads. Killed and reaped when the object goes.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>

#include "transfer/support.h"

namespace transfer_test {

class Child {
 public:
  explicit Child(Way way, const std::string& failpoints = "");
  ~Child();
  Child(const Child&) = delete;

  const std::string& address() const { return address_; }
  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  void stop();  // SIGSTOP, and wait until it stands still
  void kill_and_reap();

  // One command, one line of answer. The commands are in child.cpp.
  std::string ask(const std::string& command);
  // The command without waiting, and its answer later.
  void tell(const std::string& command);
  std::string answer();
  // Memory registered there, zero-filled or with a pattern.
  std::string make(const std::string& name, size_t nbytes, uint64_t seed = 0);
  RemoteRegionPtr open(Peer& peer, const std::string& name);
  bool holds(const std::string& name, size_t nbytes, uint64_t seed);  // that pattern, or zeros for seed 0

 private:
  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
  std::string address_, pending_;
};

// A connected engine here, and a child.
struct TwoProcesses {
  Way way;
  Child child;
  EnginePtr engine;
  PeerPtr peer;
  explicit TwoProcesses(Way w, const std::string& failpoints = "")
      : way(w), child(w, failpoints), engine(must(Engine::create(options_for(w, "parent")))) {
    peer = must(engine->connect(child.address(), soon()));
  }
  ~TwoProcesses() { engine->close(); }
  RemoteRegionPtr remote(const std::string& name, size_t nbytes, uint64_t seed = 0) {
    child.make(name, nbytes, seed);
    return child.open(*peer, name);
  }
};

}  // namespace transfer_test
