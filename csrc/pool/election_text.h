// What etcd's HTTP gateway speaks: base64, and JSON of which single fields are read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/api.h"

namespace torch_mooncake::pool {

TM_API std::string to_base64(std::string_view bytes);
TM_API std::string from_base64(std::string_view text);  // up to the first character that is none

// The first member of this name at any depth, a text (without its quotes) or a number, true or false, as it is written.
// For answers whose texts are numbers and base64: nothing is unescaped.
TM_API std::optional<std::string> json_field(std::string_view json, std::string_view name);
TM_API std::optional<uint64_t> json_number(std::string_view json, std::string_view name);  // also in quotes

}  // namespace torch_mooncake::pool
