#include "kv/delta.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <mutex>
#include <string>

#include "kv/cpu/changes.h"
#include "kv/delta_segment.h"
#include "kv/xxh3.h"

namespace torch_mooncake::kv {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kExpectedChanges = 32;     // one element of so many, at most
constexpr int64_t kGrainNbytes = 256 << 10;  // what one thread must have to do to be worth its wake-up

FindChanges find_changes(int64_t element_nbytes) {
#ifdef __x86_64__
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi");
  static const bool avx512 = has_changes_avx512();
  if (avx512) return find_changes_avx512(element_nbytes);
  if (avx2) return find_changes_avx2(element_nbytes);
#endif
  return find_changes_portable(element_nbytes);
}

int64_t grain(int64_t element_nbytes) { return std::max<int64_t>(1, kGrainNbytes / (kDeltaSegment * element_nbytes)); }

// Elements of a segment that lie in one piece.
struct Stretch {
  int64_t first;  // position within the segment
  int64_t count;
  int64_t offset;  // bytes
};

// The elements of some ranges, one after the other.
class Elements {
 public:
  static Result<Elements> of(const std::vector<DeltaRange>& ranges, int64_t element_nbytes) {
    if (element_nbytes != 1 && element_nbytes != 2 && element_nbytes != 4 && element_nbytes != 8)
      return {Code::invalid_argument,
              "elements of a delta have 1, 2, 4 or 8 bytes, not " + std::to_string(element_nbytes)};
    Elements found;
    found.nbytes_ = element_nbytes;
    for (const DeltaRange& range : ranges) {
      if (range.offset < 0 || range.nbytes < 0 || range.nbytes % element_nbytes != 0)
        return {Code::invalid_argument, "a range of " + std::to_string(range.nbytes) + " bytes at " +
                                            std::to_string(range.offset) + " is not whole elements of " +
                                            std::to_string(element_nbytes)};
      if (range.nbytes == 0) continue;
      found.ranges_.push_back({found.count_, range.offset});
      found.count_ += range.nbytes / element_nbytes;
    }
    found.ranges_.push_back({found.count_, 0});
    return found;
  }

  int64_t count() const { return count_; }

  // Those of a segment.
  std::vector<Stretch> stretches(int64_t segment) const {
    const int64_t begin = segment * kDeltaSegment, end = std::min(begin + kDeltaSegment, count_);
    auto behind = [](int64_t at, const Range& range) { return at < range.first; };
    auto range = std::upper_bound(ranges_.begin(), ranges_.end(), begin, behind) - 1;
    std::vector<Stretch> found;
    for (int64_t at = begin; at < end; ++range) {
      const int64_t n = std::min(end, range[1].first) - at;
      found.push_back({at - begin, n, range->offset + (at - range->first) * nbytes_});
      at += n;
    }
    return found;
  }

 private:
  struct Range {
    int64_t first;  // element
    int64_t offset;
  };
  int64_t nbytes_ = 1, count_ = 0;
  std::vector<Range> ranges_;  // and one behind the last
};

Status malformed(const char* what) { return {Code::corrupt, std::string("the delta is malformed: ") + what}; }

// Asks for the lines that a segment's changes are in, all at once: the processor would find them one by one.
template <int kNbytes>
void fetch_segment(const DeltaBlob& blob, int64_t segment, const std::byte* target, const Elements& elements) {
  const DeltaSegment& at = blob.segments[static_cast<size_t>(segment)];
  const int64_t nbytes = blob.segments[static_cast<size_t>(segment) + 1].token - at.token;
  const std::byte* origin = target + elements.stretches(segment)[0].offset;  // of others the first stretch alone
  for_delta_changes(blob.tokens + at.token, nbytes,
                    [&](uint32_t position, uint32_t) { __builtin_prefetch(origin + int64_t{position} * kNbytes, 1); });
}

template <int kNbytes>
void apply_segment(const DeltaBlob& blob, int64_t segment, std::byte* target, const std::byte* base,
                   const Elements& elements) {
  const DeltaSegment& at = blob.segments[static_cast<size_t>(segment)];
  const uint8_t* tokens = blob.tokens + at.token;
  const int64_t nbytes = blob.segments[static_cast<size_t>(segment) + 1].token - at.token;
  const std::byte* values = blob.values + at.value * kNbytes;
  const std::vector<Stretch> stretches = elements.stretches(segment);
  for (const Stretch& stretch : stretches)
    if (base != nullptr) std::memcpy(target + stretch.offset, base + stretch.offset, stretch.count * kNbytes);
  if (stretches.size() == 1) {
    std::byte* origin = target + stretches[0].offset;
    for_delta_changes(tokens, nbytes, [&](uint32_t position, uint32_t n) {
      std::byte* to = origin + int64_t{position} * kNbytes;
      if (n == 1)
        std::memcpy(to, values, kNbytes);
      else
        std::memcpy(to, values, int64_t{n} * kNbytes);
      values += int64_t{n} * kNbytes;
    });
    return;
  }
  auto stretch = stretches.begin();
  for_delta_changes(tokens, nbytes, [&](int64_t position, int64_t n) {
    for (const int64_t end = position + n; position < end;) {
      while (position >= stretch->first + stretch->count) ++stretch;
      const int64_t here = std::min(end, stretch->first + stretch->count) - position;
      std::memcpy(target + stretch->offset + (position - stretch->first) * kNbytes, values, here * kNbytes);
      values += here * kNbytes;
      position += here;
    }
  });
}

}  // namespace

