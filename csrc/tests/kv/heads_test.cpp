#include "kv/heads.h"

#include <doctest/doctest.h>

#include <string>

using namespace torch_mooncake;
using namespace torch_mooncake::kv;

namespace {

std::vector<int64_t> ranks(int64_t tp) {
  std::vector<int64_t> all(tp);
  for (int64_t r = 0; r < tp; ++r) all[r] = r;
  return all;
}

}  // namespace

TEST_CASE("every head of every rank comes from a source that has it, once") {
  for (int64_t heads = 1; heads <= 16; ++heads)
    for (int64_t a = 1; a <= 32; ++a)
      for (int64_t b = 1; b <= 32; ++b) {
        bool fits = (heads % a == 0 || a % heads == 0) && (heads % b == 0 || b % heads == 0);
        auto plan = plan_heads(ranks(a), a, ranks(b), b, heads);
        REQUIRE(plan.is_ok() == fits);
        if (!fits) continue;
        int64_t per_out = heads_of_rank(0, b, heads, "out")->count;
        std::vector<int64_t> found(b * per_out, 0);
        for (const HeadPiece& piece : plan->pieces)
          for (int64_t k = 0; k < plan->heads_per_piece; ++k) {
            Heads source = *heads_of_rank(piece.source, a, heads, "source"),
                  out = *heads_of_rank(piece.out, b, heads, "out");
            REQUIRE(piece.source_head + k < source.count);
            REQUIRE(piece.out_head + k < out.count);
            REQUIRE(source.first + piece.source_head + k == out.first + piece.out_head + k);
            ++found[piece.out * per_out + piece.out_head + k];
          }
        for (int64_t times : found) REQUIRE(times == 1);
      }
}

TEST_CASE("what does not fit is named") {
  auto message = [](const auto& result) { return result.status().message(); };
  CHECK(message(heads_of_rank(0, 3, 4, "source")).find("source_tp is 3, which neither divides the 4") == 0);
  CHECK(message(heads_of_rank(4, 4, 4, "out")) == "out_ranks has 4, not in [0, 4)");
  CHECK(message(heads_of_rank(0, 0, 4, "out")) == "out_tp is 0: at least 1");
  CHECK(message(heads_of_rank(0, 1, 0, "out")) == "kv_heads is 0: at least 1");
  CHECK(message(plan_heads(ranks(1), 2, ranks(1), 1, 4)) == "head 2 of out rank 0 is in none of the sources");
  CHECK(plan_heads(ranks(1), 2, ranks(1), 2, 4).is_ok());  // which only wants what is there
}
