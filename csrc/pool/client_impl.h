// The one implementation of Client. client.cpp: life cycle, connections, view, questions; client_put.cpp: put;
// client_get.cpp: locate, read, map.
// client_batch.cpp: many keys at once.
//
// A client asks its own node for the view and then talks to donors and to the home itself: one hop, and a busy or
// stopped node in between can delay nobody. Connections are made when they are needed and again when they broke.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <set>

#include "pool/batch_messages.h"
#include "pool/client.h"
#include "pool/client_link.h"
#include "pool/location_cache.h"
#include "pool/turn.h"

namespace torch_mooncake::pool {

// How long a call goes on trying to reach a node that answered once (its worker may be starting again).
inline constexpr int64_t kReconnectMs = 10'000;

struct ObjectPart {
  uint64_t offset = 0, nbytes = 0;
  std::optional<uint32_t> crc32c;
  std::vector<Replica> replicas;
};

class ObjectImpl final : public Object {
 public:
  ObjectInfo info_;
  std::vector<ObjectPart> parts_;
  bool local_ = false;
  std::optional<std::string> data_;  // the value came along
  // If all of it lies on one node of this host, as its first replicas. An object that somebody keeps keeps no node up.
  std::weak_ptr<Link> link_;
  const ObjectInfo& info() const override { return info_; }
  bool local() const override { return local_; }
};

class ClientImpl final : public Client, public std::enable_shared_from_this<ClientImpl> {
 public:
  explicit ClientImpl(ClientOptions options);
  ~ClientImpl() override { close(); }
  Status start(Deadline deadline);

  Result<PutOutcome> put(std::string_view key, std::string_view meta, std::span<const iovec> data,
                         const PutOptions& options, Deadline deadline) override;
  Result<ObjectPtr> locate(std::string_view key, const GetOptions& options, Deadline deadline) override;
  Status read(const ObjectPtr& object, uint64_t offset, std::span<const iovec> out, Deadline deadline) override;
  Status read_ranges(const ObjectPtr& object, std::span<const ReadRange> ranges, iovec memory,
                     Deadline deadline) override;
  Result<MappedObject> map(const ObjectPtr& object, bool read_only, Deadline deadline) override;
  Result<std::vector<bool>> exists(std::span<const std::string> keys, Deadline deadline) override;
  Result<std::vector<std::optional<Tier>>> tiers(std::span<const std::string> keys, Deadline deadline) override;
  Result<bool> remove(std::string_view key, Deadline deadline, std::optional<Version> only) override;
  Result<std::vector<std::string>> keys(std::string_view prefix, Deadline deadline) override;
  Result<ObjectPtr> wait(std::string_view key, const GetOptions& options, Deadline deadline) override;
  Result<PoolStats> stat(Deadline deadline, bool here) override;
  Status drain(Deadline deadline) override;
  Result<Drained> drained(Deadline deadline) override;
  std::vector<Result<PutOutcome>> put_many(std::span<const PutEntry> entries, const PutOptions& options,
                                           Deadline deadline) override;
  std::vector<Result<ObjectPtr>> locate_many(std::span<const std::string> keys, Deadline deadline) override;
  std::vector<Result<ObjectPtr>> peek_many(std::span<const std::string> keys, Deadline deadline) override;
  Result<KeyEvents> events(uint64_t stream, uint64_t after, std::string_view prefix, uint32_t wait_ms,
                           Deadline deadline) override;
  Result<Id128> key_hash(std::string_view key) override;
  Result<size_t> match_prefix(std::span<const std::string> keys, uint64_t pin_ms, Deadline deadline) override;
  Status refresh_chain(std::span<const std::string> keys, bool unpin, Deadline deadline) override;
  Status refresh_chain(std::span<const ObjectPtr> objects, bool unpin, Deadline deadline) override;
  std::vector<Status> read_many(std::span<const ReadEntry> entries, Deadline deadline) override;
  std::vector<Result<MappedObject>> map_many(std::span<const ObjectPtr> objects, bool read_only,
                                             Deadline deadline) override;
  Result<std::vector<Quota>> set_quota(const Quota& quota, Deadline deadline) override {
    if (quota.prefix.size() > kMaxQuotaPrefix)
      return {Code::invalid_argument, "a quota's prefix has at most " + std::to_string(kMaxQuotaPrefix) + " bytes"};
    return ask_quota(quota, deadline);
  }
  std::vector<Result<bool>> remove_many(std::span<const RemoveEntry> entries, Deadline deadline) override {
    return change_many(entries, {}, deadline);
  }
  std::vector<Result<bool>> pin_many(std::span<const std::string> keys, Pin pin, Deadline deadline) override {
    std::vector<RemoveEntry> entries;
    for (const std::string& key : keys) entries.push_back({key, {}});
    return change_many(entries, pin, deadline);
  }
  const EnginePtr& engine() const override { return engine_; }
  bool alive() const override;
  void close() override;

