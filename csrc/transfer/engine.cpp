#include <algorithm>
#include <array>
#include <bit>
#include <unordered_map>

#include "common/log.h"
#include "common/process.h"
#include "common/random.h"
#include "memory/shared_heap.h"
#include "transfer/cuda/endpoint.h"
#include "transfer/cuda/memory.h"
#include "transfer/cuda/stream.h"
#include "transfer/engine_impl.h"
#include "transfer/file/file.h"
#include "transfer/group.h"
#include "transfer/process_vm/endpoint.h"
#include "transfer/rdma/endpoint.h"
#include "transfer/rdma/verbs_driver.h"
#include "transfer/shm/endpoint.h"
#include "transfer/stage/endpoint.h"
#include "transfer/tcp/endpoint.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {

constexpr std::array kOptions = {"local", "shm", "rdma", "tcp"};

// Every live engine of this process, so that two of them find each other.
struct Registry {
  std::mutex mutex;
  std::map<Id128, std::weak_ptr<EngineImpl>> engines;
};
Registry& registry() {
  static auto* r = new Registry;  // never destroyed: engines may outlive static destructors
  return *r;
}

// The op of an empty list with nobody to notify.
class NothingOp final : public Op {
 public:
  explicit NothingOp(OpOptions options, Worker& callbacks) {
    if (options.on_end) callbacks.post([fn = std::move(options.on_end)] { fn({}); });
  }
  OpState state() const override { return OpState::done; }
  Status status() const override { return {}; }
  Status wait(Deadline) override { return {}; }
  void cancel() override {}
  uint64_t nbytes() const override { return 0; }
  uint64_t bytes_done() const override { return 0; }
  bool remote_quiescent() const override { return true; }
  std::string transport() const override { return ""; }
  std::string peers() const override { return ""; }
  bool watch(std::shared_ptr<OpWatcher>, uint64_t) override { return false; }
};

PeerImplPtr impl_of(const PeerPtr& peer) {
  if (auto* handle = dynamic_cast<const PeerHandle*>(peer.get())) return handle->impl();
  return std::static_pointer_cast<PeerImpl>(peer);
}

}  // namespace

EngineImpl::EngineImpl(EngineOptions options, NicFilter nics, std::unique_ptr<rpc::Endpoint> rpc)
    : options_(std::move(options)),
      callbacks_(std::make_shared<Worker>("tm-callbacks")),
      notes_(std::make_shared<NotificationQueue>(callbacks_)),
      rpc_(std::move(rpc)),
      regions_(std::make_shared<RegionTable>(rpc_->self().engine)),
      pacer_(std::make_shared<Pacer>(*rpc_, options_.foreground_rate, options_.background_rate)),
      host_rails_(std::move(nics), [this] { rails_changed(); }) {}

Result<std::shared_ptr<EngineImpl>> EngineImpl::make(EngineOptions options) {
  for (auto& name : options.transports)
    if (std::find(kOptions.begin(), kOptions.end(), name) == kOptions.end())
      return Status(Code::unsupported,
                    "transport '" + name + "' does not exist here; there are: local, shm, rdma, tcp");
  if (options.lanes < 1 || options.lanes > 64)
    return Status(Code::invalid_argument, "lanes must be 1..64, not " + std::to_string(options.lanes));
  if (options.slice_bytes < (256 << 10) || options.slice_bytes > (4 << 20))
    return Status(Code::invalid_argument,
                  "slice_bytes must be 256 KiB .. 4 MiB, not " + std::to_string(options.slice_bytes));
  TM_ASSIGN(auto nics, NicFilter::parse(options.nics));
  TM_ASSIGN(auto rpc, rpc::Endpoint::create(options.rpc));
  const NicFilter filter = nics;
  std::shared_ptr<EngineImpl> engine(new EngineImpl(std::move(options), std::move(nics), std::move(rpc)));
  if (engine->allows("rdma")) TM_TRY(engine->open_nics(filter));
  engine->attach();
  {
    std::lock_guard lock(registry().mutex);
    registry().engines[engine->id()] = engine;
  }
  for (auto& address : engine->options_.listen)
    if (auto bound = engine->listen(address); !bound) {
      engine->close();
      return bound.status();
    }
  return engine;
}

