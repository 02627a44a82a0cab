// locate, read, map.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "common/crc32c.h"
#include "memory/copy.h"
#include "pool/client_impl.h"
#include "pool/forked_children.h"

namespace torch_mooncake::pool {
namespace {

constexpr uint64_t kMapBytes = 256 << 10;  // smaller objects are copied faster than they are mapped privately

Status missing(std::string_view key) { return {Code::key_not_found, "key '" + std::string(key) + "'"}; }

uint64_t page_up(uint64_t n) { return (n + kPageBytes - 1) / kPageBytes * kPageBytes; }

// What keeps one mapped object in place: pins, and the budget they count against.
struct Hold {
  std::vector<LinkPtr> links;  // one a pin
  std::vector<uint32_t> slots;
  uint64_t budget_bytes = 0;
  uint64_t epoch = fork_epoch();
  void release() {
    for (size_t i = 0; i < slots.size(); ++i) links[i]->pins().unpin(slots[i]);
    if (!links.empty()) links[0]->release_map(budget_bytes);
    links.clear();
  }
};

// Those whose map a forked child may still have.
struct Deferred {
  std::mutex mutex;
  std::vector<Hold> holds;
};
Deferred& deferred() {
  static auto* d = new Deferred;
  return *d;
}

void release_deferred() {
  std::vector<Hold> over;
  {
    std::lock_guard lock(deferred().mutex);
    auto& holds = deferred().holds;
    if (holds.empty()) return;
    std::erase_if(holds, [&](Hold& hold) {
      if (!no_child_since(hold.epoch)) return false;
      over.push_back(std::move(hold));
      return true;
    });
  }
  for (Hold& hold : over) hold.release();
}

// One mapped object: all goes with the last pointer to it.
struct Stitched {
  Hold hold;
  MappingPtr map;              // the persistent one that `data` lies in, or
  std::byte* range = nullptr;  // a range of our own to unmap
  uint64_t range_bytes = 0;
  const pid_t pid = ::getpid();
  ~Stitched() {
    if (range) ::munmap(range, range_bytes);
    release_deferred();
    if (::getpid() != pid) {  // the pins are the parent's
      std::lock_guard lock(deferred().mutex);
      hold.epoch = UINT64_MAX;
      static auto* kept = new std::vector<Hold>;
      kept->push_back(std::move(hold));
    } else if (no_child_since(hold.epoch)) {
      hold.release();
    } else {
      std::lock_guard lock(deferred().mutex);
      deferred().holds.push_back(std::move(hold));
    }
  }
};

}  // namespace

// --- locate ---

// What was found before is the key's current version if its words have not changed and its donor still counts: a newer
// version is acknowledged only after the words of the older one have changed.
ObjectPtr ClientImpl::cached(std::string_view key) {
  auto place = cache_.find(key);
  if (!place) return nullptr;
  const auto& object = static_cast<const ObjectImpl&>(*place->object);
  Link& link = *place->link;
  const bool intact = link.alive() && std::all_of(object.parts_.begin(), object.parts_.end(), [&](const auto& part) {
                        return link.pins().valid(part.replicas[0].extent);
                      });
  if (!intact || !link.counted(static_cast<int64_t>(options_.view_ttl_s * 1e9))) {
    cache_.erase(key);
    return nullptr;
  }
  for (const ObjectPart& part : object.parts_) link.touch(part.replicas[0].extent);
  return std::move(place->object);
}

Result<ObjectPtr> ClientImpl::locate(std::string_view key, const GetOptions& options, Deadline deadline) {
  TM_TRY(usable());
  if (auto object = cached(key); object && (!options.at_least || object->info().version >= *options.at_least) &&
                                 (options.label.empty() || object->info().label == options.label))
    return object;
  const std::string keys[] = {std::string(key)};
  auto object = std::move(locate_many(keys, deadline)[0]);
  if (!object.is_ok()) return object;
  const ObjectInfo& info = (*object)->info();
  if (options.at_least && info.version < *options.at_least)
    return {Code::key_not_found, "key '" + keys[0] + "' has only an older version"};
  if (!options.label.empty() && info.label != options.label)
    return {Code::key_not_found,
            "key '" + keys[0] + "' has version label '" + info.label + "', not '" + options.label + "'"};
  return object;
}

ClientImpl::Silent ClientImpl::describe_elsewhere(std::span<const std::string> keys, std::vector<LookupEntry>& entries,
                                                  Deadline deadline, bool peek) {
  std::map<NodeId, std::vector<std::pair<Place*, const std::string*>>> wanted;
  for (size_t i = 0; i < entries.size(); ++i)
    for (Place& place : entries[i].places)
      if (!place.description) wanted[place.at.node].emplace_back(&place, &keys[i]);
  Silent silent;
  for (auto& [id, places] : wanted) {
    auto node = link(id, deadline);
    if (!node.is_ok()) {
      // The home has named it just now: our node has not been told of it yet.
      silent[id] = node.status().code() == Code::key_not_found
                       ? Status(Code::pool_unavailable, "this host knows it not yet")
                       : node.status();
      continue;
    }
    for (size_t at = 0; at < places.size();) {
      DescribeCall call;
      for (size_t i = at; i < places.size() && call.extents.size() < 8192; ++i)
        call.extents.push_back({*places[i].second, places[i].first->at.extent});
      call.data = !peek && !(*node)->mapped();
      call.peek = peek;
      auto answer = (*node)->call<DescribeAnswer>(kDescribe, call, deadline);
      if (!answer.is_ok() || answer->descriptions.empty() || answer->descriptions.size() > call.extents.size()) {
        silent[id] = answer.is_ok() ? Status(Code::internal, "describe: wrong number of answers") : answer.status();
        break;
      }
      for (auto& d : answer->descriptions) places[at++].first->description = std::move(d);
    }
  }
  return silent;
}

// Why a part of it was not described; ok: whoever has it answered, and it was not there.
Status ClientImpl::why_silent(const LookupEntry& entry, const Silent& silent) {
  for (const Place& place : entry.places)
    if (const auto it = silent.find(place.at.node); it != silent.end() && !place.description) return it->second;
  return {};
}

// What has gone between the home's answer and the donor's is looked up again, as is what a silent donor holds and what
// waits for others to come from an SSD: for kReconnectMs, and as long as some of it comes.
std::vector<Result<ObjectPtr>> ClientImpl::build(std::span<const std::string> keys, std::vector<LookupEntry> entries,
                                                 Deadline deadline) {
  std::vector<size_t> again;
  auto out = build_once(keys, std::move(entries), &again, deadline);
  Deadline until = min(deadline, Deadline::after_ms(kReconnectMs));
  while (!again.empty() && until.remaining_ns() >= 20'000'000 && usable().is_ok()) {
    timespec pause{0, 20'000'000};
    nanosleep(&pause, nullptr);
    std::vector<std::string> some;
    for (size_t i : again) some.push_back(keys[i]);
    LookupCall shape;
    shape.describe = true;
    auto fresh = look_up(some, shape, until);
    if (!fresh.is_ok()) {
      for (size_t i : again) out[i] = fresh.status();
      return out;
    }
    std::vector<size_t> left;
    auto built = build_once(some, std::move(fresh).value(), &left, until);
    for (size_t n = 0; n < again.size(); ++n) out[again[n]] = std::move(built[n]);
    if (left.size() < again.size()) until = min(deadline, Deadline::after_ms(kReconnectMs));
    for (size_t& n : left) n = again[n];
    again = std::move(left);
  }
  return out;
}

// `again`: positions of what was found, but could not be described.
std::vector<Result<ObjectPtr>> ClientImpl::build_once(std::span<const std::string> keys,
                                                      std::vector<LookupEntry> entries, std::vector<size_t>* again,
                                                      Deadline deadline) {
  std::vector<Result<ObjectPtr>> out;
  out.reserve(keys.size());
  std::map<NodeId, LinkPtr> mapped;  // those of this host
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, link] : links_)
      if (link->mapped() && link->alive()) mapped[id] = link;
  }
  const Silent silent = describe_elsewhere(keys, entries, deadline);
  std::vector<bool> described, here;  // the parts
  for (size_t i = 0; i < keys.size(); ++i) {
    LookupEntry& e = entries[i];
    if (!e.found) {
      out.emplace_back(missing(keys[i]));
      continue;
    }
    auto object = std::make_shared<ObjectImpl>();
    ObjectInfo& info = object->info_;
    info.key = keys[i];
    info.kind = e.kind;
    info.version = e.version;
    info.left_ms = e.left_ms;
    info.pin = e.pin;
    info.parts.resize(e.parts);
    object->parts_.resize(e.parts);
    object->local_ = true;
    described.assign(e.parts, false);
    here.assign(e.parts, false);
    for (Place& place : e.places) {
      if (place.part >= e.parts || !place.description) continue;
      Description& d = *place.description;
      ObjectPart& part = object->parts_[place.part];
      if (d.data && e.parts == 1) object->data_ = std::move(d.data->bytes);
      if (!described[place.part]) {
        part.nbytes = d.nbytes;
        part.crc32c = d.crc32c;
        info.parts[place.part].meta = std::move(d.meta);
        if (place.part == 0) info.label = std::move(d.label);
      }
      described[place.part] = true;
      const bool is_here = mapped.count(place.at.node) != 0;
      Replica replica{place.at.node, d.copy.value_or(place.at.extent), std::move(d.pieces), place.at.tier};
      part.replicas.insert(is_here ? part.replicas.begin() : part.replicas.end(), std::move(replica));
      here[place.part] = here[place.part] || is_here;
    }
    if (!std::all_of(described.begin(), described.end(), [](bool b) { return b; })) {
      again->push_back(i);
      const bool waits = std::any_of(e.places.begin(), e.places.end(),
                                     [](const Place& p) { return !p.description && p.at.tier == Tier::ssd; });
      const Status why = why_silent(e, silent);
      out.emplace_back(
          !why.is_ok() ? why.with("key '" + keys[i] + "'")
          : waits      ? Status(Code::pool_full, "key '" + keys[i] + "' is on an SSD, and no memory was free for it")
                       : missing(keys[i]));
      continue;
    }
    for (size_t p = 0; p < object->parts_.size(); ++p) {
      object->parts_[p].offset = info.parts[p].offset = info.nbytes;
      info.parts[p].nbytes = object->parts_[p].nbytes;
      info.nbytes += object->parts_[p].nbytes;
      object->local_ = object->local_ && here[p];
    }
    const NodeId first = object->parts_[0].replicas[0].node;
    if (object->local_ && std::all_of(object->parts_.begin(), object->parts_.end(),
                                      [&](const auto& part) { return part.replicas[0].node == first; }))
      object->link_ = mapped[first];
    info.meta = info.parts[0].meta;
    info.replicas = object->parts_[0].replicas;
    info.has_crc = e.parts == 1 && object->parts_[0].crc32c.has_value();
    info.crc32c = info.has_crc ? *object->parts_[0].crc32c : 0;
    if (auto one = object->link_.lock(); one && !info.left_ms) cache_.add({object, std::move(one)});
    out.emplace_back(ObjectPtr(std::move(object)));
  }
  return out;
}

