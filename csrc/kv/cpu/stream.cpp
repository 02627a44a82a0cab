#include "kv/cpu/stream.h"

#include <algorithm>
#include <cstring>

#include "kv/cpu/simd.h"

namespace torch_mooncake::kv {

#ifdef __x86_64__

namespace {

constexpr size_t kLine = 64;
constexpr size_t kStreams = 4;
constexpr size_t kSpan = 4096;              // a long piece feeds the four streams with neighbouring 4 KiB pages
constexpr size_t kTurn = 2 * kLine;         // of a stream, before the next one has its turn
constexpr size_t kMinStreamed = 2 * kLine;  // below this the unaligned ends are all there is
constexpr size_t kAhead = 4 * kLine;        // fetched before it is copied: no prefetcher follows from page to page

// One cache line.
__attribute__((target("avx512f"), always_inline)) inline void line_avx512(std::byte* dst, const std::byte* src) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}
__attribute__((target("avx2"), always_inline)) inline void line_avx2(std::byte* dst, const std::byte* src) {
  auto* from = reinterpret_cast<const __m256i*>(src);
  auto* to = reinterpret_cast<__m256i*>(dst);
  __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
  _mm256_stream_si256(to, low);
  _mm256_stream_si256(to + 1, high);
}
__attribute__((target("sse2"), always_inline)) inline void line_sse2(std::byte* dst, const std::byte* src) {
  auto* from = reinterpret_cast<const __m128i*>(src);
  auto* to = reinterpret_cast<__m128i*>(dst);
  for (int part = 0; part < 4; ++part) _mm_stream_si128(to + part, _mm_loadu_si128(from + part));
}
inline void fetch(const std::byte* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }

// `nbytes` (whole turns) of each of four streams; destinations are aligned to a line. `next`: the streams after these.
using Stream4 = void (*)(std::byte* const* dst, const std::byte* const* src, const std::byte* const* next,
                         size_t nbytes);
using Rows = void (*)(std::byte* dst, int64_t dst_stride, const std::byte* src, int64_t src_stride, int64_t rows,
                      int64_t row_nbytes, int64_t ahead);

// The loops for one instruction set: what a target attribute says does not reach into templates. A stream's turn is two
// lines.
#define TM_STREAM_TURN(isa, to, from, ahead) \
  fetch(ahead), fetch(ahead + kLine), line_##isa(to, from), line_##isa(to + kLine, from + kLine)
#define TM_STREAM_LOOPS(isa, features)                                                                        \
  __attribute__((target(features))) void stream4_##isa(std::byte* const* dst, const std::byte* const* src,    \
                                                       const std::byte* const* next, size_t nbytes) {         \
    std::byte *d0 = dst[0], *d1 = dst[1], *d2 = dst[2], *d3 = dst[3];                                         \
    const std::byte *s0 = src[0], *s1 = src[1], *s2 = src[2], *s3 = src[3];                                   \
    const std::byte *n0 = next[0], *n1 = next[1], *n2 = next[2], *n3 = next[3];                               \
    const size_t own = nbytes > kAhead ? nbytes - kAhead : 0;                                                 \
    size_t i = 0;                                                                                             \
    for (; i < own; i += kTurn) {                                                                             \
      TM_STREAM_TURN(isa, d0 + i, s0 + i, s0 + i + kAhead);                                                   \
      TM_STREAM_TURN(isa, d1 + i, s1 + i, s1 + i + kAhead);                                                   \
      TM_STREAM_TURN(isa, d2 + i, s2 + i, s2 + i + kAhead);                                                   \
      TM_STREAM_TURN(isa, d3 + i, s3 + i, s3 + i + kAhead);                                                   \
    }                                                                                                         \
    for (; i < nbytes; i += kTurn) {                                                                          \
      TM_STREAM_TURN(isa, d0 + i, s0 + i, n0 + (i - own));                                                    \
      TM_STREAM_TURN(isa, d1 + i, s1 + i, n1 + (i - own));                                                    \
      TM_STREAM_TURN(isa, d2 + i, s2 + i, n2 + (i - own));                                                    \
      TM_STREAM_TURN(isa, d3 + i, s3 + i, n3 + (i - own));                                                    \
    }                                                                                                         \
  }                                                                                                           \
  __attribute__((target(features))) void rows_##isa(std::byte* dst, int64_t dst_stride, const std::byte* src, \
                                                    int64_t src_stride, int64_t rows, int64_t row_nbytes,     \
                                                    int64_t ahead) {                                          \
    for (int64_t r = 0; r < rows; ++r, dst += dst_stride, src += src_stride)                                  \
      for (int64_t i = 0; i < row_nbytes; i += static_cast<int64_t>(kLine)) {                                 \
        fetch(src + i + ahead);                                                                               \
        line_##isa(dst + i, src + i);                                                                         \
      }                                                                                                       \
  }

TM_STREAM_LOOPS(avx512, "avx512f")
TM_STREAM_LOOPS(avx2, "avx2")
TM_STREAM_LOOPS(sse2, "sse2")

