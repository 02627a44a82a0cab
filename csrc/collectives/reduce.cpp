#include "collectives/reduce.h"

#include <algorithm>
#include <bit>
#include <complex>
#include <cstring>
#include <type_traits>

#pragma GCC optimize("O3")  // vector code; -O2 of this compiler keeps short loops scalar

namespace torch_mooncake::coll {
namespace {

// fp16 <-> fp32 by integer arithmetic without branches on the data, so that loops over it vectorise.
inline float half_to_float(uint16_t h) {
  const uint32_t shifted = static_cast<uint32_t>(h & 0x7fff) << 13;
  // Scaling by 2^112 moves the exponent's bias and makes subnormals normal; infinity and NaN get their exponent back.
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(shifted) * std::bit_cast<float>(0x77800000u));
  bits |= shifted >= 0x0f800000u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(bits | static_cast<uint32_t>(h & 0x8000) << 16);
}

inline uint16_t float_to_half(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t mag = bits & 0x7fffffff;
  // Normal results: re-bias, round to nearest even. Subnormal ones: let an fp32 addition do the rounding.
  const uint32_t normal = (mag + 0xc8000fffu + ((mag >> 13) & 1)) >> 13;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(mag) + 0.5f) - 0x3f000000u;
  uint32_t out = mag < 0x38800000u ? subnormal : normal;
  out = mag >= 0x477ff000u ? 0x7c00u : out;  // rounds beyond the largest: infinity
  out = mag > 0x7f800000u ? 0x7e00u : out;   // NaN
  return static_cast<uint16_t>(out | sign);
}

inline float bfloat_to_float(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

inline uint16_t float_to_bfloat(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000u ? 0x7fc0u : rounded);
}

// One trait a type: how it lies in memory, what it is summed in.
template <DType D, typename Memory, typename Acc = Memory>
struct TypeOf {
  using M = Memory;
  using A = Acc;
  static constexpr bool is_bool = D == DType::boolean;
  static A load(M m) {
    if constexpr (D == DType::f16) return half_to_float(m);
    if constexpr (D == DType::bf16) return bfloat_to_float(m);
    if constexpr (D == DType::boolean) return m != 0;
    return static_cast<A>(m);
  }
  static M store(A a) {
    if constexpr (D == DType::f16) return float_to_half(a);
    if constexpr (D == DType::bf16) return float_to_bfloat(a);
    return static_cast<M>(a);
  }
};

template <typename T>
constexpr bool is_complex = false;
template <typename T>
constexpr bool is_complex<std::complex<T>> = true;

// Calls fn with the TypeOf of `dtype`.
template <typename Fn>
void with_type(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::u8:
      return fn(TypeOf<DType::u8, uint8_t>{});
    case DType::i8:
      return fn(TypeOf<DType::i8, int8_t>{});
    case DType::u16:
      return fn(TypeOf<DType::u16, uint16_t>{});
    case DType::i16:
      return fn(TypeOf<DType::i16, int16_t>{});
    case DType::u32:
      return fn(TypeOf<DType::u32, uint32_t>{});
    case DType::i32:
      return fn(TypeOf<DType::i32, int32_t>{});
    case DType::u64:
      return fn(TypeOf<DType::u64, uint64_t>{});
    case DType::i64:
      return fn(TypeOf<DType::i64, int64_t>{});
    case DType::f16:
      return fn(TypeOf<DType::f16, uint16_t, float>{});
    case DType::bf16:
      return fn(TypeOf<DType::bf16, uint16_t, float>{});
    case DType::f32:
      return fn(TypeOf<DType::f32, float>{});
    case DType::f64:
      return fn(TypeOf<DType::f64, double>{});
    case DType::c64:
      return fn(TypeOf<DType::c64, std::complex<float>>{});
    case DType::c128:
      return fn(TypeOf<DType::c128, std::complex<double>>{});
    case DType::boolean:
      return fn(TypeOf<DType::boolean, uint8_t>{});
  }
}

template <typename T>
T complex_product(T a, T b) {  // without the library's NaN recovery, as torch multiplies
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

// acc[i] = acc[i] op load(in[i])
template <typename Type, typename In, typename Load>
void combine(typename Type::A* acc, const In* in, uint64_t count, ReduceOp op, Load load) {
  using A = typename Type::A;
  auto each = [&](auto fn) {
    for (uint64_t i = 0; i < count; ++i) acc[i] = static_cast<A>(fn(acc[i], load(in[i])));
  };
  constexpr bool ordered = !is_complex<A>;
  constexpr bool bitwise = std::is_integral_v<A>;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      if constexpr (Type::is_bool) return each([](A a, A b) { return a | b; });
      // Signed overflow wraps, as torch's does: add as unsigned.
      if constexpr (bitwise && !Type::is_bool) {
        using U = std::make_unsigned_t<A>;
        return each([](A a, A b) { return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b))); });
      }
      if constexpr (!bitwise) return each([](A a, A b) { return a + b; });
      break;
    case ReduceOp::product:
      if constexpr (Type::is_bool) return each([](A a, A b) { return a & b; });
      if constexpr (bitwise && !Type::is_bool) {
        return each([](A a, A b) { return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); });
      }
      if constexpr (is_complex<A>) return each([](A a, A b) { return complex_product(a, b); });
      if constexpr (ordered && !bitwise) return each([](A a, A b) { return a * b; });
      break;
    case ReduceOp::min:
      if constexpr (ordered) return each([](A a, A b) { return (a < b || a != a) ? a : b; });
      break;
    case ReduceOp::max:
      if constexpr (ordered) return each([](A a, A b) { return (a > b || a != a) ? a : b; });
      break;
    case ReduceOp::band:
      if constexpr (bitwise) return each([](A a, A b) { return a & b; });
      break;
    case ReduceOp::bor:
      if constexpr (bitwise) return each([](A a, A b) { return a | b; });
      break;
    case ReduceOp::bxor:
      if constexpr (bitwise) return each([](A a, A b) { return a ^ b; });
      break;
  }
}