Result<DeltaEncoded> delta_encode(const DeltaInput& input, const ParallelFor& parallel_for) {
  const int64_t element_nbytes = input.element_nbytes;
  auto elements = Elements::of(input.ranges, element_nbytes);
  TM_TRY(elements.status());
  DeltaEncoded encoded;
  encoded.elements_ = elements->count();
  encoded.element_nbytes_ = element_nbytes;
  const int64_t segments = delta_segments(encoded.elements_);
  encoded.directory_.resize(static_cast<size_t>(segments));
  const FindChanges find = find_changes(element_nbytes);
  std::atomic<int64_t> so_far = DeltaSizes::of(encoded.elements_, element_nbytes, 0, 0).tokens_at;  // at least
  std::mutex mutex;
  parallel_for(segments, grain(element_nbytes), [&](int64_t begin, int64_t end) {
    DeltaEncoded::Part part{begin, {}, {}};
    const int64_t most = (end - begin) * kDeltaSegment / kExpectedChanges;  // then nothing has to move
    part.tokens.reserve(static_cast<size_t>(most));
    part.values.reserve(static_cast<size_t>(most * element_nbytes));
    uint8_t tokens[kDeltaMaxTokens];
    uint16_t positions[kDeltaSegment + kChangesSlack];
    for (int64_t s = begin; s < end; ++s) {
      DeltaTokens<true> writer(tokens);
      const size_t values_before = part.values.size();
      for (const auto& [first, n, offset] : elements->stretches(s)) {
        const int64_t count =
            find(input.base + offset, input.fresh + offset, n, static_cast<uint16_t>(first), positions);
        if (count == 0) continue;
        const size_t at = part.values.size();
        part.values.resize(at + static_cast<size_t>(count * element_nbytes));
        const std::byte* origin = input.fresh + offset - first * element_nbytes;
        for_delta_size(element_nbytes, [&]<int kNbytes>() {
          std::byte* to = part.values.data() + at;
          for (int64_t i = 0; i < count; ++i) {
            writer.change(positions[i]);
            std::memcpy(to + i * kNbytes, origin + int64_t{positions[i]} * kNbytes, kNbytes);
          }
        });
      }
      const uint32_t nbytes = writer.finish();
      part.tokens.insert(part.tokens.end(), tokens, tokens + nbytes);
      const size_t values_nbytes = part.values.size() - values_before;
      encoded.directory_[static_cast<size_t>(s)] = {
          static_cast<uint16_t>(values_nbytes / static_cast<size_t>(element_nbytes)), static_cast<uint16_t>(nbytes)};
      const auto more = static_cast<int64_t>(nbytes + values_nbytes);
      if (so_far.fetch_add(more, std::memory_order_relaxed) + more > input.limit && input.limit >= 0) return;
    }
    const std::lock_guard lock(mutex);
    encoded.token_nbytes_ += static_cast<int64_t>(part.tokens.size());
    encoded.changed_ += static_cast<int64_t>(part.values.size()) / element_nbytes;
    encoded.parts_.push_back(std::move(part));
  });
  encoded.sizes_ = DeltaSizes::of(encoded.elements_, element_nbytes, encoded.token_nbytes_, encoded.changed_);
  if (input.limit >= 0 && (so_far > input.limit || encoded.sizes_.nbytes > input.limit)) {
    encoded.within_limit_ = false;
    encoded.parts_.clear();
    return encoded;
  }
  std::sort(encoded.parts_.begin(), encoded.parts_.end(),
            [](const auto& a, const auto& b) { return a.first_segment < b.first_segment; });
  return encoded;
}

void DeltaEncoded::write(std::byte* blob) const {
  if (!directory_.empty())
    std::memcpy(blob + sizeof(DeltaHeader), directory_.data(), directory_.size() * sizeof(DeltaEntry));
  std::byte *tokens = blob + sizes_.tokens_at, *values = blob + sizes_.values_at;
  for (const Part& part : parts_) {
    tokens = std::copy_n(reinterpret_cast<const std::byte*>(part.tokens.data()), part.tokens.size(), tokens);
    values = std::copy_n(part.values.data(), part.values.size(), values);
  }
  delta_seal(blob, elements_, element_nbytes_, token_nbytes_, changed_);
}

