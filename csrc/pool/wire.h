// Encoding of the pool's messages: each message lists its fields once (`fields(ar)`), and that list is walked by a
// writer or by a bounds-checked reader. A body starts with the format's version; a decode succeeds only if the version
// is ours, every bound holds and nothing is left over.
#pragma once

#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/bytes.h"
#include "common/status.h"
#include "pool/types.h"

namespace torch_mooncake::pool {

inline constexpr uint8_t kMessageFormat = 7;

// The last valid value of each enum that travels.
constexpr auto last_value(Kind) { return Kind::sealed; }
constexpr auto last_value(Tier) { return Tier::ssd; }
constexpr auto last_value(Pin) { return Pin::hard; }
constexpr auto last_value(KeyChange) { return KeyChange::moved; }
constexpr auto last_value(IfExists) { return IfExists::error; }
constexpr auto last_value(ExtentState) { return ExtentState::limbo; }
constexpr auto last_value(Code) { return Code::internal; }

class FieldWriter {
 public:
  template <typename T>
  FieldWriter& operator()(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      out_.put<uint8_t>(value);
    } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
      out_.put(value);
    } else if constexpr (std::is_same_v<T, Id128>) {
      out_.put(value);
    } else {
      const_cast<T&>(value).fields(*this);
    }
    return *this;
  }
  FieldWriter& operator()(const std::string& text, size_t) {
    out_.put(std::string_view(text));
    return *this;
  }
  FieldWriter& operator()(std::string_view text, size_t) {
    out_.put(text);
    return *this;
  }
  FieldWriter& operator()(const ExtentRef& ref) { return (*this)(ref.index)(ref.generation); }
  FieldWriter& operator()(const Piece& p) { return (*this)(p.segment)(p.offset)(p.nbytes); }
  FieldWriter& operator()(const Version& v) { return (*this)(v.view)(v.counter); }
  template <typename T>
  FieldWriter& operator()(const std::vector<T>& items, size_t) {
    out_.put(static_cast<uint32_t>(items.size()));
    for (const T& item : items) {
      if constexpr (std::is_convertible_v<T, std::string_view>) {
        (*this)(item, 0);
      } else {
        (*this)(item);
      }
    }
    return *this;
  }
  template <typename T>
  FieldWriter& operator()(const std::optional<T>& value) {
    out_.put<uint8_t>(value.has_value());
    if (value) (*this)(*value);
    return *this;
  }
  void require(bool) {}
  std::string take() { return out_.take(); }

 private:
  ByteWriter out_;
};

class FieldReader {
 public:
  explicit FieldReader(std::string_view in) : in_(in) {}
  template <typename T>
  FieldReader& operator()(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      const auto byte = in_.get<uint8_t>();
      require(byte <= 1);
      value = byte == 1;
    } else if constexpr (std::is_enum_v<T>) {
      const auto raw = in_.get<std::underlying_type_t<T>>();
      require(raw <= static_cast<std::underlying_type_t<T>>(last_value(T{})));
      value = static_cast<T>(raw);
    } else if constexpr (std::is_arithmetic_v<T>) {
      value = in_.get<T>();
    } else if constexpr (std::is_same_v<T, Id128>) {
      value = in_.get_id();
    } else {
      value.fields(*this);
    }
    return *this;
  }
  FieldReader& operator()(std::string& text, size_t limit) {
    const auto view = in_.get_bytes();
    require(view.size() <= limit);
    if (ok()) text.assign(view);
    return *this;
  }
  FieldReader& operator()(std::string_view& text, size_t limit) {  // of the body, which has to stay
    text = in_.get_bytes();
    require(text.size() <= limit);
    return *this;
  }
  FieldReader& operator()(ExtentRef& ref) { return (*this)(ref.index)(ref.generation); }
  FieldReader& operator()(Piece& p) { return (*this)(p.segment)(p.offset)(p.nbytes); }
  FieldReader& operator()(Version& v) { return (*this)(v.view)(v.counter); }
  template <typename T>
  FieldReader& operator()(std::vector<T>& items, size_t limit) {
    const uint32_t n = in_.get_count(1);
    require(n <= limit);
    items.clear();
    for (uint32_t i = 0; i < n && ok(); ++i) {
      items.emplace_back();
      if constexpr (std::is_convertible_v<T, std::string_view>) {
        (*this)(items.back(), kMaxKeyBytes);
      } else {
        (*this)(items.back());
      }
    }
    return *this;
  }
  template <typename T>
  FieldReader& operator()(std::optional<T>& value) {
    bool has = false;
    (*this)(has);
    value.reset();
    if (has && ok()) (*this)(value.emplace());
    return *this;
  }
  void require(bool holds) { sound_ = sound_ && holds; }
  bool ok() const { return sound_ && in_.ok(); }
  bool done() const { return sound_ && in_.done(); }

 private:
  ByteReader in_;
  bool sound_ = true;
};

template <typename T>
std::string encode(const T& message) {
  FieldWriter out;
  out(kMessageFormat);
  out(message);
  return out.take();
}

template <typename T>
Result<T> decode(std::string_view body) {
  if (!body.empty() && static_cast<uint8_t>(body[0]) != kMessageFormat)
    return {Code::version_mismatch, "pool message of format " + std::to_string(static_cast<uint8_t>(body[0])) +
                                        ", this side speaks " + std::to_string(kMessageFormat)};
  FieldReader in(body);
  uint8_t format = 0;
  T message;
  in(format)(message);
  if (!in.done()) return {Code::invalid_argument, std::string("malformed pool message ") + T::kName};
  return message;
}

}  // namespace torch_mooncake::pool
