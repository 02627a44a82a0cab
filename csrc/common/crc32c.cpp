#include "common/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace torch_mooncake {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected 0x1edc6f41

// tables[k][b]: the effect of byte b followed by k zero bytes ("slicing by 8").
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = c & 1 ? c >> 1 ^ kPolynomial : c >> 1;
    t[0][i] = c;
  }
  for (int k = 1; k < 8; ++k) {
    for (int i = 0; i < 256; ++i) t[k][i] = t[k - 1][i] >> 8 ^ t[0][t[k - 1][i] & 255];
  }
  return t;
}();

// The crc register is linear over GF(2), so "append n zero bytes" is a 32x32 bit matrix, here as four byte tables.
struct ZeroShift {
  std::array<std::array<uint32_t, 256>, 4> t{};
  explicit ZeroShift(size_t nbytes) {
    uint32_t column[32];
    for (int bit = 0; bit < 32; ++bit) {
      uint32_t c = 1u << bit;
      for (size_t i = 0; i < nbytes; ++i) c = c >> 8 ^ kTables[0][c & 255];
      column[bit] = c;
    }
    for (int byte = 0; byte < 4; ++byte) {
      for (int value = 0; value < 256; ++value) {
        uint32_t c = 0;
        for (int bit = 0; bit < 8; ++bit) {
          if (value >> bit & 1) c ^= column[8 * byte + bit];
        }
        t[byte][value] = c;
      }
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return t[0][crc & 255] ^ t[1][crc >> 8 & 255] ^ t[2][crc >> 16 & 255] ^ t[3][crc >> 24];
  }
};

uint64_t load64(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

}  // namespace

uint32_t crc32c_tables(const void* data, size_t nbytes, uint32_t crc) {
  auto* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; nbytes >= 8; p += 8, nbytes -= 8) {
    uint64_t v = load64(p) ^ crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) crc ^= kTables[7 - i][v >> (8 * i) & 255];
  }
  for (; nbytes > 0; ++p, --nbytes) crc = crc >> 8 ^ kTables[0][(crc ^ *p) & 255];
  return ~crc;
}

#if defined(__x86_64__)
bool crc32c_has_hardware() { return __builtin_cpu_supports("sse4.2"); }

// One crc32 instruction has a latency of three cycles and a throughput of one: three independent streams fill it.
__attribute__((target("sse4.2"))) uint32_t crc32c_hardware(const void* data, size_t nbytes, uint32_t crc) {
  constexpr size_t kStream = 4096;
  static const ZeroShift shift(kStream);
  auto* p = static_cast<const uint8_t*>(data);
  uint64_t a = ~crc;
  for (; nbytes >= 3 * kStream; p += 3 * kStream, nbytes -= 3 * kStream) {
    uint64_t b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, load64(p + i));
      b = _mm_crc32_u64(b, load64(p + kStream + i));
      c = _mm_crc32_u64(c, load64(p + 2 * kStream + i));
    }
    b ^= shift(static_cast<uint32_t>(a));
    a = c ^ shift(static_cast<uint32_t>(b));
  }
  for (; nbytes >= 8; p += 8, nbytes -= 8) a = _mm_crc32_u64(a, load64(p));
  auto tail = static_cast<uint32_t>(a);
  for (; nbytes > 0; ++p, --nbytes) tail = _mm_crc32_u8(tail, *p);
  return ~tail;
}
#else
bool crc32c_has_hardware() { return false; }
uint32_t crc32c_hardware(const void* data, size_t nbytes, uint32_t crc) { return crc32c_tables(data, nbytes, crc); }
#endif

uint32_t crc32c(const void* data, size_t nbytes, uint32_t crc) {
  static const bool hardware = crc32c_has_hardware();
  return hardware ? crc32c_hardware(data, nbytes, crc) : crc32c_tables(data, nbytes, crc);
}

}  // namespace torch_mooncake
