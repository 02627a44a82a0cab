// The one implementation of NodeService. Everything but the membership thread runs on one Strand: the donor, the home
// (if this node is the leader) and all books kept here need no locks.
//   service.cpp          life cycle, client sessions, time
//   service_put.cpp      reserve, give back, begin, commit
//   service_batch.cpp    the same of many keys, inline puts, removals, exists
//   service_lookup.cpp   lookup, describe, keys, stat
//   service_chains.cpp   what concerns chains of keys: prefix, refresh
//   service_events.cpp   the stream of what becomes of keys
//   service_tiers.cpp    what is asked for and lies on an SSD
//   service_members.cpp  marks, and the leader's side of membership
//   service_join.cpp     a member's side of membership (its own thread)
//   service_copies.cpp   replicas that were lost are made again, a leaving node's objects are moved away
//   service_election.cpp who leads, if that is not given: the thread of members, and taking and leaving the lead
//   service_vouch.cpp    a leader goes on while etcd does not answer: its members vouch for it
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

#include "pool/batch_messages.h"
#include "pool/client_link.h"
#include "pool/election.h"
#include "pool/home.h"
#include "pool/node_service.h"
#include "pool/strand.h"
#include "transfer/engine.h"

namespace torch_mooncake::pool {

inline constexpr int64_t kBeatMs = 500;
inline constexpr int64_t kAskMs = 2000;                        // a question to etcd
inline constexpr int64_t kExpelMs = kLeaseMs + kLeaseMs / 10;  // the leader waits longer, by its own clock

class NodeServiceImpl final : public NodeService {
 public:
  explicit NodeServiceImpl(NodeServiceOptions options) : options_(std::move(options)) {}
  ~NodeServiceImpl() override { close(); }
  Status start();

  std::vector<std::string> addresses() const override { return self_.addresses; }
  Status drain(Deadline deadline) override;
  void close() override;
  Status check(bool at_rest) override;
  Donor& donor() override { return *donor_; }

 private:
  using ResponderPtr = std::shared_ptr<rpc::Responder>;
  struct ClientSession {
    std::weak_ptr<rpc::Session> session;
    bool mapped = false;
  };
  struct WaitingReserve {
    ReserveCall call;
    ResponderPtr responder;
    int64_t deadline_ns = 0;
  };
  struct ReservedBatch {
    TxnId txn{};
    uint32_t items = 0;
    int64_t until_ns = 0;
  };
  // Questions of one message whose answers come one by one; those of request ids [first, first + answer.items.size()).
  template <typename Answer>
  struct Batch {
    Answer answer;
    size_t left = 0;
    ResponderPtr responder;
    bool pins = false;  // of keys, not removals
  };
  struct PendingLookup {
    LookupCall call;
    bool exists_only = false;
    ResponderPtr responder;
    int64_t deadline_ns = 0;
    uint32_t promoting = 0;  // extents that are on their way into memory
    bool promoted = false;   // those that were not, were asked for
  };
  struct Member {
    NodeInfo info;
    rpc::SessionPtr session;
    int64_t heard_ns = 0;
    std::vector<Announced> incoming;
    std::vector<Quota> quotas;  // as in its last beat
    bool announced = false;
    // What it announces is on its way: it does not have what marks would change meanwhile, nor what it reports then.
    bool joining = true;
    uint64_t joins = 0;
    std::vector<EvictedExtent> evicted;
    std::vector<TierChange> moved;
  };

  struct QuotaSet {
    std::set<NodeId> members;  // who do not know of it yet
    ResponderPtr responder;
  };

