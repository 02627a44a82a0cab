// The arithmetic of the CUDA kernels that quantise, run here thread by thread, against the CPU's kernels and against
// float64.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kv/as_the_gpu_does.h"
#include "kv/quantize.h"

using namespace torch_mooncake;
using namespace torch_mooncake::kv;

namespace {

constexpr WideType kWideTypes[] = {WideType::fp32, WideType::fp16, WideType::bf16};
constexpr NarrowType kNarrowTypes[] = {NarrowType::fp8_e4m3fn, NarrowType::int8};

// Of all magnitudes, and random bits: denormals, infinities and NaN of any sign and payload.
std::vector<std::byte> numbers(WideType type, size_t count, uint32_t seed) {
  std::vector<std::byte> bytes(count * nbytes_of(type));
  std::mt19937 random(seed);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = static_cast<uint32_t>(random());
    if (random() % 8 != 0) {  // an ordinary number
      const float x = std::ldexp(static_cast<float>(bits % 2001) - 1000, -static_cast<int>(random() % 24));
      std::memcpy(&bits, &x, 4);
      if (type == WideType::bf16) bits >>= 16;
      if (type == WideType::fp16) bits = cuda::narrow_to<WideType::fp16>(bits);
    }
    std::memcpy(bytes.data() + i * nbytes_of(type), &bits, nbytes_of(type));
  }
  return bytes;
}

struct Dim {
  int64_t size, wide, narrow;
  bool scaled;
};

// Both ways, on both.
void check_both(WideType wide_type, NarrowType narrow_type, const std::vector<Dim>& dims, int64_t wide_elements,
                int64_t narrow_elements, int64_t skew) {
  PageScaling call;
  call.wide_type = wide_type;
  call.narrow_type = narrow_type;
  int64_t groups = 1;
  for (size_t d = dims.size(); d-- > 0;) {
    call.dims[d] = {dims[d].size, dims[d].wide, dims[d].narrow, dims[d].scaled ? groups : 0};
    if (dims[d].scaled) groups *= dims[d].size;
  }
  call.num_dims = static_cast<int>(dims.size());
  while (call.block_dims < call.num_dims && dims[call.block_dims].scaled) ++call.block_dims;
  for (size_t d = call.block_dims; d < dims.size(); ++d)
    if (dims[d].scaled) call.groups_per_block *= dims[d].size;

  std::vector<std::byte> wide = numbers(wide_type, wide_elements + skew, 5);
  struct Result {
    std::vector<std::byte> narrow, wide;
    std::vector<float> scales;
  } expected, got;
  for (Result* result : {&expected, &got}) {
    result->narrow.assign(narrow_elements + skew, std::byte{0x55});
    result->wide.assign(wide.size(), std::byte{0x55});
    result->scales.assign(groups, -1.0f);
    call.narrow = result->narrow.data() + skew;
    call.scales = result->scales.data();
    call.wide = wide.data() + skew * nbytes_of(wide_type);
    if (result == &got)
      scale_as_the_gpu_does(call, true);
    else
      REQUIRE(quantize_pages(call).is_ok());
    call.wide = result->wide.data() + skew * nbytes_of(wide_type);
    if (result == &got)
      scale_as_the_gpu_does(call, false);
    else
      REQUIRE(dequantize_pages(call).is_ok());
  }
  REQUIRE((got.narrow == expected.narrow));
  REQUIRE((got.scales == expected.scales));
  REQUIRE((got.wide == expected.wide));
}

}  // namespace

