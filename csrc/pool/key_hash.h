// Seeded 128-bit hash of a key: two lanes of 64-bit multiply-and-fold over 8-byte words. Not for secrets: keys come
// from inside the trust domain, and whoever needs certainty compares the full key.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace torch_mooncake::pool {

using KeyHash = std::array<uint64_t, 2>;

inline KeyHash hash_key(std::string_view key, uint64_t seed = 0) {
  auto fold = [](uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  constexpr uint64_t k0 = 0x9e3779b97f4a7c15, k1 = 0xc2b2ae3d27d4eb4f, k2 = 0xd6e8feb86659fd93;
  uint64_t a = fold(seed ^ k0, k1 ^ key.size()), b = fold(seed ^ k1, k2 + key.size());
  for (size_t i = 0; i < key.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, key.data() + i, key.size() - i < 8 ? key.size() - i : 8);
    a = fold(a ^ word, k1 ^ i) + b;
    b = fold(b + word, k2 ^ a) ^ k0;
  }
  return {fold(a ^ k2, b ^ k0), fold(b ^ k1, a + k2)};
}

}  // namespace torch_mooncake::pool
