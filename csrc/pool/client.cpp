#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "common/log.h"
#include "common/random.h"
#include "pool/client_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr size_t kLookupBatch = 8192;
constexpr int64_t kAskMs = 10'000;  // one round of a long wait
constexpr int64_t kDialMs = 3000;   // a node that has stopped accepts a connection, and says nothing

}  // namespace

uint32_t timeout_ms(Deadline deadline) {
  return static_cast<uint32_t>(deadline.is_never() ? int64_t{24} * 3600 * 1000 : deadline.remaining_ms());
}

Result<ClientPtr> Client::connect(ClientOptions options, Deadline deadline) {
  if (!(options.view_ttl_s >= 0 && options.view_ttl_s * 1e3 <= kMaxViewTtlMs))
    return {Code::invalid_argument, "view_ttl is between 0 and " + std::to_string(kMaxViewTtlMs) + " ms"};
  auto client = std::make_shared<ClientImpl>(std::move(options));
  TM_TRY(client->start(deadline));
  return ClientPtr(std::move(client));
}

ClientImpl::ClientImpl(ClientOptions options)
    : options_(std::move(options)), pid_(::getpid()), first_txn_(random_id()) {}

// Not a random one each: that is a system call.
TxnId ClientImpl::next_txn(uint32_t n) {
  TxnId txn = first_txn_;
  uint64_t low;
  std::memcpy(&low, txn.data(), sizeof low);
  low += txns_.fetch_add(n, std::memory_order_relaxed);
  std::memcpy(txn.data(), &low, sizeof low);
  return txn;
}

Status ClientImpl::start(Deadline deadline) {
  engine_ = options_.engine;
  if (!engine_) {
    EngineOptions engine_options;
    engine_options.rpc.name = options_.name;
    engine_options.rpc.role = options_.monitor ? kMonitorRole : "client";
    engine_options.rpc.token = options_.token;
    engine_options.rpc.host_id = options_.host_id;
    engine_options.transports = options_.transports;
    engine_options.nics = options_.nics;
    engine_options.rdma = options_.rdma;
    TM_ASSIGN(engine_, Engine::create(engine_options));
    own_engine_ = true;
  }
  host_id_ = engine_->rpc().self().host_id;
  TM_ASSIGN(auto link, Link::open({engine_, options_.name, host_id_}, options_.node_address, deadline));
  std::lock_guard lock(mutex_);
  take_view(link->first_view());
  links_[link->node()] = link;
  local_ = std::move(link);
  return {};
}

Status ClientImpl::usable() const {
  if (::getpid() != pid_) return {Code::forked, "this client belongs to the parent process: connect anew"};
  if (closed_) return {Code::closed, "the client is closed"};
  return {};
}

bool ClientImpl::alive() const {
  std::lock_guard lock(mutex_);
  return !closed_ && local_ && local_->alive();
}

void ClientImpl::close() {
  if (closed_.exchange(true)) return;
  std::map<NodeId, LinkPtr> links;
  LinkPtr local;
  {
    std::lock_guard lock(mutex_);
    links.swap(links_);
    local.swap(local_);
  }
  if (::getpid() == pid_) cache_.clear();  // in a forked child the links in it are not ours to end either
  // In a forked child the parent's session is not ours to end. Mapped objects keep their link, and it the engine.
  if (::getpid() != pid_) {
    static auto* kept = new std::vector<LinkPtr>;
    for (auto& [id, link] : links) kept->push_back(std::move(link));
  }
}

bool ClientImpl::passing(const Status& status) {
  return status.code() == Code::peer_lost || status.code() == Code::pool_unavailable || status.code() == Code::io ||
         status.code() == Code::closed;
}

// --- connections ---

