// Group: ranks that talk to one another; point-to-point messages with tags, which the collectives are made of.
//
// Protocol. A message of at most kEagerBytes travels inside one control message while the receiver has room (credits);
// the send has then ended. Any other waits in the sender's memory: the sender registers it and posts kReady with the
// descriptor; the receiver, when a receive matches, reads it with the engine straight into its buffer (same host: one
// copy) and posts kTaken, which ends the send. So unread messages take at most kEagerWindow a peer, and every byte that
// lands in user memory is put there by its owner's own engine: a receive that has ended is never written to again.
//
// Matching. Per (channel, tag), messages of one sender match receives in the order both were posted; a receive from any
// source takes the message that arrived first. Sizes must be equal, else both ends fail with layout_mismatch.
//
// Failure. A rank whose process dies (or connection breaks) without having left is lost: every pending collective and
// every message with that rank fails with peer_lost naming it, on all ranks (they tell each other), and so does every
// later collective. A rank that gave up on a collective (deadline) makes the others fail too. A rank that left in order
// fails only what still needs it.
//
// Threads: everything is safe from any thread that is not an I/O thread. After leave() or abort() calls fail at once.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "collectives/choice.h"
#include "collectives/hub.h"
#include "collectives/messages.h"
#include "collectives/request.h"
#include "collectives/topology.h"

namespace torch_mooncake::coll {

class Board;

inline constexpr int kAnySource = -1;

// Where the bytes of a message lie. On a CUDA device only engines touch them, so they never travel eagerly, and a
// receive there takes no message that did (the sender's bytes are on the host then, and few).
enum class Place : uint8_t { host, cuda };

struct GroupOptions {
  Id128 id{};
  int rank = 0;
  std::vector<Member> members;        // by rank
  std::vector<int64_t> global_ranks;  // for messages; empty: the same
  std::vector<int> seats;             // by rank, ascending: what users call that rank (seats.h); empty: the same
  int seat_count = 0;                 // with those that nobody sits in; 0: one a rank
  Algorithms algorithms{};            // equal on all ranks
};

// Payload of a group, in bytes; messages are counted when they have arrived. `shown`: written to shared slots, from
// where the other ranks of the host read it.
struct Traffic {
  struct Way {
    std::atomic<uint64_t> sent{0}, received{0};
  };
  Way to_hosts, within_host;  // messages, by where the other rank is
  std::atomic<uint64_t> shown{0};
};

class TM_API Group : public std::enable_shared_from_this<Group> {
 public:
  static Result<std::shared_ptr<Group>> join(HubPtr hub, GroupOptions options);
  ~Group();

  int rank() const { return options_.rank; }
  int size() const { return static_cast<int>(options_.members.size()); }
  const Id128& id() const { return options_.id; }
  std::string name_of(int rank) const;  // "rank 1", "rank 1 (global rank 5)": its seat
  int seats() const { return options_.seat_count > 0 ? options_.seat_count : size(); }
  int seat_of(int rank) const { return options_.seats.empty() || rank < 0 ? rank : options_.seats[rank]; }
  int rank_in(int seat) const;          // -1: nobody sits there
  std::vector<int> gone_seats() const;  // whose rank was lost, or has left
  void lose_seat(int seat, const Status& why);
  const Topology& topology() const { return topology_; }
  const Algorithms& algorithms() const { return options_.algorithms; }
  Traffic& traffic() { return traffic_; }
  // JSON: the ranks of each host; for each collective and size which algorithm and why; the traffic so far.
  std::string explain() const;
  bool single_host() const { return topology_.hosts().size() == 1; }  // all members carry our host id
  Engine& engine() { return hub_->engine(); }
  const std::shared_ptr<Progress>& progress() { return hub_->progress(); }

  // `data` stays valid (held by `keep`, or by the caller) until the request has ended.
  RequestPtr send(int to, Channel channel, uint64_t tag, const void* data, uint64_t nbytes, Deadline deadline,
                  std::shared_ptr<void> keep = nullptr, Place place = Place::host);
  RequestPtr receive(int from, Channel channel, uint64_t tag, void* data, uint64_t nbytes, Deadline deadline,
                     std::shared_ptr<void> keep = nullptr, Place place = Place::host);

