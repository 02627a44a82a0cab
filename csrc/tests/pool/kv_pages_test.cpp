// Pages of paged caches of any layout as objects: stored and read whole, read by layers, gone in between.
#include "pool/kv_pages.h"

#include "pool/node_fixture.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;
using namespace torch_mooncake::pool::test;

namespace {

constexpr size_t kPages = 6, kLayers = 3, kPiece = 40'000;  // more than rides inside a message

Deadline soon(int64_t ms = 20'000) { return Deadline::after_ms(ms); }

// Each layer of a page is two pieces: one in a buffer ordered by layer, one in a buffer ordered by page.
struct Cache {
  explicit Cache(uint64_t number) : outer(pattern(number, kBytes)), inner(pattern(number + 1, kBytes)) {}
  PagedMemory memory() {
    std::vector<std::vector<PagePiece>> layers;
    for (size_t layer = 0; layer < kLayers; ++layer)
      layers.push_back({{at(outer, layer * kPages), kPiece, kPiece}, {at(inner, layer), kLayers * kPiece, kPiece}});
    return {layers, kPages};
  }
  std::string layer(size_t layer, size_t page) const {
    return outer.substr((layer * kPages + page) * kPiece, kPiece) +
           inner.substr((page * kLayers + layer) * kPiece, kPiece);
  }
  static std::byte* at(std::string& buffer, size_t piece) {
    return reinterpret_cast<std::byte*>(buffer.data()) + piece * kPiece;
  }
  static constexpr size_t kBytes = kPages * kLayers * kPiece;
  std::string outer, inner;
};

std::vector<ObjectPtr> located(Client& client, const std::vector<std::string>& keys) {
  std::vector<ObjectPtr> out;
  for (auto& object : client.locate_many(keys, soon())) {
    REQUIRE_MESSAGE(object.is_ok(), object.status().to_string());
    out.push_back(*object);
  }
  return out;
}

const std::vector<std::string> kNames = {"a", "b", "c"}, kMetas = {"1", "2", "3"};

}  // namespace

TEST_CASE("pages are read by layers, on their host and from elsewhere") {
  Node node(64 << 20);
  auto here = connect(node), far = connect(node.tcp_address, "host-b");
  Cache source(10);
  const PagedMemory from = source.memory();
  REQUIRE(from.object_nbytes() == kLayers * 2 * kPiece);
  for (auto& outcome : put_pages(*here, kNames, kMetas, from, std::vector<int64_t>{5, 0, 3}, soon())) {
    REQUIRE_MESSAGE(outcome.is_ok(), outcome.status().to_string());
    CHECK(outcome->stored);
  }
  for (Client* client : {here.get(), far.get()}) {
    const auto objects = located(*client, kNames);
    Cache target(70);
    const Cache before = target;
    const PagedMemory to = target.memory();
    const std::vector<int64_t> pages = {1, 2, 4};
    for (auto [first, count] : {std::pair<size_t, size_t>{1, 1}, {0, 1}, {2, 1}, {0, 0}, {3, 0}}) {
      for (const Status& s : read_page_layers(*client, objects, to, first, count, pages, soon()))
        REQUIRE_MESSAGE(s.is_ok(), s.to_string());
      if (first != 1) continue;
      CHECK(target.layer(1, 1) == source.layer(1, 5));
      CHECK(target.layer(0, 1) == before.layer(0, 1));  // of no other layer anything was written
      CHECK(target.layer(2, 4) == before.layer(2, 4));
    }
    for (size_t layer = 0; layer < kLayers; ++layer) {
      CHECK(target.layer(layer, 1) == source.layer(layer, 5));
      CHECK(target.layer(layer, 2) == source.layer(layer, 0));
      CHECK(target.layer(layer, 4) == source.layer(layer, 3));
      for (size_t page : {0, 3, 5}) CHECK(target.layer(layer, page) == before.layer(layer, page));
    }
    Cache whole(90);
    const auto read = read_pages(*client, objects, whole.memory(), pages, soon());
    REQUIRE_MESSAGE(read.is_ok(), read.status().to_string());
    CHECK(*read == 3);
    CHECK(whole.layer(2, 4) == source.layer(2, 3));
    CHECK(whole.layer(0, 1) == source.layer(0, 5));
  }
}

TEST_CASE("what is gone, wrong or too large is told for each page, and nothing else is written") {
  Node node(64 << 20);
  auto client = connect(node);
  Cache source(10), target(50);
  const Cache before = target;
  const PagedMemory to = target.memory();
  put_pages(*client, kNames, kMetas, source.memory(), std::vector<int64_t>{0, 1, 2}, soon());
  auto objects = located(*client, kNames);
  REQUIRE(*client->remove("b", soon()));
  // Other pages take the memory that b had.
  for (int i = 0; i < 200; ++i) put(*client, "other" + std::to_string(i), pattern(1000 + i, kLayers * 2 * kPiece));
  const std::vector<int64_t> pages = {3, 4, 5};
  auto outcomes = read_page_layers(*client, objects, to, 1, 2, pages, soon());
  CHECK(outcomes[1].code() == Code::key_not_found);
  size_t there = 0;
  for (size_t i : {0, 2}) {  // evicted, or whole
    if (!outcomes[i].is_ok()) {
      CHECK(outcomes[i].code() == Code::key_not_found);
      continue;
    }
    ++there;
    CHECK(target.layer(1, pages[i]) == source.layer(1, i));
    CHECK(target.layer(2, pages[i]) == source.layer(2, i));
  }
  MESSAGE(there << " of 2 pages were still there");
  CHECK(target.layer(0, 3) == before.layer(0, 3));
  auto all = [&](Code code, size_t first, size_t count, const std::vector<int64_t>& ids) {
    for (const Status& s : read_page_layers(*client, objects, to, first, count, ids, soon())) CHECK(s.code() == code);
  };
  all(Code::out_of_bounds, 0, 1, {0, 1, 6});
  all(Code::out_of_bounds, 0, 1, {0, 1, -1});
  all(Code::out_of_bounds, 3, 1, pages);
  all(Code::out_of_bounds, 1, SIZE_MAX, pages);
  all(Code::invalid_argument, 0, 1, {0});
  put(*client, "short", "not a page");
  objects = located(*client, {"short"});
  all(Code::corrupt, 0, 1, {0});
}
