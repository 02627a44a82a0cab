// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for handshakes and digests of small things. Plain C++: a handshake
// hashes a few hundred bytes, so speed does not matter here (bulk checksums are crc32c).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/api.h"

namespace torch_mooncake {

using Digest = std::array<uint8_t, 32>;

class TM_API Sha256 {
 public:
  Sha256();
  Sha256& update(std::string_view bytes);
  Digest finish();  // once

 private:
  void block(const uint8_t* data);
  uint32_t state_[8];
  uint8_t buffer_[64];
  uint64_t nbytes_ = 0;
};

TM_API Digest sha256(std::string_view bytes);
TM_API Digest hmac_sha256(std::string_view key, std::string_view bytes);
// Takes the same time wherever the two differ.
TM_API bool equal_constant_time(const Digest& a, const Digest& b);
inline std::string_view as_view(const Digest& d) { return {reinterpret_cast<const char*>(d.data()), d.size()}; }

}  // namespace torch_mooncake