  // The ranks that pending collectives wait for, as text: "rank 1, rank 3".
  std::string awaited() const;
  // ok, or why no collective can run any more; or none that this rank takes part in.
  Status trouble() const;
  Status trouble_with(int rank, Channel channel = Channel::collective) const;
  // This rank gives up on a collective: the group runs no more of them, here and on the other ranks.
  void give_up(const Status& why);
  // Everything pending and everything later fails with `why`, on this rank.
  void abort(const Status& why);
  // Tells the others, waits (at most `deadline`) until they have all our messages, and is gone. Idempotent.
  void leave(Deadline deadline);

  // For what the ranks of this host do among themselves; null: there is only this one.
  Board* board(int which) const { return boards_[which].get(); }
  Result<rpc::SessionPtr> session_with(int rank, Deadline deadline, Channel channel = Channel::collective);

  // From the hub, on I/O threads.
  void on_eager(const rpc::SessionPtr& session, const Envelope& envelope, std::string body, size_t payload_at);
  void on_ready(const rpc::SessionPtr& session, Ready ready);
  void on_taken(const Verdict& verdict);
  void on_withdraw(const Verdict& verdict);
  void on_trouble(const Trouble& trouble);
  void on_leave(uint32_t rank);
  void on_board(uint32_t rank, uint8_t which, const Id128& segment, UniqueFd fd);
  void on_engine_gone(const Id128& engine, const Status& why);

 private:
  struct Arrival {  // a message without a receive
    int source;
    rpc::SessionPtr session;
    std::string body;  // eager: the whole control message
    size_t payload_at = 0;
    bool eager = true;
    Ready ready;
  };
  struct Posted {  // a receive without a message
    int source;
    RequestPtr request;
    std::byte* data;
    uint64_t nbytes;
    Deadline deadline;
    Channel channel;
    Place place;
  };
  struct Sending {
    int to;
    Channel channel;
    RequestPtr request;
    RegionPtr region;  // null for an empty message
    LinkPtr link;
    uint64_t nbytes = 0;
    bool taken = false;  // its end is on the way, whatever becomes of the receiver
  };
  struct Box {
    std::deque<Arrival> arrived;
    std::deque<Posted> posted;
  };
  struct Key {
    Channel channel;
    uint64_t tag;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& k) const { return std::hash<uint64_t>()(k.tag * 2 + static_cast<uint8_t>(k.channel)); }
  };

  Group(HubPtr hub, GroupOptions options);
  std::string name_of_any(int rank) const;           // also if there is none such
  Status refusal(int peer, Channel channel) const;   // mutex_ held: why nothing can go between us and `peer`
  bool take_arrival(Key key, const Posted& posted);  // true: it matched (and was completed or started)
  void arrived(Key key, Arrival arrival);
  void complete(const Posted& posted, Arrival arrival);
  Status named(const Status& status, int rank) const;  // an error says with whom
  void read(const Posted& posted, const Arrival& arrival, bool may_block);
  void end_read(const Posted& posted, const Arrival& arrival, const RegionPtr& local, Status status);
  void end_send(uint64_t send_id, Status status, bool withdraw);
  void rank_gone(int rank, const Status& why, bool lost);
  void fail_pending(const Status& why, bool collectives, bool messages, int rank);
  void tell_trouble(int lost_rank, const Status& why);
  void arm_timer(const RequestPtr& request, Channel channel, Deadline deadline);
  void drop_box_if_empty(Key key);
  Traffic::Way& way_to(int rank) {
    return topology_.host_of(rank) == topology_.host_of(options_.rank) ? traffic_.within_host : traffic_.to_hosts;
  }

  HubPtr hub_;
  const GroupOptions options_;
  const Topology topology_;
  Traffic traffic_;
  std::array<std::unique_ptr<Board>, 2> boards_;
  mutable std::mutex mutex_;
  std::unordered_map<Key, Box, KeyHash> boxes_;
  std::unordered_map<uint64_t, Sending> sending_;
  std::map<Request*, RequestPtr> reading_;
  uint64_t next_send_id_ = 1;
  std::vector<Status> gone_;  // by rank; ok while it is here
  Status trouble_;            // no collectives any more
  Status ended_;              // nothing any more
  bool left_ = false;
};
using GroupPtr = std::shared_ptr<Group>;

}  // namespace torch_mooncake::coll