Status EngineImpl::open_nics(const NicFilter& filter) {
  TM_ASSIGN(auto settings, rdma::RdmaOptions::parse(options_.rdma));
  auto driver = options_.rdma_driver ? options_.rdma_driver : rdma::verbs_driver();
  TM_ASSIGN(auto devices, driver->open_devices(filter, settings));
  for (auto& device : devices) nics_.push_back(std::make_shared<rdma::Nic>(device, nics_.size()));
  lazy_nics_ = settings.lazy;
  words_ = std::make_shared<rdma::WordTable>(nics_);
  nic_ranks_ = std::make_unique<rdma::NicRanks>(nics_, driver);
  TM_ASSIGN(nic_identity_, words_->take());
  std::array<uint64_t, 2> halves;
  std::memcpy(halves.data(), id().data(), sizeof halves);
  for (int i : {0, 1}) nic_identity_->set(i, halves[i]);
  return {};
}

Status EngineImpl::ensure_nic_keys(RegionImpl& region) {
  return region.ensure_nic_keys([&] {
    return rdma::RegionKeys::make(*words_, *nic_ranks_, region.data(), region.nbytes(), region.readable(),
                                  region.writable());
  });
}

void EngineImpl::attach() {
  rpc_->set_bulk_handler(this);
  rpc_->on_session([this](const rpc::SessionPtr& session) { peer(session); });
  handle(kHello, [](PeerImpl& p, rpc::Message m, rpc::Responder r) { p.on_hello(std::move(m), std::move(r)); });
  handle(kOpen, [](PeerImpl& p, rpc::Message m, rpc::Responder r) { p.on_open(std::move(m), std::move(r)); });
  handle(kRevoke, [](PeerImpl& p, rpc::Message m, rpc::Responder r) { p.on_revoke(std::move(m), std::move(r)); });
  handle(kCloseGrant, [](PeerImpl& p, rpc::Message m, rpc::Responder r) {
    p.grants().remove(ByteReader(m.body).get<uint32_t>());
    r.ok();
  });
  handle(kReleaseAll, [](PeerImpl& p, rpc::Message, rpc::Responder r) {
    p.grants().remove_all();
    r.ok();
  });
  handle(kReleaseOld, [this](PeerImpl& p, rpc::Message m, rpc::Responder r) {
    held_.on_release_old(p, std::move(m), std::move(r));
  });
  handle(kNotify, [this](PeerImpl& p, rpc::Message m, rpc::Responder r) {
    notes_->push({p.identity().engine, p.identity().name, std::move(m.body)});
    r.ok();
  });
  SegmentEndpoint::attach(*this);
  ProcessVmEndpoint::attach(*this);
  StreamEndpoint::attach(*this);
  rdma::RdmaEndpoint::attach(*this);
  StageEndpoint::attach(*this);
  CudaEndpoint::attach(*this);
}

EngineImpl::~EngineImpl() {
  if (getpid() != pid_) {
    const bool rdma = !nics_.empty();
    rpc_.release();  // its threads are the parent's: nothing of it can be ended here
    new rdma::Nics(std::move(nics_));
    new std::shared_ptr<rdma::WordTable>(std::move(words_));
    // Nor may regions end their registrations: the descriptor that this goes through is the parent's as well.
    if (rdma) new std::shared_ptr<RegionTable>(std::move(regions_));
    return;
  }
  close();
}

std::shared_ptr<EngineImpl> EngineImpl::find(const Id128& id) {
  std::lock_guard lock(registry().mutex);
  auto it = registry().engines.find(id);
  auto engine = it == registry().engines.end() ? nullptr : it->second.lock();
  return engine && engine->usable() ? engine : nullptr;
}

