// Random bytes of the kernel (getrandom), and ids as text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/api.h"
#include "common/bytes.h"

namespace torch_mooncake {

// Aborts only if the kernel has no randomness at all (a kernel older than 3.17).
TM_API void random_bytes(void* out, size_t nbytes);
TM_API Id128 random_id();
TM_API uint64_t random_u64();

TM_API std::string to_hex(std::string_view bytes);
inline std::string to_hex(const Id128& id) {
  return to_hex(std::string_view(reinterpret_cast<const char*>(id.data()), id.size()));
}
// false: `text` is not an id as to_hex() writes it.
TM_API bool from_hex(std::string_view text, Id128& id);

}  // namespace torch_mooncake
