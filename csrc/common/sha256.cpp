#include "common/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace torch_mooncake {
namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

void store_big_endian(uint8_t* out, uint32_t v) {
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint8_t>(v >> (24 - 8 * i));
}

}  // namespace

Sha256::Sha256() { std::memcpy(state_, kInitial, sizeof state_); }

void Sha256::block(const uint8_t* data) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t{data[4 * i]} << 24 | uint32_t{data[4 * i + 1]} << 16 | uint32_t{data[4 * i + 2]} << 8 |
           uint32_t{data[4 * i + 3]};
  }
  for (int i = 16; i < 64; ++i) {
    uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  uint32_t a = state_[0], b = state_[1], c = state_[2], d = state_[3];
  uint32_t e = state_[4], f = state_[5], g = state_[6], h = state_[7];
  for (int i = 0; i < 64; ++i) {
    uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    uint32_t choice = (e & f) ^ (~e & g);
    uint32_t t1 = h + sum1 + choice + kRound[i] + w[i];
    uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g, g = f, f = e, e = d + t1;
    d = c, c = b, b = a, a = t1 + sum0 + majority;
  }
  state_[0] += a, state_[1] += b, state_[2] += c, state_[3] += d;
  state_[4] += e, state_[5] += f, state_[6] += g, state_[7] += h;
}

Sha256& Sha256::update(std::string_view bytes) {
  while (!bytes.empty()) {
    size_t used = nbytes_ % 64;
    size_t n = std::min(bytes.size(), 64 - used);
    std::memcpy(buffer_ + used, bytes.data(), n);
    nbytes_ += n;
    bytes.remove_prefix(n);
    if (used + n == 64) block(buffer_);
  }
  return *this;
}

Digest Sha256::finish() {
  uint64_t bits = nbytes_ * 8;
  size_t used = nbytes_ % 64;
  size_t padding = (used < 56 ? 56 : 120) - used;
  uint8_t tail[72] = {0x80};
  store_big_endian(tail + padding, static_cast<uint32_t>(bits >> 32));
  store_big_endian(tail + padding + 4, static_cast<uint32_t>(bits));
  update({reinterpret_cast<const char*>(tail), padding + 8});
  Digest out;
  for (int i = 0; i < 8; ++i) store_big_endian(out.data() + 4 * i, state_[i]);
  return out;
}

Digest sha256(std::string_view bytes) { return Sha256().update(bytes).finish(); }

Digest hmac_sha256(std::string_view key, std::string_view bytes) {
  Digest hashed;
  if (key.size() > 64) {
    hashed = sha256(key);
    key = as_view(hashed);
  }
  char inner[64] = {}, outer[64] = {};
  if (!key.empty()) {
    std::memcpy(inner, key.data(), key.size());
    std::memcpy(outer, key.data(), key.size());
  }
  for (int i = 0; i < 64; ++i) {
    inner[i] ^= 0x36;
    outer[i] ^= 0x5c;
  }
  Digest first = Sha256().update({inner, 64}).update(bytes).finish();
  return Sha256().update({outer, 64}).update(as_view(first)).finish();
}

bool equal_constant_time(const Digest& a, const Digest& b) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = difference | (a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace torch_mooncake
