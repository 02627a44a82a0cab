#include "kv/xxh3.h"

#include <cstring>

#include "kv/cpu/simd.h"
#include "kv/xxh3_constants.h"

namespace torch_mooncake::kv {
namespace {

using namespace xxh3;

constexpr size_t kSecretMinNbytes = 136, kStripe = 64, kSecretStep = 8;
constexpr size_t kStripesPerBlock = (kSecretNbytes - kStripe) / kSecretStep, kBlock = kStripe * kStripesPerBlock;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "reads words as they lie");

template <typename T>
T read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
uint64_t read64(const uint8_t* at) { return read<uint64_t>(at); }
uint64_t read32(const uint8_t* at) { return read<uint32_t>(at); }
uint64_t secret_pair(size_t at) { return read64(kSecret + at) ^ read64(kSecret + at + 8); }

Hash128 multiply(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  Wide product = Wide{a} * b;
  return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}
uint64_t fold(uint64_t a, uint64_t b) {
  Hash128 product = multiply(a, b);
  return product.low ^ product.high;
}

uint64_t avalanche(uint64_t h) {
  h = (h ^ h >> 37) * kPrimeMix1;
  return h ^ h >> 32;
}
uint64_t avalanche64(uint64_t h) {
  h = (h ^ h >> 33) * kPrime64_2;
  h = (h ^ h >> 29) * kPrime64_3;
  return h ^ h >> 32;
}

Hash128 hash_0() { return {avalanche64(secret_pair(64)), avalanche64(secret_pair(80))}; }

Hash128 hash_1_to_3(const uint8_t* in, size_t n) {
  uint32_t low = uint32_t{in[0]} << 16 | uint32_t{in[n / 2]} << 24 | in[n - 1] | static_cast<uint32_t>(n) << 8;
  uint32_t swapped = __builtin_bswap32(low), high = swapped << 13 | swapped >> 19;
  return {avalanche64(low ^ read32(kSecret) ^ read32(kSecret + 4)),
          avalanche64(high ^ read32(kSecret + 8) ^ read32(kSecret + 12))};
}

Hash128 hash_4_to_8(const uint8_t* in, size_t n) {
  uint64_t keyed = (read32(in) + (read32(in + n - 4) << 32)) ^ secret_pair(16);
  Hash128 h = multiply(keyed, kPrime64_1 + (n << 2));
  h.high += h.low << 1;
  h.low ^= h.high >> 3;
  h.low = (h.low ^ h.low >> 35) * kPrimeMix2;
  h.low ^= h.low >> 28;
  h.high = avalanche(h.high);
  return h;
}

Hash128 hash_9_to_16(const uint8_t* in, size_t n) {
  uint64_t first = read64(in), last = read64(in + n - 8);
  Hash128 m = multiply(first ^ last ^ secret_pair(32), kPrime64_1);
  m.low += static_cast<uint64_t>(n - 1) << 54;
  last ^= secret_pair(48);
  m.high += last + static_cast<uint32_t>(last) * (kPrime32_2 - 1);
  m.low ^= __builtin_bswap64(m.high);
  Hash128 h = multiply(m.low, kPrime64_2);
  h.high += m.high * kPrime64_2;
  return {avalanche(h.low), avalanche(h.high)};
}

uint64_t mix16(const uint8_t* in, size_t secret) {
  return fold(read64(in) ^ read64(kSecret + secret), read64(in + 8) ^ read64(kSecret + secret + 8));
}

void mix32(Hash128* acc, const uint8_t* a, const uint8_t* b, size_t secret) {
  acc->low = (acc->low + mix16(a, secret)) ^ (read64(b) + read64(b + 8));
  acc->high = (acc->high + mix16(b, secret + 16)) ^ (read64(a) + read64(a + 8));
}

Hash128 finish(const Hash128& acc, size_t n) {
  uint64_t high = acc.low * kPrime64_1 + acc.high * kPrime64_4 + n * kPrime64_2;
  return {avalanche(acc.low + acc.high), -avalanche(high)};
}

Hash128 hash_17_to_128(const uint8_t* in, size_t n) {
  Hash128 acc{n * kPrime64_1, 0};
  for (size_t i = (n - 1) / 32; i > 0; --i) mix32(&acc, in + 16 * i, in + n - 16 * (i + 1), 32 * i);
  mix32(&acc, in, in + n - 16, 0);
  return finish(acc, n);
}

Hash128 hash_129_to_240(const uint8_t* in, size_t n) {
  Hash128 acc{n * kPrime64_1, 0};
  for (size_t i = 0; i < 128; i += 32) mix32(&acc, in + i, in + i + 16, i);
  acc = {avalanche(acc.low), avalanche(acc.high)};
  for (size_t i = 128; i + 32 <= n; i += 32) mix32(&acc, in + i, in + i + 16, i - 128 + 3);
  mix32(&acc, in + n - 16, in + n - 32, kSecretMinNbytes - 17 - 16);
  return finish(acc, n);
}

// --- long inputs: eight accumulators over stripes of 64 bytes ---

// `stripes` stripes, the secret moving on by kSecretStep from `secret`.
using Accumulate = void (*)(uint64_t* acc, const uint8_t* in, size_t secret, size_t stripes);
using Scramble = void (*)(uint64_t* acc);
struct Loop {
  Accumulate accumulate;
  Scramble scramble;
};
constexpr size_t kScrambleSecret = kSecretNbytes - kStripe;

void accumulate_portable(uint64_t* acc, const uint8_t* in, size_t secret, size_t stripes) {
  for (size_t s = 0; s < stripes; ++s)
    for (size_t i = 0; i < 8; ++i) {
      uint64_t data = read64(in + s * kStripe + 8 * i);
      uint64_t keyed = data ^ read64(kSecret + secret + s * kSecretStep + 8 * i);
      acc[i ^ 1] += data;
      acc[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    }
}

void scramble_portable(uint64_t* acc) {
  for (size_t i = 0; i < 8; ++i)
    acc[i] = (acc[i] ^ acc[i] >> 47 ^ read64(kSecret + kScrambleSecret + 8 * i)) * kPrime32_1;
}

#ifdef __x86_64__

__attribute__((target("avx2"))) void accumulate_avx2(uint64_t* acc, const uint8_t* in, size_t secret, size_t stripes) {
  auto* sums = reinterpret_cast<__m256i*>(acc);
  __m256i sum[2] = {_mm256_load_si256(sums), _mm256_load_si256(sums + 1)};
  for (size_t s = 0; s < stripes; ++s)
    for (size_t half = 0; half < 2; ++half) {
      size_t at = 32 * half;
      __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + s * kStripe + at));
      __m256i keyed = _mm256_xor_si256(
          data, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSecret + secret + s * kSecretStep + at)));
      __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
      sum[half] = _mm256_add_epi64(product, _mm256_add_epi64(sum[half], swapped));
    }
  _mm256_store_si256(sums, sum[0]);
  _mm256_store_si256(sums + 1, sum[1]);
}

