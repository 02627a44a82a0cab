// The collectives, as algorithms over a group's messages. Torch-free; memory is raw pointers and sizes in bytes or
// elements.
//
// How bytes travel. Between ranks of one host through shared slots (board.h), but for large gathers and scatters.
// Across hosts by messages (across.h), by host if several ranks share one (by_host.h). Which algorithm is a matter of
// size and topology (choice.h). Results are equal bit for bit on all ranks and from run to run; fp16/bf16 are summed in
// fp32 and rounded once, but where across.h and by_host.h say otherwise.
//
// Threads: the ranks of a group must call the same collectives in the same order; one at a time on each rank. Memory of
// the caller is neither read nor written after a call returns, whatever the outcome. Arguments that make no sense fail
// before anything is sent. After a failure the ranks are no longer in step: the caller ends the group
// (Group::give_up).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "collectives/choice.h"
#include "collectives/dtype.h"
#include "collectives/group.h"
#include "common/api.h"
#include "common/clock.h"
#include "common/status.h"

namespace torch_mooncake::coll {

// Working memory that one executor reuses from call to call.
class TM_API Scratch {
 public:
  std::byte* get(uint64_t nbytes);  // contents undefined, 64-byte aligned
  // Another one, for what a collective calls while it uses this one.
  Scratch& inner();
  // Gives back what a large call needed.
  void trim();

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte[], Free> data_;
  uint64_t capacity_ = 0;
  std::unique_ptr<Scratch> inner_;
};

class Device;

struct TM_API Call {
  Group& group;
  uint64_t seq;  // equal on all ranks: what keeps messages of different calls apart
  Deadline deadline;
  Scratch& scratch;
  const Team* team = nullptr;  // who takes part; null: all ranks of the group
  // Whose memory the pointers of the collective are (device.h); null: the host's. Of all ranks, not of a team.
  Device* device = nullptr;

  // Members of the team are numbered from 0.
  int size() const { return team ? team->size() : group.size(); }
  int rank() const { return team ? team->me : group.rank(); }
  int member(int number) const { return team ? team->ranks[number] : number; }  // its rank in the group
  std::string name_of(int number) const { return group.name_of(member(number)); }
  Layout layout() const;
  // What to use instead of the table; never anything within the hosts of a group that has several.
  const Algorithms::Rule& rule(Collective collective) const;
  Choice choose(Collective collective, uint64_t nbytes, DType dtype = DType::u8) const {
    const bool half = dtype == DType::f16 || dtype == DType::bf16;
    return coll::choose(collective, layout(), nbytes, rule(collective), half);
  }
  Board* board(int which) const;  // null: they are on several hosts, or are alone
  // A step among some of the ranks, of which this one is one.
  Call among(const Team& some) const { return {group, seq, deadline, scratch.inner(), &some}; }
};

struct Piece {
  void* data;
  uint64_t nbytes;
};
struct ConstPiece {
  const void* data;
  uint64_t nbytes;
};

TM_API Status barrier(const Call& call);
// A barrier whose timeout names every rank that did not come, not only the next one (on rank 0).
TM_API Status monitored_barrier(const Call& call);
TM_API Status broadcast(const Call& call, void* data, uint64_t nbytes, int root);
// In place.
TM_API Status all_reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op);
// In place at the root; elsewhere `data` keeps its content.
TM_API Status reduce(const Call& call, void* data, uint64_t count, DType dtype, ReduceOp op, int root);
// out[r] receives rank r's `in`; sizes may differ by rank; out[rank] may be `in`.
TM_API Status all_gather(const Call& call, ConstPiece in, std::span<const Piece> out);
// in[r] goes to rank r and is reduced there into `out`, which may be in[rank]; sizes may differ by rank.
TM_API Status reduce_scatter(const Call& call, std::span<const ConstPiece> in, Piece out, DType dtype, ReduceOp op);
// `out` is read at the root only.
TM_API Status gather(const Call& call, const void* in, uint64_t nbytes, std::span<void* const> out, int root);
// `in` is read at the root only.
TM_API Status scatter(const Call& call, std::span<const void* const> in, void* out, uint64_t nbytes, int root);
// in[r] goes to rank r, out[r] comes from it; sizes may differ by pair, the two ends of a pair must agree.
TM_API Status all_to_all(const Call& call, std::span<const ConstPiece> in, std::span<const Piece> out);

}  // namespace torch_mooncake::coll
