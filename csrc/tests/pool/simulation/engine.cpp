#include "pool/simulation/engine.h"

#include <cstring>

#include "common/random.h"

namespace torch_mooncake::pool::sim {
namespace {

constexpr int64_t kCancelGrace = 250 * kMs;

std::map<const SimEndpoint*, SimEngine*>& engines() {
  static auto* all = new std::map<const SimEndpoint*, SimEngine*>;
  return *all;
}

rpc::Identity identity(Process* process, std::string role) {
  rpc::Identity self;
  self.engine = random_id();
  self.host_id = process->host->id;
  self.name = process->name;
  self.role = std::move(role);
  return self;
}

}  // namespace

EngineMutations engine_mutations;

SimEngine* engine_of(const SimEndpoint* endpoint) {
  const auto it = engines().find(endpoint);
  return it == engines().end() ? nullptr : it->second;
}

// --- regions ---

SimRegion::SimRegion(SimEngine& engine, std::byte* data, uint64_t nbytes, RegionOptions options, MappingPtr map,
                     uint64_t id)
    : engine_(engine), data_(data), nbytes_(nbytes), options_(std::move(options)), map_(std::move(map)), id_(id) {}

std::string SimRegion::descriptor() const {
  ByteWriter out;
  out.put(engine_.id()).put(id_).put(nbytes_);
  return out.take();
}

Result<RemoteRegionPtr> SimPeer::open(std::string_view descriptor, Deadline) {
  ByteReader in(descriptor);
  const Id128 engine = in.get_id();
  const auto id = in.get<uint64_t>(), nbytes = in.get<uint64_t>();
  if (!in.done() || engine != session_->peer().engine) return {Code::invalid_argument, "a region of another engine"};
  if (!session_->alive()) return session_->status();
  return RemoteRegionPtr(std::make_shared<SimRemoteRegion>(shared_from_this(), id, nbytes));
}

// --- engine ---

SimEngine::SimEngine(Process* process, std::string role, std::string)
    : process_(process), endpoint_(process, identity(process, std::move(role))) {
  engines()[&endpoint_] = this;
}

Result<RegionPtr> SimEngine::register_memory(void* data, uint64_t nbytes, RegionOptions options) {
  auto region = std::make_shared<SimRegion>(*this, static_cast<std::byte*>(data), nbytes, std::move(options), nullptr,
                                            next_region_++);
  regions_[region->id()] = region;
  return RegionPtr(region);
}

Result<RegionPtr> SimEngine::register_segment(const std::shared_ptr<Segment>& segment, uint64_t offset, uint64_t nbytes,
                                              RegionOptions options) {
  TM_ASSIGN(auto map, segment->map(Protection::read_write));
  std::byte* data = map->data + offset;
  auto region = std::make_shared<SimRegion>(*this, data, nbytes, std::move(options), std::move(map), next_region_++);
  regions_[region->id()] = region;
  return RegionPtr(region);
}

Status SimEngine::deregister(const RegionPtr& region, Deadline) {
  regions_.erase(region->id());  // an op that has ended touches nothing
  return {};
}

std::shared_ptr<SimRegion> SimEngine::region(uint64_t id) const {
  const auto it = regions_.find(id);
  return it == regions_.end() ? nullptr : it->second;
}

Result<PeerPtr> SimEngine::connect(const std::string& address, Deadline deadline) {
  TM_ASSIGN(auto session, endpoint_.connect(address, deadline, true));
  return PeerPtr(std::make_shared<SimPeer>(std::static_pointer_cast<SimSession>(session)));
}

PeerPtr SimEngine::peer_of(const rpc::SessionPtr& session) {
  return std::make_shared<SimPeer>(std::static_pointer_cast<SimSession>(session));
}

Result<OpPtr> SimEngine::transfer(Direction direction, std::vector<Batch> batches, OpOptions options) {
  if (!options.notify.empty() || options.stream) return no();
  auto op = std::make_shared<SimOp>(*this, direction, std::move(options));
  op->begin(batches);
  return OpPtr(op);
}

// --- ops ---

SimOp::SimOp(SimEngine& engine, Direction direction, OpOptions options)
    : engine_(engine), direction_(direction), options_(std::move(options)) {}

void SimOp::begin(const std::vector<Batch>& batches) {
  const auto self = shared_from_this();
  for (const Batch& batch : batches)
    for (const Extent& e : batch.extents) nbytes_ += e.nbytes;
  for (const Batch& batch : batches) {
    const auto& remote = static_cast<const SimRemoteRegion&>(*batch.remote);
    const auto local = std::static_pointer_cast<SimRegion>(batch.local);
    const auto& session = remote.simulated()->simulated();
    sessions_.push_back(session);
    keep_.push_back(batch.local);
    session->on_close([self](const Status& why) {
      self->end(OpState::failed, {Code::peer_lost, why.message()});  // what is on its way may land all the same
    });
    for (const Extent& e : batch.extents) {
      for (uint64_t at = 0; at < e.nbytes;) {
        const uint64_t n = std::min<uint64_t>(e.nbytes - at, 1 + world->roll(48 << 10));
        add(local, e.local_offset + at, remote, e.remote_offset + at, n);
        at += n;
      }
    }
  }
  if (nbytes_ == 0) return end(OpState::done, {});
  const int64_t until = engine_.process()->host->when(options_.deadline.ns());
  if (until != INT64_MAX)
    world->start_at(until, engine_.process(), [self] { self->stop({Code::deadline_exceeded, "the op's deadline"}); });
}

// One chunk: it waits here for its turn, crosses to the owner of the remote memory, and comes back (with the bytes of
// a read, or with word that those of a write are there).
void SimOp::add(const std::shared_ptr<SimRegion>& local, uint64_t local_offset, const SimRemoteRegion& remote,
                uint64_t remote_offset, uint64_t nbytes) {
  const auto self = shared_from_this();
  const auto ours = remote.simulated()->simulated();
  const auto theirs = ours->other();
  if (!theirs) return;
  const uint64_t id = remote.id();
  Process* owner = theirs->process();
  Process* user = engine_.process();
  const auto sink = sink_;
  std::byte* memory = local->data() + local_offset;
  const bool reads = direction_ == Direction::read;
  const int64_t turn = world->now() + world->between(0, world->chance(0.1) ? 30 * kMs : 500 * kUs);
  world->start_at(turn, user, [=] {
    if (self->ended() || self->stopping_ || !ours->alive()) return;
    auto bytes = std::make_shared<std::string>();
    if (!reads) bytes->assign(reinterpret_cast<const char*>(memory), nbytes);
    int64_t arrival = network->arrival(user, owner);
    if (engine_mutations.late_writes && !reads && world->chance(0.2)) arrival += world->between(500, 4000) * kMs;
    world->start_at(arrival, owner, [=] {
      if (!theirs->alive() && !(engine_mutations.late_writes && !reads)) return;
      SimEngine* engine = engine_of(theirs->endpoint());
      const auto region = engine->region(id);
      if (!region || *sink || remote_offset + nbytes > region->nbytes() || (!reads && !region->writable())) return;
      if (reads) {
        bytes->assign(reinterpret_cast<const char*>(region->data()) + remote_offset, nbytes);
        if (engine_mutations.read) engine_mutations.read(user, engine->id(), id, remote_offset, *bytes);
      } else {
        std::memcpy(region->data() + remote_offset, bytes->data(), nbytes);
        world->trace("landed", remote_offset);
      }
      world->start_at(network->arrival(owner, user), user, [=] {
        if (self->ended() || !ours->alive()) return;
        if (reads) std::memcpy(memory, bytes->data(), nbytes);
        self->chunk_done(nbytes);
      });
    });
  });
}

void SimOp::chunk_done(uint64_t nbytes) {
  done_ += nbytes;
  if (done_ == nbytes_) end(OpState::done, {});
}

void SimOp::stop(const Status& why) {
  if (ended() || stopping_) return;
  stopping_ = true;
  const auto self = shared_from_this();
  const OpState state = why.code() == Code::cancelled ? OpState::cancelled : OpState::timeout;
  auto left = std::make_shared<size_t>(sessions_.size());
  for (const auto& ours : sessions_)
    ours->send([self, sink = sink_, left, state, why](SimSession& at) {
      *sink = true;
      at.send([self, left, state, why](SimSession&) {
        if (--*left > 0 || self->ended()) return;
        self->quiescent_ = true;
        self->end(state, why);
      });
    });
  world->start_at(world->now() + kCancelGrace, engine_.process(), [self, state, why] { self->end(state, why); });
}

void SimOp::end(OpState state, const Status& status) {
  if (ended()) return;
  state_ = state;
  status_ = status;
  quiescent_ = quiescent_ || state == OpState::done;
  keep_.clear();
  options_.keep = nullptr;
  ended_.wake();
  if (options_.on_end) world->start(engine_.process(), [fn = std::move(options_.on_end), status] { fn(status); });
  for (const auto& [watcher, tag] : std::exchange(watchers_, {})) watcher->op_ended(tag);
}

Status SimOp::wait(Deadline deadline) {
  while (!ended()) {
    if (deadline.expired()) return {Code::deadline_exceeded, "waiting for an op"};
    ended_.wait(engine_.process()->host->when(deadline.ns()));
  }
  return status_;
}

bool SimOp::watch(std::shared_ptr<OpWatcher> watcher, uint64_t tag) {
  if (ended()) return false;
  watchers_.emplace_back(std::move(watcher), tag);
  return true;
}

}  // namespace torch_mooncake::pool::sim
