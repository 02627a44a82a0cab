#include "transfer/peer.h"

#include <algorithm>

#include "common/failpoint.h"
#include "transfer/cuda/endpoint.h"
#include "transfer/engine_impl.h"
#include "transfer/file/endpoint.h"
#include "transfer/local/endpoint.h"
#include "transfer/local/memory.h"
#include "transfer/process_vm/endpoint.h"
#include "transfer/rdma/endpoint.h"
#include "transfer/shm/endpoint.h"
#include "transfer/stage/endpoint.h"
#include "transfer/tcp/endpoint.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {

PeerImpl::PeerImpl(EngineImpl& engine, rpc::SessionPtr session)
    : engine_(engine),
      engine_weak_(engine.weak_from_this()),
      session_(std::move(session)),
      name_(identity().name + " (pid " + std::to_string(identity().pid) + ")"),
      grants_(name_) {
  // No options: they take part only where somebody has registered a file or a device.
  auto of_this_process = [this, added = false]() mutable {
    if (std::exchange(added, true)) return;
    endpoints_.push_back(std::make_unique<CudaEndpoint>(*this, false));
    endpoints_.push_back(std::make_unique<FileEndpoint>(*this));
  };
  for (auto& option : engine.options().transports) {
    if (option == "local") {
      endpoints_.push_back(std::make_unique<LocalEndpoint>(*this));
      of_this_process();  // before the way through a NIC
    }
    if (option == "shm") {
      endpoints_.push_back(std::make_unique<SegmentEndpoint>(*this));
      endpoints_.push_back(std::make_unique<ProcessVmEndpoint>(*this));
      endpoints_.push_back(std::make_unique<CudaEndpoint>(*this, true));
    }
    if (option == "rdma") endpoints_.push_back(std::make_unique<rdma::RdmaEndpoint>(*this));
    if (option == "tcp") endpoints_.push_back(std::make_unique<StreamEndpoint>(*this));
  }
  of_this_process();
  endpoints_.push_back(std::make_unique<StageEndpoint>(*this, false));
  endpoints_.push_back(std::make_unique<StageEndpoint>(*this, true));
}

PeerImpl::~PeerImpl() = default;

std::shared_ptr<EngineImpl> PeerImpl::lock_engine() const {
  return std::static_pointer_cast<EngineImpl>(engine_weak_.lock());
}

// ---- Features

bool PeerImpl::we_read_peer_vm() const {
  int known = we_read_peer_vm_.load(std::memory_order_relaxed);
  if (known < 0 && same_host()) {
    known = engine_.allows("shm") && can_read_process(session_->peer_pid(), identity());
    we_read_peer_vm_.store(known, std::memory_order_relaxed);
  }
  return known > 0;
}

// hello: u8 shm allowed, u8 tcp allowed, u8 "I can read your memory by process_vm_readv", u8 rdma
// allowed, u64 number of the session, and the ends of its rails.
std::string PeerImpl::hello() const {
  ByteWriter out;
  out.put(static_cast<uint8_t>(engine_.allows("shm"))).put(static_cast<uint8_t>(engine_.allows("tcp")));
  out.put(static_cast<uint8_t>(we_read_peer_vm())).put(static_cast<uint8_t>(engine_.allows("rdma"))).put(number_);
  encode_ends(out, session_->same_host() ? std::vector<RailEnd>() : engine_.host_rails().ends());
  return out.take();
}

void PeerImpl::learn_rails(std::vector<RailEnd> rails) {
  std::lock_guard lock(mutex_);
  features_.rails = std::move(rails);
}

void PeerImpl::learn(std::string_view hello) {
  ByteReader in(hello);
  PeerFeatures f;
  f.shm = in.get<uint8_t>() != 0;
  f.tcp = in.get<uint8_t>() != 0;
  f.peer_reads_our_vm = in.get<uint8_t>() != 0;
  f.rdma = in.get<uint8_t>() != 0;
  f.session = in.get<uint64_t>();
  f.rails = decode_ends(in);
  f.known = in.ok();
  {
    std::lock_guard lock(mutex_);
    features_ = f;
  }
  if (f.known) engine_.held().tell(shared_from_this());
}

PeerFeatures PeerImpl::features() const {
  std::lock_guard lock(mutex_);
  return features_;
}

