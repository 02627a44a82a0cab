// Which algorithm a collective takes: decided by what all ranks know (the collective, the number of bytes, how the
// ranks lie on hosts, what rank 0 was told to use instead), so that all decide alike.
//
// Ranks of one host use their shared slots (board.h), whatever is said here about messages. Several hosts of which one
// has several ranks: by host, that is first within each host, then between one rank of each (or several, each with a
// share of the data), then within each host again; so no byte enters or leaves a host twice. What is left are messages
// between ranks that are alike, for which there is a table. All here are values and pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/api.h"
#include "common/status.h"

namespace torch_mooncake::coll {

enum class Collective : uint32_t {
  barrier,
  broadcast,
  all_reduce,
  reduce,
  all_gather,
  reduce_scatter,
  gather,
  scatter,
  all_to_all,
  other
};
inline constexpr size_t kCollectives = static_cast<size_t>(Collective::other);

enum class Algorithm : uint8_t {
  automatic,
  direct,    // everybody sends to whom it concerns, in one step
  slices,    // every rank reduces its part of the data, collected from all others; then it goes where it is wanted
  doubling,  // pairs, twice as far apart in each step
  halving,   // recursive halving, then doubling (Rabenseifner)
  ring,      // in pieces from neighbour to neighbour
  tree,      // binomial
  chain,     // in pieces along all ranks
  bruck,     // all blocks seen so far, twice as many in each step
};

// What is used instead of the table: "all_reduce=ring,broadcast=flat/tree". `flat`: as if each rank were on a host of
// its own, without shared slots.
class TM_API Algorithms {
 public:
  struct Rule {
    Algorithm algorithm = Algorithm::automatic;
    bool flat = false;
    bool operator==(const Rule&) const = default;
  };
  // invalid_argument that lists what is legal.
  static Result<Algorithms> parse(std::string_view text);
  const Rule& of(Collective collective) const { return rules_[static_cast<size_t>(collective)]; }
  std::string text() const;  // what parse() takes; "" if nothing is changed

 private:
  std::array<Rule, kCollectives + 1> rules_{};
};

struct Layout {
  int ranks = 1, hosts = 1;
  bool nested() const { return hosts > 1 && hosts < ranks; }
};

struct Choice {
  Algorithm algorithm = Algorithm::direct;  // of messages, between hosts if `by_host`
  bool by_host = false;
  bool flat = false;  // no shared slots
  const char* why = "";
};

// Up to this size what goes by host is carried by one rank of each; more by as many as the smallest host has.
inline constexpr uint64_t kLittleBytes = 64 << 10;

// `nbytes`: of the data, which is everybody's; of the longest part in all_gather, reduce_scatter and all_to_all.
// `half`: of elements (fp16, bf16) that are better not rounded in every step.
TM_API Choice choose(Collective collective, const Layout& layout, uint64_t nbytes, const Algorithms::Rule& rule = {},
                     bool half = false);
// The sizes (largest of each class) between which the choice may change; the last one is UINT64_MAX.
TM_API std::vector<uint64_t> size_classes(Collective collective);
TM_API const char* name_of(Collective collective);
TM_API const char* name_of(Algorithm algorithm);

}  // namespace torch_mooncake::coll