Result<LinkPtr> ClientImpl::local(Deadline deadline) {
  TM_TRY(usable());
  {
    std::lock_guard lock(mutex_);
    if (local_ && local_->alive()) return local_;
  }
  TM_TRY(connect_turn_.lock(deadline));
  std::lock_guard connecting(connect_turn_, std::adopt_lock);
  {
    std::lock_guard lock(mutex_);
    if (local_ && local_->alive()) return local_;
  }
  TM_ASSIGN(auto link, Link::open({engine_, options_.name, host_id_}, options_.node_address, deadline));
  std::lock_guard lock(mutex_);
  TM_TRY(usable());
  cache_.clear();
  take_view(link->first_view());
  links_[link->node()] = link;
  local_ = link;
  return link;
}

Result<LinkPtr> ClientImpl::link(const NodeId& node, Deadline deadline) {
  TM_ASSIGN(auto local_link, local(deadline));
  if (local_link->node() == node) return local_link;
  NodeInfo info;
  if (!view()->find(node)) TM_TRY(refresh_view(deadline));  // it may have joined since
  {
    std::lock_guard lock(mutex_);
    if (const auto it = links_.find(node); it != links_.end()) {
      if (it->second->alive()) return it->second;
      links_.erase(it);
      cache_.clear();  // nothing keeps the memory of a node that is gone
    }
    const NodeInfo* found = view_->find(node);
    if (!found) return {Code::key_not_found, "the node that held this has left the pool"};
    info = *found;
  }
  TM_TRY(connect_turn_.lock(deadline));
  std::lock_guard connecting(connect_turn_, std::adopt_lock);
  {
    std::lock_guard lock(mutex_);
    if (const auto it = links_.find(node); it != links_.end() && it->second->alive()) return it->second;
  }
  // On this host a Unix socket; elsewhere that path is somebody else's, so never.
  Status last(Code::peer_lost, "a node of the pool listens on no address that can be reached from here");
  const bool same_host = info.host_id == host_id_;
  std::stable_sort(info.addresses.begin(), info.addresses.end(), [](const std::string& a, const std::string& b) {
    return a.starts_with("unix://") > b.starts_with("unix://");
  });
  for (const std::string& address : info.addresses) {
    if (address.starts_with("unix://") && !same_host) continue;
    const Deadline soon = min(deadline, Deadline::after_ms(kDialMs));
    auto opened = Link::open({engine_, options_.name, host_id_}, address, soon);
    if (opened.status().code() == Code::deadline_exceeded && !deadline.expired())
      opened = Status(Code::peer_lost, "it does not answer");  // another may lead meanwhile
    if (opened.is_ok() && (*opened)->node() != node) opened = Status(Code::peer_lost, "another node answers there");
    if (!opened.is_ok()) {
      last = opened.status().with(address);
      continue;
    }
    std::lock_guard lock(mutex_);
    TM_TRY(usable());
    return links_[node] = std::move(opened).value();
  }
  return last;
}

std::shared_ptr<const View> ClientImpl::view() const {
  std::lock_guard lock(mutex_);
  return view_;
}

void ClientImpl::take_view(View fresh) {
  if (fresh.lineage != view_->lineage || fresh.number > view_->number)
    view_ = std::make_shared<const View>(std::move(fresh));
}

Result<LinkPtr> ClientImpl::home(Deadline deadline) {
  TM_ASSIGN(auto local_link, local(deadline));
  return link(view()->home, deadline);
}

bool ClientImpl::reachable() { return home(Deadline::after_ms(100)).is_ok(); }

Status ClientImpl::refresh_view(Deadline deadline) {
  TM_ASSIGN(auto node, local(deadline));
  TM_ASSIGN(View fresh, node->call<View>(kView, Empty{}, min(deadline, Deadline::after_ms(2000))));
  std::lock_guard lock(mutex_);
  take_view(std::move(fresh));
  return {};
}

PutHead ClientImpl::head(const View& view, std::string_view key, Deadline deadline) const {
  PutHead h;
  h.view = view.number;
  h.shard = shard_of(hash_key(key, view.seed));
  h.key = key;
  h.timeout_ms = timeout_ms(deadline);
  return h;
}

// --- questions ---

