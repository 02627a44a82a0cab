// Client of the pool: what tm.put and tm.get stand on.
//
// A Client belongs to one process, owns (or shares) an Engine, holds a session with this host's node and, when an
// object lives elsewhere, with that node. Threads: every method is safe from any thread; all may block up to their
// deadline and release nothing of Python's. After close(): `closed`. In a forked child: `forked` (the Python layer
// re-attaches). Objects that were handed out stay readable after close(): the session stays until the last mapping
// dies.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/api.h"
#include "common/clock.h"
#include "memory/segment.h"
#include "pool/types.h"
#include "transfer/engine.h"

namespace torch_mooncake::pool {

struct ClientOptions {
  std::string node_address;  // "unix:///run/…/node.sock" or "tcp://host:7400"
  std::string token;
  std::string name = "client";
  std::string host_id;
  std::vector<std::string> transports = {"local", "shm", "tcp"};  // these three: see EngineOptions
  std::vector<std::string> nics{};
  std::string rdma{};
  EnginePtr engine;         // null: the client makes its own
  double view_ttl_s = 1.0;  // 0 to 4: how long after a node was counted its known locations are used without asking
  bool monitor = false;     // only looks on: keeps no node from exiting when nobody uses it
};

struct PutOptions {
  Kind kind = Kind::named;
  IfExists if_exists = IfExists::replace;
  uint32_t replicas = 1;  // on different hosts; not to be met: pool_full / unsupported, unless lenient
  bool replicas_lenient = false;
  std::string label;             // version=
  uint32_t part = 0, parts = 1;  // several writers of one object: same group, parts gather, visible at n of n
  std::string group;             // empty: the label
  bool checksum = false;
  uint64_t ttl_ms = 0;  // it is missing so long after it became visible; 0: never
  Pin pin = Pin::none;
  std::string parent;  // the key it comes after, which is there and is not evicted before it; empty: none
};
// One of a batch of puts.
struct PutEntry {
  std::string_view key, meta;
  std::span<const iovec> data;
};
struct PutOutcome {
  Version version;
  bool stored = true;  // false: if_exists=keep found one, or a sealed copy was there
};

struct GetOptions {
  std::optional<Version> at_least;
  std::string label;  // version=: key_not_found if the current one has another label
};

// A found version. Reading validates the generation after the data; an object superseded in between is looked up again
// by Client::read (named) or read from another replica.
class TM_API Object {
 public:
  virtual ~Object() = default;
  virtual const ObjectInfo& info() const = 0;
  virtual bool local() const = 0;  // on this host's node: mappable
};
using ObjectPtr = std::shared_ptr<Object>;

// Bytes [offset, offset + nbytes) of an object, and where they go.
struct ReadRange {
  uint64_t offset = 0;
  std::byte* to = nullptr;
  uint64_t nbytes = 0;
};

// One of a batch of reads: bytes [offset, offset + sum(out)) of the object.
struct ReadEntry {
  ObjectPtr object;
  uint64_t offset = 0;
  std::span<const iovec> out;
};
struct RemoveEntry {
  std::string_view key;
  std::optional<Version> only{};
};

struct MappedObject {
  std::shared_ptr<std::byte> data;  // contiguous; pins and maps live as long as this pointer
  uint64_t nbytes = 0;
  bool zero_copy = false;  // false: small, over budget, or remote: a private copy
};

// What has become of keys; see Client::events.
struct KeyEvents {
  struct Event {
    Id128 hash{};     // Client::key_hash of the key
    std::string key;  // empty if it went; of one that moved it may be
    KeyChange what = KeyChange::removed;
    Kind kind = Kind::named;
    Version version;
    Tier tier = Tier::dram;  // where it is now
  };
  uint64_t stream = 0, last = 0;
  bool anew = false;
  std::vector<Event> events;
};

struct Drained {
  uint64_t moved = 0, moved_bytes = 0;  // objects (of several writers: parts)
  uint64_t left = 0;                    // that could not be, and are lost
  std::string why;
};

struct PoolStats {
  struct Node {
    NodeId id;
    std::string address, host_id;
    uint64_t limit_bytes, used_bytes, limbo_bytes, prepared_bytes, extents, evictions, pinned;
    uint64_t soft_pinned_bytes, hard_pinned_bytes;
    bool is_home;
    uint64_t fenced_bytes, granted_bytes;
    uint64_t starts, clients, waiting;  // of its worker, NodeActivity in messages.h
    uint64_t reservations, refusals;
    uint64_t lookups, misses, commits, removals;
    uint64_t copies, copied_bytes, to_copy;
    bool draining, ready;
    std::string unready;
    SsdStats ssd;
  };
  uint64_t view = 0, keys = 0;
  std::vector<Node> nodes;
  std::vector<Quota> quotas;
  uint64_t client_maps = 0, client_mapped_bytes = 0;
  uint64_t client_read_bytes = 0;  // that this client has copied out of the pool
};

class TM_API Client {
 public:
  static Result<std::shared_ptr<Client>> connect(ClientOptions options, Deadline deadline);
  virtual ~Client() = default;

