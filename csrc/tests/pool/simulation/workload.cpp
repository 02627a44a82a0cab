#include "pool/simulation/workload.h"

#include <algorithm>

namespace torch_mooncake::pool::sim {

using test::HistoryOp;
using What = HistoryOp::What;

namespace {

constexpr uint64_t kSealedBytes = 36'000;

bool unknown(const Status& s) { return s.message().starts_with("outcome unknown"); }

Result<std::string> read_whole(Client& client, const ObjectPtr& object, Deadline deadline) {
  std::string out(object->info().nbytes, '\0');
  const iovec v{out.data(), out.size()};
  const Status s = client.read(object, 0, std::span(&v, out.empty() ? 0 : 1), deadline);
  if (!s.is_ok()) return s;
  return out;
}

// One call that must end in time: by its deadline and a second, not counting what its process was paused.
struct InTime {
  InTime(const char* call, int64_t timeout_ms)
      : call(call), timeout_ns(timeout_ms * kMs), began(world->now()), process(world->current()->process) {}
  ~InTime() {
    const int64_t took = world->now() - began, limit = timeout_ns + timeout_ns / 8 + kSecond;
    if (took > limit && process->paused_until < began)
      world->violation(std::string(call) + " took " + std::to_string(took / kMs) + " ms of " +
                       std::to_string(timeout_ns / kMs));
  }
  const char* const call;
  const int64_t timeout_ns, began;
  Process* const process;
};

}  // namespace

Workload::Workload(Cluster& cluster, History& history, int clients) : cluster_(cluster), history_(history) {
  keys_ = {"a", "b", "c"};
  sealed_ = {"sealed1", "sealed2"};
  if (world->chance(0.6)) usual_size_ = some_size();  // clients have room in advance then
  cluster.on_killed_client = [this](int host) {
    if (!stopping_) start_client(host);
  };
  for (int i = 0; i < clients; ++i) start_client(i % cluster.hosts());
}

void Workload::start_client(int host) {
  static int number = 0;
  Process* process = world->process("client" + std::to_string(++number), cluster_.node(host).host());
  cluster_.add_client(process, host);
  world->start(process, [this, host, process] { client(host, process); });
}

void Workload::client(int host, Process* process) {
  auto* engine = new std::shared_ptr<SimEngine>(std::make_shared<SimEngine>(process, "client", ""));
  process->on_killed = [this, engine, process] {
    running_ -= std::exchange(users_[process], 0);
    (*engine)->endpoint().died(process->host->lost);
  };
  while (!stopping_) {
    ClientOptions options;
    options.node_address = cluster_.node(host).unix_address();
    options.name = process->name;
    options.host_id = process->host->id;
    options.engine = *engine;
    auto client = Client::connect(options, Deadline::after_ms(5000));
    if (!client.is_ok()) {
      world->sleep_until(world->now() + world->between(50, 300) * kMs);
      continue;
    }
    const int users = 1 + static_cast<int>(world->roll(2));
    running_ += users;
    users_[process] += users;
    for (int i = 1; i < users; ++i) world->start(process, [this, c = *client, process] { user(c, process); });
    user(*client, process);
    return;
  }
}

void Workload::user(const ClientPtr& client, Process* process) {
  while (!stopping_) {
    world->sleep_until(world->now() + world->between(0, world->chance(0.1) ? 900 : 60) * kMs);
    if (!stopping_) act(*client);
  }
  --running_;
  if (--users_[process] == 0) client->close();
}

void Workload::act(Client& client) {
  const std::string& key = keys_[world->roll(keys_.size())];
  const auto what = world->roll(100);
  if (what < 34) return put(client, key);
  if (what < 40) return put_part(client, key);
  if (what < 68) return get(client, key, false, false);
  if (what < 78) return hold(client, key);
  if (what < 83) return get(client, key, true, false);
  if (what < 88) return remove(client, key);
  if (what < 91) return exists(client, key);
  if (what < 93) return get(client, key, false, true);
  if (what < 94) return list(client);
  if (what < 97) return put_sealed(client, sealed_[world->roll(sealed_.size())]);
  return get_sealed(client, sealed_[world->roll(sealed_.size())]);
}

uint64_t Workload::some_size() {
  if (usual_size_ != 0 && world->chance(0.7)) return usual_size_;
  switch (world->roll(5)) {
    case 0:
      return 8 + world->roll(200);
    case 1:
      return 3000 + world->roll(3000);
    case 2:
      return 17'000 + world->roll(15'000);
    case 3:
      return 32'768 + world->roll(9000);
    default:
      return 60'000 + world->roll(70'000);
  }
}

// --- puts ---