void delta_seal(std::byte* blob, int64_t elements, int64_t element_nbytes, int64_t token_nbytes, int64_t changed) {
  const DeltaSizes sizes = DeltaSizes::of(elements, element_nbytes, token_nbytes, changed);
  const int64_t tokens_end = sizes.tokens_at + token_nbytes;
  std::memset(blob + tokens_end, 0, static_cast<size_t>(sizes.values_at - tokens_end));
  DeltaHeader header{kDeltaMagic,
                     0,
                     static_cast<uint64_t>(elements),
                     static_cast<uint64_t>(changed),
                     static_cast<uint64_t>(token_nbytes),
                     static_cast<uint32_t>(element_nbytes),
                     0};
  std::memcpy(blob, &header, sizeof header);
  constexpr size_t kBehind = offsetof(DeltaHeader, checksum) + sizeof header.checksum;
  header.checksum = xxh3_128(blob + kBehind, static_cast<size_t>(sizes.nbytes) - kBehind).low;
  std::memcpy(blob, &header, sizeof header);
}

Result<DeltaBlob> delta_open(const std::byte* data, int64_t nbytes, const ParallelFor& parallel_for) {
  DeltaHeader header;
  if (nbytes < static_cast<int64_t>(sizeof header)) return malformed("it is shorter than its header");
  std::memcpy(&header, data, sizeof header);
  if (header.magic != kDeltaMagic) return malformed("it does not begin as one");
  constexpr size_t kBehind = offsetof(DeltaHeader, checksum) + sizeof header.checksum;
  if (xxh3_128(data + kBehind, static_cast<size_t>(nbytes) - kBehind).low != header.checksum)
    return malformed("its checksum is not that of its bytes");
  // From here on only who forged the checksum, too, is told.
  const uint32_t size = header.element_nbytes;
  constexpr uint64_t kMost = uint64_t{1} << 56;
  if ((size != 1 && size != 2 && size != 4 && size != 8) || header.reserved != 0 || header.elements > kMost ||
      header.changed > header.elements || header.token_nbytes > kMost)
    return malformed("its header says what cannot be");
  DeltaBlob blob;
  blob.elements = static_cast<int64_t>(header.elements);
  blob.element_nbytes = size;
  blob.changed = static_cast<int64_t>(header.changed);
  blob.token_nbytes = static_cast<int64_t>(header.token_nbytes);
  const DeltaSizes sizes = DeltaSizes::of(blob.elements, size, blob.token_nbytes, blob.changed);
  if (sizes.nbytes != nbytes) return malformed("it has not the length that its header says");
  blob.tokens = reinterpret_cast<const uint8_t*>(data) + sizes.tokens_at;
  blob.values = data + sizes.values_at;
  blob.segments.resize(static_cast<size_t>(sizes.segments) + 1);
  const std::byte* directory = data + sizeof header;
  DeltaSegment at{0, 0, 0};
  for (int64_t s = 0; s < sizes.segments; ++s) {
    DeltaEntry entry;
    std::memcpy(&entry, directory + s * static_cast<int64_t>(sizeof entry), sizeof entry);
    at.changed = entry.changed;
    blob.segments[static_cast<size_t>(s)] = at;
    at.token += entry.token_nbytes;
    at.value += entry.changed;
  }
  at.changed = 0;
  blob.segments.back() = at;
  if (at.token != blob.token_nbytes || at.value != blob.changed) return malformed("its directory does not add up");
  std::atomic<bool> good = true;
  parallel_for(sizes.segments, 64, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const DeltaSegment &here = blob.segments[static_cast<size_t>(s)],
                         &next = blob.segments[static_cast<size_t>(s) + 1];
      const int64_t elements = std::min(kDeltaSegment, blob.elements - s * kDeltaSegment);
      if (!delta_tokens_good(blob.tokens + here.token, next.token - here.token, here.changed, elements))
        good.store(false, std::memory_order_relaxed);
    }
  });
  if (!good) return malformed("its tokens leave their segment");
  return blob;
}

Status delta_apply(const DeltaBlob& blob, std::byte* target, const std::vector<DeltaRange>& ranges,
                   const ParallelFor& parallel_for, const std::byte* base) {
  auto elements = Elements::of(ranges, blob.element_nbytes);
  TM_TRY(elements.status());
  if (elements->count() != blob.elements)
    return {Code::invalid_argument, "the delta is of " + std::to_string(blob.elements) + " elements of " +
                                        std::to_string(blob.element_nbytes) + " bytes, the target has " +
                                        std::to_string(elements->count())};
  for_delta_size(blob.element_nbytes, [&]<int kNbytes>() {
    parallel_for(delta_segments(blob.elements), grain(kNbytes), [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        if (base == nullptr && s + 1 < end) fetch_segment<kNbytes>(blob, s + 1, target, *elements);
        apply_segment<kNbytes>(blob, s, target, base, *elements);
      }
    });
  });
  return {};
}

}  // namespace torch_mooncake::kv
