// Little-endian encoding of control messages. A ByteReader never reads past its view: after a short or absurd
// field `ok()` is false, every later get returns zero or empty, and the caller checks once at the end.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace torch_mooncake {

using Id128 = std::array<uint8_t, 16>;  // random identity: engine, segment, transaction, …

class ByteWriter {
 public:
  template <typename T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T> ByteWriter& put(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);  // little-endian hosts only
    return *this;
  }
  ByteWriter& put(const Id128& id) { return raw({reinterpret_cast<const char*>(id.data()), id.size()}); }
  // Length-prefixed (u32) bytes.
  ByteWriter& put(std::string_view bytes) {
    put(static_cast<uint32_t>(bytes.size()));
    return raw(bytes);
  }
  ByteWriter& raw(std::string_view bytes) {
    out_.append(bytes);
    return *this;
  }
  size_t size() const { return out_.size(); }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

class ByteReader {
 public:
  explicit ByteReader(std::string_view in) : in_(in) {}
  template <typename T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T> T get() {
    T value{};
    if (in_.size() < sizeof(T)) {
      fail();
      return value;
    }
    std::memcpy(&value, in_.data(), sizeof value);
    in_.remove_prefix(sizeof value);
    return value;
  }
  Id128 get_id() {
    Id128 id{};
    if (in_.size() < id.size()) {
      fail();
      return id;
    }
    std::memcpy(id.data(), in_.data(), id.size());
    in_.remove_prefix(id.size());
    return id;
  }
  // A view into the input, valid as long as it.
  std::string_view get_bytes() {
    auto n = get<uint32_t>();
    if (n > in_.size()) {
      fail();
      return {};
    }
    auto view = in_.substr(0, n);
    in_.remove_prefix(n);
    return view;
  }
  std::string get_string() { return std::string(get_bytes()); }
  // An element count that cannot exceed what the rest of the input could hold.
  uint32_t get_count(size_t min_element_bytes) {
    auto n = get<uint32_t>();
    if (min_element_bytes != 0 && n > in_.size() / min_element_bytes) {
      fail();
      return 0;
    }
    return n;
  }
  std::string_view rest() const { return in_; }
  bool ok() const { return ok_; }
  bool done() const { return ok_ && in_.empty(); }  // everything read, nothing over

 private:
  void fail() {
    ok_ = false;
    in_ = {};
  }
  std::string_view in_;
  bool ok_ = true;
};

}  // namespace torch_mooncake