struct Loops {
  Stream4 stream4;
  Rows rows;
};

const Loops& loops() {
  static const Loops best = [] {
    if (__builtin_cpu_supports("avx512f")) return Loops{stream4_avx512, rows_avx512};
    if (__builtin_cpu_supports("avx2")) return Loops{stream4_avx2, rows_avx2};
    return Loops{stream4_sse2, rows_sse2};
  }();
  return best;
}

void copy_part(const Piece& piece, size_t begin, size_t end) {
  if (begin == end) return;
  std::memcpy(static_cast<std::byte*>(piece.dst) + begin, static_cast<const std::byte*>(piece.src) + begin,
              end - begin);
}

size_t to_line(const Piece& piece) { return std::min(piece.nbytes, -reinterpret_cast<uintptr_t>(piece.dst) % kLine); }

// Four streams that advance together.
using Quad = Piece[kStreams];

// Cuts pieces into quads. What fits in none (ends of long pieces, short ones) is copied on the way.
class Quads {
 public:
  explicit Quads(std::span<const Piece> pieces) : pieces_(pieces) {}

  bool next(Quad* quad) {
    size_t filled = 0;
    for (; index_ < pieces_.size(); ++index_, done_ = 0) {
      const Piece& piece = pieces_[index_];
      if (piece.nbytes >= kStreams * kSpan) {
        if (filled > 0) break;  // the ones before are too few for a quad
        if (take_block(piece, quad)) return true;
      } else if (piece.nbytes < kMinStreamed) {
        copy_part(piece, 0, piece.nbytes);
      } else {
        (*quad)[filled++] = piece;
        if (filled == kStreams) {
          ++index_;
          return true;
        }
      }
    }
    for (size_t i = 0; i < filled; ++i) copy_part((*quad)[i], 0, (*quad)[i].nbytes);
    return index_ < pieces_.size() && next(quad);
  }

 private:
  // The next four neighbouring spans of a long piece, from a line on.
  bool take_block(const Piece& piece, Quad* quad) {
    if (done_ == 0) {
      done_ = to_line(piece);
      copy_part(piece, 0, done_);
    }
    if (piece.nbytes - done_ < kStreams * kSpan) {
      copy_part(piece, done_, piece.nbytes);
      return false;
    }
    auto* dst = static_cast<std::byte*>(piece.dst) + done_;
    auto* src = static_cast<const std::byte*>(piece.src) + done_;
    for (size_t s = 0; s < kStreams; ++s) (*quad)[s] = {dst + s * kSpan, src + s * kSpan, kSpan};
    done_ += kStreams * kSpan;
    return true;
  }

  std::span<const Piece> pieces_;
  size_t index_ = 0;
  size_t done_ = 0;  // bytes of a long piece
};

// Ordinary stores for the ends, the common middle streamed.
void copy_quad(const Quad& quad, const Quad& following) {
  std::byte* dst[kStreams];
  const std::byte *src[kStreams], *next[kStreams];
  size_t head[kStreams], nbytes = SIZE_MAX;
  for (size_t s = 0; s < kStreams; ++s) {
    head[s] = to_line(quad[s]);
    copy_part(quad[s], 0, head[s]);
    dst[s] = static_cast<std::byte*>(quad[s].dst) + head[s];
    src[s] = static_cast<const std::byte*>(quad[s].src) + head[s];
    next[s] = static_cast<const std::byte*>(following[s].src);
    nbytes = std::min(nbytes, (quad[s].nbytes - head[s]) / kTurn * kTurn);
  }
  loops().stream4(dst, src, next, nbytes);
  for (size_t s = 0; s < kStreams; ++s) copy_part(quad[s], head[s] + nbytes, quad[s].nbytes);
}

void copy_streamed(std::span<const Piece> pieces) {
  Quads quads(pieces);
  Quad a, b;
  Quad *current = &a, *following = &b;
  for (bool more = quads.next(current); more; std::swap(current, following)) {
    more = quads.next(following);
    copy_quad(*current, more ? *following : *current);
  }
  fence();
}

}  // namespace

bool can_stream_rows() { return true; }
void stream_rows(std::byte* dst, int64_t dst_stride, const std::byte* src, int64_t src_stride, int64_t rows,
                 int64_t row_nbytes, int64_t ahead) {
  loops().rows(dst, dst_stride, src, src_stride, rows, row_nbytes, ahead);
}
void fence() { _mm_sfence(); }

#else

bool can_stream_rows() { return false; }
void stream_rows(std::byte*, int64_t, const std::byte*, int64_t, int64_t, int64_t, int64_t) {}
void fence() {}

#endif

void copy_pieces(std::span<const Piece> pieces, bool non_temporal) {
#ifdef __x86_64__
  if (non_temporal) return copy_streamed(pieces);
#else
  (void)non_temporal;
#endif
  for (const Piece& piece : pieces) std::memcpy(piece.dst, piece.src, piece.nbytes);
}

}  // namespace torch_mooncake::kv