Status PeerImpl::ensure_features(Deadline deadline) {
  if (features().known) return {};
  TM_ASSIGN(auto answer, session_->call_sync(kHello, hello(), deadline));
  learn(answer.body);
  if (!features().known) return {Code::corrupt, name_ + " answered hello with bytes we cannot read"};
  return {};
}

void PeerImpl::on_hello(rpc::Message request, rpc::Responder responder) {
  learn(request.body);
  responder.ok(hello());
}

std::string PeerImpl::best_transport() const {
  for (auto& endpoint : endpoints_)
    if (endpoint->available()) return endpoint->name();
  return "";
}

PeerExplanation PeerImpl::explain() const {
  PeerExplanation out{.peer = name_, .alive = alive(), .same_host = same_host()};
  if (!out.same_host)
    out.not_same_host_because =
        identity().host_id != session_->self().host_id
            ? "its host id is '" + identity().host_id + "', ours '" + session_->self().host_id + "'"
            : "no Unix socket connects it to us";
  for (auto& endpoint : endpoints_) {
    auto path = endpoint->explain();
    if (path.ordinary_memory) {
      if (out.read.empty() && path.no_read.empty()) out.read = path.transport;
      if (out.write.empty() && path.no_write.empty()) out.write = path.transport;
    }
    out.paths.push_back(std::move(path));
  }
  return out;
}

void PeerImpl::add_lane_stats(std::vector<LaneStats>& out) const {
  for (auto& endpoint : endpoints_) {
    for (auto& lane : endpoint->lane_stats()) {
      out.push_back(std::move(lane));
      out.back().peer = name_;
      out.back().peer_id = identity().engine;
    }
  }
}

// ---- Remote regions

Result<RemoteRegionPtr> PeerImpl::open(std::string_view bytes, Deadline deadline) {
  auto engine = lock_engine();
  if (!engine) return Status(Code::closed, "the engine is gone");
  TM_TRY(engine->usable());
  TM_ASSIGN(auto descriptor, Descriptor::decode(bytes));
  if (descriptor.engine != identity().engine)
    return Status(Code::invalid_argument, "that descriptor was made by another engine than " + name_);
  {
    std::lock_guard lock(mutex_);
    auto it = by_generation_.find(descriptor.generation);
    if (it != by_generation_.end())
      if (auto known = it->second.lock()) return RemoteRegionPtr(known);
  }
  if (!alive()) return session_->status().with(name_);
  TM_TRY(ensure_features(deadline));
  TM_ASSIGN(auto opened, ask_to_open(std::move(descriptor), deadline));
  TM_ASSIGN(auto remote, make_remote(std::move(opened), deadline));
  TM_TRY(failpoint("transfer.open"));
  TM_TRY(publish(remote));
  return RemoteRegionPtr(remote);
}

Result<OpenedRegion> PeerImpl::ask_to_open(Descriptor descriptor, Deadline deadline) {
  // open: the descriptor's region and generation. Answer: u32 grant, u64 nbytes, u8 readable, u8 writable.
  ByteWriter request;
  request.put(descriptor.region).put(descriptor.generation).put(std::string_view(descriptor.label));
  auto give_back = [weak = std::weak_ptr(session_)](rpc::Message late) {
    ByteReader in(late.body);
    auto grant = in.get<uint32_t>();
    if (auto session = weak.lock(); session && in.ok())
      (void)session->post(kCloseGrant, ByteWriter().put(grant).take());
  };
  TM_ASSIGN(auto answer, session_->call_sync(kOpen, request.take(), deadline, {}, give_back));
  ByteReader in(answer.body);
  OpenedRegion opened{std::move(descriptor), in.get<uint32_t>()};
  opened.descriptor.nbytes = in.get<uint64_t>();
  opened.descriptor.readable = in.get<uint8_t>() != 0;
  opened.descriptor.writable = in.get<uint8_t>() != 0;
  if (!in.done()) return Status(Code::corrupt, name_ + " answered open with bytes we cannot read");
  std::lock_guard lock(mutex_);
  by_grant_[opened.grant];  // before anything of it is mapped: it can be called back from then on
  return opened;
}