__attribute__((target("avx2"))) void scramble_avx2(uint64_t* acc) {
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32_1));
  for (size_t half = 0; half < 2; ++half) {
    auto* at = reinterpret_cast<__m256i*>(acc) + half;
    __m256i sum = _mm256_load_si256(at);
    sum = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    sum = _mm256_xor_si256(sum,
                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSecret + kScrambleSecret + 32 * half)));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
    _mm256_store_si256(at, _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32)));
  }
}

__attribute__((target("avx512f"))) void accumulate_avx512(uint64_t* acc, const uint8_t* in, size_t secret,
                                                          size_t stripes) {
  __m512i sum = _mm512_load_si512(acc);
  for (size_t s = 0; s < stripes; ++s) {
    __m512i data = _mm512_loadu_si512(in + s * kStripe);
    __m512i keyed = _mm512_xor_si512(data, _mm512_loadu_si512(kSecret + secret + s * kSecretStep));
    __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
    sum = _mm512_add_epi64(product, _mm512_add_epi64(sum, swapped));
  }
  _mm512_store_si512(acc, sum);
}

__attribute__((target("avx512f"))) void scramble_avx512(uint64_t* acc) {
  const __m512i prime = _mm512_set1_epi32(static_cast<int>(kPrime32_1));
  __m512i sum = _mm512_load_si512(acc);
  sum = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
  sum = _mm512_xor_si512(sum, _mm512_loadu_si512(kSecret + kScrambleSecret));
  __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
  _mm512_store_si512(acc, _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(high, 32)));
}

#endif

Loop choose(Xxh3Path path) {
#ifdef __x86_64__
  bool best = path == Xxh3Path::best;
  if (path == Xxh3Path::avx512 || (best && __builtin_cpu_supports("avx512f")))
    return {accumulate_avx512, scramble_avx512};
  if (path == Xxh3Path::avx2 || (best && __builtin_cpu_supports("avx2"))) return {accumulate_avx2, scramble_avx2};
#else
  (void)path;
#endif
  return {accumulate_portable, scramble_portable};
}

uint64_t merge(const uint64_t* acc, size_t secret, uint64_t start) {
  for (size_t i = 0; i < 4; ++i)
    start +=
        fold(acc[2 * i] ^ read64(kSecret + secret + 16 * i), acc[2 * i + 1] ^ read64(kSecret + secret + 16 * i + 8));
  return avalanche(start);
}

Hash128 hash_long(const uint8_t* in, size_t n, const Loop& loop) {
  alignas(64) uint64_t acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const size_t blocks = (n - 1) / kBlock;
  for (size_t b = 0; b < blocks; ++b) {
    loop.accumulate(acc, in + b * kBlock, 0, kStripesPerBlock);
    loop.scramble(acc);
  }
  loop.accumulate(acc, in + blocks * kBlock, 0, (n - 1 - blocks * kBlock) / kStripe);
  loop.accumulate(acc, in + n - kStripe, kSecretNbytes - kStripe - 7, 1);
  return {merge(acc, 11, n * kPrime64_1), merge(acc, kSecretNbytes - kStripe - 11, ~(n * kPrime64_2))};
}

Hash128 hash(const uint8_t* in, size_t n, const Loop& loop) {
  if (n > 240) return hash_long(in, n, loop);
  if (n > 128) return hash_129_to_240(in, n);
  if (n > 16) return hash_17_to_128(in, n);
  if (n > 8) return hash_9_to_16(in, n);
  if (n > 3) return hash_4_to_8(in, n);
  return n > 0 ? hash_1_to_3(in, n) : hash_0();
}

}  // namespace

Hash128 xxh3_128(const void* data, size_t nbytes) {
  static const Loop best = choose(Xxh3Path::best);
  return hash(static_cast<const uint8_t*>(data), nbytes, best);
}

Hash128 xxh3_128(const void* data, size_t nbytes, Xxh3Path path) {
  return hash(static_cast<const uint8_t*>(data), nbytes, choose(path));
}

bool xxh3_has_path(Xxh3Path path) {
#ifdef __x86_64__
  if (path == Xxh3Path::avx2) return __builtin_cpu_supports("avx2");
  if (path == Xxh3Path::avx512) return __builtin_cpu_supports("avx512f");
#endif
  return path == Xxh3Path::portable || path == Xxh3Path::best;
}

}  // namespace torch_mooncake::kv
