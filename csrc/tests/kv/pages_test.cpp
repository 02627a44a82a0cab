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

// Pages in a pool by id, and one after the other in a list.
PageCopy pool_to_list(const PageIds& ids, int64_t num_pages, int64_t pool_stride, int64_t page) {
  PageCopy copy;
  copy.page.run_nbytes = page;
  copy.src_ids = ids;
  copy.dst_ids = {nullptr, ids.count};
  copy.src_pages = num_pages;
  copy.dst_pages = ids.count;
  copy.src_page_stride = pool_stride;
  copy.dst_page_stride = page;
  return copy;
}

PageCopy list_to_pool(const PageIds& ids, int64_t num_pages, int64_t pool_stride, int64_t page) {
  PageCopy copy = pool_to_list(ids, num_pages, pool_stride, page);
  std::swap(copy.src_ids, copy.dst_ids);
  std::swap(copy.src_pages, copy.dst_pages);
  std::swap(copy.src_page_stride, copy.dst_page_stride);
  return copy;
}

Status copy_of(PageCopy copy, const std::byte* src, std::byte* dst) {
  const CopyRegion region{src, dst};
  copy.regions = {&region, 1};
  return copy_pages(copy, two_threads);
}

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
      PageIds page_ids{ids.data(), n};
      const std::byte* in_pool = pool.data() + skew;
      std::byte* in_list = list.data() + skew;
      REQUIRE(copy_of(pool_to_list(page_ids, num_pages, stride, page), in_pool, in_list).is_ok());
      for (int64_t i = 0; i < n; ++i) REQUIRE(std::memcmp(in_list + i * page, in_pool + ids[i] * stride, page) == 0);
      for (int64_t i = 0; i < 64; ++i) REQUIRE(list[skew + n * page + i] == std::byte{0xAA});

      auto other = noise(pool.size(), 3);
      auto expected = other;
      for (int64_t i = 0; i < n; ++i) std::memcpy(expected.data() + skew + ids[i] * stride, in_list + i * page, page);
      REQUIRE(copy_of(list_to_pool(page_ids, num_pages, stride, page), in_list, other.data() + skew).is_ok());
      REQUIRE(other == expected);  // the chosen pages, and no byte between or beside them
    }
  }
}

TEST_CASE("strided pages: heads and tokens change places, several regions of one page") {
  // Two regions of H heads each in pages [N, 2H, D], to lists [H, N, D]; rows of whole lines and others, small and
  // large.
  struct Case {
    int64_t n, h, d, pages;
  };
  for (Case c : {Case{4, 2, 3, 7}, {16, 4, 64, 9}, {16, 4, 128, 2600}, {5, 3, 100, 14000}, {1, 1, 1, 3}}) {
    CAPTURE(c.d);
    const int64_t token = 2 * c.h * c.d, page = c.n * token, list_page = c.n * c.h * c.d;
    auto pool = noise(c.pages * page, 7);
    std::vector<std::byte> lists(2 * c.pages * list_page);
    auto ids = some_pages(c.pages, c.pages, 8);
    PageCopy copy = pool_to_list({ids.data(), c.pages}, c.pages, page, list_page);
    const CopyDim dims[] = {{c.n, token, c.d}, {c.h, c.d, c.n * c.d}, {c.d, 1, 1}};
    auto pattern = make_pattern(dims, 1);
    REQUIRE(pattern.is_ok());
    CHECK(pattern->page_nbytes() == list_page);
    copy.page = *pattern;
    const CopyRegion regions[] = {{pool.data(), lists.data()},
                                  {pool.data() + c.h * c.d, lists.data() + c.pages * list_page}};
    copy.regions = regions;
    REQUIRE(copy_pages(copy, two_threads).is_ok());
    for (int64_t r = 0; r < 2; ++r)
      for (int64_t i = 0; i < c.pages; ++i)
        for (int64_t n = 0; n < c.n; ++n)
          for (int64_t h = 0; h < c.h; ++h)
            REQUIRE(std::memcmp(lists.data() + ((r * c.pages + i) * c.h + h) * c.n * c.d + n * c.d,
                                pool.data() + ids[i] * page + n * token + (r * c.h + h) * c.d, c.d) == 0);
  }
}

