#include "common/random.h"

#include <sys/random.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>

namespace torch_mooncake {

void random_bytes(void* out, size_t nbytes) {
  auto* at = static_cast<char*>(out);
  while (nbytes > 0) {
    ssize_t n = ::getrandom(at, nbytes, 0);
    if (n < 0) {
      if (errno == EINTR) continue;
      std::perror("torch_mooncake: getrandom");
      std::abort();
    }
    at += n;
    nbytes -= static_cast<size_t>(n);
  }
}

Id128 random_id() {
  Id128 id;
  random_bytes(id.data(), id.size());
  return id;
}

uint64_t random_u64() {
  uint64_t value;
  random_bytes(&value, sizeof value);
  return value;
}

std::string to_hex(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(2 * bytes.size());
  for (unsigned char c : bytes) {
    out += kDigits[c >> 4];
    out += kDigits[c & 15];
  }
  return out;
}

bool from_hex(std::string_view text, Id128& id) {
  if (text.size() != 2 * id.size()) return false;
  for (size_t i = 0; i < id.size(); ++i) {
    const auto [end, error] = std::from_chars(text.data() + 2 * i, text.data() + 2 * i + 2, id[i], 16);
    if (error != std::errc() || end != text.data() + 2 * i + 2) return false;
  }
  return true;
}

}  // namespace torch_mooncake
