// Seats: the places of a process group, over the changes of who sits in them.
//
// The members of a Group never change. When ranks have died, the survivors go on in a new group in which those seats
// are empty and everybody else keeps theirs; when a replacement has come, in one that has it in its seat. What lives on
// is this object: who sits where, and the agreement on what comes next.
//
// Protocol. Who wants a change calls change(), on every rank that stays. Each sends what it knows (the newest seating
// it was in, who is lost, who wants to join) to the chair: the lowest seat that it does not know as lost. The chair
// waits until every seat is either heard of or lost, makes the next seating and answers all with it. A chair that dies
// is lost, and the next seat presides. Who takes a seating tells those it leaves, before its good-bye, so that nobody
// takes it for lost; a seating that only some have heard of is older than the one after it. A replacement asks any rank
// to let it in, which tells the others; it is answered with the seating that has it. Nothing of this needs the store,
// or rank 0.
//
// Who is cut off from the others cannot know that they live: both sides of a cut network may go on. change() can be
// told how many must stay (`at_least`): more than half of them rules that out.
//
// Threads: everything is safe from any thread that is not an I/O thread; one change() at a time on a rank. Ownership:
// the hub knows it until close(); group() is the present one.
#pragma once

#include <map>

#include "collectives/group.h"

namespace torch_mooncake::coll {

struct TM_API Seating {
  uint64_t epoch = 0;
  Id128 group{};
  uint64_t sequence = 0;        // collectives so far
  std::vector<Member> members;  // by seat
  std::vector<uint8_t> active;  // by seat
  std::vector<int64_t> global_ranks;
  Algorithms algorithms{};  // for all groups that follow

  void encode(ByteWriter& out) const;
  static Result<Seating> decode(ByteReader& in);
  std::vector<int> active_seats() const;
  // The group of this seating as `seat` joins it.
  GroupOptions group_of(int seat) const;
};

class Seats;
using SeatsPtr = std::shared_ptr<Seats>;

class TM_API Seats : public std::enable_shared_from_this<Seats> {
 public:
  // With all ranks present from the start; their id is that of the first group. The caller has acquired the hub.
  static Result<SeatsPtr> found(HubPtr hub, int seat, Seating seating);
  // A replacement: asks at the addresses, one after the other, until somebody answers with a seating that has it.
  // Errors: invalid_argument (no such seat), deadline_exceeded (nobody let it in), auth.
  static Result<SeatsPtr> join(HubPtr hub, const Id128& id, int seat, const std::vector<std::string>& addresses,
                               Deadline deadline);

  // A group of its own of some of its ranks, this one among them.
  Result<SeatsPtr> found_part(int seat, Seating seating) const;

  const Id128& id() const { return id_; }
  int seat() const { return seat_; }
  const std::string& token() const { return hub_->token(); }
  GroupPtr group() const;
  Seating seating() const;
  std::vector<int> waiting() const;  // seats for which a replacement has asked

  // Goes on without `remove` and without all that are lost, and with the replacements of `admit`, for which it waits.
  // `sequence`: collectives so far on this rank. Afterwards group() is the new one. Errors: deadline_exceeded naming
  // who did not agree or did not come; cancelled: fewer than `at_least` would be left; then nothing has changed.
  // peer_lost: the others went on without this rank.
  Status change(const std::vector<int>& remove, const std::vector<int>& admit, uint64_t sequence, int at_least,
                Deadline deadline);
  // Ends a change() under way, and all later ones.
  void cancel(const Status& why);
  // Leaves the group, which the others are told, and the hub.
  void close(Deadline deadline);

  // From the hub, on I/O threads: kSeats after the id.
  void on_call(const rpc::SessionPtr& session, ByteReader& in, rpc::Responder responder);

 private:
  struct Proposal {
    Seating seating;
    std::vector<int> lost, admit;
    uint64_t sequence = 0;
  };
  struct Proposed {
    Proposal proposal;
    rpc::Responder responder;
  };
  struct Joiner {
    Member member;
    rpc::Responder responder;  // empty: another rank answers it
  };
  // seating: a post of who has taken it.
  enum class What : uint8_t { propose = 0, join = 1, joiner = 2, seating = 3 };

  Seats(HubPtr hub, const Id128& id, int seat);
  Status start(Seating seating);  // the first
  std::vector<int> lost(const std::vector<int>& remove) const;
  bool has_heard_news() const { return heard_.epoch > seating_.epoch; }  // under mutex_
  void on_seating(Seating seating);
  void on_proposal(const rpc::SessionPtr& session, int seat, ByteReader& in, rpc::Responder responder);
  Status ask(int chair, const Proposal& proposal, const std::vector<int>& remove, Deadline deadline, Status& why_not);
  Status preside(Proposal own, const std::vector<int>& remove, int at_least, Deadline deadline);
  Status take(Seating seating);  // joins its group and leaves the old one
  ByteWriter message(What what) const;
  void on_joiner(int seat, Member member, bool asked_here, rpc::Responder responder);

  const HubPtr hub_;
  const Id128 id_;
  const int seat_;
  std::mutex changing_;  // held by change()
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  GroupPtr group_;
  Seating seating_;
  Seating heard_;                      // the newest that another rank has taken; epoch 0: none
  std::map<int, Proposed> proposals_;  // by seat, until they are answered
  std::map<int, Joiner> joiners_;      // by seat
  Status cancelled_;
};

// The id of a part of a group that its members make out of what they all know.
TM_API Id128 derived_id(const Id128& parent, std::string_view purpose, const std::vector<int>& ranks, uint64_t count);

}  // namespace torch_mooncake::coll
