#include "kv/quantize.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kv/cpu/numbers.h"
#include "kv/cpu/scale_runs.h"

using namespace torch_mooncake;
using namespace torch_mooncake::kv;

namespace {

struct Kernel {
  const char* name;
  ScaleRuns runs;
};

std::vector<Kernel> kernels(WideType wide, NarrowType narrow) {
  std::vector<Kernel> found{{"portable", scale_runs_portable(wide, narrow)}};
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", scale_runs_avx2(wide, narrow)});
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    found.push_back({"avx512", scale_runs_avx512(wide, narrow)});
#endif
  return found;
}

constexpr WideType kWideTypes[] = {WideType::fp32, WideType::fp16, WideType::bf16};
constexpr NarrowType kNarrowTypes[] = {NarrowType::fp8_e4m3fn, NarrowType::int8};

// Finite numbers of many sizes, none larger than `largest`.
std::vector<std::byte> finite_numbers(WideType type, size_t n, float largest) {
  std::mt19937 random(static_cast<uint32_t>(n));
  std::vector<std::byte> bytes(n * static_cast<size_t>(nbytes_of(type)));
  for (size_t i = 0; i < n; ++i) {
    float x = std::ldexp(static_cast<float>(static_cast<int32_t>(random())), -31 - static_cast<int>(random() % 24));
    x *= largest;
    uint16_t word = type == WideType::fp16 ? float_to_half(x) : float_to_bfloat(x);
    if (type == WideType::fp32)
      std::memcpy(bytes.data() + 4 * i, &x, 4);
    else
      std::memcpy(bytes.data() + 2 * i, &word, 2);
  }
  return bytes;
}

}  // namespace

TEST_CASE("every path gives the portable one's bits, at every length") {
  for (WideType wide : kWideTypes)
    for (NarrowType narrow : kNarrowTypes)
      for (int64_t n = 1; n < 200; n += n < 70 ? 1 : 13) {
        const int64_t wide_nbytes = nbytes_of(wide), rows = 3, groups = 40;
        auto x = finite_numbers(wide, static_cast<size_t>(rows * groups * n), largest_of(narrow));
        const Tile tile{rows, groups, n, groups * n * wide_nbytes, n * wide_nbytes, groups * n, n, 1};
        std::vector<uint32_t> expected_amax(groups);
        std::vector<float> inverse(groups), scales(groups);
        std::vector<std::byte> expected_q(x.size() / wide_nbytes), expected_x(x.size());
        for (const Kernel& kernel : kernels(wide, narrow)) {
          CAPTURE(kernel.name);
          CAPTURE(n);
          std::vector<uint32_t> amax(groups);
          std::vector<std::byte> q(expected_q.size()), back(x.size());
          kernel.runs.amax(x.data(), tile, amax.data());
          if (expected_amax[0] == 0) {
            expected_amax = amax;
            for (int64_t g = 0; g < groups; ++g) {
              scales[g] = std::max(std::bit_cast<float>(amax[g]) / largest_of(narrow), kScaleFloor);
              inverse[g] = 1.0f / scales[g];
            }
          }
          REQUIRE(amax == expected_amax);
          kernel.runs.quantize_finite(x.data(), q.data(), tile, inverse.data());
          kernel.runs.dequantize(q.data(), back.data(), tile, scales.data());
          if (std::strcmp(kernel.name, "portable") == 0) {
            expected_q = q;
            expected_x = back;
          }
          REQUIRE(q == expected_q);
          REQUIRE(back == expected_x);
        }
      }
}

