// Home: the directory node's state machine: from key to the extents that hold its current version.
//
// Pure: no network, no clock, no threads. Events go in as calls, what is to be done comes out of take_actions(), in
// order. The service drives it, and so can a simulator. Soft state: everything here can be rebuilt from what donors
// announce.
//
// Commit of a key, each step acknowledged by all donors concerned before the next (the numbers are the blueprint's):
//   (1) the parts are PREPARED in donors' tables before commit() is called; parts of several writers gather here;
//   (2) a version is assigned and donors mark COMMITTED          phase `marking`; a refusal aborts
//   (3) donors of the older version mark it SUPERSEDED           phase `superseding`; from here on it goes through
//   (4) the index flips; lookups that came in during (3) waited for it
//   (5) the writer is answered
//   (6) new extents become FINAL, lazily. (Old ones were freed along with their mark.)
// Removal is 3-5; a fresh key skips 3. One operation at a time per key, the others queue in order. A donor silent in
// any step blocks that key until it answers or is expelled; it is asked again when it announces anew.
//
// Time: the home has no clock; at() says what time it is for the calls that follow. An object with a time to live is
// missing from that instant on, and its extents are superseded at the next tick. Its donors count from their own
// mark, which is earlier, so that a rebuilt home never serves what an earlier one has called expired.
//
// An operation whose deadline passes before its step 2 did nothing and never will; after that it is carried through
// whether or not its writer still waits.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "common/api.h"
#include "pool/index.h"
#include "pool/messages.h"

namespace torch_mooncake::pool {

using RequestId = uint64_t;  // the asker's name for its question
using MarkId = uint64_t;     // 0: no answer is wanted

struct SendMark {
  MarkId id = 0;
  NodeId node{};
  Mark mark;
};
struct CommitDone {
  RequestId request = 0;
  Result<CommitAnswer> result;
};
struct RemoveDone {
  RequestId request = 0;
  Result<bool> result;
};
struct Ready {  // a watched key may be looked up now
  RequestId request = 0;
};
// What find() says of a key has changed.
struct Change {
  KeyHash hash{};
  std::string key;  // of one that is there now; empty if the home knows only its hash
  KeyChange what = KeyChange::removed;
  Kind kind = Kind::named;
  Version version;
  Tier tier = Tier::dram;  // where it is now
};
// A part of an object of which there are too few copies.
struct MissingCopy {
  KeyHash hash{};
  Version version;
  uint32_t part = 0;
  std::vector<ReplicaRef> from;  // the copies there are
};
using HomeAction = std::variant<SendMark, CommitDone, RemoveDone, Ready>;

struct Found {
  enum class State { found, missing, later };  // later: being flipped, or not known before all donors announced
  State state = State::missing;
  Kind kind = Kind::named;
  Version version;
  uint32_t parts = 1;
  int64_t expires_ns = INT64_MAX;  // by the home's clock
  Pin pin = Pin::none;
  std::vector<std::pair<uint32_t, ReplicaRef>> places;  // (part, where)
  bool on_ssd() const {                                 // only: some part has no copy in memory
    std::vector<Spot> spots;
    for (const auto& [part, at] : places) spots.push_back({0, part, {}, at.tier});
    return tier_of(spots, parts) == Tier::ssd;
  }
  static Found not_yet() {
    Found f;
    f.state = State::later;
    return f;
  }
};

class TM_API Home {
 public:
  // `view` must be above all views of the same lineage before.
  Home(uint64_t view, uint64_t seed) : view_(view), seed_(seed) {}

  // By a steady clock; never goes back.
  void at(int64_t now_ns) { now_ns_ = std::max(now_ns_, now_ns); }

  uint64_t view() const { return view_; }
  void set_view(uint64_t view);
  uint64_t highest_version_view() const { return highest_version_view_; }
  KeyHash hash(std::string_view key) const { return hash_key(key, seed_); }

  // Donors. expect(): one of the last view, to be heard or expelled before the directory is complete. announce(): all
  // it has. A donor that announces again (its worker restarted) is compared with what is known, and asked again what
  // it has not answered. expel(): it is fenced; what it had is gone.
  void expect(const NodeId& node);
  void announce(const NodeId& node, const std::vector<Announced>& extents);
  void expel(const NodeId& node);
  bool knows(const NodeId& node) const;
  bool complete() const { return expected_ == 0; }