Status EngineImpl::usable() const {
  if (process_id() != pid_) return {Code::forked, "this engine belongs to the parent process; make one of your own"};
  if (closed_.load(std::memory_order_acquire)) return {Code::closed, "the engine is closed"};
  return {};
}

bool EngineImpl::allows(std::string_view transport) const {
  return std::find(options_.transports.begin(), options_.transports.end(), transport) != options_.transports.end();
}

const std::vector<std::string>& EngineImpl::addresses() const {
  std::lock_guard lock(mutex_);
  return addresses_;
}

Result<std::string> EngineImpl::listen(const std::string& address) {
  TM_TRY(usable());
  TM_ASSIGN(auto bound, rpc_->listen(address));
  host_rails_.listening(address, bound);
  auto told = rpc::parse_address(bound);
  if (allows("tcp") && told && told->kind == rpc::Address::Kind::tcp) {
    auto host = IpAddress::parse(told->host);
    if (!host || !host->is_loopback()) host_rails_.start();  // hosts that are not numbers: others may come
  }
  std::lock_guard lock(mutex_);
  addresses_.push_back(bound);
  return bound;
}

void EngineImpl::handle(uint16_t method, std::function<void(PeerImpl&, rpc::Message, rpc::Responder)> fn) {
  rpc_->handle(method, rpc::RunOn::inline_io,
               [this, fn = std::move(fn)](const rpc::SessionPtr& session, rpc::Message m, rpc::Responder r) {
                 fn(*peer(session), std::move(m), std::move(r));
               });
}

// ---- Regions