// --- read ---

Status ClientImpl::read(const ObjectPtr& object, uint64_t offset, std::span<const iovec> out, Deadline deadline) {
  std::set<NodeId> gone;
  return read(object, offset, out, gone, deadline);
}

Status ClientImpl::read(const ObjectPtr& object, uint64_t offset, std::span<const iovec> out, std::set<NodeId>& gone,
                        Deadline deadline) {
  TM_TRY(usable());
  const auto& o = static_cast<const ObjectImpl&>(*object);
  const bool quick = o.parts_.size() == 1 && o.info_.nbytes < kSlabLimit && out.size() == 1 && !o.parts_[0].crc32c;
  if (const LinkPtr link = quick ? o.link_.lock() : nullptr) {
    const Replica& replica = o.parts_[0].replicas[0];
    const ReadRange range{offset, static_cast<std::byte*>(out[0].iov_base), out[0].iov_len};
    TM_TRY(link->read_small(replica.extent, replica.pieces, range));
    read_bytes_ += range.nbytes;
    return {};
  }
  std::vector<ReadRange> ranges;
  for (const iovec& v : out) {
    ranges.push_back({offset, static_cast<std::byte*>(v.iov_base), v.iov_len});
    offset += v.iov_len;
  }
  TM_ASSIGN(const auto by_part, split(o, ranges));
  if (o.data_) return read_data(o, by_part[0]);
  for (size_t i = 0; i < by_part.size(); ++i) {
    if (by_part[i].empty()) continue;
    std::vector<iovec> memory;
    for (const ReadRange& r : by_part[i]) memory.push_back({r.to, r.nbytes});
    const ObjectPart& part = o.parts_[i];
    TM_TRY(read_part(part, by_part[i], memory, gone, deadline));
    if (!part.crc32c || total_bytes(memory) != part.nbytes) continue;
    uint32_t crc = 0;
    for (const iovec& v : memory) crc = crc32c(v.iov_base, v.iov_len, crc);
    if (crc != *part.crc32c) return {Code::corrupt, "checksum of key '" + o.info_.key + "' does not match"};
  }
  return {};
}

