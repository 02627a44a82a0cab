#include "kv/heads.h"

#include <numeric>
#include <string>

namespace torch_mooncake::kv {

Result<Heads> heads_of_rank(int64_t rank, int64_t tp, int64_t kv_heads, const char* what) {
  std::string side = what;
  if (kv_heads < 1) return {Code::invalid_argument, "kv_heads is " + std::to_string(kv_heads) + ": at least 1"};
  if (tp < 1) return {Code::invalid_argument, side + "_tp is " + std::to_string(tp) + ": at least 1"};
  if (rank < 0 || rank >= tp)
    return {Code::invalid_argument,
            side + "_ranks has " + std::to_string(rank) + ", not in [0, " + std::to_string(tp) + ")"};
  if (kv_heads % tp == 0) return Heads{rank * (kv_heads / tp), kv_heads / tp};
  if (tp % kv_heads == 0) return Heads{rank / (tp / kv_heads), 1};
  return {Code::invalid_argument, side + "_tp is " + std::to_string(tp) + ", which neither divides the " +
                                      std::to_string(kv_heads) + " heads nor is a multiple of them"};
}

Result<HeadPlan> plan_heads(std::span<const int64_t> source_ranks, int64_t source_tp,
                            std::span<const int64_t> out_ranks, int64_t out_tp, int64_t kv_heads) {
  // By head: the first source that has it, and where there. Also checks both degrees when no rank is given.
  TM_ASSIGN(Heads source_heads, heads_of_rank(0, source_tp, kv_heads, "source"));
  TM_ASSIGN(Heads out_heads, heads_of_rank(0, out_tp, kv_heads, "out"));
  HeadPlan plan{std::gcd(source_heads.count, out_heads.count), {}};
  constexpr int64_t kNobody = -1;
  std::vector<int64_t> holder(static_cast<size_t>(kv_heads), kNobody), first_head(static_cast<size_t>(kv_heads));
  for (size_t s = 0; s < source_ranks.size(); ++s) {
    TM_ASSIGN(Heads heads, heads_of_rank(source_ranks[s], source_tp, kv_heads, "source"));
    for (int64_t head = heads.first; head < heads.first + heads.count; ++head) {
      if (holder[head] != kNobody) continue;
      holder[head] = static_cast<int64_t>(s);
      first_head[head] = heads.first;
    }
  }
  for (size_t o = 0; o < out_ranks.size(); ++o) {
    TM_ASSIGN(Heads heads, heads_of_rank(out_ranks[o], out_tp, kv_heads, "out"));
    for (int64_t head = heads.first; head < heads.first + heads.count; head += plan.heads_per_piece) {
      if (holder[head] == kNobody)
        return {Code::invalid_argument, "head " + std::to_string(head) + " of out rank " +
                                            std::to_string(out_ranks[o]) + " is in none of the sources"};
      plan.pieces.push_back({holder[head], head - first_head[head], static_cast<int64_t>(o), head - heads.first});
    }
  }
  return plan;
}

}  // namespace torch_mooncake::kv
