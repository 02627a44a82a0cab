#include "memory/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torch_mooncake {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kStreams = 4;
// A long piece is cut into strips that advance together. Neighbouring strips of 4 KiB reach 9.7 GB/s where strips of
// 64 KiB reach 13.4 (256 KiB pieces, one thread): every 4 KiB the hardware prefetchers start anew.
constexpr size_t kStripBytes = 64 << 10;
constexpr size_t kLeastStripBytes = 4 << 10;
// From this total on non-temporal stores win: a cached store first reads the line it is about to overwrite, which costs
// a third of the memory traffic, but it leaves the destination in the cache for a reader who comes at once. Measured
// with cold destinations (both sides rotating over 1 GiB, one thread), streaming wins from 32 KiB on; below 256 KiB the
// destination is often in L2, or read next, and plain stays.
constexpr size_t kNonTemporalBytes = 256 << 10;
// Shorter pieces have too few whole lines to be worth it.
constexpr size_t kNonTemporalPiece = 1 << 10;

struct Strip {
  std::byte* dst;
  const std::byte* src;
  size_t nbytes;
};

// Cuts a run of pieces into strips of whole lines with aligned destinations. The odd bytes before and behind them are
// copied here.
class Strips {
 public:
  Strips(const CopyPiece* piece, size_t offset, size_t nbytes) : piece_(piece), offset_(offset), left_(nbytes) {}

  bool next(Strip& strip) {
    while (left_ > 0) {
      size_t rest = piece_->nbytes - offset_;
      if (rest == 0) {
        ++piece_;
        offset_ = 0;
        continue;
      }
      auto* dst = static_cast<std::byte*>(piece_->dst) + offset_;
      auto* src = static_cast<const std::byte*>(piece_->src) + offset_;
      size_t head = -reinterpret_cast<uintptr_t>(dst) % kLine;
      // Towards the end strips get shorter, so that the streams end together.
      size_t length = std::clamp(left_ / kStreams, kLeastStripBytes, kStripBytes) / kLeastStripBytes * kLeastStripBytes;
      size_t take = std::min({rest, left_, head + length});
      offset_ += take;
      left_ -= take;
      if (take < head + kLine) {
        std::memcpy(dst, src, take);
        continue;
      }
      size_t lines = (take - head) / kLine * kLine;
      std::memcpy(dst, src, head);
      std::memcpy(dst + head + lines, src + head + lines, take - head - lines);
      strip = {dst + head, src + head, lines};
      return true;
    }
    return false;
  }

 private:
  const CopyPiece* piece_;
  size_t offset_, left_;
};

#if defined(__x86_64__)

// The first nbytes of `count` (at most kStreams) strips, a line of each in turn: as many DRAM rows are open at once,
// and the hardware prefetchers each see one sequential stream.
template <size_t count>
__attribute__((target("avx512f"))) void stream_avx512(const Strip* strips, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += kLine) {
    __m512i line[count];
    for (size_t s = 0; s < count; ++s) line[s] = _mm512_loadu_si512(strips[s].src + i);
    for (size_t s = 0; s < count; ++s) _mm512_stream_si512(reinterpret_cast<__m512i*>(strips[s].dst + i), line[s]);
  }
}

template <size_t count>
__attribute__((target("avx2"))) void stream_avx2(const Strip* strips, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += kLine) {
    for (size_t s = 0; s < count; ++s) {
      auto* from = reinterpret_cast<const __m256i*>(strips[s].src + i);
      auto* to = reinterpret_cast<__m256i*>(strips[s].dst + i);
      auto low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
      _mm256_stream_si256(to, low);
      _mm256_stream_si256(to + 1, high);
    }
  }
}

struct Kernel {
  void (*four)(const Strip*, size_t);
  void (*one)(const Strip*, size_t);
};

void stream(const Kernel& kernel, Strips strips) {
  Strip live[kStreams];
  size_t count = 0;
  while (count < kStreams && strips.next(live[count])) ++count;
  while (count == kStreams) {
    size_t nbytes = live[0].nbytes;
    for (auto& strip : live) nbytes = std::min(nbytes, strip.nbytes);
    kernel.four(live, nbytes);
    for (size_t s = 0; s < count;) {
      live[s].dst += nbytes;
      live[s].src += nbytes;
      live[s].nbytes -= nbytes;
      if (live[s].nbytes > 0 || strips.next(live[s]))
        ++s;
      else
        live[s] = live[--count];
    }
  }
  for (size_t s = 0; s < count; ++s) kernel.one(&live[s], live[s].nbytes);
  _mm_sfence();
}

Kernel kernel_of(CopyPath path) {
  if (path == CopyPath::avx512) return {stream_avx512<kStreams>, stream_avx512<1>};
  return {stream_avx2<kStreams>, stream_avx2<1>};
}

CopyPath best_path() {
  static const CopyPath best = copy_path_available(CopyPath::avx512) ? CopyPath::avx512
                               : copy_path_available(CopyPath::avx2) ? CopyPath::avx2
                                                                     : CopyPath::plain;
  return best;
}

#else

CopyPath best_path() { return CopyPath::plain; }

#endif

void copy_plain(const CopyPiece* piece, size_t offset, size_t nbytes) {
  for (; nbytes > 0; ++piece, offset = 0) {
    size_t take = std::min(nbytes, piece->nbytes - offset);
    if (take > 0)
      std::memcpy(static_cast<std::byte*>(piece->dst) + offset, static_cast<const std::byte*>(piece->src) + offset,
                  take);
    nbytes -= take;
  }
}

}  // namespace

bool copy_path_available(CopyPath path) {
#if defined(__x86_64__)
  if (path == CopyPath::avx512) return __builtin_cpu_supports("avx512f");
  if (path == CopyPath::avx2) return __builtin_cpu_supports("avx2");
#endif
  return path == CopyPath::plain;
}

CopyPath copy_path_for(size_t total_nbytes, size_t pieces) {
  bool large = total_nbytes >= kNonTemporalBytes && total_nbytes / kNonTemporalPiece >= pieces;
  return large ? best_path() : CopyPath::plain;
}

void copy_run(CopyPath path, const CopyPiece* first, size_t offset, size_t nbytes) {
#if defined(__x86_64__)
  if (path != CopyPath::plain) return stream(kernel_of(path), Strips(first, offset, nbytes));
#endif
  copy_plain(first, offset, nbytes);
}

void copy_bytes(void* dst, const void* src, size_t nbytes) {
  CopyPiece piece{dst, src, nbytes};
  copy_run(copy_path_for(nbytes, 1), &piece, 0, nbytes);
}

}  // namespace torch_mooncake
