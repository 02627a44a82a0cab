#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kv/page_hash.h"
#include "kv/xxh3.h"

using namespace torch_mooncake;
using namespace torch_mooncake::kv;

namespace {

struct Vector {
  size_t nbytes;
  const char* digest;
};

// Made with python-xxhash 4.1.0: xxh3_128 of the first bytes of `input`. One or more for every way through XXH3.
constexpr Vector kVectors[] = {
    {0, "99aa06d3014798d86001c324468d497f"},    {1, "a6cd5e9392000f6ac44bdff4074eecdb"},
    {3, "2012adb9c9d860b71729c78f56ec7369"},    {4, "845026b94ecb793b2494ffbfb3959765"},
    {8, "4132fb07c0432330ce0ff5563c3393fc"},    {9, "6cc3a7d0f308d91272ca3cbcd7ef6247"},
    {16, "e973c9785debe255c5db1599402c959c"},   {17, "8219c336c5babc21e9c20cd7156aac1e"},
    {32, "d4efec9ae31b15d4d640cdcdee5478d7"},   {33, "4547521a276f1e692f8628ac91baf3c4"},
    {64, "6148f6cdefe06a7def25431289170df7"},   {65, "3a07e8b1f9a071d936473657f62b2645"},
    {96, "4631995c136f344872e1d148df591910"},   {97, "6930037316af1dd15ee1098837abb049"},
    {128, "b7dc1a8e2a298c315ff0625c7e1e9d5f"},  {129, "b72d53d90720128de7c6328994fdd22c"},
    {144, "6f6f0454176ddc065ddcc18e3619c2e5"},  {160, "1a2e5a988dc563d31e58b2b3083de1ae"},
    {240, "d379160924f79efe66cbbc5363497aa6"},  {241, "037fc7f5eb0e62df5f15f12e172b51fa"},
    {272, "a0c0266165dd31120222bba991967cf4"},  {1024, "f71bd8197487cda16049adedbb22283e"},
    {1025, "97b196dd29fe16fb63c9fc3d4dc27985"}, {2048, "4c612a4c3e7b950402e59e016d711afd"},
    {4999, "f428045eb480bb35309a06321552a01d"},
};

std::vector<uint8_t> input(size_t nbytes) {
  std::vector<uint8_t> bytes(nbytes);
  for (size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<uint8_t>(i * i * 31 + i * 7 + (i >> 8));
  return bytes;
}

std::string hex(const uint8_t* digest) {
  std::string text;
  for (int i = 0; i < 16; ++i) {
    text += "0123456789abcdef"[digest[i] >> 4];
    text += "0123456789abcdef"[digest[i] & 15];
  }
  return text;
}

std::string hex(const Hash128& hash) {
  uint8_t digest[16];
  hash.write(digest);
  return hex(digest);
}

}  // namespace

TEST_CASE("XXH3-128 of known inputs, over every path of this machine") {
  auto bytes = input(5000);
  for (const Vector& vector : kVectors) {
    CAPTURE(vector.nbytes);
    CHECK(hex(xxh3_128(bytes.data(), vector.nbytes)) == vector.digest);
    for (Xxh3Path path : {Xxh3Path::portable, Xxh3Path::avx2, Xxh3Path::avx512, Xxh3Path::best})
      if (xxh3_has_path(path)) CHECK(hex(xxh3_128(bytes.data(), vector.nbytes, path)) == vector.digest);
  }
}

TEST_CASE("paths agree at every length, reading nothing beyond it") {
  for (size_t n = 0; n < 2300; ++n) {
    auto bytes = input(n);  // of exactly this size: a sanitizer sees a step too far
    std::string expected = hex(xxh3_128(bytes.data(), n, Xxh3Path::portable));
    for (Xxh3Path path : {Xxh3Path::avx2, Xxh3Path::avx512})
      if (xxh3_has_path(path)) REQUIRE(hex(xxh3_128(bytes.data(), n, path)) == expected);
  }
}

TEST_CASE("pages are a chain, prompts are apart") {
  const std::vector<int32_t> narrow{1, -2, 3, 4, 5, 6, 7, 8, 9};
  const std::vector<int64_t> wide(narrow.begin(), narrow.end()), offsets{0, 5, 5, 9};
  const std::vector<uint8_t> roots = input(48);
  for (bool is_wide : {true, false}) {
    std::vector<uint8_t> hashes(16 * 4);
    PageHashing call{is_wide ? static_cast<const void*>(wide.data()) : narrow.data(),
                     is_wide,
                     9,
                     offsets.data(),
                     3,
                     2,
                     roots.data(),
                     16,
                     hashes.data()};
    REQUIRE(hash_pages(call).is_ok());
    int64_t row = 0;
    for (auto [prompt, first, pages] : {std::tuple{0, 0, 2}, {2, 5, 2}}) {
      std::vector<uint8_t> page(roots.begin() + 16 * prompt, roots.begin() + 16 * prompt + 16);
      page.resize(32);
      for (int p = 0; p < pages; ++p, ++row) {
        std::memcpy(page.data() + 16, wide.data() + first + 2 * p, 16);
        Hash128 hash = xxh3_128(page.data(), 32);
        CHECK(hex(hashes.data() + 16 * row) == hex(hash));
        hash.write(page.data());
      }
    }
    call.page_size = 10;
    CHECK(hash_pages(call).is_ok());  // no full page
    call.page_size = 0;
    CHECK(hash_pages(call).code() == Code::invalid_argument);
  }
}