Status ClientImpl::read_ranges(const ObjectPtr& object, std::span<const ReadRange> ranges, iovec memory,
                               Deadline deadline) {
  TM_TRY(usable());
  const auto* base = static_cast<std::byte*>(memory.iov_base);
  for (const ReadRange& r : ranges)
    if (r.to < base || r.nbytes > memory.iov_len || static_cast<uint64_t>(r.to - base) > memory.iov_len - r.nbytes)
      return {Code::invalid_argument, "a range to be read leaves the memory that was given for it"};
  const auto& o = static_cast<const ObjectImpl&>(*object);
  TM_ASSIGN(const auto by_part, split(o, ranges));
  if (o.data_) return read_data(o, by_part[0]);
  std::set<NodeId> gone;
  for (size_t i = 0; i < by_part.size(); ++i)
    if (!by_part[i].empty()) TM_TRY(read_part(o.parts_[i], by_part[i], std::span(&memory, 1), gone, deadline));
  return {};
}

// Of a value that came along: nothing to validate but its checksum.
Status ClientImpl::read_data(const ObjectImpl& object, std::span<const ReadRange> ranges) {
  const std::string& data = *object.data_;
  if (object.parts_[0].crc32c && crc32c(data.data(), data.size()) != *object.parts_[0].crc32c)
    return {Code::corrupt, "checksum of key '" + object.info_.key + "' does not match"};
  for (const ReadRange& r : ranges) {
    std::memcpy(r.to, data.data() + r.offset, r.nbytes);
    read_bytes_ += r.nbytes;
  }
  return {};
}

