// What lies on an SSD: segment files of one size, each a header block, then records one after the other, and, once
// sealed, an index of them with a footer in its last block. Everything is in blocks of 4 KiB.
//
// A record is its head (fixed fields, key, label, metadata), then the bytes: right behind it if they are few, from the
// next block on otherwise. It names its store, segment and block, so that nothing left in a reused file passes for it.
// The head carries a crc32c of itself and one of the bytes.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "pool/types.h"

namespace torch_mooncake::pool::ssd {

inline constexpr uint64_t kBlock = 4096;

// Where a record is. Segment numbers never repeat in a store, so neither do spots.
struct Spot {
  uint64_t segment = 0;
  uint32_t block = 0, blocks = 0;
  auto operator<=>(const Spot&) const = default;
  uint64_t offset() const { return block * kBlock; }
  uint64_t nbytes() const { return blocks * kBlock; }
};

// What a record says of its object's part.
struct Record {
  ExtentRef name;  // what the home calls it, while the memory below lives
  Id128 memory{};  // the donor's memory when it was written
  Id128 boot{};    // of the host, by whose steady clock `committed_ns` is
  std::string key, label, meta;
  Kind kind = Kind::named;
  Pin pin = Pin::none;
  Version version;
  uint32_t part = 0, parts = 1;
  uint64_t nbytes = 0;
  std::optional<uint32_t> crc32c;  // the writer's, if it gave one
  uint64_t ttl_ms = 0;
  int64_t committed_ns = 0;
};

struct Fields {  // of a head, and of an index entry (which has only the key behind it)
  uint32_t magic, crc;
  Id128 store;
  uint64_t segment;
  uint32_t block, blocks;
  uint32_t key_nbytes, label_nbytes, meta_nbytes;
  uint32_t data_offset;  // from the record's start
  uint64_t nbytes;
  uint32_t data_crc, crc32c;
  uint8_t has_crc, kind, pin, zero;
  uint32_t part, parts, name_index;
  uint64_t name_generation;
  uint64_t view, counter;
  uint64_t ttl_ms;
  int64_t committed_ns;
  Id128 memory, boot;
};
static_assert(sizeof(Fields) == 160);

struct SegmentHeader {
  static constexpr uint32_t kMagic = 0x31676573;
  uint32_t magic, crc;
  Id128 store;
  uint64_t number, nbytes;
};
struct Footer {  // in the last block; the index ends before it
  static constexpr uint32_t kMagic = 0x31746f66;
  uint32_t magic, crc;
  Id128 store;
  uint64_t number;
  uint64_t index_offset, index_nbytes;
  uint32_t index_crc, entries;
};
struct Superblock {  // the file "store"
  static constexpr uint32_t kMagic = 0x31647373, kLayout = 1;
  uint32_t magic, crc, layout, zero;
  Id128 store;
  uint64_t segment_bytes;
  uint64_t opens;  // how often it was opened: the upper half of the segment numbers of that time
};

constexpr uint64_t blocks_of(uint64_t nbytes) { return (nbytes + kBlock - 1) / kBlock; }
uint64_t data_offset(const Record& record);
uint64_t blocks_of(const Record& record);  // of the whole record
// Bytes of its index entry.
inline uint64_t index_nbytes(const Record& record) { return sizeof(Fields) + record.key.size(); }

// Writes the head to `out`, which has room for data_offset() bytes and is zeroed behind the head.
void encode_head(const Record& record, const Id128& store, const Spot& spot, uint32_t data_crc, std::byte* out);
struct Head {
  Record record;
  Spot spot;
  uint64_t data_offset = 0;
  uint32_t data_crc = 0;
};
// The record that begins at `at`, of which `nbytes` were read. corrupt: it is none of that store and place.
Result<Head> decode_head(const std::byte* at, size_t nbytes, const Id128& store, uint64_t segment, uint32_t block);
// The length of the head that begins there, if its fixed part could be one: how much decode_head() needs.
std::optional<uint64_t> head_nbytes(const std::byte* at, const Id128& store, uint64_t segment, uint32_t block);

void append_entry(std::string& index, const Record& record, const Id128& store, const Spot& spot, uint64_t data_offset,
                  uint32_t data_crc);
// All entries of an index whose checksum is right. corrupt: it is no index of that segment.
Result<std::vector<Head>> decode_index(std::string_view index, const Id128& store, uint64_t segment);

// The crc32c of a header struct, which lies behind `magic` and `crc`.
template <typename T>
uint32_t checksum_of(const T& t);

}  // namespace torch_mooncake::pool::ssd