Status PeerImpl::publish(const std::shared_ptr<RemoteRegionImpl>& remote) {
  std::lock_guard lock(mutex_);
  auto& opened = by_grant_[remote->grant()];
  if (over_) {  // the end of the session has not seen it: no copy may use it
    TM_TRY(session_->status().with(name_));
    return {Code::closed, name_ + " is being closed"};
  }
  if (opened.revoked) return {Code::key_not_found, remote->name() + " was deregistered while it was being opened"};
  opened.remote = remote;
  by_generation_[remote->descriptor().generation] = remote;
  return {};
}

Result<std::shared_ptr<RemoteRegionImpl>> PeerImpl::make_remote(OpenedRegion opened, Deadline deadline) {
  // Each local kind takes the first transport that carries it. A transport that several kinds ask is opened once.
  RemoteRegionImpl::Paths paths;
  auto find_paths = [&](Direction direction) -> Status {
    uint8_t missing = (1 << kLocalKinds) - 1;
    for (auto& endpoint : endpoints_) {
      uint8_t takes = missing & endpoint->local_kinds();
      if (takes == 0) continue;
      // Nobody has device memory for NICs: no connection is made for it.
      if (takes == kind_bit(LocalKind::cuda_on_nics) && !CudaDriver::if_used()) continue;
      auto opening = endpoint->open(opened, direction, deadline);
      // Host memory is what everybody has; for the others the next transport is asked.
      if (!opening && takes & kind_bit(LocalKind::host)) return opening.status();
      RemoteMemoryPtr memory = opening ? std::move(*opening) : nullptr;
      if (!memory) continue;
      missing &= ~takes;
      for (int kind = 0; kind < kLocalKinds; ++kind)
        if (takes >> kind & 1) paths[kind][static_cast<int>(direction)] = {endpoint.get(), memory};
    }
    if (!(missing & kind_bit(LocalKind::host))) return {};  // the other kinds are staged through it
    return {Code::unsupported,
            "no allowed transport reaches memory of " + name_ + (same_host() ? " (same host)" : " (another host)")};
  };
  Status found = opened.descriptor.readable ? find_paths(Direction::read) : Status();
  if (found && opened.descriptor.writable) found = find_paths(Direction::write);
  auto remote = std::make_shared<RemoteRegionImpl>(shared_from_this(), std::move(opened), std::move(paths));
  TM_TRY(found);  // what was mapped goes with it, then the grant
  return remote;
}

void PeerImpl::on_open(rpc::Message request, rpc::Responder responder) {
  ByteReader in(request.body);
  auto id = in.get<uint64_t>();
  auto generation = in.get<uint64_t>();
  auto label = in.get_string();
  if (!in.done()) return responder.fail({Code::invalid_argument, "malformed open"});
  auto region = engine_.regions().find(id, generation);
  if (!region) {
    std::string name = "region " + std::to_string(id) + (label.empty() ? "" : " '" + label + "'");
    return responder.fail({Code::key_not_found, name + " is not registered any more"});
  }
  ByteWriter out;
  out.put(grants_.add(region)).put(region->nbytes());
  out.put(static_cast<uint8_t>(region->readable())).put(static_cast<uint8_t>(region->writable()));
  responder.ok(out.take());
}

// The owner wants its memory back: answered when no copy of ours is inside it, and none can be any more. An open that
// is under way ends with an error, and answers.
void PeerImpl::on_revoke(rpc::Message request, rpc::Responder responder) {
  auto grant = ByteReader(request.body).get<uint32_t>();
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  auto gone = [shared] { shared->ok(); };
  std::shared_ptr<RemoteRegionImpl> remote;
  {
    std::lock_guard lock(mutex_);
    auto it = by_grant_.find(grant);
    if (it != by_grant_.end() && !(remote = it->second.remote.lock())) {
      it->second.revoked = true;
      it->second.gone.push_back(std::move(gone));
      return;
    }
  }
  if (!remote) return gone();
  remote->take_back(std::move(gone));
  engine_.callbacks()->post([remote] {});  // perhaps the last reference
}

