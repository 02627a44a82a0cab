// Another process with an engine of its own, told what to do line by line. It is this test's binary run again, so that
// it starts without our threads. Killed and reaped when the object goes. For one source file of a test program.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <sstream>
#include <string>

#include "common/random.h"
#include "transfer/support.h"

namespace transfer_test {

class Child {
 public:
  explicit Child(Way way, const std::string& failpoints = "", const std::string& listen = "tcp://127.0.0.1:0");
  ~Child();
  Child(const Child&) = delete;

  const std::string& address() const { return address_; }
  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  void stop();  // SIGSTOP, and wait until it stands still
  void kill_and_reap();

  // One command, one line of answer. The commands are in run_command().
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

// ---- The other process

inline std::string from_hex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

inline std::string run_command(Engine& engine, Way way, std::istringstream in) {
  struct Named {
    Memory memory;
    RegionPtr region;
  };
  static std::map<std::string, Named> regions;
  static std::map<std::string, PeerPtr> peers;
  static std::map<std::string, RemoteRegionPtr> remotes;
  static OpPtr op;
  std::string verb, name;
  in >> verb >> name;
  if (verb == "make" || verb == "make_local") {  // make NAME BYTES SEED; make_local: of the kind an initiator has
    size_t nbytes;
    uint64_t seed;
    in >> nbytes >> seed;
    Memory memory(verb == "make" ? way : local_of(way), nbytes);
    if (seed) fill(memory.data, nbytes, seed);
    auto region = memory.register_in(engine, {.label = name});
    regions.emplace(name, Named{memory, region});
    return to_hex(region->descriptor());
  }
  if (verb == "cuda") {  // cuda NAME BYTES SEED PARTS SKIP: a part of an allocation
    size_t nbytes, parts, skip;
    uint64_t seed;
    in >> nbytes >> seed >> parts >> skip;
    Memory memory(Way::cuda, 1);
    memory.device = FakeCuda::install().allocate(nbytes + skip + 100, parts);
    memory.data = static_cast<std::byte*>(memory.device.get()) + skip;
    memory.nbytes = nbytes;
    if (seed) fill(memory.data, nbytes, seed);
    regions.erase(name);
    regions.emplace(name, Named{memory, memory.register_in(engine, {.label = name})});
    return "ok";
  }
  if (verb == "reuse") {  // frees the region's memory, and gives its address to another allocation
    auto& memory = regions.at(name).memory;
    void* at = memory.device.get();
    memory.device.reset();
    memory.device = FakeCuda::install().allocate(memory.nbytes, 1, 0, at);
    return "ok";
  }
  if (verb == "part") {  // part NAME OF OFFSET BYTES: another region in the memory of one
    std::string of;
    size_t offset, nbytes;
    in >> of >> offset >> nbytes;
    Memory memory = regions.at(of).memory;
    memory.data += offset;
    memory.nbytes = nbytes;
    regions.emplace(name, Named{memory, memory.register_in(engine, {.label = name})});
    return "ok";
  }
  if (verb == "weak") {  // weak NAME OF: a region that does not keep the memory
    std::string of;
    in >> of;
    Memory memory = regions.at(of).memory;
    regions.emplace(name, Named{memory, memory.register_in(engine, {.writable = false, .label = name})});
    return "ok";
  }
  if (verb == "edges") {  // are the bytes of the allocation before and behind the region as they were?
    auto& memory = regions.at(name).memory;
    auto* begin = static_cast<std::byte*>(memory.device.get());
    bool zero = all_zero(begin, static_cast<size_t>(memory.data - begin)) && all_zero(memory.data + memory.nbytes, 100);
    return zero ? "zero" : "written";
  }
  if (verb == "again") {  // registers the same memory once more
    auto& named = regions.at(name);
    named.region = named.memory.register_in(engine, {.label = name});
    return "ok";
  }
  if (verb == "fake") {  // fake FLAG VALUE
    auto& cuda = FakeCuda::install();
    int value;
    in >> value;
    if (name == "no_share") cuda.no_share = value != 0;
    if (name == "no_ids") cuda.no_ids = value != 0;
    if (name == "copy_us") cuda.copy_us = value;
    if (name == "hang_pins") cuda.hang_pins = value != 0;
    if (name == "no_pins") cuda.no_pins = value != 0;
    if (name == "hang") cuda.hang = value != 0;
    if (name == "hardware") cuda.hardware = static_cast<char>(value);
    if (name == "mappings") return std::to_string(cuda.mappings_alive);
    return "ok";
  }
  if (verb == "descriptor") return to_hex(regions.at(name).region->descriptor());
  if (verb == "holds") {  // holds NAME BYTES SEED
    size_t nbytes;
    uint64_t seed;
    in >> nbytes >> seed;
    auto* data = regions.at(name).memory.data;
    bool same = seed ? mismatch(data, nbytes, seed) == nbytes : all_zero(data, nbytes);
    return same ? "yes" : "no";
  }
  if (verb == "zero") {
    std::memset(regions.at(name).memory.data, 0, regions.at(name).memory.nbytes);
    return "ok";
  }
  if (verb == "digest") {  // of all bytes
    uint64_t sum = 0;
    auto& memory = regions.at(name).memory;
    for (size_t i = 0; i < memory.nbytes; ++i) sum = sum * 31 + static_cast<uint8_t>(memory.data[i]);
    return std::to_string(sum);
  }
  if (verb == "deregister") {  // deregister NAME MS
    int64_t ms;
    in >> ms;
    Status s = engine.deregister(regions.at(name).region, Deadline::after_ms(ms));
    return std::string(code_name(s.code())) + " " + s.message();
  }
  if (verb == "quarantined") return std::to_string(engine.stats().quarantined_regions);
  if (verb == "notes") return std::to_string(engine.stats().notifications);
  if (verb == "sessions") return std::to_string(engine.stats().sessions);
  if (verb == "connect") {  // connect NAME ADDRESS
    std::string address;
    in >> address;
    peers[name] = must(engine.connect(address, soon()));
    return "ok";
  }
  if (verb == "open") {  // open NAME PEER HEX
    std::string peer, hex;
    in >> peer >> hex;
    remotes[name] = must(peers.at(peer)->open(from_hex(hex), soon()));
    return remotes[name]->transport();
  }
  if (verb == "write" || verb == "read") {  // write LOCAL REMOTE BYTES MS
    std::string remote;
    size_t nbytes;
    int64_t ms;
    in >> remote >> nbytes >> ms;
    std::vector<Slice> slices = {{regions.at(name).region, 0, remotes.at(remote), 0, nbytes}};
    OpOptions options{.deadline = Deadline::after_ms(ms)};
    op = must(verb == "write" ? engine.write(slices, options) : engine.read(slices, options));
    return "ok";
  }
  if (verb == "keep") {  // keep write|read LOCAL REMOTE BYTES: one after the other, whatever they say
    std::string local, remote;
    size_t nbytes;
    in >> local >> remote >> nbytes;
    for (;;) {
      std::vector<Slice> slices = {{regions.at(local).region, 0, remotes.at(remote), 0, nbytes}};
      auto started = name == "write" ? engine.write(slices, {}) : engine.read(slices, {});
      if (started) (void)(*started)->wait();
    }
  }
  if (verb == "wait") {
    Status s = op->wait();
    return std::string(code_name(s.code())) + " " + s.message();
  }
  return "unknown command " + verb;
}

inline void be_the_other_process() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // also when it is stopped
  auto way = static_cast<Way>(std::stoi(getenv("TM_TEST_WAY")));
  FILE* in = fdopen(std::stoi(getenv("TM_TEST_IN")), "r");
  FILE* out = fdopen(std::stoi(getenv("TM_TEST_OUT")), "w");
  auto options = options_for(way, "child");
  options.listen = {getenv("TM_TEST_LISTEN")};
  auto engine = must(Engine::create(options));
  fprintf(out, "%s\n", engine->addresses().front().c_str());
  fflush(out);
  char* line = nullptr;
  size_t capacity = 0;
  while (getline(&line, &capacity, in) > 0) {
    std::string answer = run_command(*engine, way, std::istringstream(line));
    fprintf(out, "%s\n", answer.c_str());
    fflush(out);
  }
  _exit(0);
}

// Not a test in the parent; the body of a Child.
TEST_CASE("the other process") {
  if (getenv("TM_TEST_OUT")) be_the_other_process();
}

inline Child::Child(Way way, const std::string& failpoints, const std::string& listen) {
  if (way == Way::rdma) fake_verbs::Fabric::instance();  // of both processes
  int down[2], up[2];
  REQUIRE(pipe2(down, O_CLOEXEC) == 0);
  REQUIRE(pipe2(up, O_CLOEXEC) == 0);
  std::vector<std::string> environment;
  environment.push_back("TM_TEST_WAY=" + std::to_string(static_cast<int>(way)));
  environment.push_back("TM_TEST_LISTEN=" + listen);
  environment.push_back("TM_TEST_IN=" + std::to_string(down[0]));
  environment.push_back("TM_TEST_OUT=" + std::to_string(up[1]));
  // Its main thread and its engine's are ordered by messages to and from us, which a TSan in there cannot see.
  environment.push_back("TSAN_OPTIONS=report_bugs=0");
  if (!failpoints.empty()) environment.push_back("TM_FAILPOINTS=" + failpoints);
  for (char** e = environ; *e; ++e) environment.push_back(*e);
  std::vector<char*> env;
  for (auto& e : environment) env.push_back(e.data());
  env.push_back(nullptr);
  const char* args[] = {"/proc/self/exe", "-tc=the other process", "-ni", "-nv", nullptr};
  pid_ = vfork();
  if (pid_ == 0) {
    fcntl(down[0], F_SETFD, 0);
    fcntl(up[1], F_SETFD, 0);
    execve(args[0], const_cast<char**>(args), env.data());
    _exit(127);
  }
  close(down[0]);
  close(up[1]);
  to_ = down[1];
  from_ = up[0];
  address_ = answer();
}

inline Child::~Child() {
  kill_and_reap();
  close(to_);
  close(from_);
}

inline void Child::kill_and_reap() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

inline void Child::stop() {
  signal(SIGSTOP);
  int state = 0;
  REQUIRE(waitpid(pid_, &state, WUNTRACED) == pid_);
  REQUIRE(WIFSTOPPED(state));
}

inline void Child::tell(const std::string& command) {
  std::string line = command + "\n";
  REQUIRE(write(to_, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
}

inline std::string Child::answer() {
  for (auto until = soon(60'000);;) {
    if (auto end = pending_.find('\n'); end != std::string::npos) {
      std::string line = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      return line;
    }
    pollfd poll_fd{from_, POLLIN, 0};
    REQUIRE(poll(&poll_fd, 1, until.remaining_ms()) == 1);
    char buffer[4096];
    ssize_t n = read(from_, buffer, sizeof buffer);
    REQUIRE(n > 0);
    pending_.append(buffer, static_cast<size_t>(n));
  }
}

inline std::string Child::ask(const std::string& command) {
  tell(command);
  return answer();
}

inline std::string Child::make(const std::string& name, size_t nbytes, uint64_t seed) {
  return from_hex(ask("make " + name + " " + std::to_string(nbytes) + " " + std::to_string(seed)));
}

inline RemoteRegionPtr Child::open(Peer& peer, const std::string& name) {
  return must(peer.open(from_hex(ask("descriptor " + name)), soon()));
}

inline bool Child::holds(const std::string& name, size_t nbytes, uint64_t seed) {
  return ask("holds " + name + " " + std::to_string(nbytes) + " " + std::to_string(seed)) == "yes";
}

}  // namespace transfer_test