 private:
  Status usable() const;
  // Connections (client.cpp).
  Result<LinkPtr> local(Deadline deadline);  // this host's node, attached anew if it broke
  Result<LinkPtr> link(const NodeId& node, Deadline deadline);
  Result<LinkPtr> home(Deadline deadline);
  bool reachable();  // our node and the home, now
  std::shared_ptr<const View> view() const;
  void take_view(View fresh);  // if it is newer; mutex_ held
  Status refresh_view(Deadline deadline);
  // Runs `attempt` until it succeeds, fails for good, or node and home stay away for too long.
  template <typename Fn>
  auto with_retries(Deadline deadline, Fn attempt) -> decltype(attempt());
  static bool passing(const Status& status);

  LookupCall question(std::span<const std::string> keys, LookupCall shape, const Link& home, Deadline deadline) const;
  Result<std::vector<LookupEntry>> look_up(std::span<const std::string> keys, const LookupCall& shape,
                                           Deadline deadline);
  std::vector<Result<ObjectPtr>> look_up_and_build(std::span<const std::string> keys, Deadline deadline);
  PutHead head(const View& view, std::string_view key, Deadline deadline) const;
  static Status stat_of(const LinkPtr& node, const NodeInfo& info, PoolStats& stats, Deadline deadline);

  // client_put.cpp
  static Status check_put(const PutOptions& options);
  static Status check_entry(std::string_view key, std::string_view meta);
  struct Replicated {
    LinkPtr link;
    ReserveAnswer place;
    bool quiescent = true;
  };
  Result<PutOutcome> put_once(std::string_view key, std::string_view meta, std::span<const iovec> data,
                              const PutOptions& options, Deadline deadline, bool* asked);
  Result<PutOutcome> write_and_commit(const LinkPtr& home, std::vector<Replicated>& reserved, const PutHead& head,
                                      std::span<const iovec> data, const PutOptions& options,
                                      std::optional<Binding> binding, Deadline deadline, bool* asked);
  Result<std::vector<Replicated>> reserve(const ReserveCall& shape, const PutOptions& options, const View& view,
                                          const std::set<NodeId>& near, Deadline deadline);
  static std::vector<const NodeInfo*> by_preference(const View& view, const NodeId& here, const std::set<NodeId>& near);
  static Result<size_t> replicas_wanted(const View& view, const PutOptions& options);
  Result<std::set<NodeId>> nodes_of_parent(const PutOptions& options, Deadline deadline);
  // What a put that does not replace comes to where `entry` is.
  static Result<PutOutcome> existing(std::string_view key, const LookupEntry& entry, const PutOptions& options);
  Result<std::optional<PutOutcome>> already_there(std::string_view key, const PutOptions& options, Deadline deadline);
  static Status write_all(std::vector<Replicated>& reserved, std::span<const iovec> data, Deadline deadline);
  static void let_go(std::vector<Replicated>& reserved);

  // client_batch.cpp
  struct Leg;
  struct Chunk;
  using Outcomes = std::span<Result<PutOutcome>>;
  struct Round;
  void put_round(std::span<const PutEntry> entries, const PutOptions& options, Deadline deadline, Outcomes outcomes);
  void choose_donors(Round& round, const LinkPtr& here);
  void begin_chunk(Round& round, Chunk& chunk);
  static Result<std::vector<ReserveManyAnswer>> reserved_by_all(Chunk& chunk);
  static Status write_legs(std::vector<Leg>& legs, std::span<const std::vector<ExtentWrite>> writes, uint64_t nbytes,
                           Deadline deadline);
  void write_chunk(Round& round, Chunk& chunk);
  void finish_chunk(Round& round, Chunk& chunk);
  Status skip_existing(Round& round);