void PeerImpl::forget_remote(const OpenedRegion& region) {
  uint32_t grant = region.grant;
  std::vector<std::function<void()>> gone;
  {
    std::lock_guard lock(mutex_);
    if (auto opened = by_grant_.extract(grant)) gone = std::move(opened.mapped().gone);
    auto it = by_generation_.find(region.descriptor.generation);
    if (it != by_generation_.end() && it->second.expired()) by_generation_.erase(it);  // or opened again already
  }
  if (alive()) (void)session_->post(kCloseGrant, ByteWriter().put(grant).take());
  for (auto& tell : gone) tell();
}

// ---- Notifications

void PeerImpl::notify(const std::string& data, std::function<void(const Status&)> done) {
  if (endpoint<LocalEndpoint>()) {
    if (auto owner = EngineImpl::find(identity().engine); owner && owner->allows("local")) {
      owner->notes()->push({engine_.id(), engine_.rpc().self().name, data});
      engine_.callbacks()->post([owner] {});  // perhaps the last reference
      return done({});
    }
  }
  session_->call(kNotify, data, Deadline::never(),
                 [done = std::move(done)](Result<rpc::Message> answer) { done(answer.status()); });
}

// ---- The end

void PeerImpl::track(OpImpl* op, bool live) {
  std::lock_guard lock(mutex_);
  if (live)
    ops_[op] = op->weak_from_this();
  else
    ops_.erase(op);
}

void PeerImpl::stop_ops(const Status& why) {
  std::vector<OpImplPtr> ops;
  {
    std::lock_guard lock(mutex_);
    for (auto& [raw, weak] : ops_)
      if (auto op = weak.lock()) ops.push_back(std::move(op));
  }
  for (auto& op : ops) op->stop(why);
}

bool PeerImpl::take_all_back(std::function<void()> quiet) {
  std::vector<std::shared_ptr<RemoteRegionImpl>> remotes, mapped;
  auto left = std::make_shared<std::atomic<size_t>>(1);
  auto one_less = [left, quiet = std::move(quiet)] {
    if (left->fetch_sub(1) == 1) quiet();
  };
  {
    std::lock_guard lock(mutex_);
    over_ = true;
    for (auto& [grant, opened] : by_grant_) {
      auto remote = opened.remote.lock();
      if (!remote) {
        opened.revoked = true;
        opened.gone.push_back(one_less);
      } else if (remote->maps()) {
        mapped.push_back(remote);
      }
      if (!remote || remote->maps()) left->fetch_add(1);
      remotes.push_back(std::move(remote));
    }
  }
  bool any = left->load() > 1;
  for (auto& remote : mapped) remote->take_back(one_less);
  one_less();
  mapped.clear();
  engine_.callbacks()->post([remotes = std::move(remotes)] {});  // perhaps the last references
  return any;
}

void PeerImpl::release_all(Deadline deadline) {
  auto idle = std::make_shared<Event>();
  if (!take_all_back([idle] { idle->set(); }) || !alive()) return;
  // A copy that is stuck keeps its grant: the owner then waits for our death.
  if (idle->wait(deadline)) (void)session_->call_sync(kReleaseAll, {}, deadline);
}

void PeerImpl::close() {
  auto engine = lock_engine();
  if (!engine || !engine->usable()) return;
  const Status why(Code::closed, "the peer was closed by its owner");
  stop_ops(why);
  release_all(Deadline::after_ms(500));
  session_->close(why);
}

std::shared_ptr<Peer> PeerImpl::make_handle() {
  std::lock_guard lock(mutex_);
  if (handles_closed_) return nullptr;
  ++handles_;
  return std::make_shared<PeerHandle>(shared_from_this());
}

void PeerImpl::drop_handle(bool last_closes) {
  {
    std::lock_guard lock(mutex_);
    if (--handles_ > 0 || !last_closes) return;
    handles_closed_ = true;
  }
  close();
}

PeerHandle::~PeerHandle() {
  if (!closed_) impl_->drop_handle(false);
}

void PeerHandle::close() {
  if (!closed_.exchange(true)) impl_->drop_handle(true);
}

Result<RemoteRegionPtr> PeerHandle::open(std::string_view descriptor, Deadline deadline) {
  if (closed_) return Status(Code::closed, "this peer was closed");
  return impl_->open(descriptor, deadline);
}

void PeerImpl::session_over(const Status& why) {
  for (auto& endpoint : endpoints_) endpoint->session_over(why);
  stop_ops(why);
  auto self = shared_from_this();
  engine_.held().hold(grants_.take_held(), self);
  release_later();
  session_->set_state(rpc::Session::kTransferSlot, nullptr);
}

