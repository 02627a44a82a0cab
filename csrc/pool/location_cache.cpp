#include "pool/location_cache.h"

#include <utility>

namespace torch_mooncake::pool {

namespace {

size_t hash_of(std::string_view key) { return std::hash<std::string_view>()(key); }

}  // namespace

std::unordered_map<size_t, LocationCache::Place>::iterator LocationCache::Generation::find(std::string_view key) {
  const auto it = places.find(hash_of(key));
  return it != places.end() && it->second.object->info().key == key ? it : places.end();
}

size_t LocationCache::nbytes(const Place& place) {
  const ObjectInfo& info = place.object->info();
  size_t n = 512 + info.key.size() + info.label.size() + info.meta.size();
  for (const PartInfo& part : info.parts) n += 256 + part.meta.size();
  for (const Replica& replica : info.replicas) n += 128 + 2 * replica.pieces.size() * sizeof(Piece);
  return n;
}

std::optional<LocationCache::Place> LocationCache::find(std::string_view key) {
  Generation dropped;  // freed without the lock
  std::lock_guard lock(mutex_);
  if (const auto it = young_.find(key); it != young_.places.end()) return it->second;
  const auto it = old_.find(key);
  if (it == old_.places.end()) return std::nullopt;
  Place place = std::move(it->second);
  old_.bytes -= nbytes(place);
  old_.places.erase(it);
  insert(place, &dropped);
  return place;
}

void LocationCache::add(Place place) {
  Generation dropped;
  std::lock_guard lock(mutex_);
  insert(std::move(place), &dropped);
}

void LocationCache::insert(Place place, Generation* dropped) {
  const size_t size = nbytes(place);
  if (size > bytes_ / 8) return;
  if (young_.places.size() >= entries_ / 2 || young_.bytes + size > bytes_ / 2)
    *dropped = std::exchange(old_, std::exchange(young_, {}));
  Place& mine = young_.places[hash_of(place.object->info().key)];
  if (mine.object) young_.bytes -= nbytes(mine);
  young_.bytes += size;
  mine = std::move(place);
}

void LocationCache::erase(std::string_view key) {
  Place dropped;
  std::lock_guard lock(mutex_);
  for (Generation* generation : {&young_, &old_}) {
    const auto it = generation->find(key);
    if (it == generation->places.end()) continue;
    dropped = std::move(it->second);
    generation->bytes -= nbytes(dropped);
    generation->places.erase(it);
  }
}

void LocationCache::clear() {
  Generation young, old;
  std::lock_guard lock(mutex_);
  std::swap(young, young_);
  std::swap(old, old_);
}

size_t LocationCache::size() const {
  std::lock_guard lock(mutex_);
  return young_.places.size() + old_.places.size();
}

}  // namespace torch_mooncake::pool