  struct Evacuation {
    NodeId node{};
    Evacuated result;
    std::vector<KeyHash> keys;  // not taken up yet
    size_t open = 0;
    int64_t deadline_ns = 0;
    std::function<void(const Result<Evacuated>&)> done;
    bool over = false;  // `done` has been told
  };
  using EvacuationPtr = std::shared_ptr<Evacuation>;
  struct Copying {
    MissingCopy what;
    EvacuationPtr evacuation;         // for whose leave it is made; null: a replica that was lost
    size_t tries = 0;                 // before this one
    std::vector<ReplicaRef> sources;  // the first is next
    std::map<NodeId, size_t> failed;  // how often, at this target: no more than there are sources
    bool nowhere = false;             // no source is left, or no target
    NodeId at{};
    Status last{Code::pool_full, "no other host is there"};
  };

  // Registers a method whose body is a T: decoded, then run on the strand. The body stays as long as the message, whose
  // texts may be views of it.
  template <typename T>
  void method(Method id, void (NodeServiceImpl::*fn)(const rpc::SessionPtr&, T, ResponderPtr));
  void register_methods();
  Status start_home();

  // service.cpp
  void on_attach(const rpc::SessionPtr&, AttachRequest, ResponderPtr);
  void on_detach(const rpc::SessionPtr&, DetachRequest, ResponderPtr);
  void on_view(const rpc::SessionPtr&, Empty, ResponderPtr);
  void session_closed(rpc::Session* session);
  void count_clients();
  void tick();
  void arm_tick();
  void arm_soon();
  void arm_at(int64_t deadline_ns);
  Status usable() const;  // not draining, not fenced

  // service_put.cpp
  void on_reserve(const rpc::SessionPtr&, ReserveCall, ResponderPtr);
  void on_grant(const rpc::SessionPtr&, GrantCall, ResponderPtr);
  void on_give_back(const rpc::SessionPtr&, GiveBackCall, ResponderPtr);
  void on_begin(const rpc::SessionPtr&, BeginCall, ResponderPtr);
  void on_commit(const rpc::SessionPtr&, CommitCall, ResponderPtr);
  Result<Reservation> reserve(const ReserveCall& call);
  Result<Reservation> reserve(const ReserveRequest& request);
  void retry_reservations();
  void commit(const CommitCall& call, std::function<void(const Result<CommitAnswer>&)> done);
  Status need_home(uint64_t view) const;
  static Status check_ttl(uint64_t ttl_ms);

  // service_batch.cpp
  void on_reserve_many(const rpc::SessionPtr&, ReserveManyCall, ResponderPtr);
  void on_put_many(const rpc::SessionPtr&, PutManyCall, ResponderPtr);
  void on_remove_many(const rpc::SessionPtr&, RemoveManyCall, ResponderPtr);
  void on_exists(const rpc::SessionPtr&, ExistsCall, ResponderPtr);
  void batch_done(const CommitDone& done);
  void batch_done(const RemoveDone& done);

  // service_lookup.cpp
  void on_lookup(const rpc::SessionPtr&, LookupCall, ResponderPtr);
  void on_describe(const rpc::SessionPtr&, DescribeCall, ResponderPtr);
  void on_keys(const rpc::SessionPtr&, KeysCall, ResponderPtr);
  void on_stat(const rpc::SessionPtr&, Empty, ResponderPtr);
  void on_drain(const rpc::SessionPtr&, Empty, ResponderPtr);
  Status readiness() const;
  void on_touch(const rpc::SessionPtr&, TouchCall, ResponderPtr);
  void look_up(RequestId request);
  std::optional<Description> describe(ExtentRef extent, const std::string& key, bool data);
  void peek(const DescribeCall& call, const ResponderPtr& responder);
  void answer_describe(const DescribeCall& call, const ResponderPtr& responder, const Status& failure);

  // service_tiers.cpp
  bool promote_for(RequestId request, const std::vector<Found>& found);
  void promote_then(const std::vector<ExtentRef>& extents, std::function<void(const Status&)> done);
  void disk_done();
  void on_tiers(const rpc::SessionPtr&, TierReport, ResponderPtr);