void Workload::put(Client& client, const std::string& key) {
  PutOptions options;
  const auto mode = world->roll(8);
  options.if_exists = mode == 0 ? IfExists::keep : mode == 1 ? IfExists::error : IfExists::replace;
  // Times to live are checked by the clock of host 0, whose home it is that counts them if leaders are not elected.
  if (world->chance(0.25) && !cluster_.shape().election) options.ttl_ms = 1 + world->roll(1500);
  if (world->chance(0.2)) {
    options.replicas = 2;
    options.replicas_lenient = true;
  }
  options.checksum = world->chance(0.1);
  const uint64_t nbytes = some_size(), number = history_.new_value(key, nbytes, 1);
  const std::string bytes = make_bytes(number, 0, nbytes);
  const bool replace = options.if_exists == IfExists::replace;
  const int64_t called = history_.stamp();
  const size_t op = history_.add(key, {replace ? What::put : What::put_if_absent, number, called, INT64_MAX});
  const int64_t ttl_ns = static_cast<int64_t>(options.ttl_ms) * kMs;
  size_t expiry = SIZE_MAX;
  if (ttl_ns) expiry = history_.add(key, {What::expire, number, called, INT64_MAX});
  const int64_t timeout_ms = world->between(150, world->chance(0.2) ? 800 : 12'000);
  const iovec v{const_cast<char*>(bytes.data()), bytes.size()};
  const auto result = [&] {
    InTime in_time("put", timeout_ms);
    return client.put(key, std::to_string(number), std::span(&v, 1), options, Deadline::after_ms(timeout_ms));
  }();
  world->trace("put", number, [&] {
    return key + " = " + std::to_string(number) + ", " + std::to_string(nbytes) +
           " bytes: " + (result.is_ok() ? (result->stored ? "stored" : "kept") : result.status().to_string());
  });
  if (!result.is_ok() && unknown(result.status())) return;
  const bool stored = result.is_ok() && result->stored;
  if (stored) {
    history_.at(key, op).returned = history_.stamp();
    if (ttl_ns) {
      history_.at(key, expiry).called = called + ttl_ns;
      history_.at(key, expiry).returned = history_.stamp() + ttl_ns;
    }
    return;
  }
  history_.never_stored(number);
  history_.erase(key, op);
  if (ttl_ns) history_.erase(key, expiry);
  if (result.is_ok() || result.status().code() == Code::key_exists)
    history_.add(key, {What::kept, 0, called, history_.stamp()});
}

// Two writers meet in a round. It is one put, which begins when the first is called and ends when both are told.
void Workload::put_part(Client& client, const std::string& key) {
  Round& round = rounds_[key];
  const uint32_t part = static_cast<uint32_t>(round.started % 2);
  if (part == 0) {
    round = {};
    const uint64_t nbytes = some_size();
    round.key = key;
    round.value = history_.new_value(key, nbytes, 2);
    round.group = "round" + std::to_string(round.value);
    round.op = history_.add(key, {What::put, round.value, history_.stamp(), INT64_MAX});
  }
  ++round.started;
  const uint64_t number = round.value;
  const std::string bytes = make_bytes(number, part, history_.value(number).nbytes);
  PutOptions options;
  options.part = part;
  options.parts = 2;
  options.group = round.group;
  const int64_t timeout_ms = world->between(300, 4000);
  const iovec v{const_cast<char*>(bytes.data()), bytes.size()};
  const auto result = [&] {
    InTime in_time("put of a part", timeout_ms);
    return client.put(key, std::to_string(number), std::span(&v, 1), options, Deadline::after_ms(timeout_ms));
  }();
  world->trace("put part", number, [&] {
    return key + " = " + std::to_string(number) + "/" + std::to_string(part) + ": " +
           (result.is_ok() ? "stored" : result.status().to_string());
  });
  Round* mine = &rounds_[key];
  if (mine->value != number) return;  // a later round has begun: the outcome of this one is left open
  if (result.is_ok()) {
    ++mine->stored;
  } else if (!unknown(result.status())) {
    ++mine->refused;
  }
  if (mine->stored && mine->refused)
    return world->violation(key + ": one writer of value " + std::to_string(number) +
                            " was told that it is stored, the other not");
  if (mine->stored == 2) history_.at(key, mine->op).returned = history_.stamp();
  if (mine->refused == 2) {
    history_.never_stored(number);
    history_.erase(key, mine->op);
  }
}

void Workload::put_sealed(Client& client, const std::string& key) {
  PutOptions options;
  options.kind = Kind::sealed;
  const std::string bytes = make_bytes(std::stoull(key.substr(6)), 0, kSealedBytes);
  const iovec v{const_cast<char*>(bytes.data()), bytes.size()};
  const int64_t timeout_ms = world->between(150, 5000);
  InTime in_time("put of a sealed key", timeout_ms);
  const auto result = client.put(key, "s", std::span(&v, 1), options, Deadline::after_ms(timeout_ms));
  world->trace("seal", 0, [&] { return key + ": " + (result.is_ok() ? "ok" : result.status().to_string()); });
}

// --- reads ---

void Workload::get(Client& client, const std::string& key, bool consume, bool wait) {
  const int64_t called = history_.stamp();
  const int64_t timeout_ms = wait ? world->between(50, 1500) : world->between(200, 12'000);
  InTime in_time("get", timeout_ms);
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  for (;;) {
    auto object = wait ? client.wait(key, {}, deadline) : client.locate(key, {}, deadline);
    if (!object.is_ok()) {
      world->trace("get", 0, [&] { return key + ": " + object.status().to_string(); });
      if (object.status().code() == Code::key_not_found) history_.read(key, 0, called);
      return;
    }
    world->trace("located", (*object)->info().version.counter, [&] {
      return key + ": version " + std::to_string((*object)->info().version.view) + "." +
             std::to_string((*object)->info().version.counter);
    });
    const auto bytes = read_whole(client, *object, deadline);
    if (!bytes.is_ok()) {
      world->trace("get", 0, [&] { return key + ": " + bytes.status().to_string(); });
      if (bytes.status().code() == Code::corrupt) world->violation(key + ": " + bytes.status().to_string());
      if (bytes.status().code() == Code::key_not_found && !deadline.expired()) continue;  // superseded: again
      return;
    }
    const uint64_t number = identify(history_, key, *bytes);
    world->trace("get", number, [&] { return key + ": value " + std::to_string(number); });
    if (number == 0) return;
    if ((*object)->info().meta != std::to_string(number))
      world->violation(key + ": value " + std::to_string(number) + " has the metadata of " + (*object)->info().meta);
    if (!consume) return history_.read(key, number, called);
    const size_t op = history_.add(key, {What::consume, number, called, INT64_MAX});
    const auto taken = client.remove(key, deadline, (*object)->info().version);
    world->trace("take", number, [&] {
      return key + ": " + (taken.is_ok() ? (*taken ? "taken" : "not there") : taken.status().to_string());
    });
    if (taken.is_ok() && *taken) {
      history_.at(key, op).returned = history_.stamp();
    } else if (taken.is_ok() || !unknown(taken.status())) {
      history_.erase(key, op);
    }
    return;
  }
}

// As memory, for a while. What is mapped keeps its bytes, whatever becomes of the key.
void Workload::hold(Client& client, const std::string& key) {
  const int64_t called = history_.stamp();
  const int64_t timeout_ms = world->between(200, 8000);
  MappedObject mapped;
  uint64_t number = 0;
  {
    InTime in_time("map", timeout_ms);
    const Deadline deadline = Deadline::after_ms(timeout_ms);
    auto object = client.locate(key, {}, deadline);
    if (!object.is_ok()) {
      if (object.status().code() == Code::key_not_found) history_.read(key, 0, called);
      return;
    }
    auto map = client.map(*object, world->chance(0.7), deadline);
    if (!map.is_ok()) return;
    mapped = std::move(*map);
    number = identify(history_, key, {reinterpret_cast<const char*>(mapped.data.get()), mapped.nbytes});
    if (number != 0) history_.read(key, number, called);
  }
  world->trace("map", number, [&] { return key + ": value " + std::to_string(number); });
  for (auto n = world->roll(6); n > 0 && number != 0; --n) {
    world->sleep_until(world->now() + world->between(0, 500) * kMs);
    identify(history_, key, {reinterpret_cast<const char*>(mapped.data.get()), mapped.nbytes});
  }
  world->trace("unmap", number);
}

void Workload::get_sealed(Client& client, const std::string& key) {
  const Deadline deadline = Deadline::after_ms(3000);
  auto object = client.locate(key, {}, deadline);
  if (!object.is_ok()) return;
  if (const auto bytes = read_whole(client, *object, deadline); bytes.is_ok()) identify(history_, key, *bytes);
}

void Workload::remove(Client& client, const std::string& key) {
  const size_t op = history_.add(key, {What::remove, 0, history_.stamp(), INT64_MAX});
  const int64_t timeout_ms = world->between(150, 8000);
  InTime in_time("remove", timeout_ms);
  const int broken = world->current()->process->broken;
  const auto removed = client.remove(key, Deadline::after_ms(timeout_ms));
  world->trace("remove", op, [&] {
    return key + ": " + (removed.is_ok() ? (*removed ? "removed" : "was not there") : removed.status().to_string());
  });
  if (!removed.is_ok()) return;
  const int64_t called = history_.at(key, op).called;
  history_.at(key, op).returned = history_.stamp();
  if (!*removed) history_.at(key, op).what = What::removed_nothing;
  if (world->current()->process->broken != broken) history_.add(key, {What::remove_again, 0, called, history_.stamp()});
}

void Workload::exists(Client& client, const std::string& key) {
  const int64_t called = history_.stamp();
  const std::string keys[] = {key};
  InTime in_time("exists", 5000);
  const auto there = client.exists(keys, Deadline::after_ms(5000));
  if (!there.is_ok()) return;
  history_.add(key, {(*there)[0] ? What::kept : What::removed_nothing, 0, called, history_.stamp()});
}

void Workload::list(Client& client) {
  InTime in_time("keys", 5000);
  const auto all = client.keys("", Deadline::after_ms(5000));
  if (!all.is_ok()) return;
  for (const std::string& key : *all)
    if (!std::count(keys_.begin(), keys_.end(), key) && !std::count(sealed_.begin(), sealed_.end(), key))
      world->violation("a listing has the key '" + key + "', which nobody has put");
}

// --- the end ---

void Workload::wait_idle(int64_t until) {
  while (!idle() && world->now() < until) world->sleep_until(world->now() + 100 * kMs);
}

}  // namespace torch_mooncake::pool::sim
