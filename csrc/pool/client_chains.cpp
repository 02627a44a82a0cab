// match_prefix and refresh_chain: the home says what is there, the donors pin and refresh what they hold. Events.
#include <algorithm>
#include <cstring>

#include "pool/client_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr size_t kFirstBatch = 1024;  // a first answer is often short: the rest is asked for if all of it is there
constexpr size_t kBatch = 8192;

}  // namespace

Result<std::vector<Replicas>> ClientImpl::find_prefix(std::span<const std::string> keys, uint64_t pin_ms,
                                                      Deadline deadline) {
  std::vector<Replicas> all;
  while (all.size() < keys.size()) {
    const auto part = keys.subspan(all.size(), std::min(all.empty() ? kFirstBatch : kBatch, keys.size() - all.size()));
    auto answer = with_retries(deadline, [&]() -> Result<PrefixAnswer> {
      TM_ASSIGN(auto node, home(deadline));
      const auto now = view();
      PrefixCall call;
      call.view = now->number;
      call.session = node->session_id();
      call.pin_ms = pin_ms;
      for (const std::string& key : part) call.keys.push_back({shard_of(hash_key(key, now->seed)), key});
      return node->call<PrefixAnswer>(kPrefix, call, deadline);
    });
    if (!answer.is_ok()) return answer.status();
    if (answer->found.size() > part.size()) return {Code::internal, "a prefix longer than its keys"};
    const bool whole = answer->found.size() == part.size();
    std::move(answer->found.begin(), answer->found.end(), std::back_inserter(all));
    if (!whole) break;
  }
  return all;
}

Result<std::vector<size_t>> ClientImpl::refresh(const Places& places, RefreshCall shape, Deadline deadline) {
  std::vector<size_t> gone;
  const auto now = view();
  shape.view = now->number;
  for (const auto& [id, extents] : places) {
    for (size_t end = extents.size(); end > 0;) {  // last first, also over several messages
      const size_t begin = end - std::min(end, kBatch);
      auto node = link(id, deadline);
      Result<RefreshAnswer> answer = node.status();
      if (node.is_ok()) {
        shape.session = (*node)->session_id();
        (*node)->tell_touches();  // of reads before this, in their own order
        shape.extents.clear();
        for (size_t i = end; i-- > begin;) shape.extents.push_back(extents[i].second);
        answer = (*node)->call<RefreshAnswer>(kRefresh, shape, deadline);
      }
      if (!answer.is_ok() && !passing(answer.status()) && answer.status().code() != Code::key_not_found)
        return answer.status();
      if (answer.is_ok()) {
        for (uint32_t i : answer->gone)
          if (i < end - begin) gone.push_back(extents[end - 1 - i].first);
      } else {  // its node cannot be reached, or has left: what it holds is as good as gone
        for (size_t i = begin; i < end; ++i) gone.push_back(extents[i].first);
      }
      end = begin;
    }
  }
  return gone;
}

Result<size_t> ClientImpl::match_prefix(std::span<const std::string> keys, uint64_t pin_ms, Deadline deadline) {
  TM_TRY(usable());
  TM_ASSIGN(const auto found, find_prefix(keys, pin_ms, deadline));
  if (pin_ms == 0) return found.size();
  const auto now = view();
  Places elsewhere;
  std::vector<size_t> copies(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    copies[i] = found[i].at.size();
    for (const ReplicaRef& r : found[i].at)
      if (r.node != now->home) elsewhere[r.node].emplace_back(i, r.extent);
  }
  RefreshCall shape;
  shape.pins = RefreshCall::Pins::pin;
  shape.pin_ms = pin_ms;
  TM_ASSIGN(const auto gone, refresh(elsewhere, shape, deadline));
  for (size_t i : gone)
    if (copies[i] > 0) --copies[i];
  const auto first = std::find(copies.begin(), copies.end(), size_t{0});
  return static_cast<size_t>(first - copies.begin());
}

Status ClientImpl::refresh_chain(std::span<const std::string> keys, bool unpin, Deadline deadline) {
  TM_TRY(usable());
  TM_ASSIGN(const auto found, find_prefix(keys, 0, deadline));
  Places places;
  for (size_t i = 0; i < found.size(); ++i)
    for (const ReplicaRef& r : found[i].at) places[r.node].emplace_back(i, r.extent);
  RefreshCall shape;
  if (unpin) shape.pins = RefreshCall::Pins::unpin;
  return refresh(places, shape, deadline).status();
}

Status ClientImpl::refresh_chain(std::span<const ObjectPtr> objects, bool unpin, Deadline deadline) {
  TM_TRY(usable());
  Places places;
  for (size_t i = 0; i < objects.size(); ++i)
    for (const ObjectPart& part : static_cast<const ObjectImpl&>(*objects[i]).parts_)
      for (const Replica& r : part.replicas) places[r.node].emplace_back(i, r.extent);
  RefreshCall shape;
  if (unpin) shape.pins = RefreshCall::Pins::unpin;
  return refresh(places, shape, deadline).status();
}

// --- events ---

Result<KeyEvents> ClientImpl::events(uint64_t stream, uint64_t after, std::string_view prefix, uint32_t wait_ms,
                                     Deadline deadline) {
  TM_TRY(usable());
  auto answer = with_retries(deadline, [&]() -> Result<EventsAnswer> {
    TM_TRY(refresh_view(deadline));  // whose seed is that of the hashes
    TM_ASSIGN(auto node, home(deadline));
    const auto now = view();
    EventsCall call;
    call.view = now->number;
    call.stream = stream;
    call.after = after;
    call.prefix = prefix;
    call.timeout_ms = wait_ms;
    return node->call<EventsAnswer>(kEvents, call, deadline);
  });
  if (!answer.is_ok()) return answer.status();
  KeyEvents out{answer->stream, answer->last, answer->anew, {}};
  for (KeyEvent& e : answer->events)
    out.events.push_back({e.hash, std::move(e.key), e.what, e.kind, e.version, e.tier});
  return out;
}

Result<Id128> ClientImpl::key_hash(std::string_view key) {
  const auto now = view();
  const KeyHash hash = hash_key(key, now->seed);
  Id128 out;
  std::memcpy(out.data(), hash.data(), sizeof out);
  return out;
}

}  // namespace torch_mooncake::pool