  // service_chains.cpp
  void on_prefix(const rpc::SessionPtr&, PrefixCall, ResponderPtr);
  void on_refresh(const rpc::SessionPtr&, RefreshCall, ResponderPtr);
  SessionId owner(const rpc::SessionPtr&, SessionId claimed) const;

  // service_events.cpp
  void on_events(const rpc::SessionPtr&, EventsCall, ResponderPtr);
  void gather_events();
  void end_events();
  void tick_events(int64_t now_ns);
  bool answer_events(const EventsCall& call, const ResponderPtr& responder, bool late);

  // service_members.cpp
  void on_join(const rpc::SessionPtr&, JoinRequest, ResponderPtr);
  void on_announce(const rpc::SessionPtr&, AnnounceRequest, ResponderPtr);
  void on_quota(const rpc::SessionPtr&, QuotaCall, ResponderPtr);
  std::vector<Quota> quotas_without(const NodeId& node) const;
  void knows_quotas(const NodeId& node, const std::vector<Quota>& known);
  void tell_quota_sets();
  void share_quotas() { donor_->set_quotas(quotas_without(self_.id)); }
  void on_beat(const rpc::SessionPtr&, BeatRequest, ResponderPtr);
  void on_leave(const rpc::SessionPtr&, LeaveRequest, ResponderPtr);
  void on_mark(const rpc::SessionPtr&, Mark, ResponderPtr);
  void on_evicted(const rpc::SessionPtr&, EvictedReport, ResponderPtr);
  void apply_mark(const Mark& mark, std::function<void(const Status&)> done);
  void send_mark(const SendMark& send);
  Status bind(const Mark& mark);
  void repeat_marks();
  template <typename Report, typename Item>
  void tell_leader(Method method, const std::vector<Item>& items);
  void pump();  // does what the home wants done, until it wants nothing
  void expel(const NodeId& id, const char* why);
  void next_view(uint64_t at_least);
  View make_view() const;
  void watch_members(int64_t now_ns);

  // service_join.cpp
  void counted(int64_t at_ns);  // the leader counted this node among the pool's at that time
  void membership_thread();
  // Until the connection is lost or the service closes.
  Status be_member(const std::string& leader, int64_t connect_ms);
  Status follow(const rpc::SessionPtr& leader);
  Status announce_to(const rpc::SessionPtr& leader, const JoinAnswer& answer);
  void drop_named(std::function<void(const Status&)> done);
  Status drop_named_and_wait();
  bool sleep_ms(int64_t ms);  // false: closing
  Announced slim(Announcement a) const;
  std::vector<Announced> announcements() const;

  // service_copies.cpp: the leader's
  void tick_copies(int64_t now_ns);
  void retry_copies();
  void start_copies();
  void queue_copy(MissingCopy what, const EvacuationPtr& evacuation, size_t tries);
  void take_up_copies();
  void start_copy(std::shared_ptr<Copying> copy);
  void copy_over(const std::shared_ptr<Copying>& copy, const Status& status, uint64_t nbytes);
  const NodeInfo* place_for(const Copying& copy) const;
  void end_copies(const Status& why);
  void on_evacuate(const rpc::SessionPtr&, EvacuateCall, ResponderPtr);
  void start_evacuation(const NodeId& node, int64_t deadline_ns, std::function<void(const Result<Evacuated>&)> done);
  void evacuation_over(const NodeId& node, const Status& why = {});
  // the donor's
  using CopyDone = std::function<void(const Result<CopyAnswer>&)>;
  void on_copy(const rpc::SessionPtr&, CopyCall, ResponderPtr);
  void on_export(const rpc::SessionPtr&, ExportCall, ResponderPtr);
  void on_drained(const rpc::SessionPtr&, Empty, ResponderPtr);
  void copy_here(const CopyCall& call, CopyDone done);
  void copier_thread();
  Result<CopyAnswer> make_copy(const CopyCall& call);
  Result<uint64_t> left_of_copy(const Mark& mark) const;
  Result<LinkPtr> link_to(const NodeInfo& node, Deadline deadline);
  void evacuate(Deadline deadline);  // not on the strand
  Result<Evacuated> ask_to_evacuate(Deadline deadline);

