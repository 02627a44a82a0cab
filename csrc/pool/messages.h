// What pool processes say to each other: methods 200-299 and their bodies. Every request and mark carries the sender's
// view and the shard it is about, so that several directory nodes need no new protocol.
//
// Who asks whom: a client asks its own node for the view, donors for space and descriptions, and the home (the
// directory node of a key's shard) for versions. The leader's home sends marks to donors.
#pragma once

#include "pool/key_hash.h"
#include "pool/wire.h"

namespace torch_mooncake::pool {

enum Method : uint16_t {
  kAttach = 200,
  kDetach,
  kView,
  kReserve,
  kGiveBack,
  kReserveMany,
  kPutMany,
  kBegin,
  kCommit,
  kRemoveMany,
  kLookup,
  kExists,
  kDescribe,
  kKeys,
  kStat,
  kTouch,
  kGrant,
  kJoin = 220,
  kAnnounce,
  kBeat,
  kMark,
  kEvicted,
  kLeave,
  kVouch,
  kDrain = 230,
  kPrefix,
  kRefresh,
  kEvents,
  kTiers,
  kCopy = 240,
  kExport,
  kEvacuate,
  kDrained,
  kQuota = 250,
};

inline constexpr size_t kEventLog = 1 << 16;
inline constexpr uint64_t kMaxPinMs = 3'600'000;
inline constexpr const char* kMonitorRole = "monitor";  // of sessions that do not count as users
inline constexpr uint64_t kInlineLimit = 16 * 1024;     // smaller values may ride inside the put
inline constexpr size_t kMaxLabelBytes = 256;
inline constexpr size_t kMaxBatch = 1 << 16;
inline constexpr uint32_t kMaxGrants = 64;
inline constexpr size_t kMaxNodes = 4096;
inline constexpr size_t kMaxTextBytes = 4096;  // names, addresses, descriptors, error texts

inline uint32_t shard_of(const KeyHash& hash) { return static_cast<uint32_t>(hash[0] % kShards); }

// --- membership ---

// A node's id names the memory it lends: it stays over restarts of the worker that attach to that memory, and is new
// with new memory. The incarnation is the worker's engine.
struct NodeInfo {
  NodeId id{};
  Id128 incarnation{};
  std::string host_id;
  std::vector<std::string> addresses;
  uint64_t limit_bytes = 0, used_bytes = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(id)(incarnation)(host_id, kMaxTextBytes)(addresses, 64)(limit_bytes)(used_bytes);
  }
};

struct View {
  static constexpr const char* kName = "view";
  uint64_t number = 0;
  uint64_t seed = 0;  // of the key hash
  Id128 lineage{};    // of the leader's memory: versions of one lineage compare
  NodeId home{};      // the directory node (one, for now)
  std::vector<NodeInfo> nodes;
  const NodeInfo* find(const NodeId& id) const {
    for (const auto& node : nodes)
      if (node.id == id) return &node;
    return nullptr;
  }
  template <typename Ar>
  void fields(Ar& ar) {
    ar(number)(seed)(lineage)(home)(nodes, kMaxNodes);
  }
};

struct JoinRequest {
  static constexpr const char* kName = "join";
  NodeInfo node;
  uint64_t view = 0;  // the highest it has seen
  template <typename Ar>
  void fields(Ar& ar) {
    ar(node)(view);
  }
};
struct JoinAnswer {
  static constexpr const char* kName = "join answer";
  View view;
  bool keep_named = false;  // false: drop named extents before announcing: others may have newer versions
  uint32_t lease_ms = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(keep_named)(lease_ms);
  }
};