LookupCall ClientImpl::question(std::span<const std::string> keys, LookupCall shape, const Link& home,
                                Deadline deadline) const {
  const auto now = view();
  shape.view = now->number;
  shape.timeout_ms = timeout_ms(deadline);
  shape.data = shape.describe && !home.mapped();
  shape.keys.clear();
  shape.keys.reserve(keys.size());
  for (const std::string& key : keys) shape.keys.push_back({shard_of(hash_key(key, now->seed)), key});
  return shape;
}

Result<std::vector<LookupEntry>> ClientImpl::look_up(std::span<const std::string> keys, const LookupCall& shape,
                                                     Deadline deadline) {
  std::vector<LookupEntry> all;
  while (all.size() < keys.size()) {
    const auto some = keys.subspan(all.size(), std::min(keys.size() - all.size(), kLookupBatch));
    auto answer = with_retries(deadline, [&]() -> Result<LookupAnswer> {
      TM_ASSIGN(auto node, home(deadline));
      return node->call<LookupAnswer>(kLookup, question(some, shape, *node, deadline), deadline);
    });
    if (!answer.is_ok()) return answer.status();
    if (answer->entries.empty() || answer->entries.size() > some.size())
      return {Code::internal, "a lookup was answered with the wrong number of entries"};
    if (all.empty() && answer->entries.size() == keys.size()) return std::move(answer->entries);
    std::move(answer->entries.begin(), answer->entries.end(), std::back_inserter(all));
  }
  return all;
}

Result<std::vector<std::string>> ClientImpl::keys(std::string_view prefix, Deadline deadline) {
  TM_TRY(usable());
  return with_retries(deadline, [&]() -> Result<std::vector<std::string>> {
    TM_TRY(refresh_view(deadline));
    const auto now = view();
    std::set<std::string> all;
    for (const NodeInfo& info : now->nodes) {
      TM_ASSIGN(auto node, link(info.id, deadline));
      KeysCall call;
      call.view = now->number;
      call.prefix = prefix;
      for (bool more = true; more;) {
        TM_ASSIGN(KeysAnswer answer, node->call<KeysAnswer>(kKeys, call, deadline));
        more = answer.more && !answer.keys.empty();
        if (more) call.after = answer.keys.back();
        all.insert(std::make_move_iterator(answer.keys.begin()), std::make_move_iterator(answer.keys.end()));
      }
    }
    return std::vector<std::string>(all.begin(), all.end());
  });
}

Result<ObjectPtr> ClientImpl::wait(std::string_view key, const GetOptions& options, Deadline deadline) {
  TM_TRY(usable());
  const std::string keys[] = {std::string(key)};
  LookupCall shape;
  shape.describe = shape.present = true;
  shape.at_least = options.at_least;
  for (;;) {
    const Deadline round = min(deadline, Deadline::after_ms(kAskMs));
    auto entries = look_up(keys, shape, round);
    if (entries.is_ok()) {
      auto object = std::move(build(keys, std::move(entries).value(), deadline)[0]);
      if (object.is_ok() && (options.label.empty() || (*object)->info().label == options.label)) return object;
      if (!object.is_ok() && object.status().code() != Code::key_not_found) return object.status();
      if (object.is_ok())
        shape.at_least = Version{(*object)->info().version.view, (*object)->info().version.counter + 1};
    } else if (entries.status().code() != Code::deadline_exceeded) {
      return entries.status();
    }
    TM_TRY(usable());
    if (deadline.expired()) return {Code::deadline_exceeded, "waiting for key '" + keys[0] + "'"};
  }
}