Result<RegionPtr> EngineImpl::add_region(RegionTable::Place place, RegionOptions options) {
  TM_TRY(usable());
  bool shm = allows("shm");
  if (!nics_.empty() && !lazy_nics_ && place.kind == MemoryKind::host) {
    TM_ASSIGN(place.nic_keys, rdma::RegionKeys::make(*words_, *nic_ranks_, place.data, place.nbytes, options.readable,
                                                     options.writable));
  }
  if (!nics_.empty() && place.kind == MemoryKind::cuda) {
    auto& memory = static_cast<CudaMemory&>(*place.backing);
    if (memory.shareable()) {  // a weak region's memory may be freed at any time
      auto keys = rdma::RegionKeys::of_device(*words_, *nic_ranks_, memory, options.readable, options.writable);
      static log::Once once(60'000);
      if (keys) {
        if ((*keys)->flush()) flush_devices_ |= uint64_t{1} << (memory.queue().device() & 63);
        place.nic_keys = std::move(*keys);
      } else if (once.pass()) {
        log::warning("transfer", keys.status().with("no GPUDirect RDMA, it goes through host memory").to_string());
      }
    }
  }
  return RegionPtr(regions_->add(std::move(place), std::move(options), [&](const RegionImpl& region) {
    std::vector<AccessRecord> records;
    if (region.backing()) records = region.backing()->access_records(region);
    const bool host = !region.backing();
    if (host && shm && region.segment()) records.push_back(segment_record(region));
    if (host && shm) records.push_back(process_vm_record(region));
    if (auto keys = region.nic_keys())
      records.push_back(keys->record());
    else if (host && !nics_.empty())
      records.push_back({AccessKind::rdma, ""});  // ask for it
    return records;
  }));
}

Result<RegionPtr> EngineImpl::register_memory(void* data, uint64_t nbytes, RegionOptions options) {
  if (data == nullptr && nbytes != 0) return Status(Code::invalid_argument, "cannot register bytes at a null address");
  if (reinterpret_cast<uintptr_t>(data) + nbytes < reinterpret_cast<uintptr_t>(data))
    return Status(Code::invalid_argument, std::to_string(nbytes) + " bytes do not fit behind that address");
  RegionTable::Place place{.data = data, .nbytes = nbytes};
  if (auto shared = SharedHeap::instance().find(data, nbytes)) {
    place.segment = shared->segment;
    place.segment_offset = shared->offset;
  }
  return add_region(std::move(place), std::move(options));
}

Result<RegionPtr> EngineImpl::register_segment(const std::shared_ptr<Segment>& segment, uint64_t offset,
                                               uint64_t nbytes, RegionOptions options) {
  if (!segment) return Status(Code::invalid_argument, "no segment given");
  if (offset > segment->capacity() || nbytes > segment->capacity() - offset)
    return Status(Code::out_of_bounds, "bytes " + std::to_string(offset) + " + " + std::to_string(nbytes) +
                                           " leave a segment of " + std::to_string(segment->capacity()) + " bytes");
  TM_ASSIGN(auto mapping, segment->map(Protection::read_write));
  struct Keep {
    MappingPtr mapping;
    std::shared_ptr<void> user;
  };
  options.keep = std::make_shared<Keep>(Keep{mapping, std::move(options.keep)});
  return add_region({.data = mapping->data + offset, .nbytes = nbytes, .segment = segment, .segment_offset = offset},
                    std::move(options));
}

RegionPtr EngineImpl::region_at(const void* address, uint64_t nbytes) const { return regions_->at(address, nbytes); }

void EngineImpl::forget_address(const RegionPtr& region) {
  if (auto impl = std::dynamic_pointer_cast<RegionImpl>(region)) regions_->forget_address(*impl);
}

Result<RegionPtr> EngineImpl::register_file(FileOptions file, RegionOptions options) {
  TM_TRY(usable());
  if (options.label.empty()) options.label = file.path;
  options.writable = options.writable && file.writable;
  TM_ASSIGN(auto opened, File::open(file, IoQueue::shared()));
  uint64_t nbytes = opened->nbytes();
  return add_region({.nbytes = nbytes, .kind = MemoryKind::file, .backing = std::move(opened)}, std::move(options));
}

Result<RegionPtr> EngineImpl::register_cuda(void* data, uint64_t nbytes, RegionOptions options) {
  TM_TRY(usable());
  if (nbytes == 0) return Status(Code::invalid_argument, "there is no CUDA memory in 0 bytes");
  TM_ASSIGN(auto memory, CudaMemory::of(reinterpret_cast<uint64_t>(data), nbytes));
  // A region that neither keeps its memory nor lets peers write it is a weak one: its memory may be freed at any time.
  memory->set_shareable(options.keep != nullptr || options.writable);
  struct Keep {
    std::shared_ptr<CudaMemory> memory;
    std::shared_ptr<void> user;
    ~Keep() { memory->detach(); }  // before the user's memory goes
  };
  options.keep = std::shared_ptr<Keep>(new Keep{memory, std::move(options.keep)});
  return add_region({.data = data, .nbytes = nbytes, .kind = MemoryKind::cuda, .backing = std::move(memory)},
                    std::move(options));
}

// One after the other, each on a thread of its own: a device that hangs holds up those ops alone that wait for it.
static void flush_devices(uint64_t devices, std::function<void(const Status&)> done) {
  static auto* workers = [] {
    auto* all = new std::array<std::unique_ptr<Worker>, 64>;
    for (auto& worker : *all) worker = std::make_unique<Worker>("tm-cuda-flush");
    return all;
  }();
  if (devices == 0) return done({});
  const int device = std::countr_zero(devices);
  (*workers)[static_cast<size_t>(device)]->post([=, done = std::move(done)]() mutable {
    auto driver = CudaDriver::get();
    const Status status = driver ? (*driver)->flush_nic_writes(device) : driver.status();
    status ? flush_devices(devices & (devices - 1), std::move(done)) : done(status);
  });
}

void EngineImpl::flush_nic_writes(std::function<void(const Status&)> done) {
  flush_devices(flush_devices_, std::move(done));
}

void EngineImpl::revoke_mapped(const RegionImplPtr& region) {
  for (auto& peer : peers())
    for (auto grant : peer->grants().mapped_on(*region))
      peer->session()->call(kRevoke, ByteWriter().put(grant).take(), Deadline::never(),
                            [peer, grant](Result<rpc::Message> answer) {
                              // No answer: the session is over, and the peer may still write. See HeldGrants.
                              if (answer) peer->grants().remove(grant);
                            });
}

Status EngineImpl::deregister(const RegionPtr& region, Deadline deadline) {
  TM_TRY(usable());
  auto impl = std::dynamic_pointer_cast<RegionImpl>(region);
  if (!impl || impl->engine() != id()) return {Code::invalid_argument, "that region belongs to another engine"};
  regions_->remove(impl);  // not live: deregistered before, and perhaps still in quarantine
  struct Drain {
    Event done;
    std::atomic<bool> deferred{false};
  };
  auto drain = std::make_shared<Drain>();
  auto caller = pthread_self();
  const bool on_callbacks = callbacks_->in_thread();  // which cannot wait for itself
  impl->usage().revoke([drain, impl, regions = regions_, callbacks = callbacks_, caller, on_callbacks] {
    auto keep = regions->forget(impl);
    // The user's reference: dropped here if this is the user's thread, never on one for I/O.
    const bool here = !drain->deferred && pthread_equal(pthread_self(), caller);
    if (impl->kind() == MemoryKind::cuda && !(here && keep) && !on_callbacks) {
      // With it go pins and mappings of device memory, which may be freed when we return.
      return callbacks->post([keep = std::move(keep), drain]() mutable {
        keep = nullptr;
        drain->done.set();
      });
    }
    if (keep && !here) callbacks->post([keep = std::move(keep)] {});
    drain->done.set();
  });
  if (drain->done.is_set()) return {};
  drain->deferred = true;
  revoke_mapped(impl);
  if (drain->done.wait(deadline)) return {};
  return {Code::busy, impl->name() + " of " + std::to_string(impl->nbytes()) + " bytes can still be touched by " +
                          impl->usage().users() + "; it stays in quarantine until then"};
}

// ---- Peers

PeerImplPtr EngineImpl::peer(const rpc::SessionPtr& session) {
  PeerImplPtr made;
  {
    std::lock_guard lock(mutex_);
    if (auto state = session->state(rpc::Session::kTransferSlot)) return std::static_pointer_cast<PeerImpl>(state);
    made = std::make_shared<PeerImpl>(*this, session);
    session->set_state(rpc::Session::kTransferSlot, made);
    if (!nics_.empty()) {
      std::erase_if(rdma_peers_, [](auto& weak) { return weak.expired(); });
      rdma_peers_.push_back(made);
    }
  }
  std::weak_ptr<PeerImpl> weak = made;
  session->on_lane_close([weak](rpc::Lane& lane, const Status&) {
    if (auto peer = weak.lock())
      if (auto* streams = peer->endpoint<StreamEndpoint>()) streams->lane_closed(lane);
  });
  session->on_close([weak](const Status& why) {
    if (auto peer = weak.lock()) peer->session_over(why);
  });
  return made;
}

void EngineImpl::rails_changed() {
  if (!usable()) return;
  for (auto& peer : peers())
    if (auto* streams = peer->endpoint<StreamEndpoint>()) streams->our_rails_changed();
}

std::vector<PeerImplPtr> EngineImpl::peers() const {
  std::vector<PeerImplPtr> out;
  for (auto& session : rpc_->sessions())
    if (auto state = session->state(rpc::Session::kTransferSlot))
      out.push_back(std::static_pointer_cast<PeerImpl>(state));
  return out;
}

Result<PeerPtr> EngineImpl::connect(const std::string& address, Deadline deadline) {
  TM_TRY(usable());
  PeerImplPtr made;
  PeerPtr handle;
  while (!handle) {  // the session that is there may be closing: then dial again
    TM_ASSIGN(auto session, rpc_->connect(address, deadline));
    made = peer(session);
    handle = made->make_handle();
    if (!handle && deadline.expired()) return Status(Code::closed, made->name() + " is being closed");
  }
  auto lanes = made->session()->lanes();
  bool leaves_host = std::any_of(lanes.begin(), lanes.end(), [](auto& lane) {
    auto host = IpAddress::parse(lane->rail().remote);
    return host && !host->is_loopback();
  });
  if (leaves_host && !made->same_host() && allows("tcp")) host_rails_.start();
  TM_TRY(made->ensure_features(deadline));
  // Where lanes are the way, open them now: the other side, which cannot, may want to send first.
  auto* streams = made->endpoint<StreamEndpoint>();
  if (streams && made->best_transport() == streams->name()) TM_TRY(streams->open_lanes(deadline));
  return PeerPtr(std::move(handle));
}

Result<PeerPtr> EngineImpl::self_peer(Deadline deadline) {
  TM_TRY(usable());
  std::string address;
  {
    std::lock_guard lock(mutex_);
    address = addresses_.empty() ? self_address_ : addresses_.front();
    if (address.empty()) {
      TM_ASSIGN(self_address_, rpc_->listen("unix://@tm-self-" + to_hex(id())));
      address = self_address_;
    }
  }
  return connect(address, deadline);
}

std::string EngineImpl::transport_for(const PeerPtr& peer) const { return impl_of(peer)->best_transport(); }

PeerExplanation EngineImpl::explain(const PeerPtr& peer) const {
  auto out = impl_of(peer)->explain();
  for (auto option : kOptions) {
    if (allows(option)) continue;
    std::string why = "not among the transports this engine allows";
    out.paths.push_back({.transport = option, .option = option, .serves = "", .no_read = why, .no_write = why});
  }
  return out;
}

std::unique_ptr<rpc::BulkReceive> EngineImpl::begin(rpc::Lane& lane, std::string_view body, uint64_t payload_bytes) {
  auto from = peer(lane.session().shared_from_this());
  auto* streams = from->endpoint<StreamEndpoint>();
  return streams ? streams->begin(body, payload_bytes, lane.is_unix()) : nullptr;
}

// ---- Ops

Status EngineImpl::check_bounds(const Batch& batch, size_t first) const {
  auto& local = static_cast<const RegionImpl&>(*batch.local);
  auto& remote = static_cast<const RemoteRegionImpl&>(*batch.remote);
  const uint64_t local_size = local.nbytes(), remote_size = remote.nbytes();
  auto outside = [](uint64_t offset, uint64_t nbytes, uint64_t size) {
    return (offset > size) | (nbytes > size - offset);
  };
  bool bad = false;  // no early end: the loop stays free of branches
  for (auto& e : batch.extents)
    bad |= outside(e.local_offset, e.nbytes, local_size) | outside(e.remote_offset, e.nbytes, remote_size);
  if (!bad) return {};
  size_t i = 0;
  while (!outside(batch.extents[i].local_offset, batch.extents[i].nbytes, local_size) &&
         !outside(batch.extents[i].remote_offset, batch.extents[i].nbytes, remote_size))
    ++i;
  auto& e = batch.extents[i];
  bool here = outside(e.local_offset, e.nbytes, local_size);
  return {Code::out_of_bounds, "slice " + std::to_string(first + i) + ": bytes " +
                                   std::to_string(here ? e.local_offset : e.remote_offset) + " + " +
                                   std::to_string(e.nbytes) + " leave the " + (here ? "local " : "remote ") +
                                   (here ? local.name() : remote.name()) + " of " +
                                   std::to_string(here ? local_size : remote_size) + " bytes"};
}

Status EngineImpl::check(Direction direction, std::span<const Batch> batches) const {
  size_t first = 0;
  for (auto& batch : batches) {
    auto bad = [&](const std::string& what) {
      return Status(Code::invalid_argument, "slice " + std::to_string(first) + ": " + what);
    };
    if (!batch.local || !batch.remote) return bad("no region given");
    auto& local = static_cast<RegionImpl&>(*batch.local);
    auto& remote = static_cast<RemoteRegionImpl&>(*batch.remote);
    if (local.engine() != id()) return bad("the local region belongs to another engine");
    if (&static_cast<PeerImpl&>(*remote.peer()).engine() != this)
      return bad("the remote region was opened by another engine");
    TM_TRY(check_bounds(batch, first));
    TM_TRY(remote.reachable(direction, local.local_kind()));
    first += batch.extents.size();
  }
  return {};
}

Result<OpPtr> EngineImpl::transfer(Direction direction, std::vector<Batch> batches, OpOptions options) {
  if (batches.size() == 1)
    if (auto op = transfer_now(direction, batches.front(), options)) return op;
  TM_TRY(usable());
  if (options.notify.size() > kMaxNotifyBytes)
    return Status(Code::invalid_argument,
                  "a notification holds at most 64 KiB, not " + std::to_string(options.notify.size()) + " bytes");
  TM_TRY(check(direction, batches));
  PeerImplPtr peer;
  if (!batches.empty())
    peer = std::static_pointer_cast<PeerImpl>(batches.front().remote->peer());
  else if (options.peer)
    peer = impl_of(options.peer);
  if (!peer) {
    if (!options.notify.empty())
      return Status(Code::invalid_argument, "an empty list with a notification needs OpOptions::peer");
    return OpPtr(std::make_shared<NothingOp>(std::move(options), *callbacks_));
  }
  for (auto& batch : batches)
    if (batch.remote->peer() != peer) return transfer_to_many(direction, std::move(batches), std::move(options));
  if (!peer->alive()) return peer->session()->status().with(peer->name());
  auto stream = options.stream;
  auto op = std::make_shared<OpImpl>(std::move(peer), direction, std::move(batches), std::move(options));
  TM_TRY(stream ? start_on_stream(op, *stream) : op->start());
  return OpPtr(op);
}

Result<OpPtr> EngineImpl::transfer_to_many(Direction direction, std::vector<Batch> batches, OpOptions options) {
  if (options.stream) return Status(Code::unsupported, "an op in the order of a stream has one peer");
  std::map<PeerPtr, std::vector<Batch>> by_peer;
  for (auto& batch : batches) {
    auto peer = batch.remote->peer();
    by_peer[peer].push_back(std::move(batch));
  }
  std::vector<OpImplPtr> members;
  for (auto& [peer, its] : by_peer) {
    auto impl = std::static_pointer_cast<PeerImpl>(peer);
    if (!impl->alive()) return impl->session()->status().with(impl->name());
    OpOptions each{.deadline = options.deadline, .priority = options.priority, .notify = options.notify};
    members.push_back(std::make_shared<OpImpl>(std::move(impl), direction, std::move(its), std::move(each)));
  }
  auto group = std::make_shared<GroupOp>(std::move(members), std::move(options), callbacks_);
  group->start();
  return OpPtr(group);
}

Result<Notification> EngineImpl::next_notification(Deadline deadline) {
  if (getpid() != pid_) return usable();
  return notes_->pop(deadline);
}

bool EngineImpl::watch_notifications(std::shared_ptr<OpWatcher> watcher, uint64_t tag) {
  return getpid() == pid_ && notes_->watch(std::move(watcher), tag);
}

// ---- Counters, end

EngineStats EngineImpl::stats() const {
  EngineStats out;
  metrics_.read(out);
  out.notifications = notes_->count();
  out.regions = regions_->live_count();
  out.quarantined_regions = regions_->quarantined_count();
  if (!usable()) return out;
  out.mover_queue = mover_.depth();
  out.callback_queue = callbacks_->depth();
  out.sessions = rpc_->sessions().size();
  for (auto& peer : peers()) peer->add_lane_stats(out.lanes);
  return out;
}

void EngineImpl::track_move(const MovePtr& move) {
  std::lock_guard lock(mutex_);
  if (moves_.size() >= 64) std::erase_if(moves_, [](auto& weak) { return weak.expired(); });
  moves_.push_back(move);
}

void EngineImpl::end_moves(Deadline deadline) {
  std::vector<std::weak_ptr<Move>> moves;
  {
    std::lock_guard lock(mutex_);
    moves.swap(moves_);
  }
  auto under_way = [](auto& weak) { return !weak.expired(); };
  while (!deadline.expired() && std::any_of(moves.begin(), moves.end(), under_way)) usleep(200);
  for (auto& weak : moves)
    if (auto move = weak.lock()) move->abandon();
}

// After the sessions. Ops end, also those of peers whose session had ended before: a NIC may not have let go of them.
void EngineImpl::stop_nics(const Status& why) {
  std::vector<PeerImplPtr> left;
  {
    std::lock_guard lock(mutex_);
    for (auto& weak : std::exchange(rdma_peers_, {}))
      if (auto peer = weak.lock()) left.push_back(std::move(peer));
  }
  const auto patience = Deadline::after_ms(1000);
  for (auto& peer : left) {
    auto* endpoint = peer->endpoint<rdma::RdmaEndpoint>();
    endpoint->session_over(why);  // if no thread of the session's has come to it
    endpoint->wait_at_rest(patience);
  }
  pinner_.stop();
  for (auto& worker : repair_) worker.stop();
  for (auto& nic : nics_) nic->stop();
  for (auto& peer : left) peer->endpoint<rdma::RdmaEndpoint>()->take_back();
}

void EngineImpl::close() {
  if (getpid() != pid_ || closed_.exchange(true)) return;
  const Status why(Code::closed, "the engine was closed");
  host_rails_.stop();
  auto everybody = peers();
  for (auto& peer : everybody) peer->stop_ops(why);
  pacer_->stop();
  mover_.stop();  // copies stop at their next step
  auto soon = Deadline::after_ms(1000);
  for (auto& peer : everybody) peer->release_all(soon);
  auto regions = regions_->live();
  for (auto& region : regions) {
    regions_->remove(region);
    region->usage().revoke(
        [region, table = regions_, callbacks = callbacks_] { callbacks->post([keep = table->forget(region)] {}); });
    if (region->usage().in_use()) revoke_mapped(region);
  }
  // Peers that map our segments answer within this time, or what they can write is never given back.
  auto mapped = [&](const RegionImplPtr& region) {
    return std::any_of(everybody.begin(), everybody.end(),
                       [&](auto& peer) { return !peer->grants().mapped_on(*region).empty(); });
  };
  while (!soon.expired() && std::any_of(regions.begin(), regions.end(), mapped)) usleep(200);
  end_moves(soon);
  rpc_->close();
  stop_nics(why);
  notes_->close();
  for (auto& region : regions_->quarantined()) {
    log::warning("transfer", region->name() + " can still be written by " + region->usage().users() +
                                 " after close: its memory stays allocated until this process ends");
    new std::shared_ptr<void>(regions_->forget(region));
  }
  callbacks_->stop();
  std::lock_guard lock(registry().mutex);
  registry().engines.erase(id());
}

}  // namespace torch_mooncake::transfer

namespace torch_mooncake {

namespace {

std::vector<Batch> batches_of(std::vector<Slice> slices) {
  std::vector<Batch> out;
  for (auto& s : slices) {
    if (out.empty() || out.back().local != s.local || out.back().remote != s.remote)
      out.push_back({std::move(s.local), std::move(s.remote), {}});
    out.back().extents.push_back({s.local_offset, s.remote_offset, s.nbytes});
  }
  return out;
}

}  // namespace

Result<OpPtr> Engine::write(std::vector<Slice> slices, OpOptions options) {
  return transfer(Direction::write, batches_of(std::move(slices)), std::move(options));
}

Result<OpPtr> Engine::read(std::vector<Slice> slices, OpOptions options) {
  return transfer(Direction::read, batches_of(std::move(slices)), std::move(options));
}

Result<std::shared_ptr<Engine>> Engine::create(EngineOptions options) {
  TM_ASSIGN(auto engine, transfer::EngineImpl::make(std::move(options)));
  return std::shared_ptr<Engine>(engine);
}

}  // namespace torch_mooncake