TEST_CASE("pages of any layout, as on the CPU") {
  for (WideType wide : kWideTypes)
    for (NarrowType narrow : kNarrowTypes)
      for (int64_t skew : {0, 1, 8}) {
        CAPTURE(static_cast<int>(wide));
        CAPTURE(static_cast<int>(narrow));
        CAPTURE(skew);
        // [n, N, H, D] with scales per page and head, dense
        check_both(wide, narrow,
                   {{3, 16 * 2 * 24, 16 * 2 * 24, true}, {16, 48, 48, false}, {2, 24, 24, true}, {24, 1, 1, false}},
                   3 * 768, 3 * 768, skew);
        // an odd head
        check_both(wide, narrow, {{3, 5 * 2 * 7, 70, true}, {5, 14, 14, false}, {2, 7, 7, true}, {7, 1, 1, false}}, 210,
                   210, skew);
        // HND, one group contiguous and longer than the registers hold
        check_both(wide, narrow, {{2, 9000, 9000, true}, {3, 3000, 3000, true}, {3000, 1, 1, false}}, 18000, 18000,
                   skew);
        // a group of a warp's, a group of one element
        check_both(wide, narrow, {{5, 64, 64, true}, {64, 1, 1, false}}, 320, 320, skew);
        check_both(wide, narrow, {{37, 1, 1, true}}, 37, 37, skew);
        // gaps between the pages, and a narrow side in another order
        check_both(wide, narrow, {{3, 100, 96, true}, {4, 24, 1, false}, {24, 1, 4, false}}, 300, 288, skew);
        check_both(wide, narrow,
                   {{2, 2 * 6 * 8, 2 * 6 * 8, true}, {2, 48, 8, false}, {6, 8, 16, false}, {8, 1, 1, false}}, 192, 192,
                   skew);
        // nothing inside, nothing at all
        check_both(wide, narrow, {{3, 0, 0, true}, {0, 1, 1, false}}, 0, 0, skew);
        check_both(wide, narrow, {{0, 8, 8, true}, {8, 1, 1, false}}, 0, 0, skew);
      }
}

TEST_CASE("vectors where everything allows them") {
  PageScaling call;
  alignas(16) std::byte wide[64];
  alignas(16) std::byte narrow[64];
  call.wide = wide;
  call.narrow = narrow;
  call.wide_type = WideType::bf16;
  auto vector = [&](std::vector<QuantizeDim> dims) {
    std::copy(dims.begin(), dims.end(), call.dims);
    call.num_dims = static_cast<int>(dims.size());
    return cuda::plan_scaling(call).vector;
  };
  CHECK(vector({{2, 16, 16, 1}, {16, 1, 1, 0}}) == 8);
  CHECK(vector({{2, 12, 16, 1}, {8, 1, 1, 0}}) == 1);
  CHECK(vector({{2, 16, 16, 1}, {4, 2, 2, 0}}) == 1);
  CHECK(vector({{2, 20, 20, 1}, {20, 1, 1, 0}}) == 1);
  call.narrow = narrow + 4;
  CHECK(vector({{2, 16, 16, 1}, {16, 1, 1, 0}}) == 1);
  call.wide_type = WideType::fp32;
  CHECK(vector({{2, 20, 20, 1}, {20, 1, 1, 0}}) == 4);
  CHECK(!cuda::plan_scaling({.num_dims = 1, .dims = {{int64_t{1} << 31, 1, 1, 1}}}).fits);
}

TEST_CASE("halves and narrow numbers are read exactly") {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const uint32_t exponent = h >> 10 & 31, fraction = h & 0x3FF;
    const float x = cuda::float_of(cuda::widen<WideType::fp16>(h));
    REQUIRE(std::signbit(x) == (h >= 0x8000));
    if (exponent == 31) {
      REQUIRE((fraction ? std::isnan(x) : std::isinf(x)));
    } else {
      const double expected =
          exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, static_cast<int>(exponent) - 25);
      REQUIRE(std::fabs(x) == expected);
      REQUIRE(cuda::narrow_to<WideType::fp16>(cuda::bits_of(x)) == h);
    }
  }
  for (uint32_t q = 0; q < 256; ++q) {
    const uint32_t exponent = q >> 3 & 15, fraction = q & 7;
    const float x = cuda::float_of(cuda::dequantized<NarrowType::fp8_e4m3fn>(q, 1.0f));
    REQUIRE(std::signbit(x) == (q >= 0x80));
    if ((q & 0x7F) == 0x7F) {
      REQUIRE(std::isnan(x));
    } else {
      const double expected =
          exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, static_cast<int>(exponent) - 10);
      REQUIRE(std::fabs(x) == expected);
    }
    REQUIRE(cuda::float_of(cuda::dequantized<NarrowType::int8>(q, 1.0f)) == static_cast<int8_t>(q));
  }
}

