#include "kv/pages.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

using namespace torch_mooncake;
using namespace torch_mooncake::kv;

namespace {

std::vector<std::byte> noise(size_t nbytes, uint32_t seed) {
  std::vector<std::byte> bytes(nbytes);
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < nbytes; i += 8) {
    uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, nbytes - i));
  }
  return bytes;
}

std::vector<int64_t> some_pages(int64_t num_pages, int64_t count, uint32_t seed) {
  std::vector<int64_t> ids(num_pages);
  for (int64_t i = 0; i < num_pages; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
  ids.resize(count);
  return ids;
}

// Two threads, alternating chunks: enough to show that chunks neither overlap nor leave gaps.
void two_threads(int64_t n, int64_t grain, const ParallelBody& fn) {
  auto half = [&](int64_t first) {
    for (int64_t begin = first * grain; begin < n; begin += 2 * grain) fn(begin, std::min(n, begin + grain));
  };
  std::thread other(half, 1);
  half(0);
  other.join();
}

}  // namespace

TEST_CASE("gather then scatter gives back every byte, for any page size and alignment") {
  for (int64_t page : {1, 3, 16, 63, 127, 128, 129, 200, 1000, 4096, 4097, 16384, 20000, 65536 + 7, (1 << 20) + 333}) {
    for (int64_t skew : {0, 1, 37}) {
      // Small ones stay under the non-temporal threshold, large ones pass it.
      int64_t num_pages = std::max<int64_t>(8, std::min<int64_t>(page < 4096 ? 3000 : 12000, (48 << 20) / page)),
              n = num_pages * 3 / 4;
      int64_t stride = page + skew;
      CAPTURE(page);
      CAPTURE(skew);
      auto pool = noise(num_pages * stride + skew, 1);
      auto ids = some_pages(num_pages, n, 2);
      std::vector<std::byte> list(n * page + skew + 64, std::byte{0xAA});
      PageLayer layer{pool.data() + skew, stride, list.data() + skew, page};
      PageIds page_ids{ids.data(), n, true};
      REQUIRE(gather_pages({&layer, 1}, page_ids, num_pages, page, two_threads).is_ok());
      for (int64_t i = 0; i < n; ++i)
        REQUIRE(std::memcmp(layer.pages + i * page, layer.pool + ids[i] * stride, page) == 0);
      for (int64_t i = 0; i < 64; ++i) REQUIRE(list[skew + n * page + i] == std::byte{0xAA});

      auto other = noise(pool.size(), 3);
      auto expected = other;
      for (int64_t i = 0; i < n; ++i)
        std::memcpy(expected.data() + skew + ids[i] * stride, layer.pages + i * page, page);
      layer.pool = other.data() + skew;
      REQUIRE(scatter_pages({&layer, 1}, page_ids, num_pages, page, two_threads).is_ok());
      REQUIRE(other == expected);  // the chosen pages, and no byte between or beside them
    }
  }
}

TEST_CASE("layers and int32 ids") {
  constexpr int64_t kLayers = 5, kPages = 40, kPage = 96;
  auto pool = noise(kLayers * kPages * kPage, 4);
  std::vector<int32_t> ids{39, 0, 7, 7, 12};
  std::vector<std::byte> list(kLayers * ids.size() * kPage);
  std::vector<PageLayer> layers;
  for (int64_t l = 0; l < kLayers; ++l)
    layers.push_back({pool.data() + l * kPages * kPage, kPage, list.data() + l * ids.size() * kPage, kPage});
  REQUIRE(gather_pages(layers, {ids.data(), 5, false}, kPages, kPage).is_ok());
  for (int64_t l = 0; l < kLayers; ++l)
    for (size_t i = 0; i < ids.size(); ++i)
      CHECK(std::memcmp(layers[l].pages + i * kPage, layers[l].pool + ids[i] * kPage, kPage) == 0);
}

TEST_CASE("a bad id changes nothing and is named") {
  constexpr int64_t kPage = 32;
  auto pool = noise(4 * kPage, 5);
  auto list = noise(3 * kPage, 6);
  auto pool_before = pool, list_before = list;
  PageLayer layer{pool.data(), kPage, list.data(), kPage};
  for (int64_t bad : {int64_t{4}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    std::vector<int64_t> ids{0, 1, bad};
    for (auto* verb : {&gather_pages, &scatter_pages}) {
      Status status = (*verb)({&layer, 1}, {ids.data(), 3, true}, 4, kPage, serial_for);
      CHECK(status.code() == Code::out_of_bounds);
      CHECK(status.message() == "page_ids[2] is " + std::to_string(bad) + ", not in [0, 4)");
    }
  }
  std::vector<int64_t> twice{3, 1, 3};
  Status status = scatter_pages({&layer, 1}, {twice.data(), 3, true}, 4, kPage);
  CHECK(status.code() == Code::invalid_argument);
  CHECK(status.message().find("3 twice, at positions 0 and 2") != std::string::npos);
  CHECK(pool == pool_before);
  CHECK(list == list_before);
}

TEST_CASE("overlapping destinations are refused, empty work is done") {
  std::vector<std::byte> pool(64), list(64);
  std::vector<int64_t> ids{0, 1};
  PageLayer overlapping{pool.data(), 16, list.data(), 32};
  CHECK(scatter_pages({&overlapping, 1}, {ids.data(), 2, true}, 2, 32).code() == Code::invalid_argument);
  CHECK(gather_pages({&overlapping, 1}, {ids.data(), 2, true}, 2, 32).is_ok());  // reading them is harmless
  CHECK(gather_pages({}, {ids.data(), 2, true}, 2, 32).is_ok());
  CHECK(gather_pages({&overlapping, 1}, {nullptr, 0, true}, 0, 32).is_ok());
  CHECK(scatter_pages({&overlapping, 1}, {ids.data(), 2, true}, 2, 0).is_ok());
}