  // The concatenation of `data` becomes the object. Bytes are read until the call returns. All or nothing: on error
  // nothing is visible, except after deadline_exceeded in the commit, whose message says "outcome unknown".
  virtual Result<PutOutcome> put(std::string_view key, std::string_view meta, std::span<const iovec> data,
                                 const PutOptions& options, Deadline deadline) = 0;
  virtual Result<ObjectPtr> locate(std::string_view key, const GetOptions& options, Deadline deadline) = 0;
  // Bytes [offset, offset + sum(out)) of the object into `out`, validated. If the object was superseded meanwhile:
  // busy-free retry is the caller's (get_into does it), code corrupt is never returned for that; it is key_not_found
  // with "superseded" when this version is gone.
  virtual Status read(const ObjectPtr& object, uint64_t offset, std::span<const iovec> out, Deadline deadline) = 0;
  // The same for any number of ranges of the object, in any order, all of which lie in `memory`: no other byte of the
  // object is read, and no other byte of the memory is written.
  virtual Status read_ranges(const ObjectPtr& object, std::span<const ReadRange> ranges, iovec memory,
                             Deadline deadline) = 0;
  // The object as memory. read_only: over the persistent shared map (a write to it crashes the caller); otherwise a
  // private copy-on-write map or, for small or remote objects, a copy.
  virtual Result<MappedObject> map(const ObjectPtr& object, bool read_only, Deadline deadline) = 0;

  virtual Result<std::vector<bool>> exists(std::span<const std::string> keys, Deadline deadline) = 0;
  // Where each is; none: it is not there.
  virtual Result<std::vector<std::optional<Tier>>> tiers(std::span<const std::string> keys, Deadline deadline) = 0;
  // False: was not there. With `only`, that version and no other: of all who ask for it at most one is told true; if
  // the answer is lost, the error's message begins with "outcome unknown".
  virtual Result<bool> remove(std::string_view key, Deadline deadline, std::optional<Version> only = {}) = 0;
  virtual Result<std::vector<std::string>> keys(std::string_view prefix, Deadline deadline) = 0;
  virtual Result<ObjectPtr> wait(std::string_view key, const GetOptions& options, Deadline deadline) = 0;
  // With `here`, of the node at node_address alone, asked once: what answers in time is alive.
  virtual Result<PoolStats> stat(Deadline deadline, bool here = false) = 0;
  // How many bytes of memory the keys with this prefix may have; 0: no limit. Other nodes know it a second later. All
  // there are then, with what is used in the pool.
  virtual Result<std::vector<Quota>> set_quota(const Quota& quota, Deadline deadline) = 0;
  // Asks the node at node_address to leave the pool: returns when it has begun to. drained(): when it has moved what
  // only it had to other nodes, as far as there was room and time; it is gone a moment later.
  virtual Status drain(Deadline deadline) = 0;
  virtual Result<Drained> drained(Deadline deadline) = 0;
  // Batches: one call for any number of keys, an outcome for each, in their order; one deadline for all. A few messages
  // go to each node, whatever the number of keys. Each key's put is all or nothing by itself, and puts of one key take
  // effect in their order; puts of different keys in no order.
  virtual std::vector<Result<PutOutcome>> put_many(std::span<const PutEntry> entries, const PutOptions& options,
                                                   Deadline deadline) = 0;
  virtual std::vector<Result<ObjectPtr>> locate_many(std::span<const std::string> keys, Deadline deadline) = 0;
  // To look only: no use of them is counted, and what is on an SSD stays there. Of an object whose replicas' tier is
  // `ssd` the bytes cannot be read.
  virtual std::vector<Result<ObjectPtr>> peek_many(std::span<const std::string> keys, Deadline deadline) = 0;
  virtual std::vector<Status> read_many(std::span<const ReadEntry> entries, Deadline deadline) = 0;
  virtual std::vector<Result<MappedObject>> map_many(std::span<const ObjectPtr> objects, bool read_only,
                                                     Deadline deadline) = 0;
  virtual std::vector<Result<bool>> remove_many(std::span<const RemoveEntry> entries, Deadline deadline) = 0;
  // All replicas of the versions that are there. False: there is none. pool_full: no room to bring it back from an SSD.
  virtual std::vector<Result<bool>> pin_many(std::span<const std::string> keys, Pin pin, Deadline deadline) = 0;

  // The events after number `after` of `stream` (of the answer before; 0 at first): keys with this prefix that are
  // there now or have moved to another tier, and any key that went. Returns when there are some, or without any after
  // `wait_ms`. `anew`: some are missing; whoever looks at all keys now and goes on from `last` misses nothing.
  virtual Result<KeyEvents> events(uint64_t stream, uint64_t after, std::string_view prefix, uint32_t wait_ms,
                                   Deadline deadline) = 0;
  virtual Result<Id128> key_hash(std::string_view key) = 0;  // by the seed of the view; a new home has another

  // Chains: keys of which each makes sense only with all before it, as the pages of a prompt do.
  // How many of the keys, from the first on, are there. With pin_ms, those are not evicted for so long (of this client:
  // the latest time counts; refresh_chain and close() end it).
  virtual Result<size_t> match_prefix(std::span<const std::string> keys, uint64_t pin_ms, Deadline deadline) = 0;
  // Each becomes at least as valuable to eviction as those behind it, so that a chain is evicted from its end. Counts
  // as no use. With `unpin`, what match_prefix has pinned is pinned no more. Keys that are gone are passed over.
  virtual Status refresh_chain(std::span<const std::string> keys, bool unpin, Deadline deadline) = 0;
  virtual Status refresh_chain(std::span<const ObjectPtr> objects, bool unpin, Deadline deadline) = 0;

  virtual const EnginePtr& engine() const = 0;
  virtual bool alive() const = 0;  // the local node's session
  virtual void close() = 0;
};
using ClientPtr = std::shared_ptr<Client>;

}  // namespace torch_mooncake::pool