// An extent as a home must know it.
struct Announced {
  std::string key;
  Kind kind = Kind::named;
  ExtentState state = ExtentState::free;  // prepared, committed or final
  Version version;
  TxnId txn{};
  uint32_t part = 0, parts = 1;
  ExtentRef extent;
  std::optional<uint64_t> left_ms;  // until it expires, by the donor's clock; none: never
  Tier tier = Tier::dram;
  uint32_t replicas = 1;  // as it was put
  Pin pin = Pin::none;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(key, kMaxKeyBytes)(kind)(state)(version)(txn)(part)(parts)(extent)(left_ms)(tier)(replicas)(pin);
    ar.require(parts >= 1 && parts <= kMaxParts && part < parts);
  }
};
struct AnnounceRequest {
  static constexpr const char* kName = "announce";
  uint64_t view = 0;
  NodeId node{};
  std::vector<Announced> extents;
  bool first = false, last = false;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(node)(extents, kMaxBatch)(first)(last);
  }
};

struct BeatRequest {
  static constexpr const char* kName = "beat";
  NodeId node{};
  Id128 incarnation{};
  uint64_t view = 0, limit_bytes = 0, used_bytes = 0;
  std::vector<Quota> quotas;  // with what is used there
  template <typename Ar>
  void fields(Ar& ar) {
    ar(node)(incarnation)(view)(limit_bytes)(used_bytes)(quotas, kMaxQuotas);
  }
};
struct BeatAnswer {
  static constexpr const char* kName = "beat answer";
  std::optional<View> view;   // if the sender's is older
  std::vector<Quota> quotas;  // that count, with what is used by others than the sender
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(quotas, kMaxQuotas);
  }
};
// To the home: sets one, or none, and tells all there are. A limit of 0 ends it.
struct QuotaCall {
  static constexpr const char* kName = "quota";
  uint64_t view = 0;
  std::optional<Quota> set;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(set);
  }
};
struct QuotaAnswer {
  static constexpr const char* kName = "quota answer";
  std::vector<Quota> quotas;  // with what is used in the pool
  template <typename Ar>
  void fields(Ar& ar) {
    ar(quotas, kMaxQuotas);
  }
};
struct LeaveRequest {
  static constexpr const char* kName = "leave";
  NodeId node{};
  template <typename Ar>
  void fields(Ar& ar) {
    ar(node);
  }
};

// --- home to donor ---

// What becomes of an extent that its writer had in advance.
struct Binding {
  SessionId writer = 0;  // at the donor
  uint64_t nbytes = 0;
  Kind kind = Kind::named;
  std::string key, meta, label, parent;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(writer)(nbytes)(kind)(key, kMaxKeyBytes)(meta, kMaxMetaBytes)(label, kMaxLabelBytes)(parent, kMaxKeyBytes);
  }
};

struct Mark {
  static constexpr const char* kName = "mark";
  enum class What : uint8_t { commit = 0, finalize, supersede, drop, pin };
  What what = What::commit;
  uint64_t view = 0;
  uint32_t shard = 0;
  ExtentRef extent;
  TxnId txn{};  // commit, drop
  Version version;
  std::optional<uint32_t> crc32c;
  uint64_t ttl_ms = 0;    // commit: it expires so long after the mark; 0: never
  uint32_t replicas = 1;  // commit: as it was put
  bool copy = false;      // commit: of a replica that was made by the donor itself, which knows when it expires
  Pin pin = Pin::none;    // commit, pin
  std::optional<Binding> binding{};  // commit
  template <typename Ar>
  void fields(Ar& ar) {
    ar(what)(view)(shard)(extent)(txn)(version)(crc32c)(ttl_ms)(replicas)(copy)(pin)(binding);
  }
};
constexpr auto last_value(Mark::What) { return Mark::What::pin; }

struct EvictedExtent {
  std::string key;
  ExtentRef extent;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(key, kMaxKeyBytes)(extent);
  }
};
struct EvictedReport {
  static constexpr const char* kName = "evicted";
  uint64_t view = 0;
  NodeId node{};
  std::vector<EvictedExtent> extents;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(node)(extents, kMaxBatch);
  }
};

