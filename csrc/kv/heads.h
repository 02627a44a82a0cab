// Which rank of a tensor-parallel group holds which KV heads, and what goes where when the degree changes.
//
// `tp` ranks and `kv_heads` heads: one divides the other. With tp <= kv_heads, rank r holds the kv_heads / tp heads
// from r * kv_heads / tp on. With tp > kv_heads every head is on tp / kv_heads ranks in a row: rank r holds head r /
// (tp / kv_heads).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/api.h"
#include "common/status.h"

namespace torch_mooncake::kv {

struct Heads {
  int64_t first;  // of the model's heads
  int64_t count;
};

// `invalid_argument` unless 0 <= rank < tp and one of tp and kv_heads divides the other; `what` is the side's name.
TM_API Result<Heads> heads_of_rank(int64_t rank, int64_t tp, int64_t kv_heads, const char* what);

// `heads_per_piece` heads from head `source_head` of sources[source] to head `out_head` of outs[out], counted inside
// them.
struct HeadPiece {
  int64_t source, source_head;
  int64_t out, out_head;
};

struct HeadPlan {
  int64_t heads_per_piece = 1;  // the same for all: the greatest common divisor of both sides' heads a rank
  std::vector<HeadPiece> pieces;
};

// Every head of every out rank from the first of the sources that has it. `invalid_argument`, naming the head and the
// out rank, when none of the sources has it.
TM_API Result<HeadPlan> plan_heads(std::span<const int64_t> source_ranks, int64_t source_tp,
                                   std::span<const int64_t> out_ranks, int64_t out_tp, int64_t kv_heads);

}  // namespace torch_mooncake::kv