  // The transaction of an object of several writers: theirs who began with the same label and are not done yet, else
  // `fresh`. It is over, and every writer is told, when its last part has come or one of their deadlines passes.
  Result<TxnId> begin(std::string_view key, std::string_view label, uint32_t parts, int64_t deadline_ns,
                      const TxnId& fresh);
  void commit(RequestId request, const CommitCall& call, int64_t deadline_ns);
  // With `only`: removes that version, and no other (at most one caller is told that it did).
  void remove(RequestId request, std::string_view key, int64_t deadline_ns, std::optional<Version> only = {});
  // Of the version that is there when its turn comes, all replicas. RemoveDone: whether there was one.
  void pin(RequestId request, std::string_view key, Pin pin, int64_t deadline_ns);

  Found find(std::string_view key) const;
  // The states of find(), of all keys.
  std::vector<Found::State> states(std::span<const std::string_view> keys) const;
  size_t index_nbytes() const { return entries_.nbytes(); }
  // Ready when find() has an answer other than `later`; with `present`, when it finds something new.
  void watch(RequestId request, std::string_view key, bool present);
  void unwatch(RequestId request);

  // Copies (home_copies.cpp). A key that has lost a replica with its donor, or that turns out in a rebuild to have
  // fewer than it was put with, is told by take_short(), once; missing() says what it lacks then; with donors that are
  // `leaving`: what would be lost with all of them. only_on(): such keys that `node` has something of.
  std::vector<KeyHash> take_short(size_t limit);
  void short_again(const KeyHash& hash) { short_.insert(hash); }
  size_t short_keys() const { return short_.size(); }
  std::vector<MissingCopy> missing(const KeyHash& hash, const std::set<NodeId>& leaving = {}) const;
  std::vector<KeyHash> only_on(const NodeId& node, const std::set<NodeId>& leaving) const;
  // A copy that was made, PREPARED: CommitDone when it is one of the object's replicas, or was dropped.
  void add_copy(RequestId request, const MissingCopy& of, const ReplicaRef& copy, const TxnId& txn,
                std::optional<uint32_t> crc32c);

  void evicted(const NodeId& node, std::string_view key, ExtentRef extent);
  void moved(const NodeId& node, std::string_view key, ExtentRef extent, Tier tier);
  // `ok`, or why the donor did not do it. Not called for marks that did not reach the donor.
  void mark_done(MarkId id, const Status& status);
  void tick(int64_t now_ns);

  // With `on`, changes are kept for take_changes(), in their order.
  void observe(bool on);
  bool observed() const { return observed_; }
  std::vector<Change> take_changes() { return std::exchange(changes_, {}); }

  std::vector<HomeAction> take_actions() { return std::exchange(actions_, {}); }
  uint64_t keys() const { return entries_.size(); }
  bool idle() const { return busy_.empty() && groups_.empty(); }
  // No key points at a donor that is not there, no mark is outstanding without an operation. For tests.
  Status check() const;

 private:
  struct NewSpot : Spot {
    std::optional<uint32_t> crc32c;
    enum class State : uint8_t { prepared, committed, gone } state = State::prepared;
  };
  struct Candidate : Spot {  // announced, not yet judged
    Version version;
    TxnId txn{};
    Kind kind = Kind::named;
    ExtentState state = ExtentState::committed;
    uint32_t parts = 1, replicas = 1;
    int64_t expires_ns = INT64_MAX;
    Pin pin = Pin::none;
  };
  struct Op {
    enum class What : uint8_t { put, remove, expire, repair, copy, pin } what = What::put;
    std::string key;  // put, if somebody observed when it came
    std::vector<RequestId> requests;
    Kind kind = Kind::named;
    IfExists if_exists = IfExists::replace;
    TxnId txn{};
    uint32_t parts = 1;
    bool strays = false;  // some donor has more PREPARED for `txn` than this counts on
    std::vector<NewSpot> spots;
    int64_t deadline_ns = INT64_MAX;
    Version version;
    std::optional<Version> only;             // remove, expire
    std::shared_ptr<const Binding> binding;  // put, of what was granted
    Pin pin = Pin::none;
    uint64_t ttl_ms = 0;             // put: from the flip on; 0: never
    int64_t expires_ns = INT64_MAX;  // repair
    uint32_t replicas = 1;           // as it was put
    std::vector<Candidate> rest;     // repair: the versions below
  };
  enum class Phase : uint8_t { idle, marking, superseding, aborting, pinning, unpinning };
  struct Busy {
    Phase phase = Phase::idle;
    Op op;
    std::vector<Spot> olds;
    uint32_t outstanding = 0;
    Status failure;
    std::deque<Op> queue;
  };
  struct Outstanding {
    KeyHash hash;
    uint32_t donor = 0;
    Mark mark;
    bool again = false;  // was refused in a way that may pass: sent again at the next tick
  };
  struct DonorState {
    NodeId id{};
    enum class State : uint8_t { expected, here, gone } state = State::here;
    bool trusted = false;  // of the last view: it knows what has become of its named keys
  };
  struct Group {
    KeyHash hash;
    std::string label;
    uint32_t parts = 1;
    int64_t deadline_ns = 0;
    std::set<uint32_t> have;
    Op op;
  };
  using Candidates = std::vector<Candidate>;
  using Heard = std::vector<std::pair<KeyHash, Candidate>>;