struct TierChange {
  std::string key;
  ExtentRef extent;
  Tier tier = Tier::dram;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(key, kMaxKeyBytes)(extent)(tier);
  }
};
struct TierReport {
  static constexpr const char* kName = "tiers";
  uint64_t view = 0;
  NodeId node{};
  std::vector<TierChange> extents;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(node)(extents, kMaxBatch);
  }
};

// --- client to node ---

struct AttachRequest {
  static constexpr const char* kName = "attach";
  std::string name;
  bool map = false;  // asks for the segments' fds; only over a Unix socket
  template <typename Ar>
  void fields(Ar& ar) {
    ar(name, kMaxTextBytes)(map);
  }
};
// With map: fds are the table, the data segments, the slot page, in this order.
struct AttachAnswer {
  static constexpr const char* kName = "attach answer";
  NodeId node{};
  SessionId session = 0;
  bool mapped = false;
  std::vector<Id128> segments;  // table first
  Id128 slots{};
  std::vector<std::string> descriptors;  // without map: regions of the same segments
  View view;
  int64_t now_ns = 0;  // the node's steady clock: who is on its host and has the same may believe its page of times
  template <typename Ar>
  void fields(Ar& ar) {
    ar(node)(session)(mapped)(segments, kMaxNodes)(slots)(descriptors, kMaxNodes)(view)(now_ns);
  }
};
// Uses of extents that their reader found without asking, for eviction. Posted.
struct TouchCall {
  static constexpr const char* kName = "touch";
  std::vector<ExtentRef> extents;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(extents, kMaxBatch);
  }
};
struct DetachRequest {
  static constexpr const char* kName = "detach";
  SessionId session = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(session);
  }
};
struct Empty {
  static constexpr const char* kName = "empty";
  template <typename Ar>
  void fields(Ar&) {}
};

// What is the same in every put.
struct PutHead {
  uint64_t view = 0;
  uint32_t shard = 0;
  std::string key;
  Kind kind = Kind::named;
  uint32_t part = 0, parts = 1;
  TxnId txn{};
  uint32_t timeout_ms = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(shard)(key, kMaxKeyBytes)(kind)(part)(parts)(txn)(timeout_ms);
  }
  bool sound() const { return !key.empty() && parts >= 1 && parts <= kMaxParts && part < parts; }
};
struct ReserveCall {
  static constexpr const char* kName = "reserve";
  PutHead head;
  SessionId session = 0;
  uint64_t nbytes = 0;
  std::string meta, label;
  bool wait = false;   // for room, up to the timeout
  std::string parent;  // the key it comes after, if any
  template <typename Ar>
  void fields(Ar& ar) {
    ar(head)(session)(nbytes)(meta, kMaxMetaBytes)(label, kMaxLabelBytes)(wait)(parent, kMaxKeyBytes);
  }
};
struct ReserveAnswer {
  static constexpr const char* kName = "reserve answer";
  ExtentRef extent;
  std::vector<Piece> pieces;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(extent)(pieces, kMaxPieces);
  }
};
// Extents in advance, of one size: as many as there is room for, with a refusal if there is none.
struct GrantCall {
  static constexpr const char* kName = "grant";
  SessionId session = 0;
  TxnId txn{};
  uint64_t nbytes = 0;
  uint32_t count = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(session)(txn)(nbytes)(count);
    ar.require(count <= kMaxGrants);
  }
};
struct GrantAnswer {
  static constexpr const char* kName = "grant answer";
  std::vector<ReserveAnswer> places;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(places, kMaxGrants);
  }
};
struct GiveBackCall {
  static constexpr const char* kName = "give back";
  SessionId session = 0;
  std::vector<ExtentRef> extents;
  TxnId txn{};        // what was reserved for this and the following transactions, and the answer to which has not been
  uint32_t txns = 0;  // waited for
  template <typename Ar>
  void fields(Ar& ar) {
    ar(session)(extents, kMaxBatch)(txn)(txns);
    ar.require(txns <= kMaxBatch);
  }
};
struct BeginCall {  // of an object of several writers: who has the same label joins the same transaction
  static constexpr const char* kName = "begin";
  PutHead head;
  std::string label;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(head)(label, kMaxLabelBytes);
  }
};
struct BeginAnswer {
  static constexpr const char* kName = "begin answer";
  TxnId txn{};
  template <typename Ar>
  void fields(Ar& ar) {
    ar(txn);
  }
};

