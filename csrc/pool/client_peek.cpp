// Objects as somebody sees them who only watches.
#include <algorithm>
#include <numeric>
#include <set>

#include "pool/client_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr int kAttempts = 5;  // at keys that are replaced meanwhile

// None: a part has gone since it was looked up. `here`: nodes whose memory we have mapped.
std::shared_ptr<ObjectImpl> object_of(const std::string& key, LookupEntry& e, const std::set<NodeId>& here) {
  auto object = std::make_shared<ObjectImpl>();
  ObjectInfo& info = object->info_;
  info.key = key;
  info.kind = e.kind;
  info.version = e.version;
  info.left_ms = e.left_ms;
  info.pin = e.pin;
  info.parts.resize(e.parts);
  object->parts_.resize(e.parts);
  for (Place& place : e.places) {
    if (place.part >= e.parts || !place.description) continue;
    Description& d = *place.description;
    ObjectPart& part = object->parts_[place.part];
    if (part.replicas.empty()) {
      part.nbytes = d.nbytes;
      part.crc32c = d.crc32c;
      info.parts[place.part].meta = std::move(d.meta);
      if (place.part == 0) info.label = std::move(d.label);
    }
    const Tier tier = d.pieces.empty() && d.nbytes > 0 ? Tier::ssd : Tier::dram;
    part.replicas.push_back({place.at.node, d.copy.value_or(place.at.extent), std::move(d.pieces), tier});
  }
  if (object->parts_.empty()) return nullptr;
  bool readable = true;
  object->local_ = true;
  for (size_t p = 0; p < object->parts_.size(); ++p) {
    ObjectPart& part = object->parts_[p];
    auto& replicas = part.replicas;
    if (replicas.empty()) return nullptr;
    std::stable_partition(replicas.begin(), replicas.end(), [](const Replica& r) { return r.tier == Tier::dram; });
    part.offset = info.parts[p].offset = info.nbytes;
    info.parts[p].nbytes = part.nbytes;
    info.nbytes += part.nbytes;
    readable = readable && replicas[0].tier == Tier::dram;
    object->local_ = object->local_ && std::any_of(replicas.begin(), replicas.end(),
                                                   [&](const Replica& r) { return here.count(r.node) != 0; });
  }
  info.meta = info.parts[0].meta;
  info.replicas = object->parts_[0].replicas;
  if (!readable)  // whichever part it is
    for (Replica& r : info.replicas) r.tier = Tier::ssd;
  return object;
}

}  // namespace

std::vector<Result<ObjectPtr>> ClientImpl::peek_many(std::span<const std::string> keys, Deadline deadline) {
  std::vector<Result<ObjectPtr>> out(keys.size(), Result<ObjectPtr>(Status(Code::closed, "the client is closed")));
  std::vector<size_t> left(keys.size());
  std::iota(left.begin(), left.end(), size_t{0});
  for (int attempt = 0; !left.empty() && attempt < kAttempts && usable().is_ok(); ++attempt) {
    if (attempt > 0) {
      timespec pause{0, 20'000'000};
      nanosleep(&pause, nullptr);
    }
    std::vector<std::string> some;
    for (size_t i : left) some.push_back(keys[i]);
    auto entries = look_up(some, {}, deadline);
    if (!entries.is_ok()) {
      for (size_t i : left) out[i] = entries.status();
      return out;
    }
    const Silent silent = describe_elsewhere(some, *entries, deadline, /*peek=*/true);
    std::set<NodeId> here;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [id, link] : links_)
        if (link->mapped() && link->alive()) here.insert(id);
    }
    std::vector<size_t> again;
    for (size_t n = 0; n < left.size(); ++n) {
      LookupEntry& e = (*entries)[n];
      auto object = e.found ? object_of(some[n], e, here) : nullptr;
      const Status why = why_silent(e, silent);
      const std::string key = "key '" + some[n] + "'";
      if (object) {
        out[left[n]] = ObjectPtr(std::move(object));
      } else if (!e.found) {
        out[left[n]] = Status(Code::key_not_found, key);
      } else if (!why.is_ok()) {
        out[left[n]] = why.with(key);
      } else {
        out[left[n]] = Status(Code::pool_unavailable, key + " was replaced whenever it was looked at");
        again.push_back(left[n]);
      }
    }
    left = std::move(again);
  }
  return out;
}

}  // namespace torch_mooncake::pool
