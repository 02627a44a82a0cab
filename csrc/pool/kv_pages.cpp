#include "pool/kv_pages.h"

namespace torch_mooncake::pool {
namespace {

void gather_page(std::span<const PagedLayer> layers, int64_t page, std::vector<iovec>& out) {
  out.clear();
  for (const PagedLayer& layer : layers)
    for (const PagePiece& piece : layer.pieces)
      out.push_back({piece.base + static_cast<uint64_t>(page) * piece.stride_nbytes, piece.nbytes});
}

Status check_read(std::span<const ObjectPtr> objects, const PagedMemory& memory, std::span<const int64_t> pages) {
  TM_TRY(memory.check(pages));
  if (objects.size() != pages.size())
    return {Code::invalid_argument,
            std::to_string(objects.size()) + " objects, " + std::to_string(pages.size()) + " pages"};
  for (const ObjectPtr& object : objects)
    if (object->info().nbytes != memory.object_nbytes())
      return {Code::corrupt, "key '" + object->info().key + "' has " + std::to_string(object->info().nbytes) +
                                 " bytes, a page has " + std::to_string(memory.object_nbytes())};
  return {};
}

}  // namespace

PagedMemory::PagedMemory(std::vector<std::vector<PagePiece>> layers, uint64_t num_pages) : num_pages_(num_pages) {
  for (std::vector<PagePiece>& pieces : layers) {
    PagedLayer& layer = layers_.emplace_back();
    layer.pieces = std::move(pieces);
    layer.offset = object_nbytes_;
    for (const PagePiece& piece : layer.pieces) layer.nbytes += piece.nbytes;
    object_nbytes_ += layer.nbytes;
  }
}

Status PagedMemory::check(std::span<const int64_t> pages) const {
  for (int64_t page : pages)
    if (page < 0 || static_cast<uint64_t>(page) >= num_pages_)
      return {Code::out_of_bounds,
              "page " + std::to_string(page) + " is not in 0.." + std::to_string(static_cast<int64_t>(num_pages_) - 1)};
  return {};
}

std::vector<Result<PutOutcome>> put_pages(Client& client, std::span<const std::string> keys,
                                          std::span<const std::string> metas, const PagedMemory& memory,
                                          std::span<const int64_t> pages, Deadline deadline) {
  Status failed = memory.check(pages);
  if (failed.is_ok() && (keys.size() != pages.size() || keys.size() != metas.size()))
    failed = Status(Code::invalid_argument, std::to_string(keys.size()) + " keys, " + std::to_string(metas.size()) +
                                                " descriptions, " + std::to_string(pages.size()) + " pages");
  PutOptions options;
  options.kind = Kind::sealed;
  std::vector<Result<PutOutcome>> outcomes;
  std::vector<iovec> data;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!failed.is_ok()) {
      outcomes.emplace_back(failed);
      continue;
    }
    gather_page(memory.layers(), pages[i], data);
    outcomes.push_back(client.put(keys[i], metas[i], data, options, deadline));
    if (!outcomes.back().is_ok()) failed = outcomes.back().status();
  }
  return outcomes;
}

Result<size_t> read_pages(Client& client, std::span<const ObjectPtr> objects, const PagedMemory& memory,
                          std::span<const int64_t> pages, Deadline deadline) {
  TM_TRY(check_read(objects, memory, pages));
  std::vector<iovec> out;
  for (size_t i = 0; i < objects.size(); ++i) {
    gather_page(memory.layers(), pages[i], out);
    const Status s = client.read(objects[i], 0, out, deadline);
    if (s.code() == Code::key_not_found) return i;
    if (!s.is_ok()) return s;
  }
  return objects.size();
}

std::vector<Status> read_page_layers(Client& client, std::span<const ObjectPtr> objects, const PagedMemory& memory,
                                     size_t first, size_t count, std::span<const int64_t> pages, Deadline deadline) {
  Status wrong = check_read(objects, memory, pages);
  const size_t have = memory.layers().size();
  if (wrong.is_ok() && (first > have || count > have - first))
    wrong = Status(Code::out_of_bounds, "layers " + std::to_string(first) + " and " + std::to_string(count) +
                                            " in all of " + std::to_string(have));
  if (!wrong.is_ok()) return std::vector<Status>(objects.size(), wrong);
  if (!count) return std::vector<Status>(objects.size());
  const auto layers = std::span(memory.layers()).subspan(first, count);
  std::vector<std::vector<iovec>> out(objects.size());
  std::vector<ReadEntry> entries;
  entries.reserve(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    gather_page(layers, pages[i], out[i]);
    entries.push_back({objects[i], layers.front().offset, out[i]});
  }
  return client.read_many(entries, deadline);
}

}  // namespace torch_mooncake::pool
