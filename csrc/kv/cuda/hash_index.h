// XXH3-128 of the page hash chain (kv/page_hash.h) by one thread, as code that also runs on the CPU, where it is
// tested. Its input is a whole number of 64-bit words, three at least: the hash before and the page's tokens.
#pragma once

#include <cstdint>

#include "kv/host_device.h"
#include "kv/page_hash.h"
#include "kv/xxh3_constants.h"

namespace torch_mooncake::kv::cuda {

struct SecretWords {
  uint64_t word[xxh3::kSecretNbytes / 8];
};
constexpr SecretWords secret_words() {
  SecretWords words{};
  for (size_t i = 0; i < xxh3::kSecretNbytes; ++i) words.word[i / 8] |= uint64_t{xxh3::kSecret[i]} << i % 8 * 8;
  return words;
}
inline constexpr SecretWords kSecretWords = secret_words();
#ifdef __CUDACC__
static __constant__ SecretWords kDeviceSecretWords = secret_words();
#endif

// The eight bytes of the secret from `at` on.
TM_HD uint64_t secret(uint32_t at) {
#ifdef __CUDA_ARCH__
  const SecretWords& words = kDeviceSecretWords;
#else
  const SecretWords& words = kSecretWords;
#endif
  const uint32_t shift = at % 8 * 8;
  const uint64_t low = words.word[at / 8] >> shift;
  return shift == 0 ? low : low | words.word[at / 8 + 1] << (64 - shift);
}

TM_HD uint64_t fold(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return a * b ^ __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = Wide{a} * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

TM_HD uint64_t avalanche(uint64_t h) {
  h = (h ^ h >> 37) * xxh3::kPrimeMix1;
  return h ^ h >> 32;
}

TM_HD uint64_t swapped(uint64_t x) {
  uint64_t out = 0;
  TM_UNROLL
  for (int i = 0; i < 8; ++i) out |= (x >> 8 * i & 0xFFu) << (56 - 8 * i);
  return out;
}

struct ChainHash {
  uint64_t low, high;
};

// The input of one step: the hash before as its bytes lie, then a page's tokens.
struct PageWords {
  uint64_t before[2];
  const void* tokens;
  bool wide;  // int64, else int32
  uint32_t count;

  TM_HD uint64_t operator[](uint32_t i) const {
    if (i < 2) return i == 0 ? before[0] : before[1];
    return wide ? static_cast<const uint64_t*>(tokens)[i - 2]
                : static_cast<uint64_t>(int64_t{static_cast<const int32_t*>(tokens)[i - 2]});
  }
};

struct TwoWords {
  uint64_t first, second;
};
TM_HD TwoWords two(const PageWords& in, uint32_t i) { return {in[i], in[i + 1]}; }

TM_HD uint64_t mix16(const TwoWords& in, uint32_t at) {
  return fold(in.first ^ secret(at), in.second ^ secret(at + 8));
}

TM_HD void mix32(ChainHash& acc, const TwoWords& a, const TwoWords& b, uint32_t at) {
  acc.low = (acc.low + mix16(a, at)) ^ (b.first + b.second);
  acc.high = (acc.high + mix16(b, at + 16)) ^ (a.first + a.second);
}

TM_HD ChainHash finish(const ChainHash& acc, uint64_t nbytes) {
  const uint64_t high = acc.low * xxh3::kPrime64_1 + acc.high * xxh3::kPrime64_4 + nbytes * xxh3::kPrime64_2;
  return {avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

TM_HD uint64_t merged(const uint64_t (&acc)[8], uint32_t at, uint64_t start) {
  TM_UNROLL
  for (uint32_t i = 0; i < 4; ++i)
    start += fold(acc[2 * i] ^ secret(at + 16 * i), acc[2 * i + 1] ^ secret(at + 16 * i + 8));
  return avalanche(start);
}

// Eight words from `first` on, the secret from `at` on.
TM_HD void accumulate(uint64_t (&acc)[8], const PageWords& in, uint32_t first, uint32_t at) {
  TM_UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    const uint64_t data = in[first + i], keyed = data ^ secret(at + 8 * i);
    acc[i ^ 1] += data;
    acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
  }
}

TM_HD ChainHash hash_long(const PageWords& in) {
  using namespace xxh3;
  constexpr uint32_t kStripe = 8, kStripesPerBlock = 16;  // words; stripes
  constexpr uint32_t kLast = kSecretNbytes - 64;
  uint64_t acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const uint32_t stripes = (in.count - 1) / kStripe;  // whole ones with something behind them
  uint32_t of_block = 0;
  for (uint32_t s = 0; s < stripes; ++s) {
    accumulate(acc, in, s * kStripe, 8 * of_block);
    if (++of_block < kStripesPerBlock) continue;
    of_block = 0;
    TM_UNROLL
    for (uint32_t i = 0; i < 8; ++i) acc[i] = (acc[i] ^ acc[i] >> 47 ^ secret(kLast + 8 * i)) * kPrime32_1;
  }
  accumulate(acc, in, in.count - kStripe, kLast - 7);
  const uint64_t nbytes = uint64_t{in.count} * 8;
  return {merged(acc, 11, nbytes * kPrime64_1), merged(acc, kLast - 11, ~(nbytes * kPrime64_2))};
}

TM_HD ChainHash hash_words(const PageWords& in) {
  const uint32_t n = in.count;
  const uint64_t nbytes = uint64_t{n} * 8;
  if (n > 30) return hash_long(in);
  ChainHash acc{nbytes * xxh3::kPrime64_1, 0};
  if (n <= 16) {
    for (uint32_t i = (n - 1) / 4; i > 0; --i) mix32(acc, two(in, 2 * i), two(in, n - 2 * (i + 1)), 32 * i);
    mix32(acc, two(in, 0), two(in, n - 2), 0);
    return finish(acc, nbytes);
  }
  for (uint32_t i = 0; i < 4; ++i) mix32(acc, two(in, 4 * i), two(in, 4 * i + 2), 32 * i);
  acc = {avalanche(acc.low), avalanche(acc.high)};
  for (uint32_t i = 4; i < n / 4; ++i) mix32(acc, two(in, 4 * i), two(in, 4 * i + 2), 32 * i - 128 + 3);
  mix32(acc, two(in, n - 2), two(in, n - 4), 136 - 17 - 16);
  return finish(acc, nbytes);
}

// One prompt: `tokens` of them from `first` on; 16 bytes a full page to `hashes`, which is 8-byte aligned, as `root`
// is.
TM_HD void hash_prompt(const PageHashing& call, const uint8_t* root, int64_t first, int64_t tokens, uint8_t* hashes) {
  auto* out = reinterpret_cast<uint64_t*>(hashes);
  PageWords in{{0, 0}, nullptr, call.wide, static_cast<uint32_t>(call.page_size) + 2};
  for (int i = 0; i < kPageHashNbytes; ++i) in.before[i / 8] |= uint64_t{root[i]} << i % 8 * 8;
  for (int64_t page = 0; page < tokens / call.page_size; ++page) {
    in.tokens = static_cast<const char*>(call.tokens) + (first + page * call.page_size) * (call.wide ? 8 : 4);
    const ChainHash hash = hash_words(in);
    in.before[0] = swapped(hash.high);
    in.before[1] = swapped(hash.low);
    out[2 * page] = in.before[0];
    out[2 * page + 1] = in.before[1];
  }
}

}  // namespace torch_mooncake::kv::cuda