  // service_election.cpp
  void election_thread();
  bool nap_ms(int64_t ms);  // or until there is something to note; false: closing or leaving
  Status take_part();
  Status lead(const Election::Won& won);  // until that is over
  Status note_view();
  void leave_record();
  void ask_to_note();
  void nothing_to_note();
  LastView recorded() const;
  void begin_to_lead(const Election::Won& won, const LastView& last, const NodeId& before);
  void renewed(int64_t until_ns, int64_t since_ns);
  void lead_until(int64_t until_ns, int64_t since_ns);  // since: when we were certainly the leader
  void still_leads();                                   // or stands down
  void stand_down();
  void when_noted(std::function<void()> change);  // once the next leader would know of it

  // service_vouch.cpp
  void ask_vouches(int64_t now_ns);
  void lead_by_vouches();
  void about_to_record(const std::vector<NodeId>& members);
  int64_t leased_until() const { return renewed_ns_ + kLeadS * 900'000'000; }
  Status lead_again();
  void on_vouch(const rpc::SessionPtr&, Leader, ResponderPtr);
  std::optional<Leader> vouched_for();  // whom we have promised to follow, and nobody else, as yet
  bool may_lead(const LastView& last);  // no: who has written that may be leading still

  NodeServiceOptions options_;
  std::unique_ptr<Donor> donor_;
  EnginePtr engine_;
  NodeInfo self_;
  bool leader_ = false;
  std::unique_ptr<Election> election_;  // null: the leader is given
  std::vector<RegionPtr> regions_;
  MappingPtr table_map_;
  std::vector<MappingPtr> data_maps_;  // read-write, for inline puts

  Strand strand_;
  std::atomic<bool> closing_{false};
  std::mutex close_mutex_;
  bool closed_ = false;
  std::atomic<bool> draining_{false};
  std::atomic<bool> left_{false};  // no heartbeats any more: the leader has been, or is being, told
  bool soon_armed_ = false;

  std::unordered_map<SessionId, ClientSession> clients_;
  std::vector<SessionId> ending_;  // of remote sessions that are gone: ended at the next tick, see session_closed()
  int clients_told_ = 0;
  std::deque<WaitingReserve> waiting_;
  std::map<TxnId, int64_t> reserved_until_;
  std::vector<ReservedBatch> reserved_batches_;
  std::vector<EvictedExtent> evicted_;
  NodeActivity done_;  // the counts; the rest is filled in when asked
  std::vector<TierChange> moved_;

  // The leader's.
  std::optional<Home> home_;
  uint64_t seed_ = 0;
  RequestId next_request_ = 1;
  std::unordered_map<RequestId, std::function<void(const Result<CommitAnswer>&)>> commits_;
  std::map<RequestId, Batch<PutManyAnswer>> put_batches_;  // by the first request
  std::map<RequestId, Batch<RemoveManyAnswer>> remove_batches_;
  std::unordered_map<RequestId, PendingLookup> lookups_;
  std::map<NodeId, Member> members_;
  std::map<NodeId, int64_t> expected_until_;
  int64_t watched_ns_ = INT64_MAX / 2;  // when their silence was last looked at
  bool pumping_ = false;
  uint64_t reign_ = 0;  // changes with each home: answers to an earlier one's marks are nobody's
  int64_t lead_until_ns_ = 0;
  Id128 lineage_{};
  std::set<NodeId> counting_;  // whose named objects count, as it is recorded or about to be; we too
  std::set<NodeId> leaving_;   // to be expelled once that is recorded
  std::vector<QuotaSet> quota_sets_;
  uint64_t term_ = 0;
  int64_t renewed_ns_ = 0;                // in etcd
  std::set<NodeId> recorded_;             // by the last record that we know of
  std::set<NodeId> may_be_recorded_;      // as members: by the last record that etcd has, or may have
  std::map<NodeId, int64_t> vouched_ns_;  // when we asked, of those who vouched
  int64_t vouched_until_ns_ = 0;
  std::deque<std::pair<uint64_t, std::function<void()>>> unnoted_;
  uint64_t last_change_ = 0;
  std::vector<SendMark> unheeded_;  // of those that nothing waits for: not taken yet
  struct Listening {
    EventsCall call;
    ResponderPtr responder;
    int64_t deadline_ns = 0;
  };
  std::vector<Listening> listening_;
  std::deque<KeyEvent> events_;           // those numbered last_event_ - size + 1 to last_event_
  uint64_t stream_ = 0, last_event_ = 0;  // stream 0: nobody listens
  int64_t asked_events_ns_ = 0;

