// Element types and reductions that the collectives know. Names and meaning are torch's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/api.h"
#include "common/status.h"

namespace torch_mooncake::coll {

enum class DType : uint8_t { u8, i8, u16, i16, u32, i32, u64, i64, f16, bf16, f32, f64, c64, c128, boolean };
enum class ReduceOp : uint8_t { sum, avg, product, min, max, band, bor, bxor };

TM_API size_t item_bytes(DType dtype);
TM_API const char* dtype_name(DType dtype);
TM_API const char* op_name(ReduceOp op);

// ok, or `unsupported` naming both: bitwise operations need integers or bool, min and max an order, avg no bool.
// Every collective asks this before it sends anything, so that all ranks fail alike.
TM_API Status check_reducible(DType dtype, ReduceOp op);

}  // namespace torch_mooncake::coll
