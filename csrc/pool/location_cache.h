// LocationCache: objects of this host that a client has looked up, and the link to the memory they lie in. It says
// where a key was, never that it still is there: whoever uses a location asks the link (generation words,
// Link::counted).
//
// Bounded by entries and by bytes: two generations, of which the older one goes when the younger has filled its half.
// Threads: safe from any.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "pool/client_link.h"

namespace torch_mooncake::pool {

class LocationCache {
 public:
  struct Place {
    ObjectPtr object;
    LinkPtr link;
  };
  static constexpr size_t kEntries = 1 << 16;
  static constexpr size_t kBytes = 64 << 20;  // of keys, descriptions and pieces

  explicit LocationCache(size_t entries = kEntries, size_t bytes = kBytes) : entries_(entries), bytes_(bytes) {}
  std::optional<Place> find(std::string_view key);
  void add(Place place);
  void erase(std::string_view key);
  void clear();
  size_t size() const;

 private:
  struct Generation {
    // By the key's hash; of two keys with the same one is there. (A map by strings hashes those it passes, again.)
    std::unordered_map<size_t, Place> places;
    size_t bytes = 0;
    std::unordered_map<size_t, Place>::iterator find(std::string_view key);
  };
  static size_t nbytes(const Place& place);
  void insert(Place place, Generation* dropped);

  const size_t entries_, bytes_;
  mutable std::mutex mutex_;
  Generation young_, old_;
};

}  // namespace torch_mooncake::pool
