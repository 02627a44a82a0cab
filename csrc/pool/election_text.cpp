#include "pool/election_text.h"

#include <charconv>

namespace torch_mooncake::pool {
namespace {

constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

}  // namespace

std::string to_base64(std::string_view bytes) {
  std::string out;
  for (size_t at = 0; at < bytes.size(); at += 3) {
    const size_t n = std::min<size_t>(3, bytes.size() - at);
    uint32_t word = 0;
    for (size_t i = 0; i < 3; ++i) word = word << 8 | (i < n ? static_cast<uint8_t>(bytes[at + i]) : 0);
    for (size_t i = 0; i < 4; ++i) out += i <= n ? kDigits[word >> (18 - 6 * i) & 63] : '=';
  }
  return out;
}

std::string from_base64(std::string_view text) {
  std::string out;
  uint32_t word = 0;
  int bits = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) break;
    word = word << 6 | static_cast<uint32_t>(digit);
    bits += 6;
    if (bits < 8) continue;
    bits -= 8;
    out += static_cast<char>(word >> bits & 255);
  }
  return out;
}

std::optional<std::string> json_field(std::string_view json, std::string_view name) {
  const std::string quoted = '"' + std::string(name) + '"';
  for (size_t at = json.find(quoted); at != std::string_view::npos; at = json.find(quoted, at + 1)) {
    size_t from = json.find_first_not_of(" \t\r\n", at + quoted.size());
    if (from == std::string_view::npos || json[from] != ':') continue;  // a text, not a name
    from = json.find_first_not_of(" \t\r\n", from + 1);
    if (from == std::string_view::npos) return std::nullopt;
    const bool text = json[from] == '"';
    const size_t to = text ? json.find('"', ++from) : json.find_first_of(",}] \t\r\n", from);
    if (to == std::string_view::npos) return std::nullopt;
    return std::string(json.substr(from, to - from));
  }
  return std::nullopt;
}

std::optional<uint64_t> json_number(std::string_view json, std::string_view name) {
  const auto text = json_field(json, name);
  uint64_t number = 0;
  if (!text || text->empty()) return std::nullopt;
  const char* end = text->data() + text->size();
  if (std::from_chars(text->data(), end, number).ptr != end) return std::nullopt;
  return number;
}

}  // namespace torch_mooncake::pool