// Nobody can be asked to release what he maps of ours any more, and we cannot say that we have: the next session will.
void PeerImpl::release_later() {
  auto quiet = [weak = engine_weak_, owner = identity().engine, number = number_] {
    if (auto engine = std::static_pointer_cast<EngineImpl>(weak.lock())) engine->held().quiet(owner, number);
  };
  bool can_map = session_->same_host();  // otherwise nothing was mapped, on either side
  (void)take_all_back([can_map, quiet, callbacks = engine_.callbacks()] {
    if (can_map) callbacks->post(quiet);  // perhaps with the last reference to the engine
  });
}

// ---- RemoteRegionImpl

RemoteRegionImpl::RemoteRegionImpl(PeerImplPtr peer, OpenedRegion opened, Paths paths)
    : peer_(std::move(peer)), opened_(std::move(opened)), paths_(std::move(paths)) {}

Status RemoteRegionImpl::reachable(Direction d, LocalKind local) const {
  if (path(d, local).endpoint) return {};
  bool read = d == Direction::read;
  if (!(read ? opened_.descriptor.readable : opened_.descriptor.writable))
    return {Code::invalid_argument, name() + " is not " + (read ? "readable" : "writable") + " by peers"};
  return {Code::unsupported,
          std::string("no allowed transport carries this kind of local memory ") + (read ? "from " : "to ") + name()};
}

RemoteRegionImpl::~RemoteRegionImpl() {
  auto memories = mappings();
  paths_ = {};
  // Unmapped before the owner hears of it.
  let_go(std::move(memories),
         [peer = std::static_pointer_cast<PeerImpl>(peer_), opened = opened_] { peer->forget_remote(opened); });
}

std::vector<RemoteMemoryPtr> RemoteRegionImpl::mappings() const {
  std::vector<RemoteMemoryPtr> out;
  for (auto& of_kind : paths_)
    for (auto& path : of_kind)
      if (path.memory && path.memory->maps() && std::find(out.begin(), out.end(), path.memory) == out.end())
        out.push_back(path.memory);
  return out;
}

bool RemoteRegionImpl::maps() const { return !mappings().empty(); }

void RemoteRegionImpl::let_go(std::vector<RemoteMemoryPtr> memories, std::function<void()> gone) {
  auto left = std::make_shared<std::atomic<size_t>>(memories.size() + 1);
  auto one_gone = [left, gone = std::move(gone)] {
    if (left->fetch_sub(1) == 1) gone();
  };
  for (auto& memory : memories) memory->let_go(one_gone);
  memories.clear();
  one_gone();
}

void RemoteRegionImpl::take_back(std::function<void()> gone) {
  usage_.revoke([memories = mappings(), gone = std::move(gone)] { let_go(memories, gone); });
}

std::string RemoteRegionImpl::transport() const {
  for (auto& of_kind : paths_)
    for (auto& path : of_kind)
      if (path.endpoint) return path.endpoint->name();
  return "";
}

std::shared_ptr<const std::byte> RemoteRegionImpl::mapped() const {
  for (auto& path : paths_[static_cast<int>(LocalKind::host)])
    if (path.memory) return path.memory->mapped();
  return nullptr;
}

std::shared_ptr<const std::byte> RemoteRegionImpl::lease() {
  auto& memory = path(Direction::read).memory;
  if (!memory) return nullptr;
  auto* local = dynamic_cast<LocalMemory*>(memory.get());
  auto* usage = local ? &local->region->usage() : &usage_;
  const std::byte* data = local ? local->region->data() : memory->mapped().get();
  auto& user = static_cast<PeerImpl&>(*peer_).name();
  if (data == nullptr || !usage->acquire(user)) return nullptr;
  return {data, [self = shared_from_this(), usage, &user](const std::byte*) { usage->release(user); }};
}

std::string RemoteRegionImpl::name() const {
  std::string out = "region " + std::to_string(opened_.descriptor.region);
  if (!opened_.descriptor.label.empty()) out += " '" + opened_.descriptor.label + "'";
  return out;
}

}  // namespace torch_mooncake::transfer
