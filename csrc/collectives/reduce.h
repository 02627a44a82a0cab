// Reduction kernels. Plain loops over contiguous memory that the compiler turns into vector code; no threads, no
// allocation. fp16 and bf16 are summed in fp32 and rounded once, at the end, whatever the number of inputs. min and
// max pass NaN on, as torch.max does. bool: sum and max mean "or", product and min mean "and".
#pragma once

#include <cstdint>
#include <span>

#include "collectives/dtype.h"
#include "common/api.h"

namespace torch_mooncake::coll {

// out[i] = in[0][i] op in[1][i] op … in that order, for i < count; avg also divides by the number of inputs, or by
// `divide_by` if that is not 0 (integers towards zero). `out` may be one of the inputs, but not overlap one partly. The
// pair must have passed check_reducible(). At least one input.
TM_API void reduce_many(void* out, std::span<const void* const> in, uint64_t count, DType dtype, ReduceOp op,
                        uint64_t divide_by = 0);

// The running form, for algorithms that meet their inputs one after another. `acc` holds elements of
// accumulator_of(dtype): fp32 for fp16 and bf16, otherwise the type itself.
TM_API DType accumulator_of(DType dtype);
TM_API void load_accumulator(void* acc, const void* in, uint64_t count, DType dtype);
TM_API void accumulate(void* acc, const void* other_acc, uint64_t count, DType dtype, ReduceOp op);
// Rounds to the type, after dividing by `inputs` if the operation is avg.
TM_API void store_accumulator(void* out, const void* acc, uint64_t count, DType dtype, ReduceOp op, uint64_t inputs);

// A reduction in steps: of what has `inputs` inputs in all, which matters to avg only.
struct Reduction {
  DType dtype;
  ReduceOp op;
  uint64_t inputs;

  uint64_t item() const { return item_bytes(dtype); }
  // Every step but the last.
  ReduceOp partial() const { return op == ReduceOp::avg ? ReduceOp::sum : op; }
  void last(void* out, std::span<const void* const> in, uint64_t count) const {
    if (count > 0) reduce_many(out, in, count, dtype, op, inputs);
  }
  void step(void* out, std::span<const void* const> in, uint64_t count) const {
    if (count > 0) reduce_many(out, in, count, dtype, partial());
  }
};

// The part of `count` elements that is number `i`'s of `n`; cut on cache lines where that is possible.
struct Part {
  uint64_t begin, count;
};
TM_API Part part_of(uint64_t count, int i, int n, uint64_t item);

}  // namespace torch_mooncake::coll