Status ClientImpl::stat_of(const LinkPtr& node, const NodeInfo& info, PoolStats& stats, Deadline deadline) {
  TM_ASSIGN(StatAnswer a, node->call<StatAnswer>(kStat, Empty{}, deadline));
  const NodeActivity& act = a.activity;
  stats.view = std::max(stats.view, a.view);
  stats.keys += a.keys;
  stats.nodes.push_back({info.id,
                         info.addresses.empty() ? "" : info.addresses[0],
                         info.host_id,
                         a.limit_bytes,
                         a.used_bytes,
                         a.limbo_bytes,
                         a.prepared_bytes,
                         a.extents,
                         a.evictions,
                         a.pinned,
                         a.soft_pinned_bytes,
                         a.hard_pinned_bytes,
                         a.is_home,
                         a.fenced_bytes,
                         a.granted_bytes,
                         act.starts,
                         act.clients,
                         act.waiting,
                         act.reservations,
                         act.refusals,
                         act.lookups,
                         act.misses,
                         act.commits,
                         act.removals,
                         act.copies,
                         act.copied_bytes,
                         act.to_copy,
                         act.draining,
                         act.ready,
                         act.unready,
                         a.ssd});
  stats.client_maps += node->maps();
  stats.client_mapped_bytes += node->mapped_bytes();
  return {};
}

Result<std::vector<Quota>> ClientImpl::ask_quota(const std::optional<Quota>& set, Deadline deadline) {
  TM_TRY(usable());
  auto answer = with_retries(deadline, [&]() -> Result<QuotaAnswer> {
    TM_ASSIGN(auto node, home(deadline));
    return node->call<QuotaAnswer>(kQuota, QuotaCall{view()->number, set}, deadline);
  });
  if (!answer.is_ok()) return answer.status();
  return std::move(answer->quotas);
}

Result<PoolStats> ClientImpl::stat(Deadline deadline, bool here) {
  TM_TRY(usable());
  auto ask = [&]() -> Result<PoolStats> {
    PoolStats stats;
    TM_ASSIGN(auto node, local(deadline));
    if (here) {
      NodeInfo info;
      info.id = node->node();
      info.host_id = node->host_id();
      info.addresses = {options_.node_address};
      TM_TRY(stat_of(node, info, stats, deadline));
    } else {
      TM_TRY(refresh_view(deadline));
      const auto now = view();
      stats.view = now->number;
      for (const NodeInfo& info : now->nodes) {
        TM_ASSIGN(node, link(info.id, deadline));
        TM_TRY(stat_of(node, info, stats, deadline));
      }
    }
    if (!here) {
      TM_ASSIGN(stats.quotas, ask_quota({}, deadline));
    }
    stats.client_read_bytes = read_bytes_;
    return stats;
  };
  return here ? ask() : with_retries(deadline, ask);
}

Status ClientImpl::drain(Deadline deadline) {
  TM_TRY(usable());
  TM_ASSIGN(auto node, local(deadline));
  // The question first, on the same connection: the node may be gone as soon as it has heard that it is to leave.
  auto report = node->start_call(kDrained, encode(Empty{}), deadline);
  const Status s = node->call_empty(kDrain, encode(Empty{}), deadline);
  if (!s.is_ok()) return s;
  std::lock_guard lock(mutex_);
  report_ = std::move(report);
  return {};
}

Result<Drained> ClientImpl::drained(Deadline deadline) {
  TM_TRY(usable());
  std::optional<PendingCall> report;
  {
    std::lock_guard lock(mutex_);
    report.swap(report_);
  }
  if (!report) {
    TM_ASSIGN(auto node, local(deadline));
    report = node->start_call(kDrained, encode(Empty{}), deadline);
  }
  auto reply = report->wait();
  if (reply.status().code() == Code::deadline_exceeded && !deadline.expired()) {  // of the call before
    TM_ASSIGN(auto node, local(deadline));
    reply = node->start_call(kDrained, encode(Empty{}), deadline).wait();
  }
  if (!reply.is_ok()) return reply.status();
  TM_ASSIGN(Evacuated e, decode<Evacuated>(reply->body));
  return Drained{e.moved, e.moved_bytes, e.left, std::move(e.why)};
}

uint64_t total_bytes(std::span<const iovec> v) {
  uint64_t n = 0;
  for (const iovec& part : v) n += part.iov_len;
  return n;
}

}  // namespace torch_mooncake::pool
