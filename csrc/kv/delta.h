// What has changed between two arrays of the same elements, as bytes that make the newer one of the older one, free of
// torch. Elements count as changed by their bits: NaN against another NaN and -0.0 against 0.0 do.
//
// A delta ("blob"), little-endian:
//
//   header     DeltaHeader, 48 bytes
//   directory  of each segment (4096 elements, the last one fewer): uint16 changed elements, uint16 bytes of tokens
//   tokens     of all segments, one after the other; then zeros up to a multiple of 8 bytes
//   values     the new elements, of all segments in order
//
// The tokens of a segment walk from its first element to its last changed one:
//
//   0 to 253       so many elements as they were, and a changed one
//   254, uint16 n  the same for 254 <= n < 4096
//   255, uint16 n  n changed elements, n >= 4
//
// So a change costs its element and about a byte, and in a long run of changes its element alone. An encoder has no
// choice anywhere: equal arrays give equal blobs on every device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/api.h"
#include "common/status.h"
#include "kv/parallel.h"

namespace torch_mooncake::kv {

inline constexpr int64_t kDeltaSegment = 4096;
inline constexpr uint64_t kDeltaMagic = 0x3161746C65644D54;  // "TMdelta1"

struct DeltaHeader {
  uint64_t magic;
  uint64_t checksum;  // the low half of XXH3-128 of everything behind it
  uint64_t elements;
  uint64_t changed;
  uint64_t token_nbytes;
  uint32_t element_nbytes;  // 1, 2, 4 or 8
  uint32_t reserved;        // 0
};
static_assert(sizeof(DeltaHeader) == 48);

struct DeltaEntry {
  uint16_t changed;
  uint16_t token_nbytes;
};
static_assert(sizeof(DeltaEntry) == 4);

// Where a segment's parts lie.
struct DeltaSegment {
  int64_t token;    // bytes into the tokens
  int64_t value;    // elements into the values
  int64_t changed;  // elements
};

constexpr int64_t delta_segments(int64_t elements) { return (elements + kDeltaSegment - 1) / kDeltaSegment; }

// The parts of a blob, in bytes from its start.
struct DeltaSizes {
  int64_t segments, tokens_at, values_at, nbytes;
  static DeltaSizes of(int64_t elements, int64_t element_nbytes, int64_t token_nbytes, int64_t changed) {
    DeltaSizes sizes{};
    sizes.segments = delta_segments(elements);
    sizes.tokens_at = int64_t{sizeof(DeltaHeader)} + int64_t{sizeof(DeltaEntry)} * sizes.segments;
    sizes.values_at = (sizes.tokens_at + token_nbytes + 7) / 8 * 8;
    sizes.nbytes = sizes.values_at + changed * element_nbytes;
    return sizes;
  }
};

// Bytes of an array, from its data on.
struct DeltaRange {
  int64_t offset;
  int64_t nbytes;  // whole elements
};

// The elements are those of the ranges, one after the other; both arrays have them at the same places.
struct DeltaInput {
  const std::byte* base = nullptr;
  const std::byte* fresh = nullptr;
  std::vector<DeltaRange> ranges;
  int64_t element_nbytes = 1;
  int64_t limit = -1;  // bytes that the blob may have; -1: any number
};

// What delta_encode() finds: the blob in pieces.
class TM_API DeltaEncoded {
 public:
  int64_t nbytes() const { return sizes_.nbytes; }
  bool within_limit() const { return within_limit_; }  // if not, there is no blob
  void write(std::byte* blob) const;

 private:
  friend Result<DeltaEncoded> delta_encode(const DeltaInput&, const ParallelFor&);
  struct Part {  // of some segments in a row
    int64_t first_segment;
    std::vector<uint8_t> tokens;
    std::vector<std::byte> values;
  };
  bool within_limit_ = true;
  int64_t elements_ = 0, element_nbytes_ = 1, token_nbytes_ = 0, changed_ = 0;
  DeltaSizes sizes_{};
  std::vector<DeltaEntry> directory_;
  std::vector<Part> parts_;  // in order
};

// CPU. `invalid_argument` for an element size that there is not, and ranges that are not whole elements.
TM_API Result<DeltaEncoded> delta_encode(const DeltaInput& input, const ParallelFor& parallel_for = serial_for);

// Fills in the header (and the zeros before the values) of a blob whose directory, tokens and values are there.
TM_API void delta_seal(std::byte* blob, int64_t elements, int64_t element_nbytes, int64_t token_nbytes,
                       int64_t changed);

// A blob that has been looked at: nothing in it leaves `elements` elements, or the blob.
struct DeltaBlob {
  const uint8_t* tokens = nullptr;
  const std::byte* values = nullptr;
  int64_t elements = 0, element_nbytes = 1, token_nbytes = 0, changed = 0;
  std::vector<DeltaSegment> segments;
};

// `corrupt` for what delta_encode() does not make. Bytes of strangers may come here.
TM_API Result<DeltaBlob> delta_open(const std::byte* blob, int64_t nbytes,
                                    const ParallelFor& parallel_for = serial_for);

// CPU. Writes the changed elements to their places in `target`; ranges as of DeltaInput, in an array of any other
// layout. With `base`, an array of the target's layout that is not the target, the other elements come from there.
// `invalid_argument` if the ranges do not have the blob's elements.
TM_API Status delta_apply(const DeltaBlob& blob, std::byte* target, const std::vector<DeltaRange>& ranges,
                          const ParallelFor& parallel_for = serial_for, const std::byte* base = nullptr);

}  // namespace torch_mooncake::kv
