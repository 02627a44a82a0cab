// CRC-32C (Castagnoli), by the SSE4.2 instruction where the CPU has it (three interleaved streams, ~10 GB/s and more),
// by tables elsewhere. crc32c(b, crc32c(a)) is the checksum of a followed by b.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/api.h"

namespace torch_mooncake {

TM_API uint32_t crc32c(const void* data, size_t nbytes, uint32_t crc = 0);

// The two implementations, for tests; crc32c_hardware must only be called where crc32c_has_hardware().
bool crc32c_has_hardware();
uint32_t crc32c_hardware(const void* data, size_t nbytes, uint32_t crc);
uint32_t crc32c_tables(const void* data, size_t nbytes, uint32_t crc);

}  // namespace torch_mooncake
