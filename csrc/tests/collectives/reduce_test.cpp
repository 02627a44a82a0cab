#include "collectives/reduce.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <complex>
#include <limits>
#include <vector>

using namespace torch_mooncake;
using namespace torch_mooncake::coll;

namespace {
template <typename T>
std::vector<T> reduce(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& in) {
  std::vector<const void*> pointers;
  for (const auto& v : in) pointers.push_back(v.data());
  std::vector<T> out(in[0].size());
  reduce_many(out.data(), pointers, out.size(), dtype, op);
  return out;
}
uint16_t f16(_Float16 f) { return std::bit_cast<uint16_t>(f); }
}  // namespace

TEST_CASE("every half survives the way to fp32 and back, and rounding is to nearest even") {
  for (uint32_t h = 0; h < 65536; ++h) {
    auto in = static_cast<uint16_t>(h);
    float wide;
    load_accumulator(&wide, &in, 1, DType::f16);
    const bool nan = (h & 0x7c00) == 0x7c00 && (h & 0x3ff) != 0;
    CHECK(std::isnan(wide) == nan);
    if (nan) continue;
    REQUIRE(wide == static_cast<float>(std::bit_cast<_Float16>(in)));
    uint16_t back;
    store_accumulator(&back, &wide, 1, DType::f16, ReduceOp::sum, 1);
    REQUIRE(back == in);
    for (float nudge : {0.9997f, 1.0002f, 1.00049f, 1.0005f}) {
      const float x = wide * nudge;
      store_accumulator(&back, &x, 1, DType::f16, ReduceOp::sum, 1);
      REQUIRE(back == f16(static_cast<_Float16>(x)));
    }
  }
}

TEST_CASE("small floats are summed in fp32 and rounded once") {
  // 2048 + 1 + 1 + … rounds away every single 1 if each partial sum is rounded to fp16.
  std::vector<std::vector<uint16_t>> in(9, {f16(1)});
  in[0] = {f16(2048)};
  CHECK(reduce(DType::f16, ReduceOp::sum, in)[0] == f16(2056));
  std::vector<std::vector<uint16_t>> bf(5, {0x3f80});          // 1.0
  bf[0] = {0x4380};                                            // 256.0
  CHECK(reduce(DType::bf16, ReduceOp::sum, bf)[0] == 0x4382);  // 260.0
  CHECK(reduce<uint16_t>(DType::f16, ReduceOp::avg, {{f16(60000)}, {f16(60000)}})[0] == f16(60000));
}

TEST_CASE("integers, bool, complex, NaN") {
  CHECK(reduce<int32_t>(DType::i32, ReduceOp::avg, {{-7, 7}, {0, 0}}) == std::vector<int32_t>{-3, 3});
  CHECK(reduce<int8_t>(DType::i8, ReduceOp::sum, {{127}, {1}}) == std::vector<int8_t>{-128});
  CHECK(reduce<int16_t>(DType::i16, ReduceOp::product, {{-300}, {300}}) ==
        std::vector<int16_t>{static_cast<int16_t>(-90000)});
  CHECK(reduce<uint8_t>(DType::boolean, ReduceOp::sum, {{1, 0, 1}, {1, 0, 0}}) == std::vector<uint8_t>{1, 0, 1});
  CHECK(reduce<uint8_t>(DType::boolean, ReduceOp::product, {{1, 0, 1}, {1, 0, 0}}) == std::vector<uint8_t>{1, 0, 0});
  CHECK(reduce<uint8_t>(DType::boolean, ReduceOp::bxor, {{1, 0, 1}, {1, 0, 0}}) == std::vector<uint8_t>{0, 0, 1});
  CHECK(reduce<uint8_t>(DType::u8, ReduceOp::band, {{0xf0}, {0x3c}}) == std::vector<uint8_t>{0x30});
  using C = std::complex<float>;
  CHECK(reduce<C>(DType::c64, ReduceOp::product, {{C(1, 2)}, {C(3, 4)}}) == std::vector<C>{C(-5, 10)});
  CHECK(reduce<C>(DType::c64, ReduceOp::avg, {{C(1, 2)}, {C(3, 4)}}) == std::vector<C>{C(2, 3)});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (auto op : {ReduceOp::min, ReduceOp::max}) {
    CHECK(std::isnan(reduce<float>(DType::f32, op, {{nan}, {1}})[0]));
    CHECK(std::isnan(reduce<float>(DType::f32, op, {{1}, {nan}})[0]));
  }
}

TEST_CASE("sizes around the block, and the output being an input") {
  for (size_t n : {0, 1, 1023, 2048, 2049, 10000}) {
    std::vector<float> a(n), b(n);
    for (size_t i = 0; i < n; ++i) a[i] = float(i), b[i] = 2.0f * float(i);
    const void* in[] = {a.data(), b.data()};
    reduce_many(b.data(), in, n, DType::f32, ReduceOp::sum);
    for (size_t i = 0; i < n; ++i) REQUIRE(b[i] == 3.0f * float(i));
  }
}

TEST_CASE("pairs without a meaning are refused by name") {
  CHECK(check_reducible(DType::i32, ReduceOp::bxor).is_ok());
  for (auto [dtype, op] :
       {std::pair{DType::f32, ReduceOp::bor}, {DType::c64, ReduceOp::max}, {DType::boolean, ReduceOp::avg}}) {
    auto status = check_reducible(dtype, op);
    CHECK(status.code() == Code::unsupported);
    CHECK(status.message().find(dtype_name(dtype)) != std::string::npos);
  }
}
