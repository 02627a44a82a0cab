// Collectives by messages between ranks that are alike: one on each host, or all of a group as if they were. Every one
// runs over the team of its call, by the algorithm named (choice.h); each sends the fewest bytes that such an algorithm
// can.
//
// Rounding. `direct` and `slices` reduce every element once, in the order of the ranks; fp16/bf16 are summed in fp32
// and rounded once. `doubling` and `tree` pass partial results on in fp32. `halving` and `ring` pass them on in the
// type itself, so that they send no more bytes: fp16/bf16 are rounded in every step. All ranks have the same bits.
#pragma once

#include <functional>
#include <span>

#include "collectives/collectives.h"
#include "collectives/reduce.h"

namespace torch_mooncake::coll::across {

inline constexpr uint64_t kPieceBytes = 1 << 20;  // of a chain and of a ring
inline constexpr uint64_t kRingBytes = 16 << 20;  // of one part of a ring's round

// What follows when bytes [at, at + nbytes) have come (at the root: are there); pieces in order, together all.
using Came = std::function<Status(uint64_t at, uint64_t nbytes)>;

Status broadcast(const Call& call, Algorithm algorithm, void* data, uint64_t nbytes, int root, const Came& came = {});
// How a broadcast is cut: piece after piece of so many bytes.
uint64_t piece_bytes(Algorithm algorithm, uint64_t nbytes);
Status all_gather(const Call& call, Algorithm algorithm, ConstPiece in, std::span<const Piece> out);
Status all_reduce(const Call& call, Algorithm algorithm, void* data, uint64_t count, const Reduction& reduction);
// `data` keeps its content but at the root.
Status reduce(const Call& call, Algorithm algorithm, void* data, uint64_t count, const Reduction& reduction, int root);
Status reduce_scatter(const Call& call, Algorithm algorithm, std::span<const ConstPiece> in, Piece out,
                      const Reduction& reduction);

// `slices` of one round of data: part r of it goes from all ranks to rank r, which reduces the parts into `own`;
// results[r] is where that result goes, if it is wanted here.
struct Round {
  std::vector<ConstPiece> parts;
  std::vector<Piece> results;
  std::byte* own = nullptr;
};
struct Rounds {
  static constexpr int kAll = -1, kNobody = -2;
  uint64_t count = 0;
  uint64_t own_bytes = 0;                  // the most that this rank reduces in a round
  int wanted_by = kAll;                    // the results, but by those that made them: a rank, or one of the above
  std::function<Round(uint64_t)> at;       // the same rounds may be asked for again
  std::function<Status(uint64_t)> before;  // before round k is looked at, while others are under way
  std::function<Status(uint64_t)> after;   // when the results of round k are there, likewise
};
// Several rounds under way: the next ones being collected, this one reduced, the last ones spread. `call` null: this
// rank has no part in it but in what comes before and after.
Status in_slices(const Call* call, const Rounds& rounds, const Reduction& reduction);

// `ring`: part r travels from rank r+1 around the ring to rank r, every rank adding its own to it; in pieces, so that
// one is added while the next comes.
struct Ring {
  int n = 0, me = 0;                                    // also for those without a part in it
  uint64_t pieces = 0;                                  // of the longest part
  std::function<Status(int part, uint64_t)> is_needed;  // before a piece of ours is looked at, while others travel
  std::function<Status(int part, uint64_t)> is_done;    // when the result of a piece is there, likewise
};
uint64_t pieces_of(uint64_t nbytes);
// `out` (which may be in[me]) receives the sum of part `me`. Where `results` are wanted, each piece of them travels on
// around the ring as soon as it is there. `call` null: as above.
Status around_ring(const Call* call, const Ring& ring, std::span<const ConstPiece> in, Piece out,
                   std::span<const Piece> results, const Reduction& reduction);

inline constexpr uint64_t kSliceBytes = 1 << 20;  // of one rank in a round
// A round of an all-reduce, in place.
Round round_of(const Call& call, std::byte* data, uint64_t count, uint64_t item);

}  // namespace torch_mooncake::coll::across