  std::optional<uint32_t> donor_index(const NodeId& id) const;
  DonorState& donor(uint32_t index) { return donors_[index]; }
  bool gone(uint32_t donor) const { return donors_[donor].state == DonorState::State::gone; }
  static bool whole(const std::vector<Spot>& spots, uint32_t parts);

  void enqueue(const KeyHash& hash, Op op);
  void advance(const KeyHash& hash);  // starts what is next, erases the idle
  void start(const KeyHash& hash, Busy& busy, Op op);
  void start_marking(const KeyHash& hash, Busy& busy);
  void start_superseding(const KeyHash& hash, Busy& busy);
  void flip(const KeyHash& hash, Busy& busy);
  void start_pinning(const KeyHash& hash, Busy& busy, Pin pin);
  void join_pin(const KeyHash& hash, Busy& busy);
  void send_pin(const KeyHash& hash, uint32_t donor, ExtentRef extent, Pin pin, bool wait);
  void start_copy(const KeyHash& hash, Busy& busy, Op op);
  void join_copy(const KeyHash& hash, Busy& busy);
  void look_for_short();
  void step_over(const KeyHash& hash, Busy& busy);  // all marks of the phase are answered
  void answer(const Op& op, const Status& failure, bool stored, Version version);
  void drop(const KeyHash& hash, const Op& op);  // its PREPARED parts
  void drop_everywhere(const KeyHash& hash, const TxnId& txn);
  void fail_op(const KeyHash& hash, const Op& op, const Status& why);
  void send(const KeyHash& hash, uint32_t donor, Mark mark, bool wait);
  Mark make_mark(Mark::What what, const KeyHash& hash, ExtentRef extent) const;
  void resolve_mark(const KeyHash& hash, uint32_t donor, const Mark& mark, const Status& status);
  void set_entry(const KeyHash& hash, const IndexEntry& entry, std::string key = {});
  void update_entry(const KeyHash& hash, const IndexEntry& entry, std::string_view key = {});  // of the same version
  void erase_entry(const KeyHash& hash);
  bool forget_entry(const KeyHash& hash);
  bool expired(const Index::Ref& entry) const { return entry.expires_ns() <= now_ns_; }
  bool between(const KeyHash& hash) const;  // two versions: who asks has to wait
  void expire();                            // supersedes what has expired
  void forget_spot(const KeyHash& hash, uint32_t donor, ExtentRef extent);
  void forget_donor(uint32_t donor);
  void lost(const KeyHash& hash);
  void wake(const KeyHash& hash);
  void wake_all();

  // Rebuild (home_rebuild.cpp).
  void compare(uint32_t donor, const std::vector<Announced>& extents);
  void judge_all(const Heard& heard);
  void judge(const KeyHash& hash, Candidates candidates);
  Found served_early(const Candidates& candidates) const;
  static bool completes(const Candidate& prepared, const Op& op);
  static bool needs(const Busy& busy, const Spot& spot);
  Op* open_op(const KeyHash& hash, const TxnId& txn);  // null: none that is under way or waits
  void drop_prepared(const KeyHash& hash, uint32_t donor, const Announced& a);

  uint64_t view_;
  uint64_t seed_;
  uint64_t counter_ = 0, next_mark_ = 1, highest_version_view_ = 0;
  int64_t now_ns_ = 0;
  uint32_t expected_ = 0;
  std::vector<DonorState> donors_;
  Index entries_;
  std::set<KeyHash> short_;                         // of replicas
  std::set<std::pair<int64_t, KeyHash>> expiries_;  // of entries that will expire
  std::unordered_map<KeyHash, Busy, HashOfHash> busy_;
  std::unordered_map<KeyHash, Candidates, HashOfHash> candidates_;  // while not complete
  std::map<TxnId, Group> groups_;
  std::map<MarkId, Outstanding> outstanding_;
  std::unordered_map<KeyHash, std::vector<std::pair<RequestId, bool>>, HashOfHash> watches_;
  std::unordered_map<RequestId, std::vector<KeyHash>> watched_;
  std::vector<HomeAction> actions_;
  bool observed_ = false;
  std::vector<Change> changes_;
};

}  // namespace torch_mooncake::pool