template <typename Type>
void store(typename Type::M* out, const typename Type::A* acc, uint64_t count, uint64_t divide_by) {
  using A = typename Type::A;
  if (divide_by <= 1) {
    for (uint64_t i = 0; i < count; ++i) out[i] = Type::store(acc[i]);
  } else if constexpr (is_complex<A>) {
    const auto n = static_cast<typename A::value_type>(divide_by);
    for (uint64_t i = 0; i < count; ++i) out[i] = Type::store(acc[i] / n);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<A> && std::is_integral_v<A>, int64_t,
                                    std::conditional_t<std::is_integral_v<A>, uint64_t, A>>;
    const auto n = static_cast<Wide>(divide_by);
    for (uint64_t i = 0; i < count; ++i) out[i] = Type::store(static_cast<A>(static_cast<Wide>(acc[i]) / n));
  }
}

}  // namespace

size_t item_bytes(DType dtype) {
  size_t n = 0;
  with_type(dtype, [&](auto type) { n = sizeof(typename decltype(type)::M); });
  return n;
}

const char* dtype_name(DType dtype) {
  static constexpr const char* kNames[] = {"uint8",   "int8",    "uint16",    "int16",      "uint32",
                                           "int32",   "uint64",  "int64",     "float16",    "bfloat16",
                                           "float32", "float64", "complex64", "complex128", "bool"};
  return kNames[static_cast<int>(dtype)];
}

const char* op_name(ReduceOp op) {
  static constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
  return kNames[static_cast<int>(op)];
}

Status check_reducible(DType dtype, ReduceOp op) {
  const bool complex = dtype == DType::c64 || dtype == DType::c128;
  const bool floating =
      complex || dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
  const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  const bool order = op == ReduceOp::min || op == ReduceOp::max;
  if ((bitwise && floating) || (order && complex) || (op == ReduceOp::avg && dtype == DType::boolean)) {
    return {Code::unsupported, std::string("cannot use ReduceOp.") + op_name(op) + " with " + dtype_name(dtype)};
  }
  return {};
}

DType accumulator_of(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16 ? DType::f32 : dtype; }

void load_accumulator(void* acc, const void* in, uint64_t count, DType dtype) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    auto* a = static_cast<typename T::A*>(acc);
    auto* m = static_cast<const typename T::M*>(in);
    for (uint64_t i = 0; i < count; ++i) a[i] = T::load(m[i]);
  });
}

void accumulate(void* acc, const void* other_acc, uint64_t count, DType dtype, ReduceOp op) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    using A = typename T::A;
    combine<T>(static_cast<A*>(acc), static_cast<const A*>(other_acc), count, op, [](A a) { return a; });
  });
}

void store_accumulator(void* out, const void* acc, uint64_t count, DType dtype, ReduceOp op, uint64_t inputs) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    store<T>(static_cast<typename T::M*>(out), static_cast<const typename T::A*>(acc), count,
             op == ReduceOp::avg ? inputs : 1);
  });
}

void reduce_many(void* out, std::span<const void* const> in, uint64_t count, DType dtype, ReduceOp op,
                 uint64_t divide_by) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    using A = typename T::A;
    using M = typename T::M;
    // A block of accumulators that stays in the first-level cache while all inputs pass over it.
    constexpr uint64_t kBlock = 8192 / sizeof(A);
    alignas(64) A acc[kBlock];
    for (uint64_t begin = 0; begin < count; begin += kBlock) {
      const uint64_t n = std::min(kBlock, count - begin);
      const M* first = static_cast<const M*>(in[0]) + begin;
      for (uint64_t i = 0; i < n; ++i) acc[i] = T::load(first[i]);
      for (size_t k = 1; k < in.size(); ++k) {
        combine<T>(acc, static_cast<const M*>(in[k]) + begin, n, op, [](M m) { return T::load(m); });
      }
      store<T>(static_cast<M*>(out) + begin, acc, n, op == ReduceOp::avg ? (divide_by ? divide_by : in.size()) : 1);
    }
  });
}

Part part_of(uint64_t count, int i, int n, uint64_t item) {
  const uint64_t line = std::max<uint64_t>(1, 64 / item);
  const uint64_t each = ((count + n - 1) / n + line - 1) / line * line;
  const uint64_t begin = std::min(count, each * i);
  return {begin, std::min(count, begin + each) - begin};
}

}  // namespace torch_mooncake::coll