struct ReplicaRef {
  NodeId node{};
  ExtentRef extent;
  Tier tier = Tier::dram;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(node)(extent)(tier);
  }
};
struct CommitCall {
  static constexpr const char* kName = "commit";
  PutHead head;
  IfExists if_exists = IfExists::replace;
  std::vector<ReplicaRef> replicas;
  std::optional<uint32_t> crc32c;
  uint64_t ttl_ms = 0;  // 0: never
  Pin pin = Pin::none;
  std::optional<Binding> binding;  // of the one replica, of one writer: it was granted, not reserved
  template <typename Ar>
  void fields(Ar& ar) {
    ar(head)(if_exists)(replicas, 64)(crc32c)(ttl_ms)(pin)(binding);
  }
};
struct CommitAnswer {
  static constexpr const char* kName = "commit answer";
  Version version;
  bool stored = true;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(version)(stored);
  }
};

struct LookupKey {
  uint32_t shard = 0;
  std::string key;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(shard)(key, kMaxKeyBytes);
  }
};
struct LookupCall {
  static constexpr const char* kName = "lookup";
  uint64_t view = 0;
  std::vector<LookupKey> keys;
  bool describe = false;  // also say what the home's own donor knows of each; counts as a use
  bool data = false;      // with describe: the value too, up to kInlineLimit
  bool present = false;   // answer when all keys are there (with at least that version), or at the timeout
  std::optional<Version> at_least;
  uint32_t timeout_ms = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(keys, kMaxBatch)(describe)(data)(present)(at_least)(timeout_ms);
  }
};
struct InlineData {
  std::string bytes;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(bytes, kInlineLimit);
  }
};
struct Description {
  uint64_t nbytes = 0;
  std::string meta, label;
  std::optional<uint32_t> crc32c;
  std::vector<Piece> pieces;
  std::optional<InlineData> data;
  std::optional<ExtentRef> copy;  // the extent they are, if not the one asked for: readers validate by it
  template <typename Ar>
  void fields(Ar& ar) {
    ar(nbytes)(meta, kMaxMetaBytes)(label, kMaxLabelBytes)(crc32c)(pieces, kMaxPieces)(data)(copy);
  }
};
struct Place {
  uint32_t part = 0;
  ReplicaRef at;
  std::optional<Description> description;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(part)(at)(description);
  }
};
struct LookupEntry {
  bool found = false;
  Kind kind = Kind::named;
  Version version;
  uint32_t parts = 1;
  std::optional<uint64_t> left_ms;
  Pin pin = Pin::none;
  std::vector<Place> places;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(found);
    if (found) ar(kind)(version)(parts)(left_ms)(pin)(places, kMaxParts * 4);
    ar.require(parts >= 1 && parts <= kMaxParts);
  }
};
struct LookupAnswer {
  static constexpr const char* kName = "lookup answer";
  uint64_t view = 0;
  std::vector<LookupEntry> entries;  // one a key, fewer if the answer would be too long: ask again for the rest
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(entries, kMaxBatch);
  }
};

