#include "transfer/descriptor.h"

namespace torch_mooncake::transfer {

// Its length is known before, so that there is one allocation: regions are many.
std::string Descriptor::encode() const {
  std::string out;
  auto put = [&](auto value) { out.append(reinterpret_cast<const char*>(&value), sizeof value); };
  auto put_string = [&](std::string_view bytes) {
    put(static_cast<uint32_t>(bytes.size()));
    out.append(bytes);
  };
  constexpr size_t kFixed = 64, kRecord = 8;
  size_t length = kFixed + label.size();
  for (auto& record : access) length += kRecord + record.body.size();
  out.reserve(length);
  put(kMagic), put(kVersion), put(engine), put(kind), put(region), put(generation), put(nbytes);
  put(static_cast<uint8_t>(readable)), put(static_cast<uint8_t>(writable)), put_string(label);
  put(static_cast<uint32_t>(access.size()));
  for (auto& record : access) put(record.kind), put_string(record.body);
  return out;
}

Result<Descriptor> Descriptor::decode(std::string_view bytes) {
  ByteReader in(bytes);
  if (in.get<uint32_t>() != kMagic) return Status(Code::invalid_argument, "these bytes are not a region descriptor");
  if (auto version = in.get<uint16_t>(); in.ok() && version != kVersion)
    return Status(Code::version_mismatch, "region descriptor of version " + std::to_string(version) +
                                              ", this library reads version " + std::to_string(kVersion));
  Descriptor d;
  d.engine = in.get_id();
  d.kind = in.get<MemoryKind>();
  d.region = in.get<uint64_t>();
  d.generation = in.get<uint64_t>();
  d.nbytes = in.get<uint64_t>();
  d.readable = in.get<uint8_t>() != 0;
  d.writable = in.get<uint8_t>() != 0;
  d.label = in.get_string();
  for (uint32_t n = in.get_count(5); n > 0; --n) {
    auto kind = in.get<AccessKind>();
    d.access.push_back({kind, in.get_string()});
  }
  if (!in.done()) return Status(Code::invalid_argument, "region descriptor is cut short or has bytes left over");
  return d;
}

const std::string* Descriptor::find(AccessKind kind) const {
  for (auto& record : access)
    if (record.kind == kind) return &record.body;
  return nullptr;
}

}  // namespace torch_mooncake::transfer