TEST_CASE("roundings are to the nearest, ties to even") {
  std::mt19937 random(3);
  auto nearest = [](double x, const std::vector<double>& codes) {  // of ascending non-negative codes
    size_t best = 0;
    for (size_t c = 1; c < codes.size(); ++c) {
      const double d = std::fabs(x - codes[c]), e = std::fabs(x - codes[best]);
      if (d < e || (d == e && c % 2 == 0)) best = c;
    }
    return best;
  };
  std::vector<double> fp8, int8;
  for (uint32_t q = 0; q < 0x7F; ++q) fp8.push_back(cuda::float_of(cuda::dequantized<NarrowType::fp8_e4m3fn>(q, 1.0f)));
  for (int q = 0; q <= 127; ++q) int8.push_back(q);
  std::vector<float> inputs{0.0f, 448.0f, 1e30f, 464.0f, 463.9f, 127.0f, 127.5f, 0.5f, 1.5f, 2.5f};
  for (size_t c = 0; c + 1 < fp8.size(); ++c) {
    const auto middle = static_cast<float>((fp8[c] + fp8[c + 1]) / 2);
    inputs.insert(inputs.end(), {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)});
  }
  for (int i = 0; i < 3000; ++i)
    inputs.push_back(std::ldexp(static_cast<float>(random() % 100000), -static_cast<int>(random() % 28)));
  for (float x : inputs) {
    CAPTURE(x);
    const uint32_t bits = cuda::bits_of(x);
    REQUIRE(cuda::quantized<NarrowType::fp8_e4m3fn>(bits, 1.0f) == nearest(std::min(x, 448.0f), fp8));
    REQUIRE(cuda::quantized<NarrowType::int8>(bits, 1.0f) == nearest(std::min(x, 127.0f), int8));
    const uint32_t negative = bits | cuda::kSign;
    REQUIRE(cuda::quantized<NarrowType::fp8_e4m3fn>(negative, 1.0f) == (0x80 | nearest(std::min(x, 448.0f), fp8)));
    REQUIRE(static_cast<int8_t>(cuda::quantized<NarrowType::int8>(negative, 1.0f)) ==
            -static_cast<int>(nearest(std::min(x, 127.0f), int8)));
  }
  // float32 to fp16 and bf16, against the two neighbours.
  auto half = [](uint32_t h) { return static_cast<double>(cuda::float_of(cuda::widen<WideType::fp16>(h))); };
  auto brain = [](uint32_t h) { return static_cast<double>(cuda::float_of(h << 16)); };
  auto check_nearest = [](double x, uint32_t got, auto value) {
    const double error = std::fabs(value(got) - x);
    for (uint32_t other : {got - 1, got + 1}) {
      if (other > 0x7FFF || !std::isfinite(value(other))) continue;
      const double theirs = std::fabs(value(other) - x);
      REQUIRE((error < theirs || (error == theirs && got % 2 == 0)));
    }
  };
  for (int i = 0; i < 20000; ++i) {
    const float x = std::ldexp(static_cast<float>(random() % (1 << 24)), -static_cast<int>(random() % 50));
    const uint32_t h = cuda::narrow_to<WideType::fp16>(cuda::bits_of(x));
    if (x >= 65520.0f)
      REQUIRE(h == 0x7C00);
    else
      check_nearest(x, h, half);
    check_nearest(x, cuda::narrow_to<WideType::bf16>(cuda::bits_of(x)), brain);
  }
  CHECK(cuda::narrow_to<WideType::fp16>(cuda::bits_of(65519.996f)) == 0x7BFF);
  CHECK(cuda::narrow_to<WideType::bf16>(cuda::bits_of(std::numeric_limits<float>::max())) == 0x7F80);
}
