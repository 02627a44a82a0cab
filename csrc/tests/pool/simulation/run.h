// One seed: a cluster, its faults and its clients, and what must hold at the end.
//
//     build/…/pool_simulation_test                                   a few hundred seeds, and the mutations
//     TM_SEEDS=20000 build/…/pool_simulation_test -tc='*seeds*'      more of them
//     TM_SEED=1234 build/…/pool_simulation_test -tc='*replay*'       one of them, with a line for each thing that
//     happens
//                                                                    (TM_MUTATION=name: mutated)
//
// Each seed runs in a process of its own (fork), which makes it leave nothing behind, whatever it kills.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch_mooncake::pool::sim {

// One step of the protocol, or one check, left out.
enum class Mutation {
  none,
  supersede_lost,    // a donor says that it has changed an old version's word, and has not
  flip_early,        // the directory flips before the donors have changed the old words
  commit_lost,       // a donor says that it has marked COMMITTED, and has not
  word_unchecked,    // a remote reader finds the generation word that it expects
  old_words,         // a reader on the donor's host sees generation words of a while ago
  pins_ignored,      // a donor reclaims what clients of its host have pinned
  fence_dropped,     // a donor reuses an extent whose writer, on its host, may still write
  writes_after_end,  // the same, of a writer elsewhere: bytes land after its session's end
  consume_any,       // a taking does not say which version it takes
  ttl_forgotten,     // donors do not say in a rebuild what has a time to live
  eviction_untold,   // a donor does not tell the directory what it has evicted
  stale_kept,        // a node that was expelled keeps its named values, and what it should drop
};
inline constexpr const char* kMutations[] = {
    "none",          "supersede_lost",   "flip_early",  "commit_lost",   "word_unchecked",  "old_words", "pins_ignored",
    "fence_dropped", "writes_after_end", "consume_any", "ttl_forgotten", "eviction_untold", "stale_kept"};

struct Outcome {
  std::string found;  // what is wrong; empty: nothing
  uint64_t hash = 0;  // of all that happened
};

struct RunOptions {
  Mutation mutation = Mutation::none;
  bool verbose = false;
  bool other_heap = false;  // allocates something first, so that every address differs
};
Outcome run_seed(uint64_t seed, const RunOptions& options = {});
// Several at once, on all processors.
std::vector<Outcome> run_seeds(uint64_t first, int n, const RunOptions& options = {});

class Cluster;
void install(Mutation mutation, Cluster& cluster);  // mutations.cpp

}  // namespace torch_mooncake::pool::sim