struct PrefixCall {  // how many of a chain's keys are there
  static constexpr const char* kName = "prefix";
  uint64_t view = 0;
  std::vector<LookupKey> keys;
  SessionId session = 0;  // the caller's here: owner of the pins
  uint64_t pin_ms = 0;    // what is counted and lies on the home's own donor is not evicted for so long
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(keys, kMaxBatch)(session)(pin_ms);
  }
};
struct Replicas {
  std::vector<ReplicaRef> at;  // one of each part at least
  template <typename Ar>
  void fields(Ar& ar) {
    ar(at, kMaxParts * 4);
  }
};
struct PrefixAnswer {
  static constexpr const char* kName = "prefix answer";
  uint64_t view = 0;
  std::vector<Replicas> found;  // of the keys before the first that is not there
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(found, kMaxBatch);
  }
};
// Of a chain's extents on one donor, the chain's last first.
struct RefreshCall {
  static constexpr const char* kName = "refresh";
  enum class Pins : uint8_t { keep = 0, pin, unpin };
  uint64_t view = 0;
  std::vector<ExtentRef> extents;
  SessionId session = 0;
  Pins pins = Pins::keep;
  uint64_t pin_ms = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(extents, kMaxBatch)(session)(pins)(pin_ms);
  }
};
constexpr auto last_value(RefreshCall::Pins) { return RefreshCall::Pins::unpin; }
struct RefreshAnswer {
  static constexpr const char* kName = "refresh answer";
  std::vector<uint32_t> gone;  // positions in the list
  template <typename Ar>
  void fields(Ar& ar) {
    ar(gone, kMaxBatch);
  }
};

struct DescribeCall {
  static constexpr const char* kName = "describe";
  uint64_t view = 0;
  std::vector<EvictedExtent> extents;  // key and extent
  bool data = false;                   // as in LookupCall
  bool peek = false;                   // no use: what is on an SSD stays there, and has no pieces
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(extents, kMaxBatch)(data)(peek);
  }
};
struct DescribeAnswer {
  static constexpr const char* kName = "describe answer";
  std::vector<std::optional<Description>> descriptions;  // none: gone
  template <typename Ar>
  void fields(Ar& ar) {
    ar(descriptions, kMaxBatch);
  }
};

// --- copies of what is on one donor to another ---

// Home to the donor that is to have the copy; answered when all bytes are there, PREPARED.
struct CopyCall {
  static constexpr const char* kName = "copy";
  uint64_t view = 0;
  uint32_t shard = 0;
  NodeInfo from;
  ExtentRef extent;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(shard)(from)(extent);
  }
};
struct CopyAnswer {
  static constexpr const char* kName = "copy answer";
  TxnId txn{};
  ExtentRef extent;
  uint64_t nbytes = 0;
  std::optional<uint32_t> crc32c;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(txn)(extent)(nbytes)(crc32c);
  }
};
// Between donors: all there is to know of an extent, which is in memory then.
struct ExportCall {
  static constexpr const char* kName = "export";
  ExtentRef extent;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(extent);
  }
};
struct Exported {
  static constexpr const char* kName = "exported";
  std::string key;
  Kind kind = Kind::named;
  uint32_t part = 0, parts = 1;
  std::optional<uint64_t> left_ms;
  Description description;
  std::string parent;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(key, kMaxKeyBytes)(kind)(part)(parts)(left_ms)(description)(parent, kMaxKeyBytes);
  }
};
// A leaving node to the leader: what only it has is copied elsewhere, as far as there is room and time.
struct EvacuateCall {
  static constexpr const char* kName = "evacuate";
  NodeId node{};
  uint32_t timeout_ms = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(node)(timeout_ms);
  }
};
struct Evacuated {
  static constexpr const char* kName = "evacuated";
  uint64_t moved = 0, moved_bytes = 0;  // objects (of several writers: parts)
  uint64_t left = 0;                    // that could not be
  std::string why;                      // the last of them
  template <typename Ar>
  void fields(Ar& ar) {
    ar(moved)(moved_bytes)(left)(why, kMaxTextBytes);
  }
};