// The ranges of each part, with offsets in that part.
Result<std::vector<std::vector<ReadRange>>> ClientImpl::split(const ObjectImpl& object,
                                                              std::span<const ReadRange> ranges) {
  std::vector<std::vector<ReadRange>> by_part(object.parts_.size());
  for (ReadRange r : ranges) {
    if (r.offset > object.info_.nbytes || r.nbytes > object.info_.nbytes - r.offset)
      return {Code::out_of_bounds, "bytes " + std::to_string(r.offset) + " to " + std::to_string(r.offset + r.nbytes) +
                                       " of an object of " + std::to_string(object.info_.nbytes)};
    auto part = std::upper_bound(object.parts_.begin(), object.parts_.end(), r.offset,
                                 [](uint64_t at, const ObjectPart& p) { return at < p.offset + p.nbytes; });
    while (r.nbytes > 0) {
      const uint64_t from = r.offset - part->offset, n = std::min(r.nbytes, part->nbytes - from);
      if (n > 0) by_part[static_cast<size_t>(part - object.parts_.begin())].push_back({from, r.to, n});
      r = {r.offset + n, r.to + n, r.nbytes - n};
      ++part;
    }
  }
  return by_part;
}

// From the first replica that answers. A node that is starting again is waited for; one that has left the pool took
// its replicas along. `gone`: those that were waited for in vain; not again.
Status ClientImpl::read_part(const ObjectPart& part, std::span<const ReadRange> ranges, std::span<const iovec> memory,
                             std::set<NodeId>& gone, Deadline deadline) {
  const Deadline until = min(deadline, Deadline::after_ms(kReconnectMs));
  for (int64_t pause_ms = 2;; pause_ms = std::min<int64_t>(pause_ms * 2, 100)) {
    Status silent;
    bool hope = false;
    std::vector<NodeId> silent_nodes;
    for (const Replica& replica : part.replicas) {
      auto node = link(replica.node, deadline);
      const Status s =
          node.is_ok() ? (*node)->read(replica.extent, replica.pieces, ranges, memory, deadline) : node.status();
      if (s.is_ok()) {
        for (const ReadRange& r : ranges) read_bytes_ += r.nbytes;
        return s;
      }
      if (s.code() != Code::key_not_found && !passing(s)) return s;
      if (!passing(s)) continue;
      silent = s;
      hope = hope || !gone.count(replica.node);
      silent_nodes.push_back(replica.node);
    }
    if (silent.is_ok()) return {Code::key_not_found, "superseded: look it up again"};
    if (!hope || until.remaining_ns() <= pause_ms * 1'000'000) {
      if (!deadline.expired()) gone.insert(silent_nodes.begin(), silent_nodes.end());
      return {Code::pool_unavailable, silent.message()};
    }
    timespec pause{0, pause_ms * 1'000'000};
    nanosleep(&pause, nullptr);
  }
}

