// The arithmetic of the CUDA kernels, run here thread by thread: copy_index.h and hash_index.h against the CPU's
// kernels.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kv/as_the_gpu_does.h"
#include "kv/page_hash.h"
#include "kv/pages.h"

using namespace torch_mooncake;
using namespace torch_mooncake::kv;

namespace {

std::vector<std::byte> noise(size_t nbytes, uint32_t seed) {
  std::vector<std::byte> bytes(nbytes);
  std::mt19937 random(seed);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// A copy of pages whose inside lies differently on both sides, with room between them.
struct Problem {
  std::vector<std::byte> src, dst;
  std::vector<CopyRegion> regions;
  std::vector<int64_t> src_ids, dst_ids;
  PageCopy copy;
};

// Logical page dims `sizes` of elements of `element`; `src_order` and `dst_order` say how they lie, outermost first.
Problem make_problem(std::vector<int64_t> sizes, std::vector<int> src_order, std::vector<int> dst_order,
                     int64_t element, int64_t gap, int64_t skew, int64_t num_regions, uint32_t seed) {
  Problem p;
  auto strides = [&](const std::vector<int>& order) {
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = element;
    for (size_t i = order.size(); i-- > 0; stride *= sizes[order[i]]) strides[order[i]] = stride;
    return std::pair(strides, stride);
  };
  auto [src_strides, page_nbytes] = strides(src_order);
  auto dst_strides = strides(dst_order).first;
  std::vector<CopyDim> dims;
  for (size_t d = 0; d < sizes.size(); ++d) dims.push_back({sizes[d], src_strides[d], dst_strides[d]});
  std::mt19937 random(seed);
  constexpr int64_t kPages = 11, kCount = 7;
  const int64_t stride = page_nbytes + gap, region_nbytes = kPages * stride + skew;
  p.src = noise(num_regions * region_nbytes + 16, seed);
  p.dst = noise(num_regions * region_nbytes + 16, seed + 1);
  auto aligned = [](std::vector<std::byte>& bytes) {
    return bytes.data() + (16 - reinterpret_cast<uintptr_t>(bytes.data()) % 16) % 16;
  };
  for (int64_t r = 0; r < num_regions; ++r)
    p.regions.push_back({aligned(p.src) + r * region_nbytes + skew, aligned(p.dst) + r * region_nbytes + skew});
  for (std::vector<int64_t>* ids : {&p.src_ids, &p.dst_ids}) {
    for (int64_t i = 0; i < kPages; ++i) ids->push_back(i);
    std::shuffle(ids->begin(), ids->end(), random);
    ids->resize(kCount);
  }
  p.copy.page = *make_pattern(dims, element);
  p.copy.src_pages = p.copy.dst_pages = kPages;
  p.copy.src_page_stride = p.copy.dst_page_stride = stride;
  return p;
}

void check_problem(Problem& p, bool src_ids, bool dst_ids) {
  p.copy.regions = p.regions;
  p.copy.src_ids = {src_ids ? p.src_ids.data() : nullptr, static_cast<int64_t>(p.src_ids.size())};
  p.copy.dst_ids = {dst_ids ? p.dst_ids.data() : nullptr, static_cast<int64_t>(p.dst_ids.size())};
  const std::vector<std::byte> before = p.dst;
  REQUIRE(copy_pages(p.copy).is_ok());
  const std::vector<std::byte> expected = p.dst;
  REQUIRE((expected != before));
  const int widest = cuda::access_nbytes(p.copy);
  REQUIRE(cuda::copy_fits(p.copy, widest));
  for (int nbytes = widest; nbytes > 0; nbytes /= 2) {
    for (uint32_t blocks : {1u, 5u}) {
      CAPTURE(nbytes);
      CAPTURE(blocks);
      std::copy(before.begin(), before.end(), p.dst.begin());
      copy_as_the_gpu_does(p.copy, nbytes, blocks);
      REQUIRE((p.dst == expected));
    }
  }
}

}  // namespace

TEST_CASE("division by a known number is exact") {
  std::mt19937 random(1);
  std::vector<uint32_t> divisors{
      1, 2, 3, 5, 7, 641, 65535, 65536, 65537, (1u << 30) - 1, 1u << 30, (1u << 30) + 1, INT32_MAX};
  for (int i = 0; i < 2000; ++i) divisors.push_back(1 + random() % (i % 2 ? 5000u : uint32_t{INT32_MAX}));
  for (uint32_t d : divisors) {
    const cuda::Divider divider(d);
    std::vector<uint32_t> numbers{0, 1, d - 1, d, INT32_MAX - 1, INT32_MAX};
    for (int i = 0; i < 50; ++i) {
      const uint32_t multiple = random() % (uint32_t{INT32_MAX} / d + 1) * d;
      numbers.insert(numbers.end(), {multiple, multiple == 0 ? 0 : multiple - 1, static_cast<uint32_t>(random() >> 1)});
    }
    for (uint32_t n : numbers)
      if (n <= INT32_MAX) REQUIRE_MESSAGE(divider.quotient(n) == n / d, n << " / " << d);
  }
}

TEST_CASE("contiguous pages of any size, alignment and number of regions") {
  for (int64_t page : {1, 2, 7, 16, 24, 40, 48, 100, 255, 256, 1000, 4096, 16384 + 8, 20001})
    for (int64_t gap : {0, 3, 16})
      for (int64_t skew : {0, 1, 8})
        for (int64_t regions : {1, 3, 130}) {
          if (regions == 130 && page > 1000) continue;
          CAPTURE(page);
          CAPTURE(gap);
          CAPTURE(skew);
          CAPTURE(regions);
          Problem p = make_problem({page}, {0}, {0}, 1, gap, skew, regions, 7);
          check_problem(p, true, false);
          check_problem(p, false, true);
        }
}

TEST_CASE("pages that lie differently on both sides") {
  struct Case {
    std::vector<int64_t> sizes;
    std::vector<int> src, dst;
    int64_t element;
  };
  const std::vector<Case> cases{
      {{16, 3, 64}, {0, 1, 2}, {1, 0, 2}, 2},           // NHD -> HND
      {{16, 8, 128}, {1, 0, 2}, {0, 1, 2}, 2},          // HND -> NHD
      {{2, 16, 3, 80}, {0, 1, 2, 3}, {0, 2, 1, 3}, 4},  // K and V
      {{16, 3, 81}, {0, 1, 2}, {1, 0, 2}, 1},           // an odd head
      {{5, 4, 6}, {0, 1, 2}, {2, 1, 0}, 2},             // elements one by one
      {{3, 2, 4, 5, 6}, {0, 1, 2, 3, 4}, {3, 1, 0, 2, 4}, 8},
      {{2, 3, 2, 3, 2, 3}, {0, 1, 2, 3, 4, 5}, {4, 2, 0, 3, 1, 5}, 4},
  };
  for (const Case& c : cases)
    for (int64_t gap : {0, 5, 32}) {
      CAPTURE(c.sizes[0]);
      CAPTURE(gap);
      Problem p = make_problem(c.sizes, c.src, c.dst, c.element, gap, 0, 4, 11);
      REQUIRE(p.copy.page.num_dims > 0);
      check_problem(p, true, true);
      check_problem(p, false, false);
    }
}

TEST_CASE("the widest access that addresses and runs allow") {
  auto width = [](int64_t page, int64_t gap, int64_t skew) {
    Problem p = make_problem({page}, {0}, {0}, 1, gap, skew, 2, 3);
    p.copy.regions = p.regions;
    return cuda::access_nbytes(p.copy);
  };
  CHECK(width(16384, 0, 0) == 16);
  CHECK(width(16384, 0, 8) == 8);
  CHECK(width(16384, 4, 0) == 4);
  CHECK(width(16384 + 2, 14, 0) == 16);  // a long run: two bytes behind it
  CHECK(width(24, 8, 0) == 8);           // a short one: made of whole accesses
  CHECK(width(17, 15, 0) == 1);
  // Each side's pages count, unless there is one.
  for (bool src : {true, false}) {
    Problem p = make_problem({4096}, {0}, {0}, 1, 0, 0, 1, 3);
    p.copy.regions = p.regions;
    (src ? p.copy.src_page_stride : p.copy.dst_page_stride) = 4096 + 2;
    CHECK(cuda::access_nbytes(p.copy) == 2);
    (src ? p.copy.src_pages : p.copy.dst_pages) = 1;
    CHECK(cuda::access_nbytes(p.copy) == 16);
    p.copy.page = {64, 1, {{2, src ? 68 : 64, src ? 64 : 68}}};
    CHECK(cuda::access_nbytes(p.copy) == 4);
  }
}

TEST_CASE("ids out of range are skipped") {
  Problem p = make_problem({96}, {0}, {0}, 1, 0, 0, 2, 5);
  for (int64_t bad : {int64_t{-1}, int64_t{11}, INT64_MAX, INT64_MIN}) {
    for (bool in_src : {true, false}) {
      Problem q = p;
      for (size_t r = 0; r < q.regions.size(); ++r)
        q.regions[r] = {q.src.data() + (p.regions[r].src - p.src.data()),
                        q.dst.data() + (p.regions[r].dst - p.dst.data())};
      std::vector<int64_t>& ids = in_src ? q.src_ids : q.dst_ids;
      // What the good ids alone do, then all of them with the bad one among them.
      std::vector<int64_t> src = q.src_ids, dst = q.dst_ids;
      src.erase(src.begin() + 3);
      dst.erase(dst.begin() + 3);
      const std::vector<std::byte> before = q.dst;
      q.copy.regions = q.regions;
      q.copy.src_ids = {src.data(), 6};
      q.copy.dst_ids = {dst.data(), 6};
      REQUIRE(copy_pages(q.copy).is_ok());
      const std::vector<std::byte> expected = q.dst;
      std::copy(before.begin(), before.end(), q.dst.begin());
      ids[3] = bad;
      q.copy.src_ids = {q.src_ids.data(), 7};
      q.copy.dst_ids = {q.dst_ids.data(), 7};
      copy_as_the_gpu_does(q.copy, 1, 2);
      CHECK((q.dst == expected));
    }
  }
  // int32 ids take the same way.
  std::vector<int32_t> narrow{4, -1, 11, 0};
  p.copy.regions = p.regions;
  p.copy.src_ids = {narrow.data(), 4, false};
  p.copy.dst_ids = {nullptr, 4};
  std::vector<std::byte> expected = p.dst;
  for (size_t r = 0; r < p.regions.size(); ++r) {
    const auto at = p.regions[r].dst - p.dst.data();
    std::memcpy(expected.data() + at, p.regions[r].src + 4 * 96, 96);
    std::memcpy(expected.data() + at + 3 * 96, p.regions[r].src, 96);
  }
  copy_as_the_gpu_does(p.copy, 1, 2);
  CHECK((p.dst == expected));
}

TEST_CASE("work that does not fit the indices is known") {
  PageCopy copy;
  copy.src_ids = copy.dst_ids = {nullptr, 1};
  copy.page.run_nbytes = int64_t{16} << 31;
  CHECK(!cuda::copy_fits(copy, 16));
  CHECK(cuda::copy_fits(
      {.page = {.run_nbytes = int64_t{1} << 34}, .regions = {}, .src_ids = {nullptr, 1}, .dst_ids = {nullptr, 1}}, 16));
  copy.page = {1, 2, {{1 << 16, 4, 4}, {1 << 16, 2, 2}}};
  CHECK(!cuda::copy_fits(copy, 1));
  copy.page = {16, 0, {}};
  copy.src_ids.count = copy.dst_ids.count = int64_t{1} << 31;
  CHECK(!cuda::copy_fits(copy, 16));
  copy.src_ids.count = copy.dst_ids.count = int64_t{1} << 30;
  CHECK(cuda::copy_fits(copy, 16));
  CHECK(cuda::regions_per_launch(copy, 64) == 1);
}

TEST_CASE("page hashes, for every length of a page") {
  std::mt19937_64 random(9);
  for (bool wide : {true, false})
    for (int64_t page_size = 1; page_size <= 300; page_size += page_size < 40 ? 1 : 37) {
      CAPTURE(page_size);
      std::vector<int64_t> offsets{0};
      for (int64_t pages : {3, 0, 1, 2})
        offsets.push_back(offsets.back() + pages * page_size + pages % 2 * (page_size - 1));
      std::vector<int64_t> tokens(offsets.back());
      std::vector<int32_t> narrow(tokens.size());
      for (size_t i = 0; i < tokens.size(); ++i) {
        narrow[i] = static_cast<int32_t>(random());
        tokens[i] = wide ? static_cast<int64_t>(random()) : narrow[i];
      }
      std::vector<uint8_t> roots(4 * 16 + 1);
      for (uint8_t& byte : roots) byte = static_cast<uint8_t>(random());
      std::vector<uint8_t> expected(16 * (tokens.size() / page_size)), got(expected.size());
      PageHashing call;
      call.tokens = wide ? static_cast<void*>(tokens.data()) : narrow.data();
      call.wide = wide;
      call.num_tokens = static_cast<int64_t>(tokens.size());
      call.offsets = offsets.data();
      call.prompts = 4;
      call.page_size = page_size;
      call.roots = roots.data() + 1;
      call.root_stride = 16;
      call.hashes = expected.data();
      REQUIRE(hash_pages(call).is_ok());
      call.hashes = got.data();
      hash_as_the_gpu_does(call);
      REQUIRE((got == expected));
    }
}
