// put: reserve at donors, write, commit at the home.
#include <algorithm>
#include <set>
#include <thread>

#include "common/crc32c.h"
#include "common/failpoint.h"
#include "pool/batch_messages.h"
#include "pool/client_impl.h"

namespace torch_mooncake::pool {
namespace {

uint32_t checksum(std::span<const iovec> data) {
  uint32_t crc = 0;
  for (const iovec& v : data) crc = crc32c(v.iov_base, v.iov_len, crc);
  return crc;
}

}  // namespace

Status ClientImpl::check_entry(std::string_view key, std::string_view meta) {
  if (key.empty() || key.size() > kMaxKeyBytes)
    return {Code::invalid_argument,
            "a key has 1 to " + std::to_string(kMaxKeyBytes) + " bytes, not " + std::to_string(key.size())};
  if (meta.size() > kMaxMetaBytes)
    return {Code::invalid_argument, "metadata has at most " + std::to_string(kMaxMetaBytes) + " bytes"};
  return {};
}

Status ClientImpl::check_put(const PutOptions& options) {
  if (options.label.size() > kMaxLabelBytes || options.group.size() > kMaxLabelBytes)
    return {Code::invalid_argument,
            "a version label or group has at most " + std::to_string(kMaxLabelBytes) + " bytes"};
  if (options.parts == 0 || options.parts > kMaxParts || options.part >= options.parts)
    return {Code::invalid_argument, "part " + std::to_string(options.part) + " of " + std::to_string(options.parts)};
  if (options.ttl_ms > kMaxTtlMs) return {Code::invalid_argument, "a time to live is at most ten years"};
  if (options.parent.size() > kMaxKeyBytes) return {Code::invalid_argument, "a parent is a key"};
  if (options.replicas == 0) return {Code::invalid_argument, "an object has one replica at least"};
  return {};
}

Result<PutOutcome> ClientImpl::put(std::string_view key, std::string_view meta, std::span<const iovec> data,
                                   const PutOptions& options, Deadline deadline) {
  TM_TRY(usable());
  TM_TRY(check_put(options));
  TM_TRY(check_entry(key, meta));
  bool asked = false;  // the home was asked to commit: whatever happens then is not repeated
  Status last;
  auto result = with_retries(deadline, [&]() -> Result<PutOutcome> {
    auto once = put_once(key, meta, data, options, deadline, &asked);
    if (once.is_ok() || !asked) return once;
    last = leaves_open(once.status().code()) ? unknown_outcome(once.status()) : once.status();
    return {Code::internal, ""};  // ends the retries; `last` is what happened
  });
  if (!result.is_ok() && asked && !last.is_ok()) return last;
  return result;
}

Result<std::optional<PutOutcome>> ClientImpl::already_there(std::string_view key, const PutOptions& options,
                                                            Deadline deadline) {
  if (options.kind == Kind::named && options.if_exists == IfExists::replace) return std::optional<PutOutcome>{};
  const std::string keys[] = {std::string(key)};
  TM_ASSIGN(auto entries, look_up(keys, {}, deadline));
  if (!entries[0].found) return std::optional<PutOutcome>{};
  TM_ASSIGN(const PutOutcome there, existing(key, entries[0], options));
  return std::optional<PutOutcome>(there);
}

// Which is there, or key_not_found. None: there is no parent.
Result<std::set<NodeId>> ClientImpl::nodes_of_parent(const PutOptions& options, Deadline deadline) {
  std::set<NodeId> nodes;
  if (options.parent.empty()) return nodes;
  const std::string keys[] = {options.parent};
  TM_ASSIGN(const auto entries, look_up(keys, {}, deadline));
  if (!entries[0].found) return {Code::key_not_found, "the parent '" + options.parent + "' is not there"};
  for (const Place& place : entries[0].places) nodes.insert(place.at.node);
  return nodes;
}

Result<PutOutcome> ClientImpl::existing(std::string_view key, const LookupEntry& entry, const PutOptions& options) {
  if (entry.kind != options.kind)
    return {Code::invalid_argument, options.kind == Kind::named ? "this key is sealed: remove it first"
                                                                : "this key is named, so it cannot be sealed"};
  if (options.if_exists == IfExists::error) return {Code::key_exists, "the key '" + std::string(key) + "' exists"};
  return PutOutcome{entry.version, false};
}

Result<PutOutcome> ClientImpl::put_once(std::string_view key, std::string_view meta, std::span<const iovec> data,
                                        const PutOptions& options, Deadline deadline, bool* asked) {
  TM_ASSIGN(auto here, local(deadline));
  TM_ASSIGN(auto home_link, home(deadline));
  const auto now = view();
  const uint64_t nbytes = total_bytes(data);
  PutHead h = head(*now, key, deadline);
  h.kind = options.kind;
  h.part = options.part;
  h.parts = options.parts;
  h.txn = next_txn(1);

  TM_ASSIGN(const auto near, nodes_of_parent(options, deadline));
  const bool elsewhere = !near.empty() && !near.count(here->node());
  if (nbytes <= kInlineLimit && options.replicas == 1 && options.parts == 1 && home_link == here && !elsewhere) {
    PutManyCall call;
    call.head = {now->number,    options.kind, options.if_exists, options.label, options.parent,
                 options.ttl_ms, options.pin,  options.checksum,  h.txn,         h.timeout_ms};
    PutItem& item = call.items.emplace_back();
    item.shard = h.shard;
    item.key = key;
    item.meta = meta;
    std::string gathered;
    if (data.size() == 1) {
      item.data = {static_cast<const char*>(data[0].iov_base), data[0].iov_len};
    } else {
      gathered.reserve(nbytes);
      for (const iovec& v : data) gathered.append(static_cast<const char*>(v.iov_base), v.iov_len);
      item.data = gathered;
    }
    *asked = true;
    auto answers = home_link->call<PutManyAnswer>(kPutMany, call, deadline);
    if (answers.is_ok() && answers->items.size() != 1) answers = Status(Code::internal, "one put has several answers");
    Status status = answers.status();
    if (status.is_ok()) {
      PutManyOutcome& outcome = answers->items[0];
      if (outcome.code == Code::ok) return PutOutcome{outcome.answer.version, outcome.answer.stored};
      status = Status(outcome.code, std::move(outcome.message));
    }
    // A full pool (or a node that cannot serve) said no before anything happened; room is waited for below.
    if (status.code() == Code::pool_unavailable) *asked = false;
    if (status.code() != Code::pool_full) return status;
    *asked = false;
  }

  TM_ASSIGN(auto there, already_there(key, options, deadline));
  if (there) return *there;
  if (options.parts > 1) {
    BeginCall begin{h, options.group.empty() ? options.label : options.group};
    TM_ASSIGN(BeginAnswer begun, home_link->call<BeginAnswer>(kBegin, begin, deadline));
    h.txn = begun.txn;
  }
  ReserveCall shape;
  shape.head = h;
  shape.nbytes = nbytes;
  shape.meta = meta;
  shape.label = options.label;
  shape.parent = options.parent;
  // Room that is ours already, if what comes before may be there.
  std::optional<ReserveAnswer> granted;
  if (options.parts == 1 && options.replicas == 1 && !elsewhere) granted = here->grants().take(nbytes, next_txn(1));
  if (granted) {
    std::vector<Replicated> reserved{{here, std::move(*granted), true}};
    Binding binding{here->session_id(), nbytes, h.kind, h.key, shape.meta, shape.label, shape.parent};
    auto done = write_and_commit(home_link, reserved, h, data, options, std::move(binding), deadline, asked);
    // Refused, so nothing has happened: the worker has another life, or there is no room for this key.
    const Code code = done.status().code();
    if (code != Code::key_not_found && code != Code::pool_full) return done;
    *asked = false;
    shape.head.txn = h.txn = next_txn(1);  // that one is dropped, perhaps only now
  }
  TM_ASSIGN(auto reserved, reserve(shape, options, *now, near, deadline));
  return write_and_commit(home_link, reserved, h, data, options, {}, deadline, asked);
}

Result<PutOutcome> ClientImpl::write_and_commit(const LinkPtr& home_link, std::vector<Replicated>& reserved,
                                                const PutHead& h, std::span<const iovec> data,
                                                const PutOptions& options, std::optional<Binding> binding,
                                                Deadline deadline, bool* asked) {
  Status s = failpoint("client.reserved");
  if (s.is_ok()) s = write_all(reserved, data, deadline);
  if (s.is_ok()) s = failpoint("client.written");
  if (s.is_ok() && deadline.expired()) s = Status(Code::deadline_exceeded, "before the commit: nothing was stored");
  if (!s.is_ok()) {
    let_go(reserved);
    return s;
  }
  CommitCall call;
  call.head = h;
  call.head.timeout_ms = timeout_ms(deadline);
  call.if_exists = options.if_exists;
  for (const Replicated& r : reserved) call.replicas.push_back({r.link->node(), r.place.extent});
  if (options.checksum) call.crc32c = checksum(data);
  call.ttl_ms = options.ttl_ms;
  call.pin = options.pin;
  call.binding = std::move(binding);
  *asked = true;
  // The home says by the deadline which writer did not come.
  const bool waits = options.parts > 1 && !deadline.is_never();
  const Deadline until = waits ? Deadline::at_ns(deadline.ns() + 200'000'000) : deadline;
  auto answer = home_link->call<CommitAnswer>(kCommit, call, until);
  if (!answer.is_ok() || !answer->stored) let_go(reserved);  // no effect on what was committed meanwhile
  if (!answer.is_ok()) {
    // Said before anything was done: a donor that left the pool, or a view that the home does not know yet.
    if (answer.status().code() == Code::pool_unavailable) *asked = false;
    return answer.status();
  }
  TM_TRY(failpoint("client.committed"));
  return PutOutcome{answer->version, answer->stored};
}

// All replicas at once: those elsewhere by threads of their own, ours by this one. Little is sooner written in turn.
Status ClientImpl::write_all(std::vector<Replicated>& reserved, std::span<const iovec> data, Deadline deadline) {
  std::vector<Status> done(reserved.size());
  auto write = [&](size_t i) {
    const ExtentWrite one{&reserved[i].place.pieces, data};
    done[i] = reserved[i].link->write({&one, 1}, deadline, &reserved[i].quiescent);
  };
  std::vector<std::thread> others;
  const bool in_turn = total_bytes(data) <= (256 << 10);
  for (size_t i = 1; i < reserved.size() && !in_turn; ++i) others.emplace_back(write, i);
  for (size_t i = 0; i < (in_turn ? reserved.size() : 1); ++i) write(i);
  for (std::thread& other : others) other.join();
  for (const Status& s : done) TM_TRY(s);
  return {};
}

// Gives extents back that this process can certainly write into no more. The others stay fenced until its session ends.
void ClientImpl::let_go(std::vector<Replicated>& reserved) {
  for (Replicated& r : reserved)
    if (r.quiescent) r.link->give_back({r.place.extent});
}

// Beside what comes before it; our own host first, then those with most room.
std::vector<const NodeInfo*> ClientImpl::by_preference(const View& view, const NodeId& here,
                                                       const std::set<NodeId>& near) {
  std::vector<const NodeInfo*> nodes;
  for (const NodeInfo& info : view.nodes) nodes.push_back(&info);
  std::stable_sort(nodes.begin(), nodes.end(), [&](const NodeInfo* a, const NodeInfo* b) {
    if (near.count(a->id) != near.count(b->id)) return near.count(a->id) != 0;
    if ((a->id == here) != (b->id == here)) return a->id == here;
    return a->limit_bytes - std::min(a->limit_bytes, a->used_bytes) >
           b->limit_bytes - std::min(b->limit_bytes, b->used_bytes);
  });
  return nodes;
}

// How many replicas there will be, on as many hosts. unsupported: there are not enough.
Result<size_t> ClientImpl::replicas_wanted(const View& view, const PutOptions& options) {
  std::set<std::string_view> hosts;
  for (const NodeInfo& info : view.nodes) hosts.insert(info.host_id);
  if (hosts.size() < options.replicas && !options.replicas_lenient)
    return {Code::unsupported, std::to_string(options.replicas) + " replicas need as many hosts; this pool has " +
                                   std::to_string(hosts.size())};
  return std::min<size_t>(options.replicas, hosts.size());
}

Result<std::vector<ClientImpl::Replicated>> ClientImpl::reserve(const ReserveCall& shape, const PutOptions& options,
                                                                const View& view, const std::set<NodeId>& near,
                                                                Deadline deadline) {
  TM_ASSIGN(auto here, local(deadline));
  const std::vector<const NodeInfo*> nodes = by_preference(view, here->node(), near);
  TM_ASSIGN(const size_t wanted, replicas_wanted(view, options));
  std::vector<Replicated> reserved;
  Status last(Code::pool_unavailable, "this pool has no donor");
  // First without waiting, at anybody; then waiting for room where we would like it most.
  for (const bool wait : {false, true}) {
    std::vector<std::string> used;
    for (const Replicated& r : reserved) used.push_back(r.link->host_id());
    for (const NodeInfo* n : nodes) {
      if (reserved.size() == wanted) break;
      if (std::find(used.begin(), used.end(), n->host_id) != used.end()) continue;
      auto node = link(n->id, deadline);
      if (!node.is_ok()) {
        last = node.status();
        continue;
      }
      ReserveCall call = shape;
      call.session = (*node)->session_id();
      call.wait = wait;
      call.head.timeout_ms = static_cast<uint32_t>(
          std::min<int64_t>(deadline.remaining_ms() < 0 ? 86'400'000 : deadline.remaining_ms(), 86'400'000));
      auto place = (*node)->call<ReserveAnswer>(
          kReserve, call, wait && !deadline.is_never() ? Deadline::at_ns(deadline.ns() + 200'000'000) : deadline);
      if (place.is_ok()) {
        reserved.push_back({*node, std::move(place).value(), true});
        used.push_back(n->host_id);
        continue;
      }
      last = place.status();
      if (leaves_open(last.code())) (*node)->abandon(call.head.txn, 1);
      const bool other_may = last.code() == Code::pool_full || passing(last);
      if (!other_may) {
        let_go(reserved);
        return last;
      }
    }
    // What is ours in advance may be what is missing.
    if (reserved.size() < wanted && last.code() == Code::pool_full) here->grants().give_back();
    if (reserved.size() == wanted || (options.replicas_lenient && !reserved.empty())) return reserved;
    if (last.code() != Code::pool_full) break;
  }
  let_go(reserved);
  return last;
}

}  // namespace torch_mooncake::pool