// --- map ---

Status ClientImpl::check_crc(const ObjectImpl& object, const std::byte* data) const {
  for (const ObjectPart& part : object.parts_)
    if (part.crc32c && crc32c(data + part.offset, part.nbytes) != *part.crc32c)
      return {Code::corrupt, "checksum of key '" + object.info_.key + "' does not match"};
  return {};
}

// A copy, in one go: the bytes first, then the word.
Result<MappedObject> ClientImpl::map_small(const ObjectImpl& object, Link& link) {
  const uint64_t nbytes = object.info_.nbytes;
  auto memory = std::shared_ptr<std::byte[]>(new (std::align_val_t(64)) std::byte[std::max<uint64_t>(nbytes, 1)],
                                             [](std::byte* p) { ::operator delete[](p, std::align_val_t(64)); });
  const Replica& replica = object.parts_[0].replicas[0];
  const ReadRange all{0, memory.get(), nbytes};
  TM_TRY(link.read_small(replica.extent, replica.pieces, all));
  TM_TRY(check_crc(object, memory.get()));
  read_bytes_ += nbytes;
  return MappedObject{std::shared_ptr<std::byte>(memory, memory.get()), nbytes, false};
}

Result<MappedObject> ClientImpl::map(const ObjectPtr& object, bool read_only, Deadline deadline) {
  std::set<NodeId> gone;
  return map(object, read_only, gone, deadline);
}