TEST_CASE("every fp8 and int8 code comes back by every path") {
  for (WideType wide : kWideTypes)
    for (NarrowType narrow : kNarrowTypes)
      for (const Kernel& kernel : kernels(wide, narrow)) {
        std::vector<std::byte> codes;
        for (int code = 0; code < 256; ++code)
          if (narrow == NarrowType::int8 ? code != 128 : (code & 0x7F) != 0x7F) codes.push_back(std::byte(code));
        const auto n = static_cast<int64_t>(codes.size());
        const Tile tile{1, 1, n, 0, 0, 0, 0, 0};
        std::vector<std::byte> x(codes.size() * static_cast<size_t>(nbytes_of(wide))), q(codes.size());
        const float one = 1.0f;
        kernel.runs.dequantize(codes.data(), x.data(), tile, &one);
        kernel.runs.quantize_finite(x.data(), q.data(), tile, &one);
        CAPTURE(kernel.name);
        CHECK(q == codes);
        kernel.runs.quantize(x.data(), q.data(), tile, &one);
        CHECK(q == codes);
      }
}

TEST_CASE("conversions of numbers round to nearest even") {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    float x = half_to_float(static_cast<uint16_t>(half));
    if (std::isnan(x)) continue;
    REQUIRE(float_to_half(x) == half);
    if (std::isinf(x) || (half & 0x7FFF) == 0x7BFF || (half & 0x7FFF) == 0) continue;
    float next = half_to_float(static_cast<uint16_t>(half + 1)), middle = x + (next - x) / 2;  // exact
    REQUIRE(float_to_half(middle) == half + (half & 1));
    REQUIRE(float_to_half(std::nextafter(middle, x)) == half);
    REQUIRE(float_to_half(std::nextafter(middle, next)) == half + 1);
  }
  CHECK(float_to_half(65519.996f) == 0x7BFF);
  CHECK(float_to_half(65520.0f) == 0x7C00);
  CHECK(float_to_bfloat(1.00390625f) == 0x3F80);  // a tie
  CHECK(float_to_bfloat(1.01171875f) == 0x3F82);
  for (uint32_t code = 0; code < 0x7E; ++code) {
    float x = fp8_to_float(static_cast<uint8_t>(code)), next = fp8_to_float(static_cast<uint8_t>(code + 1));
    REQUIRE(float_to_fp8(x) == code);
    REQUIRE(float_to_fp8(-x) == (code | 0x80));
    REQUIRE(float_to_fp8((x + next) / 2) == code + (code & 1));
  }
  CHECK(float_to_fp8(1e9f) == 0x7E);
  CHECK(float_to_fp8(-INFINITY) == 0xFE);
  CHECK(float_to_fp8(NAN) == 0x7F);
  CHECK(std::isnan(fp8_to_float(0xFF)));
}

TEST_CASE("blocks are independent, groups lie anywhere in them") {
  // [page 3, token 4, head 2, element 5]: one scale a page and head.
  std::vector<float> x(3 * 4 * 2 * 5);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i + 1);
  std::vector<std::byte> q(x.size());
  std::vector<float> scales(6), back(x.size());
  PageScaling call;
  call.wide = reinterpret_cast<std::byte*>(x.data());
  call.narrow = q.data();
  call.narrow_type = NarrowType::int8;
  call.scales = scales.data();
  call.groups_per_block = 2;
  call.num_dims = 4;
  call.block_dims = 1;
  const QuantizeDim dims[] = {{3, 40, 40, 2}, {4, 10, 10, 0}, {2, 5, 5, 1}, {5, 1, 1, 0}};
  std::copy(std::begin(dims), std::end(dims), call.dims);
  REQUIRE(quantize_pages(call).is_ok());
  for (int page = 0; page < 3; ++page) {
    CHECK(scales[2 * page] == static_cast<float>(40 * page + 35) / 127.0f);
    CHECK(scales[2 * page + 1] == static_cast<float>(40 * page + 40) / 127.0f);
  }
  call.wide = reinterpret_cast<std::byte*>(back.data());
  REQUIRE(dequantize_pages(call).is_ok());
  for (size_t i = 0; i < x.size(); ++i) CHECK(std::abs(back[i] - x[i]) <= scales[i / 40 * 2 + i / 5 % 2] / 2 * 1.001f);
  call.num_dims = kMaxQuantizeDims + 1;
  CHECK(quantize_pages(call).code() == Code::invalid_argument);
}