TEST_CASE("patterns come in their shortest form") {
  auto pattern = [](std::initializer_list<CopyDim> dims, int64_t element = 2) {
    return make_pattern(std::span(dims.begin(), dims.size()), element);
  };
  CHECK(pattern({})->run_nbytes == 2);
  CHECK(pattern({{3, 8, 8}, {4, 2, 2}})->run_nbytes == 24);  // dense on both sides
  CHECK(pattern({{3, 8, 8}, {4, 2, 2}})->num_dims == 0);
  CHECK(pattern({{3, 8, 8}, {0, 2, 2}})->page_nbytes() == 0);
  auto rows = pattern({{3, 10, 8}, {1, 99, 99}, {4, 2, 2}});  // a gap between rows on one side
  CHECK(rows->num_dims == 1);
  CHECK(rows->run_nbytes == 8);
  auto turned = pattern({{3, 2, 8}, {4, 6, 2}});
  CHECK(turned->num_dims == 2);
  CHECK(turned->run_nbytes == 2);
  CHECK(turned->dims[0].dst_stride == 8);  // outermost first, as dst has it
  auto six = pattern({{2, 2, 2048}, {2, 8, 512}, {2, 32, 128}, {2, 128, 32}, {2, 512, 8}, {2, 2048, 4}});
  CHECK(six.status().code() == Code::invalid_argument);
}

TEST_CASE("layers and int32 ids") {
  constexpr int64_t kLayers = 5, kPages = 40, kPage = 96;
  auto pool = noise(kLayers * kPages * kPage, 4);
  std::vector<int32_t> ids{39, 0, 7, 7, 12};
  std::vector<std::byte> list(kLayers * ids.size() * kPage);
  std::vector<CopyRegion> layers;
  for (int64_t l = 0; l < kLayers; ++l)
    layers.push_back({pool.data() + l * kPages * kPage, list.data() + l * ids.size() * kPage});
  PageCopy copy = pool_to_list({ids.data(), 5, false}, kPages, kPage, kPage);
  copy.regions = layers;
  REQUIRE(copy_pages(copy).is_ok());
  for (int64_t l = 0; l < kLayers; ++l)
    for (size_t i = 0; i < ids.size(); ++i)
      CHECK(std::memcmp(layers[l].dst + i * kPage, layers[l].src + ids[i] * kPage, kPage) == 0);
}

TEST_CASE("a bad id changes nothing and is named") {
  constexpr int64_t kPage = 32;
  auto pool = noise(4 * kPage, 5);
  auto list = noise(3 * kPage, 6);
  auto pool_before = pool, list_before = list;
  for (int64_t bad : {int64_t{4}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    std::vector<int64_t> ids{0, 1, bad};
    for (bool scatter : {false, true}) {
      Status status = scatter ? copy_of(list_to_pool({ids.data(), 3}, 4, kPage, kPage), list.data(), pool.data())
                              : copy_of(pool_to_list({ids.data(), 3}, 4, kPage, kPage), pool.data(), list.data());
      CHECK(status.code() == Code::out_of_bounds);
      CHECK(status.message() == "page_ids[2] is " + std::to_string(bad) + ", not in [0, 4)");
    }
  }
  std::vector<int64_t> twice{3, 1, 3};
  Status status = copy_of(list_to_pool({twice.data(), 3}, 4, kPage, kPage), list.data(), pool.data());
  CHECK(status.code() == Code::invalid_argument);
  CHECK(status.message().find("3 twice, at positions 0 and 2") != std::string::npos);

  PageCopy inside = pool_to_list({twice.data(), 2}, 4, kPage, kPage);  // 3, 1 -> 0, 3
  std::vector<int64_t> to{0, 3};
  inside.dst_ids = {to.data(), 2};
  inside.dst_pages = 4;
  inside.in_place = true;
  status = copy_of(inside, pool.data(), pool.data());
  CHECK(status.code() == Code::invalid_argument);
  inside.src_ids.on_device = true;
  CHECK(copy_of(inside, pool.data(), pool.data()).code() == Code::invalid_argument);
  CHECK(pool == pool_before);
  CHECK(list == list_before);
}

TEST_CASE("overlapping destinations are refused, empty work is done") {
  std::vector<std::byte> pool(64), list(64);
  std::vector<int64_t> ids{0, 1};
  PageIds both{ids.data(), 2};
  CHECK(copy_of(list_to_pool(both, 2, 16, 32), list.data(), pool.data()).code() == Code::invalid_argument);
  CHECK(copy_of(pool_to_list(both, 2, 16, 32), pool.data(), list.data()).is_ok());  // reading them is harmless
  CHECK(copy_pages(pool_to_list(both, 2, 32, 32)).is_ok());                         // no region
  CHECK(copy_of(pool_to_list({ids.data(), 0}, 0, 32, 32), pool.data(), list.data()).is_ok());
  CHECK(copy_of(list_to_pool(both, 2, 16, 0), list.data(), pool.data()).is_ok());

  CHECK_FALSE(places_overlap({{4, 8}, {2, 32}, {8, 1}}, 1));
  CHECK(places_overlap({{4, 7}, {8, 1}}, 1));
  CHECK(places_overlap({{2, 0}}, 1));
  CHECK_FALSE(places_overlap({{2, 0}, {0, 1}}, 1));
}
