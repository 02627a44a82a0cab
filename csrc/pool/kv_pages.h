// Pages of a paged cache as the pool's objects: page p of every layer, one layer after the other, is one object. Bytes
// go straight between the cache and the pool's memory, whatever the number of layers and however scattered a page is.
//
// Owns nothing. Threads: any, for different pages. All ids are checked before the first byte moves.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "common/api.h"
#include "pool/client.h"

namespace torch_mooncake::pool {

struct PagePiece {  // of page p: [base + p * stride_nbytes, + nbytes)
  std::byte* base = nullptr;
  uint64_t stride_nbytes = 0;
  uint64_t nbytes = 0;
};
struct PagedLayer {  // its pieces one after the other are [offset, offset + nbytes) of an object
  std::vector<PagePiece> pieces;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
};
class TM_API PagedMemory {
 public:
  PagedMemory(std::vector<std::vector<PagePiece>> layers, uint64_t num_pages);
  const std::vector<PagedLayer>& layers() const { return layers_; }
  uint64_t object_nbytes() const { return object_nbytes_; }
  Status check(std::span<const int64_t> pages) const;  // out_of_bounds names the first that does not exist

 private:
  std::vector<PagedLayer> layers_;
  uint64_t num_pages_, object_nbytes_ = 0;
};

// Puts page pages[i] under keys[i], sealed, with metas[i]; in the order given. One outcome a key; after an error that
// would meet the others too (a full pool, the deadline) the rest is not tried and has the same outcome.
TM_API std::vector<Result<PutOutcome>> put_pages(Client& client, std::span<const std::string> keys,
                                                 std::span<const std::string> metas, const PagedMemory& memory,
                                                 std::span<const int64_t> pages, Deadline deadline);

// Reads object i into page pages[i]. Returns how many were read: it stops, without an error, before the first that has
// been evicted since it was located. corrupt: an object has another size than a page. On an error the pages' content is
// unspecified.
TM_API Result<size_t> read_pages(Client& client, std::span<const ObjectPtr> objects, const PagedMemory& memory,
                                 std::span<const int64_t> pages, Deadline deadline);

// The same for layers [first, first + count) of each page, in one batch; one outcome a page. key_not_found: evicted
// since it was located, and the content of these layers of that page is unspecified, as after any error.
TM_API std::vector<Status> read_page_layers(Client& client, std::span<const ObjectPtr> objects,
                                            const PagedMemory& memory, size_t first, size_t count,
                                            std::span<const int64_t> pages, Deadline deadline);

}  // namespace torch_mooncake::pool
