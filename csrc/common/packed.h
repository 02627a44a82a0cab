// Fields of long lists, side by side without padding, little-endian: a list is sized once and then filled or read in
// one pass, where a ByteWriter would grow its buffer field by field. For callers who have made sure of the room.
#pragma once

#include <cstring>

namespace torch_mooncake {

// Writes the values one after the other; returns where the next goes.
template <typename... T>
char* store(char* at, T... values) {
  ((std::memcpy(at, &values, sizeof values), at += sizeof values), ...);
  return at;
}

template <typename... T>
const char* load(const char* at, T&... values) {
  ((std::memcpy(&values, at, sizeof values), at += sizeof values), ...);
  return at;
}

}  // namespace torch_mooncake
