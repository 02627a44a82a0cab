#include "pool/kv_pages.h"

namespace torch_mooncake::pool {
namespace {

void gather_page(const PagedMemory& memory, int64_t page, std::vector<iovec>& out) {
  out.clear();
  for (const PagedLayer& layer : memory.layers)
    out.push_back({layer.base + static_cast<uint64_t>(page) * layer.stride_nbytes, memory.page_nbytes});
}

}  // namespace

Status PagedMemory::check(std::span<const int64_t> pages) const {
  for (int64_t page : pages)
    if (page < 0 || static_cast<uint64_t>(page) >= num_pages)
      return {Code::out_of_bounds,
              "page " + std::to_string(page) + " is not in 0.." + std::to_string(static_cast<int64_t>(num_pages) - 1)};
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
    gather_page(memory, pages[i], data);
    outcomes.push_back(client.put(keys[i], metas[i], data, options, deadline));
    if (!outcomes.back().is_ok()) failed = outcomes.back().status();
  }
  return outcomes;
}

Result<size_t> read_pages(Client& client, std::span<const ObjectPtr> objects, const PagedMemory& memory,
                          std::span<const int64_t> pages, Deadline deadline) {
  TM_TRY(memory.check(pages));
  if (objects.size() != pages.size())
    return {Code::invalid_argument,
            std::to_string(objects.size()) + " objects, " + std::to_string(pages.size()) + " pages"};
  for (const ObjectPtr& object : objects)
    if (object->info().nbytes != memory.object_nbytes())
      return {Code::corrupt, "key '" + object->info().key + "' has " + std::to_string(object->info().nbytes) +
                                 " bytes, a page has " + std::to_string(memory.object_nbytes())};
  std::vector<iovec> out;
  for (size_t i = 0; i < objects.size(); ++i) {
    gather_page(memory, pages[i], out);
    const Status s = client.read(objects[i], 0, out, deadline);
    if (s.code() == Code::key_not_found) return i;
    if (!s.is_ok()) return s;
  }
  return objects.size();
}

}  // namespace torch_mooncake::pool
