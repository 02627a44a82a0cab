// The deterministic simulation of directory, donors and clients together (see simulation/run.h).
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "pool/simulation/run.h"

using namespace torch_mooncake::pool::sim;

namespace {

long number(const char* name, long standard) {
  const char* text = std::getenv(name);
  return text ? std::atol(text) : standard;
}

Mutation mutation(const std::string& name) {
  for (size_t i = 0; i < std::size(kMutations); ++i)
    if (name == kMutations[i]) return static_cast<Mutation>(i);
  FAIL("no mutation is called ", name);
  return Mutation::none;
}

}  // namespace

TEST_CASE("a seed names one run, event for event") {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const Outcome once = run_seed(seed), again = run_seed(seed, {.other_heap = true});
    CHECK(once.hash == again.hash);
    CHECK(once.hash != run_seed(seed + 100).hash);
  }
}

TEST_CASE("seeds: every history holds, and nothing is left over") {
  const long n = number("TM_SEEDS", 200), first = number("TM_FIRST_SEED", 1);
  for (long at = 0; at < n; at += 100) {
    const auto outcomes = run_seeds(static_cast<uint64_t>(first + at), static_cast<int>(std::min(100L, n - at)));
    for (size_t i = 0; i < outcomes.size(); ++i)
      CHECK_MESSAGE(outcomes[i].found.empty(), "seed ", first + at + static_cast<long>(i), ": ", outcomes[i].found);
  }
}

TEST_CASE("mutations: a step or a check left out is found within 1000 seeds") {
  const char* only = std::getenv("TM_MUTATION");
  for (size_t m = 1; m < std::size(kMutations); ++m) {
    if (only && std::string(only) != kMutations[m]) continue;
    uint64_t found = 0;
    std::string what;
    for (uint64_t first = 1; first <= 1000 && found == 0; first += 8) {
      const auto outcomes = run_seeds(first, 8, {.mutation = static_cast<Mutation>(m)});
      for (size_t i = 0; i < outcomes.size() && found == 0; ++i) {
        if (outcomes[i].found.empty()) continue;
        found = first + i;
        what = outcomes[i].found;
      }
    }
    const std::string name = kMutations[m];
    CHECK_MESSAGE(found != 0, name);
    std::printf("%s: found by seed %lu: %s\n", name.c_str(), found, what.c_str());
  }
}

TEST_CASE("replay: TM_SEED" * doctest::skip(std::getenv("TM_SEED") == nullptr)) {
  const char* name = std::getenv("TM_MUTATION");
  const Outcome outcome = run_seed(static_cast<uint64_t>(number("TM_SEED", 1)),
                                   {.mutation = name ? mutation(name) : Mutation::none, .verbose = true});
  std::printf("hash %016lx, %s\n", outcome.hash, outcome.found.empty() ? "nothing is wrong" : outcome.found.c_str());
}
