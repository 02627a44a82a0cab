#include <algorithm>

#include "common/log.h"
#include "common/random.h"
#include "pool/service_impl.h"
#include "pool/view_record.h"

namespace torch_mooncake::pool {
namespace {

constexpr int64_t kLastWordNs = 2'000'000'000;  // of a drain's time: to tell the others

}  // namespace

Result<std::unique_ptr<NodeService>> NodeService::create(NodeServiceOptions options) {
  auto service = std::make_unique<NodeServiceImpl>(std::move(options));
  TM_TRY(service->start());
  return std::unique_ptr<NodeService>(std::move(service));
}

Status NodeServiceImpl::start() {
  donor_ = std::move(options_.donor);
  election_ = std::move(options_.election);
  if (!election_ && !options_.node.discovery.empty()) {
    TM_ASSIGN(election_, open_election(options_.node.discovery));
  }
  leader_ = !election_ && options_.node.leader.empty();
  engine_ = options_.engine;
  if (!engine_) {
    EngineOptions engine_options;
    engine_options.rpc.name = "node";
    engine_options.rpc.role = "node";
    engine_options.rpc.token = options_.node.token;
    engine_options.rpc.host_id = options_.node.host_id;
    engine_options.transports = options_.node.transports;
    engine_options.nics = options_.node.nics;
    engine_options.rdma = options_.node.rdma;
    TM_ASSIGN(engine_, Engine::create(engine_options));
  }

  const auto segments = donor_->segments();
  TM_ASSIGN(table_map_, segments[0]->map(Protection::read_write));
  for (size_t i = 0; i < segments.size(); ++i) {
    RegionOptions region;
    region.writable = i > 0;
    region.label = i > 0 ? "pool data" : "pool table";
    // NICs pin what they may touch: memory that they reach does not come and go.
    const auto& ways = options_.node.transports;
    if (std::find(ways.begin(), ways.end(), "rdma") != ways.end()) TM_TRY(segments[i]->grow(segments[i]->capacity()));
    TM_ASSIGN(auto registered, engine_->register_segment(segments[i], 0, segments[i]->capacity(), region));
    regions_.push_back(std::move(registered));
    if (i == 0) continue;
    TM_ASSIGN(auto map, segments[i]->map(Protection::read_write));
    data_maps_.push_back(std::move(map));
  }
  self_.id = segments[0]->id();
  self_.incarnation = engine_->id();
  self_.host_id = engine_->rpc().self().host_id;
  for (const Listener& listener : options_.listeners) self_.addresses.push_back(listener.address);
  self_.limit_bytes = donor_->stats().limit_bytes;

  donor_->set_evicted_callback([this](const Announcement& a) { evicted_.push_back({a.key, a.extent}); });
  donor_->set_tier_callback([this](const Announcement& a) { moved_.push_back({a.key, a.extent, a.tier}); });
  donor_->set_wake([this] {  // not on the disk's thread: it has other requests to serve
    engine_->rpc().add_timer(Deadline::after_ms(0), [this] {
      if (!closing_) strand_.run([this] { disk_done(); });
    });
  });
  engine_->rpc().on_session([this](const rpc::SessionPtr& session) {
    rpc::Session* raw = session.get();
    session->on_close([this, raw](const Status&) { strand_.run([this, raw] { session_closed(raw); }); });
  });
  register_methods();
  if (leader_) TM_TRY(start_home());
  for (Listener& listener : options_.listeners)
    TM_TRY(engine_->rpc().listen_fd(std::move(listener.fd), listener.address));
  if (!leader_) thread_ = std::thread([this] { election_ ? election_thread() : membership_thread(); });
  arm_tick();
  return {};
}

Status NodeServiceImpl::start_home() {
  const ViewRecord last = read_view_record(*table_map_);
  seed_ = random_u64();
  home_.emplace(last.view + 1, seed_);
  home_->expect(self_.id);
  const int64_t until = steady_ns() + kExpelMs * 1'000'000;
  for (const NodeId& member : last.members) {
    home_->expect(member);
    expected_until_[member] = until;
  }
  if (!last.all) {  // somebody unknown may hold newer versions: nobody is complete before all leases are over
    home_->expect(NodeId{});
    expected_until_[NodeId{}] = until;
  }
  write_view_record(*table_map_, {home_->view(), last.members, last.all});
  publish_counted(*table_map_, steady_ns());
  strand_.run([this] {
    home_->at(steady_ns());
    home_->announce(self_.id, announcements());
    view_ = make_view();
    pump();
  });
  return {};
}

void NodeServiceImpl::register_methods() {
  method(kAttach, &NodeServiceImpl::on_attach);
  method(kDetach, &NodeServiceImpl::on_detach);
  method(kView, &NodeServiceImpl::on_view);
  method(kReserve, &NodeServiceImpl::on_reserve);
  method(kGiveBack, &NodeServiceImpl::on_give_back);
  method(kGrant, &NodeServiceImpl::on_grant);
  method(kReserveMany, &NodeServiceImpl::on_reserve_many);
  method(kPutMany, &NodeServiceImpl::on_put_many);
  method(kBegin, &NodeServiceImpl::on_begin);
  method(kCommit, &NodeServiceImpl::on_commit);
  method(kRemoveMany, &NodeServiceImpl::on_remove_many);
  method(kLookup, &NodeServiceImpl::on_lookup);
  method(kExists, &NodeServiceImpl::on_exists);
  method(kDescribe, &NodeServiceImpl::on_describe);
  method(kKeys, &NodeServiceImpl::on_keys);
  method(kStat, &NodeServiceImpl::on_stat);
  method(kDrain, &NodeServiceImpl::on_drain);
  method(kPrefix, &NodeServiceImpl::on_prefix);
  method(kRefresh, &NodeServiceImpl::on_refresh);
  method(kEvents, &NodeServiceImpl::on_events);
  method(kTouch, &NodeServiceImpl::on_touch);
  method(kJoin, &NodeServiceImpl::on_join);
  method(kAnnounce, &NodeServiceImpl::on_announce);
  method(kBeat, &NodeServiceImpl::on_beat);
  method(kLeave, &NodeServiceImpl::on_leave);
  method(kVouch, &NodeServiceImpl::on_vouch);
  method(kMark, &NodeServiceImpl::on_mark);
  method(kEvicted, &NodeServiceImpl::on_evicted);
  method(kTiers, &NodeServiceImpl::on_tiers);
  method(kCopy, &NodeServiceImpl::on_copy);
  method(kExport, &NodeServiceImpl::on_export);
  method(kEvacuate, &NodeServiceImpl::on_evacuate);
  method(kDrained, &NodeServiceImpl::on_drained);
  method(kQuota, &NodeServiceImpl::on_quota);
}

Status NodeServiceImpl::usable() const {
  if (draining_) return {Code::pool_unavailable, "this node is draining"};
  if (!leader_ && steady_ns() > lease_until_ns_)
    return {Code::pool_unavailable, "this node has not heard from its leader for " + std::to_string(kLeaseMs) + " ms"};
  return {};
}

// --- client sessions ---

void NodeServiceImpl::on_attach(const rpc::SessionPtr& session, AttachRequest request, ResponderPtr responder) {
  if (!session->alive()) return responder->fail({Code::peer_lost, "the session is over"});
  if (!leader_ && view_.number == 0)
    return responder->fail({Code::pool_unavailable, "this node has not joined its leader yet"});
  const auto lanes = session->lanes();
  AttachAnswer answer;
  answer.node = self_.id;
  answer.session = random_u64() | 1;
  answer.mapped = request.map && session->same_host() && !lanes.empty() && lanes[0]->is_unix();
  answer.view = leader_ ? make_view() : view_;
  answer.now_ns = steady_ns();
  const auto segments = donor_->segments();
  std::vector<UniqueFd> fds;
  for (size_t i = 0; i < segments.size(); ++i) {
    answer.segments.push_back(segments[i]->id());
    if (!answer.mapped) answer.descriptors.push_back(regions_[i]->descriptor());
  }
  if (answer.mapped) {
    auto slots = donor_->open_slots(answer.session);
    if (!slots.is_ok()) return responder->fail(slots.status());
    answer.slots = (*slots)->id();
    auto fd = donor_->slots_for_client(answer.session);
    for (const auto& segment : segments) fds.emplace_back(::dup(segment->fd()));
    if (fd.is_ok()) fds.push_back(std::move(fd).value());
    if (!fd.is_ok() || !fds[0].valid() || !fds[1].valid()) {
      donor_->end_session(answer.session);
      return responder->fail(fd.is_ok() ? Status(Code::io, "no file descriptor is left") : fd.status());
    }
  }
  clients_[answer.session] = {session, answer.mapped};
  responder->ok(encode(answer), std::move(fds));
  count_clients();
}

void NodeServiceImpl::on_detach(const rpc::SessionPtr& session, DetachRequest request, ResponderPtr responder) {
  const auto it = clients_.find(request.session);
  if (it == clients_.end() || it->second.session.lock() != session)
    return responder->fail({Code::invalid_argument, "not a session of this connection"});
  const bool mapped = it->second.mapped;
  clients_.erase(it);
  if (mapped) {
    donor_->lose_session(request.session);
  } else {
    ending_.push_back(request.session);
  }
  retry_reservations();
  responder->ok();
  count_clients();
}

// A connection that ends proves nothing about a process that has the memory mapped: the donor asks the kernel. For one
// that has not, no byte can land any more once its lanes' threads have left their last recv(): by the next tick.
void NodeServiceImpl::session_closed(rpc::Session* raw) {
  still_leads();
  for (auto it = clients_.begin(); it != clients_.end();) {
    const auto session = it->second.session.lock();
    if (session && session.get() != raw) {
      ++it;
      continue;
    }
    if (it->second.mapped) {
      donor_->lose_session(it->first);
    } else {
      ending_.push_back(it->first);
    }
    it = clients_.erase(it);
  }
  retry_reservations();
  pump();
  count_clients();
}

void NodeServiceImpl::count_clients() {
  std::map<rpc::Session*, int> sessions;
  for (const auto& [id, client] : clients_)
    if (const auto session = client.session.lock();
        session && session->peer().role != "node" && session->peer().role != kMonitorRole)
      ++sessions[session.get()];
  const int n = static_cast<int>(sessions.size());
  if (n == clients_told_) return;
  clients_told_ = n;
  if (options_.on_clients_changed && !closing_) options_.on_clients_changed(n);
}

void NodeServiceImpl::on_view(const rpc::SessionPtr&, Empty, ResponderPtr responder) {
  if (const Status s = usable(); !s.is_ok() && !draining_) return responder->fail(s);
  responder->ok(encode(leader_ ? make_view() : view_));
}

// --- time ---

void NodeServiceImpl::arm_tick() {
  engine_->rpc().add_timer(Deadline::after_ms(kBeatMs), [this] {
    if (closing_) return;
    strand_.run([this] {
      tick();
      pump();
      arm_tick();
    });
  });
}

// A tick at this moment.
void NodeServiceImpl::arm_at(int64_t deadline_ns) {
  engine_->rpc().add_timer(Deadline::at_ns(deadline_ns), [this] {
    if (closing_) return;
    strand_.run([this] {
      tick();
      pump();
    });
  });
}

// While somebody waits for room: pins end without telling anybody.
void NodeServiceImpl::arm_soon() {
  if (std::exchange(soon_armed_, true)) return;
  engine_->rpc().add_timer(Deadline::after_ms(20), [this] {
    if (closing_) return;
    strand_.run([this] {
      soon_armed_ = false;
      tick();
      pump();
      if (!waiting_.empty()) arm_soon();
    });
  });
}

void NodeServiceImpl::tick() {
  const int64_t now = steady_ns();
  for (SessionId id : std::exchange(ending_, {})) donor_->end_session(id);
  for (auto it = reserved_until_.begin(); it != reserved_until_.end();) {
    if (it->second > now) {
      ++it;
      continue;
    }
    donor_->drop_txn(it->first);  // no effect on what was committed; else fenced until its writer lets go
    copies_expire_.erase(it->first);
    it = reserved_until_.erase(it);
  }
  std::erase_if(reserved_batches_, [&](const ReservedBatch& batch) {
    if (batch.until_ns > now) return false;
    for (uint32_t i = 0; i < batch.items; ++i) donor_->drop_txn(txn_of(batch.txn, i));
    return true;
  });
  still_leads();
  donor_->sweep(now);
  retry_reservations();
  std::erase_if(waiting_, [&](const WaitingReserve& w) {
    if (!clients_.count(w.call.session)) return true;  // its writer is gone: nobody would ever give it back
    if (w.deadline_ns > now) return false;
    auto last = reserve(w.call);
    if (last.is_ok()) {
      w.responder->ok(encode(ReserveAnswer{last->extent, last->pieces}));
    } else {
      w.responder->fail(last.status());
    }
    return true;
  });
  if (!leader_) return;
  if (!election_) publish_counted(*table_map_, now);
  ask_vouches(now);
  watch_members(now);
  home_->tick(now);
  tick_events(now);
  repeat_marks();
  tick_copies(now);
  std::vector<RequestId> late;
  for (const auto& [id, lookup] : lookups_)
    if (lookup.deadline_ns <= now) late.push_back(id);
  for (RequestId id : late) {
    home_->unwatch(id);
    auto lookup = std::move(lookups_.extract(id).mapped());
    if (lookup.promoting > 0) {
      lookup.responder->fail({Code::deadline_exceeded, "the SSD did not answer in time"});
      continue;
    }
    lookup.responder->fail(
        lookup.call.present
            ? Status(Code::deadline_exceeded, "the key did not appear in time")
            : Status(Code::pool_unavailable, "the directory is being rebuilt, or a donor of this key is silent"));
  }
}

// --- the end ---

Status NodeServiceImpl::drain(Deadline deadline) {
  strand_.run_and_wait([this] {
    draining_ = true;
    donor_->end_grants();                           // what comes into them would not be waited for
    if (!leader_) publish_counted(*table_map_, 0);  // from here on the leader may give its keys to others
  });
  // One that is stopped must not cost the others' time.
  const Deadline writers = Deadline::at_ns(steady_ns() + deadline.remaining_ns() / 3);
  size_t open = 1;
  while (open && !writers.expired()) {
    if (!strand_.run_and_wait([&] { open = donor_->prepared().size(); })) break;
    if (open && !sleep_ms(10)) break;
  }
  evacuate(min(deadline, Deadline::at_ns(deadline.ns() - kLastWordNs)));
  left_ = true;  // until here it is a member: its writers' commits need it
  sleep_cv_.notify_all();
  rpc::SessionPtr leader;
  strand_.run_and_wait([&] { leader = leader_session_; });
  if (leader) {
    auto left = leader->call_sync(kLeave, encode(LeaveRequest{self_.id}), min(deadline, Deadline::after_ms(2000)));
    if (!left.is_ok()) return left.status().with("telling the leader that this node leaves");
  }
  if (open) return {Code::deadline_exceeded, std::to_string(open) + " transaction(s) were still open"};
  return {};
}

Status NodeServiceImpl::check(bool at_rest) {
  Status found;
  const bool ran = strand_.run_and_wait([&] {
    found = donor_->check();
    if (found.is_ok() && home_) found = home_->check();
    if (!found.is_ok() || !at_rest) return;
    const DonorStats stats = donor_->stats();
    const char* under_way = !waiting_.empty()          ? "a reservation waits for room"
                            : stats.prepared_extents   ? "an extent is PREPARED"
                            : stats.granted_bytes      ? "an extent is granted"
                            : !reserved_until_.empty() ? "a transaction is to be dropped"
                            : !commits_.empty() || !put_batches_.empty() || !remove_batches_.empty()
                                ? "an answer is owed"
                            : !lookups_.empty()                              ? "a lookup waits"
                            : home_ && !(home_->complete() && home_->idle()) ? "the home is busy"
                                                                             : nullptr;
    if (under_way) found = Status(Code::corrupt, std::string("not at rest: ") + under_way);
  });
  return ran ? found : Status(Code::closed, "the service is closed");
}

void NodeServiceImpl::close() {
  std::lock_guard lock(close_mutex_);
  if (closed_) return;
  closed_ = true;
  {
    std::lock_guard sleeping(sleep_mutex_);
    closing_ = true;
  }
  sleep_cv_.notify_all();
  if (engine_) engine_->close();
  {
    std::lock_guard copies(copies_mutex_);  // who comes later begins none
    copies_cv_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  if (copier_.joinable()) copier_.join();
  if (donor_) donor_->set_wake(nullptr);
  strand_.close();
}

}  // namespace torch_mooncake::pool
