#include "pool/ssd/format.h"

#include <algorithm>
#include <cstring>

#include "common/crc32c.h"

namespace torch_mooncake::pool::ssd {
namespace {

constexpr uint32_t kRecordMagic = 0x31636572, kEntryMagic = 0x31746e65;
constexpr size_t kCrcFrom = 2 * sizeof(uint32_t);

uint64_t text_nbytes(const Record& r) { return r.key.size() + r.label.size() + r.meta.size(); }

Fields fields_of(uint32_t magic, const Record& r, const Id128& store, const Spot& spot, uint64_t offset,
                 uint32_t data_crc) {
  Fields f{};
  f.magic = magic;
  f.store = store;
  f.segment = spot.segment;
  f.block = spot.block;
  f.blocks = spot.blocks;
  f.key_nbytes = static_cast<uint32_t>(r.key.size());
  f.label_nbytes = static_cast<uint32_t>(r.label.size());
  f.meta_nbytes = static_cast<uint32_t>(r.meta.size());
  f.data_offset = static_cast<uint32_t>(offset);
  f.nbytes = r.nbytes;
  f.data_crc = data_crc;
  f.crc32c = r.crc32c.value_or(0);
  f.has_crc = r.crc32c.has_value();
  f.kind = static_cast<uint8_t>(r.kind);
  f.pin = static_cast<uint8_t>(r.pin);
  f.part = r.part;
  f.parts = r.parts;
  f.name_index = r.name.index;
  f.name_generation = r.name.generation;
  f.view = r.version.view;
  f.counter = r.version.counter;
  f.ttl_ms = r.ttl_ms;
  f.committed_ns = r.committed_ns;
  f.memory = r.memory;
  f.boot = r.boot;
  return f;
}

bool sound(const Fields& f) {
  const uint64_t bytes = uint64_t{f.blocks} * kBlock;
  return f.key_nbytes > 0 && f.key_nbytes <= kMaxKeyBytes && f.label_nbytes <= kMaxMetaBytes &&
         f.meta_nbytes <= kMaxMetaBytes && f.kind <= static_cast<uint8_t>(Kind::sealed) &&
         f.pin <= static_cast<uint8_t>(Pin::hard) && f.parts > 0 && f.part < f.parts && f.data_offset >= sizeof f &&
         f.data_offset <= bytes && f.nbytes <= bytes - f.data_offset;
}

Head head_of(const Fields& f) {
  Head h;
  Record& r = h.record;
  r.name = {f.name_index, f.name_generation};
  r.memory = f.memory;
  r.boot = f.boot;
  r.kind = static_cast<Kind>(f.kind);
  r.pin = static_cast<Pin>(f.pin);
  r.version = {f.view, f.counter};
  r.part = f.part;
  r.parts = f.parts;
  r.nbytes = f.nbytes;
  if (f.has_crc) r.crc32c = f.crc32c;
  r.ttl_ms = f.ttl_ms;
  r.committed_ns = f.committed_ns;
  h.spot = {f.segment, f.block, f.blocks};
  h.data_offset = f.data_offset;
  h.data_crc = f.data_crc;
  return h;
}

Status no_record(const char* why) { return {Code::corrupt, std::string("SSD record: ") + why}; }

}  // namespace

uint64_t data_offset(const Record& record) {
  const uint64_t head = sizeof(Fields) + text_nbytes(record);
  return record.nbytes < kSlabLimit ? (head + 63) / 64 * 64 : blocks_of(head) * kBlock;
}

uint64_t blocks_of(const Record& record) { return blocks_of(data_offset(record) + record.nbytes); }

void encode_head(const Record& r, const Id128& store, const Spot& spot, uint32_t data_crc, std::byte* out) {
  const Fields f = fields_of(kRecordMagic, r, store, spot, data_offset(r), data_crc);
  std::byte* at = out;
  auto append = [&](const void* from, size_t n) {
    if (n) std::memcpy(at, from, n);
    at += n;
  };
  append(&f, sizeof f);
  append(r.key.data(), r.key.size());
  append(r.label.data(), r.label.size());
  append(r.meta.data(), r.meta.size());
  const uint32_t crc = crc32c(out + kCrcFrom, static_cast<size_t>(at - out) - kCrcFrom);
  std::memcpy(out + offsetof(Fields, crc), &crc, sizeof crc);
}

std::optional<uint64_t> head_nbytes(const std::byte* at, const Id128& store, uint64_t segment, uint32_t block) {
  Fields f;
  std::memcpy(&f, at, sizeof f);
  if (f.magic != kRecordMagic || f.store != store || f.segment != segment || f.block != block || !sound(f)) return {};
  return sizeof f + uint64_t{f.key_nbytes} + f.label_nbytes + f.meta_nbytes;
}

Result<Head> decode_head(const std::byte* at, size_t nbytes, const Id128& store, uint64_t segment, uint32_t block) {
  if (nbytes < sizeof(Fields)) return no_record("cut off");
  const auto head = head_nbytes(at, store, segment, block);
  if (!head) return no_record("there is none at its place");
  Fields f;
  std::memcpy(&f, at, sizeof f);
  if (*head > nbytes || *head > f.data_offset) return no_record("its head is cut off");
  if (f.crc != crc32c(at + kCrcFrom, *head - kCrcFrom)) return no_record("the checksum of its head does not match");
  Head h = head_of(f);
  const char* text = reinterpret_cast<const char*>(at + sizeof f);
  h.record.key.assign(text, f.key_nbytes);
  h.record.label.assign(text + f.key_nbytes, f.label_nbytes);
  h.record.meta.assign(text + f.key_nbytes + f.label_nbytes, f.meta_nbytes);
  return h;
}

void append_entry(std::string& index, const Record& r, const Id128& store, const Spot& spot, uint64_t offset,
                  uint32_t data_crc) {
  const Fields f = fields_of(kEntryMagic, r, store, spot, offset, data_crc);
  index.append(reinterpret_cast<const char*>(&f), sizeof f);
  index += r.key;
}

Result<std::vector<Head>> decode_index(std::string_view index, const Id128& store, uint64_t segment) {
  std::vector<Head> out;
  while (!index.empty()) {
    Fields f;
    if (index.size() < sizeof f) return no_record("the index is cut off");
    std::memcpy(&f, index.data(), sizeof f);
    index.remove_prefix(sizeof f);
    if (f.magic != kEntryMagic || f.store != store || f.segment != segment || !sound(f) || f.key_nbytes > index.size())
      return no_record("an entry of the index is none");
    out.push_back(head_of(f));
    out.back().record.key = index.substr(0, f.key_nbytes);
    index.remove_prefix(f.key_nbytes);
  }
  return out;
}

template <typename T>
uint32_t checksum_of(const T& t) {
  return crc32c(reinterpret_cast<const std::byte*>(&t) + kCrcFrom, sizeof t - kCrcFrom);
}
template uint32_t checksum_of(const SegmentHeader&);
template uint32_t checksum_of(const Footer&);
template uint32_t checksum_of(const Superblock&);

}  // namespace torch_mooncake::pool::ssd