// What has become of keys: a stream that any number of askers follow, each asking for what comes after the last event
// it has. The home keeps the last kEventLog events, as long as somebody asks; who is further behind, or comes to
// another home, is told to start anew.
struct KeyEvent {
  Id128 hash{};     // of the key, by the view's seed
  std::string key;  // of one that is there now; of one that has moved it may be missing
  KeyChange what = KeyChange::removed;
  Kind kind = Kind::named;
  Version version;
  Tier tier = Tier::dram;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(hash)(key, kMaxKeyBytes)(what)(kind)(version)(tier);
  }
};
struct EventsCall {
  static constexpr const char* kName = "events";
  uint64_t view = 0;
  uint64_t stream = 0;      // of the last answer; 0: none yet
  uint64_t after = 0;       // the last event's number that the asker knows
  std::string prefix;       // of the keys; what went is told to everybody
  uint32_t timeout_ms = 0;  // answered when there is something, or then
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(stream)(after)(prefix, kMaxKeyBytes)(timeout_ms);
  }
};
struct EventsAnswer {
  static constexpr const char* kName = "events answer";
  uint64_t stream = 0;
  uint64_t last = 0;  // the number of the last event that this covers
  bool anew = false;  // events are missing: look at all keys after this, and go on from `last`
  std::vector<KeyEvent> events;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(stream)(last)(anew)(events, kMaxBatch);
  }
};

struct KeysCall {
  static constexpr const char* kName = "keys";
  uint64_t view = 0;
  std::string prefix, after;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(prefix, kMaxKeyBytes)(after, kMaxKeyBytes);
  }
};
struct KeysAnswer {
  static constexpr const char* kName = "keys answer";
  std::vector<std::string> keys;  // sorted
  bool more = false;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(keys, 1 << 22)(more);
  }
};

// What a node's worker has done since it started, and whether it serves.
struct NodeActivity {
  uint64_t starts = 0;                                          // workers of this node so far
  uint64_t clients = 0;                                         // sessions of users
  uint64_t waiting = 0;                                         // writers that wait for room
  uint64_t reservations = 0, refusals = 0;                      // as donor; refusals: the pool was full
  uint64_t lookups = 0, misses = 0, commits = 0, removals = 0;  // as home, in keys
  uint64_t copies = 0, copied_bytes = 0;  // made here of what other nodes hold: replicas that were lost, or will be
  uint64_t to_copy = 0;                   // as home: keys with fewer replicas than they were put with
  bool draining = false, ready = false;
  std::string unready;  // why it is not ready
  template <typename Ar>
  void fields(Ar& ar) {
    ar(starts)(clients)(waiting)(reservations)(refusals)(lookups)(misses)(commits)(removals)(draining)(ready);
    ar(copies)(copied_bytes)(to_copy);
    ar(unready, kMaxTextBytes);
  }
};
struct StatAnswer {
  static constexpr const char* kName = "stat answer";
  uint64_t view = 0, keys = 0;
  uint64_t limit_bytes = 0, used_bytes = 0, limbo_bytes = 0, prepared_bytes = 0, fenced_bytes = 0;
  uint64_t granted_bytes = 0, extents = 0, pinned = 0, evictions = 0;
  uint64_t soft_pinned_bytes = 0, hard_pinned_bytes = 0;
  bool is_home = false;
  NodeActivity activity;
  SsdStats ssd;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(keys)(
        limit_bytes)(used_bytes)(limbo_bytes)(prepared_bytes)(fenced_bytes)(granted_bytes)(extents)(pinned)(evictions)(is_home);
    ar(soft_pinned_bytes)(hard_pinned_bytes)(activity);
    ar(ssd.limit_bytes)(ssd.used_bytes)(ssd.records)(ssd.record_bytes)(ssd.demotions)(ssd.promotions)(ssd.dropped);
    ar(ssd.refused)(ssd.reclaimed)(ssd.errors)(ssd.corrupt)(ssd.out_of_service);
  }
};

}  // namespace torch_mooncake::pool