  std::deque<std::shared_ptr<Copying>> to_copy_;
  size_t copying_ = 0;
  bool copies_start_ = false;  // start_copies() is about to run
  std::set<KeyHash> parked_;   // that no node has room for: tried again when one comes, or later
  int64_t parked_until_ns_ = 0;
  std::map<NodeId, EvacuationPtr> evacuations_;
  std::set<NodeId> going_;  // who has asked for that, until it is out: where only they are, nothing stays

  // Of copies that are made here: by a thread of their own, one after the other.
  std::thread copier_;
  std::mutex copies_mutex_;
  std::condition_variable copies_cv_;
  std::deque<std::pair<CopyCall, CopyDone>> copies_;
  std::map<NodeId, LinkPtr> sources_;       // the copier's
  std::map<TxnId, int64_t> copies_expire_;  // of those that are PREPARED, by our clock; the strand's
  std::optional<Evacuated> evacuated_;
  std::vector<ResponderPtr> ask_evacuated_;

  // A member's.
  View view_;           // the leader's too
  uint64_t fence_ = 0;  // marks of older views are refused
  int64_t lease_until_ns_ = 0;
  rpc::SessionPtr leader_session_;
  rpc::SessionPtr follows_;                 // the same, until we have given it up
  std::atomic<int64_t> alone_since_ns_{0};  // nobody leads, or can be reached, since then; 0: somebody does
  std::thread thread_;
  std::mutex sleep_mutex_;
  std::condition_variable sleep_cv_;
  bool to_note_ = false;  // by sleep_mutex_
  // The election's thread's.
  bool note_failed_ = false;
  bool term_noted_ = false;  // the record has the term that we hold the key in: until then that counts for nothing
  bool etcd_silent_ = false;
  uint64_t outwaited_term_ = 0;  // of a record that we are not in: nobody has led since then
  int64_t outwaited_since_ns_ = 0;
};

inline void respond(rpc::Responder& responder, const Status& status) {
  if (status.is_ok()) {
    responder.ok();
  } else {
    responder.fail(status);
  }
}

template <typename T>
void NodeServiceImpl::method(Method id, void (NodeServiceImpl::*fn)(const rpc::SessionPtr&, T, ResponderPtr)) {
  engine_->rpc().handle(
      id, rpc::RunOn::inline_io,
      [this, fn](const rpc::SessionPtr& session, rpc::Message request, rpc::Responder responder) {
        struct Arrived {
          std::string body;
          Result<T> message;
          rpc::Responder responder;
        };
        auto arrived = std::make_shared<Arrived>(Arrived{std::move(request.body), T{}, std::move(responder)});
        arrived->message = decode<T>(arrived->body);
        if (!arrived->message.is_ok()) return arrived->responder.fail(arrived->message.status());
        strand_.run([this, fn, session, arrived] {
          still_leads();
          if (home_) home_->at(steady_ns());
          // The responder keeps what the message's texts point into.
          (this->*fn)(session, std::move(arrived->message).value(), ResponderPtr(arrived, &arrived->responder));
          pump();
        });
      });
}

}  // namespace torch_mooncake::pool
