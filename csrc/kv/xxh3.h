// XXH3, 128 bits, without seed: the hash of https://github.com/Cyan4973/xxHash (its written specification), for inputs
// of every length. Not cryptographic. Long inputs use AVX-512 or AVX2 where the machine has it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/api.h"

namespace torch_mooncake::kv {

struct Hash128 {
  uint64_t low;
  uint64_t high;

  // Canonical byte order: big-endian, high word first.
  void write(uint8_t* out) const {
    for (int i = 0; i < 8; ++i) out[i] = static_cast<uint8_t>(high >> (56 - 8 * i));
    for (int i = 0; i < 8; ++i) out[8 + i] = static_cast<uint8_t>(low >> (56 - 8 * i));
  }
};

TM_API Hash128 xxh3_128(const void* data, size_t nbytes);

// The instruction sets that the long inputs' loop exists for; `best` is what xxh3_128 takes on this machine.
enum class Xxh3Path { portable, avx2, avx512, best };
// For tests: as xxh3_128, over one path. The machine has to have it: `xxh3_has_path`.
TM_API bool xxh3_has_path(Xxh3Path path);
TM_API Hash128 xxh3_128(const void* data, size_t nbytes, Xxh3Path path);

}  // namespace torch_mooncake::kv
