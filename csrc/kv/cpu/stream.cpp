#include "kv/cpu/stream.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace torch_mooncake::kv {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kStreams = 4;
constexpr size_t kSpan = 4096;              // a long piece feeds the four streams with neighbouring 4 KiB pages
constexpr size_t kMinStreamed = 2 * kLine;  // below this the unaligned ends are all there is

#ifdef __x86_64__

// `lines` cache lines of each of four streams; destinations are aligned to a line.
using Stream4 = void (*)(std::byte* const* dst, const std::byte* const* src, size_t lines);

__attribute__((target("avx512f"))) void stream4_avx512(std::byte* const* dst, const std::byte* const* src,
                                                       size_t lines) {
  for (size_t i = 0; i < lines * kLine; i += kLine)
    for (size_t s = 0; s < kStreams; ++s)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst[s] + i), _mm512_loadu_si512(src[s] + i));
}

__attribute__((target("avx2"))) void stream4_avx2(std::byte* const* dst, const std::byte* const* src, size_t lines) {
  for (size_t i = 0; i < lines * kLine; i += kLine)
    for (size_t s = 0; s < kStreams; ++s) {
      auto* from = reinterpret_cast<const __m256i*>(src[s] + i);
      auto* to = reinterpret_cast<__m256i*>(dst[s] + i);
      __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
      _mm256_stream_si256(to, low);
      _mm256_stream_si256(to + 1, high);
    }
}

void stream4_sse2(std::byte* const* dst, const std::byte* const* src, size_t lines) {
  for (size_t i = 0; i < lines * kLine; i += kLine)
    for (size_t s = 0; s < kStreams; ++s) {
      auto* from = reinterpret_cast<const __m128i*>(src[s] + i);
      auto* to = reinterpret_cast<__m128i*>(dst[s] + i);
      for (int part = 0; part < 4; ++part) _mm_stream_si128(to + part, _mm_loadu_si128(from + part));
    }
}

Stream4 choose_stream4() {
  if (__builtin_cpu_supports("avx512f")) return stream4_avx512;
  if (__builtin_cpu_supports("avx2")) return stream4_avx2;
  return stream4_sse2;
}

// Four pieces of possibly different length and alignment: ordinary stores for the ends, the common middle streamed.
void copy4(const Piece* pieces) {
  static const Stream4 stream4 = choose_stream4();
  std::byte* dst[kStreams];
  const std::byte* src[kStreams];
  size_t rest[kStreams], lines = SIZE_MAX;
  for (size_t s = 0; s < kStreams; ++s) {
    dst[s] = static_cast<std::byte*>(pieces[s].dst);
    src[s] = static_cast<const std::byte*>(pieces[s].src);
    size_t head = std::min(pieces[s].nbytes, -reinterpret_cast<uintptr_t>(dst[s]) % kLine);
    std::memcpy(dst[s], src[s], head);
    dst[s] += head;
    src[s] += head;
    rest[s] = pieces[s].nbytes - head;
    lines = std::min(lines, rest[s] / kLine);
  }
  stream4(dst, src, lines);
  for (size_t s = 0; s < kStreams; ++s)
    std::memcpy(dst[s] + lines * kLine, src[s] + lines * kLine, rest[s] - lines * kLine);
}

// A long piece by itself: blocks of four neighbouring 4 KiB pages.
void copy_long(const Piece& piece) {
  auto* dst = static_cast<std::byte*>(piece.dst);
  auto* src = static_cast<const std::byte*>(piece.src);
  size_t done = std::min(piece.nbytes, -reinterpret_cast<uintptr_t>(dst) % kLine);
  std::memcpy(dst, src, done);
  for (; piece.nbytes - done >= kStreams * kSpan; done += kStreams * kSpan) {
    Piece block[kStreams];
    for (size_t s = 0; s < kStreams; ++s) block[s] = {dst + done + s * kSpan, src + done + s * kSpan, kSpan};
    copy4(block);
  }
  std::memcpy(dst + done, src + done, piece.nbytes - done);
}

void copy_streamed(std::span<const Piece> pieces) {
  Piece waiting[kStreams];
  size_t count = 0;
  for (const Piece& piece : pieces) {
    if (piece.nbytes >= kStreams * kSpan) {
      copy_long(piece);
    } else if (piece.nbytes < kMinStreamed) {
      std::memcpy(piece.dst, piece.src, piece.nbytes);
    } else {
      waiting[count++] = piece;
      if (count == kStreams) {
        copy4(waiting);
        count = 0;
      }
    }
  }
  for (size_t i = 0; i < count; ++i) std::memcpy(waiting[i].dst, waiting[i].src, waiting[i].nbytes);
  _mm_sfence();
}

#endif

}  // namespace

void copy_pieces(std::span<const Piece> pieces, bool non_temporal) {
#ifdef __x86_64__
  if (non_temporal) return copy_streamed(pieces);
#else
  (void)non_temporal;
#endif
  for (const Piece& piece : pieces) std::memcpy(piece.dst, piece.src, piece.nbytes);
}

}  // namespace torch_mooncake::kv