  // client_chains.cpp
  using Places =
      std::map<NodeId, std::vector<std::pair<size_t, ExtentRef>>>;  // by node: (position in the chain, extent)
  std::vector<Result<bool>> change_many(std::span<const RemoveEntry> entries, std::optional<Pin> pin,
                                        Deadline deadline);
  Result<std::vector<Quota>> ask_quota(const std::optional<Quota>& set, Deadline deadline);
  Result<std::string> ask_exists(std::span<const std::string> keys, bool tiers, Deadline deadline);
  Result<std::vector<Replicas>> find_prefix(std::span<const std::string> keys, uint64_t pin_ms, Deadline deadline);
  // Positions that have gone meanwhile.
  Result<std::vector<size_t>> refresh(const Places& places, RefreshCall shape, Deadline deadline);

  // client_get.cpp
  ObjectPtr cached(std::string_view key);  // null: to be looked up. Else this is the key's current version
  Status read_data(const ObjectImpl& object, std::span<const ReadRange> ranges);
  Result<MappedObject> map_small(const ObjectImpl& object, Link& link);
  std::vector<Result<ObjectPtr>> build(std::span<const std::string> keys, std::vector<LookupEntry> entries,
                                       Deadline deadline);
  std::vector<Result<ObjectPtr>> build_once(std::span<const std::string> keys, std::vector<LookupEntry> entries,
                                            std::vector<size_t>* again, Deadline deadline);
  Status read(const ObjectPtr& object, uint64_t offset, std::span<const iovec> out, std::set<NodeId>& gone,
              Deadline deadline);
  Result<MappedObject> map(const ObjectPtr& object, bool read_only, std::set<NodeId>& gone, Deadline deadline);
  // Of nodes that did not answer: why.
  using Silent = std::map<NodeId, Status>;
  Silent describe_elsewhere(std::span<const std::string> keys, std::vector<LookupEntry>& entries, Deadline deadline,
                            bool peek = false);
  static Status why_silent(const LookupEntry& entry, const Silent& silent);
  static Result<std::vector<std::vector<ReadRange>>> split(const ObjectImpl& object, std::span<const ReadRange> ranges);
  Status read_part(const ObjectPart& part, std::span<const ReadRange> ranges, std::span<const iovec> memory,
                   std::set<NodeId>& gone, Deadline deadline);
  Status check_crc(const ObjectImpl& object, const std::byte* data) const;
  Result<std::optional<MappedObject>> map_local(const ObjectImpl& object, bool read_only);

  TxnId next_txn(uint32_t n);  // the first of n that nobody has had

  ClientOptions options_;
  EnginePtr engine_;
  bool own_engine_ = false;
  std::string host_id_;
  const int pid_;
  mutable std::mutex mutex_;  // links and view
  LinkPtr local_;
  std::map<NodeId, LinkPtr> links_;
  std::shared_ptr<const View> view_ = std::make_shared<View>();
  std::optional<PendingCall> report_;  // of a node that was told to leave
  LocationCache cache_;
  Turn connect_turn_;  // one connects, the others wait for it
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> read_bytes_{0};
  const TxnId first_txn_;  // random
  std::atomic<uint64_t> txns_{0};
};

uint64_t total_bytes(std::span<const iovec> v);
uint32_t timeout_ms(Deadline deadline);  // as messages say it

// After these answers to a commit or a removal, it may have happened.
inline bool leaves_open(Code code) {
  return code == Code::peer_lost || code == Code::deadline_exceeded || code == Code::closed || code == Code::cancelled;
}

inline Status unknown_outcome(const Status& s) {
  return {s.code(), "outcome unknown: the put took effect wholly or not at all (" + s.message() + ")"};
}

template <typename Fn>
auto ClientImpl::with_retries(Deadline deadline, Fn attempt) -> decltype(attempt()) {
  const Deadline until = min(deadline, Deadline::after_ms(kReconnectMs));
  for (int64_t pause_ms = 2;; pause_ms = std::min<int64_t>(pause_ms * 2, 100)) {
    auto result = attempt();
    if (result.is_ok() || !passing(result.status())) return result;
    if (until.remaining_ns() <= pause_ms * 1'000'000) return Status(Code::pool_unavailable, result.status().message());
    timespec pause{0, pause_ms * 1'000'000};
    nanosleep(&pause, nullptr);
    if (const Status s = usable(); !s.is_ok()) return s;
    if (const Status s = refresh_view(until); !s.is_ok() && !passing(s)) return s;
  }
}

}  // namespace torch_mooncake::pool