Result<MappedObject> ClientImpl::map(const ObjectPtr& object, bool read_only, std::set<NodeId>& gone,
                                     Deadline deadline) {
  TM_TRY(usable());
  const auto& o = static_cast<const ObjectImpl&>(*object);
  if (o.parts_.size() == 1 && o.info_.nbytes < kSlabLimit)
    if (const LinkPtr one = o.link_.lock()) return map_small(o, *one);
  TM_ASSIGN(auto mapped, map_local(o, read_only));
  if (mapped) {
    TM_TRY(check_crc(o, mapped->data.get()));
    return std::move(*mapped);
  }
  const uint64_t nbytes = o.info_.nbytes;
  auto* memory = static_cast<std::byte*>(
      std::aligned_alloc(nbytes < 65536 ? 64 : kPageBytes, page_up(std::max<uint64_t>(nbytes, 1))));
  if (!memory) return {Code::pool_full, "no memory for a copy of " + std::to_string(nbytes) + " bytes"};
  std::shared_ptr<std::byte> data(memory, [](std::byte* p) { std::free(p); });
  const iovec v{memory, nbytes};
  TM_TRY(read(object, 0, std::span(&v, nbytes ? 1 : 0), gone, deadline));
  return MappedObject{std::move(data), nbytes, false};
}

// None: to be copied (small, remote, over budget, not page aligned).
Result<std::optional<MappedObject>> ClientImpl::map_local(const ObjectImpl& object, bool read_only) {
  const std::optional<MappedObject> copy_it;
  const uint64_t nbytes = object.info_.nbytes;
  if (!object.local_ || nbytes < (read_only ? kSlabLimit : kMapBytes)) return copy_it;
  struct Source {
    LinkPtr link;
    const Replica* replica;
  };
  std::vector<Source> sources;
  std::vector<std::pair<LinkPtr, Piece>> pieces;
  {
    std::lock_guard lock(mutex_);
    for (const ObjectPart& part : object.parts_) {
      if (part.nbytes == 0) continue;
      const auto it = part.replicas.empty() ? links_.end() : links_.find(part.replicas[0].node);
      if (it == links_.end() || !it->second->mapped()) return copy_it;
      sources.push_back({it->second, &part.replicas[0]});
      for (const Piece& piece : part.replicas[0].pieces) pieces.emplace_back(it->second, piece);
    }
  }
  // All but the last piece must fill their pages, and all begin on one.
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& p = pieces[i].second;
    if (p.offset % kPageBytes != 0 || (i + 1 < pieces.size() && p.nbytes % kPageBytes != 0)) return copy_it;
  }
  release_deferred();
  if (!sources[0].link->take_map(nbytes)) return copy_it;
  auto owner = std::make_shared<Stitched>();
  owner->hold.budget_bytes = nbytes;
  owner->hold.links.push_back(sources[0].link);  // its budget; the pin may follow
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto& [link, replica] = sources[i];
    if (i > 0) owner->hold.links.push_back(link);
    auto slot = link->pins().pin(replica->extent);
    if (!slot.is_ok() && slot.status().code() == Code::busy) return copy_it;
    if (!slot.is_ok()) return Status(Code::key_not_found, "superseded: look it up again");
    owner->hold.slots.push_back(*slot);
  }
  std::byte* data = nullptr;
  if (read_only && pieces.size() == 1) {
    const auto& [link, piece] = pieces[0];
    owner->map = link->read_map(piece.segment);
    data = const_cast<std::byte*>(link->read_only(piece));
  } else {
    const uint64_t range = page_up(nbytes);
    void* at = ::mmap(nullptr, range, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return copy_it;  // no address space or too many maps: a copy needs less
    owner->range = data = static_cast<std::byte*>(at);
    owner->range_bytes = range;
    std::byte* next = data;
    for (const auto& [link, piece] : pieces) {
      const uint64_t n = page_up(piece.nbytes);
      void* got = ::mmap(next, n, read_only ? PROT_READ : PROT_READ | PROT_WRITE,
                         (read_only ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED, link->segment(piece.segment)->fd(),
                         static_cast<off_t>(piece.offset));
      if (got == MAP_FAILED) return copy_it;
      next += n;
    }
  }
  return std::optional<MappedObject>{MappedObject{std::shared_ptr<std::byte>(owner, data), nbytes, true}};
}

}  // namespace torch_mooncake::pool
