#include "kv/delta.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kv/cpu/changes.h"
#include "kv/delta_segment.h"
#include "kv/xxh3.h"

using namespace torch_mooncake;
using namespace torch_mooncake::kv;

namespace {

using Bytes = std::vector<std::byte>;

void threads_for(int64_t n, int64_t grain, const ParallelBody& fn) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < n; i += grain) threads.emplace_back([&fn, i, n, grain] { fn(i, std::min(n, i + grain)); });
  for (auto& thread : threads) thread.join();
}

Bytes noise(int64_t nbytes, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(static_cast<size_t>(nbytes));
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Each element with this probability, in stretches of `length`.
Bytes changed(const Bytes& base, int64_t element_nbytes, double share, int64_t length, uint32_t seed) {
  Bytes fresh = base;
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> dice;
  for (size_t at = 0; at < base.size(); at += static_cast<size_t>(element_nbytes * length))
    if (dice(random) < share)
      for (size_t i = at; i < std::min(base.size(), at + static_cast<size_t>(element_nbytes * length));
           i += static_cast<size_t>(element_nbytes))
        fresh[i + random() % static_cast<size_t>(element_nbytes)] ^= std::byte{1};
  return fresh;
}

Bytes encode(const DeltaInput& input, const ParallelFor& parallel_for = serial_for) {
  auto encoded = delta_encode(input, parallel_for);
  REQUIRE(encoded.is_ok());
  REQUIRE(encoded->within_limit());
  Bytes blob(static_cast<size_t>(encoded->nbytes()), std::byte{0x55});
  encoded->write(blob.data());
  return blob;
}

DeltaInput whole(const Bytes& base, const Bytes& fresh, int64_t element_nbytes) {
  DeltaInput input;
  input.base = base.data();
  input.fresh = fresh.data();
  input.ranges = {{0, static_cast<int64_t>(base.size())}};
  input.element_nbytes = element_nbytes;
  return input;
}

Status applied(const Bytes& blob, Bytes& target, std::vector<DeltaRange> ranges = {}) {
  if (ranges.empty()) ranges = {{0, static_cast<int64_t>(target.size())}};
  auto opened = delta_open(blob.data(), static_cast<int64_t>(blob.size()));
  TM_TRY(opened.status());
  return delta_apply(*opened, target.data(), ranges, threads_for);
}

void forge(Bytes& blob) {  // the checksum that goes with what the blob has become
  const uint64_t sum = xxh3_128(blob.data() + 16, blob.size() - 16).low;
  std::memcpy(blob.data() + 8, &sum, 8);
}

}  // namespace

TEST_CASE("what is encoded comes back, whatever the sizes, shares and stretches") {
  for (int64_t size : {1, 2, 4, 8})
    for (int64_t n : {0, 1, 31, 32, 33, 4095, 4096, 4097, 20000})
      for (double share : {0.0, 0.002, 0.02, 0.5, 1.0})
        for (int64_t length : {1, 3, 4, 5, 300}) {
          CAPTURE(size);
          CAPTURE(n);
          CAPTURE(share);
          CAPTURE(length);
          const Bytes base = noise(n * size, 1), fresh = changed(base, size, share, length, 2);
          const Bytes blob = encode(whole(base, fresh, size));
          REQUIRE((blob == encode(whole(base, fresh, size), threads_for)));
          Bytes target = base;
          REQUIRE(applied(blob, target).is_ok());
          REQUIRE((target == fresh));
        }
}

TEST_CASE("every path finds the same changes") {
  for (int64_t size : {1, 2, 4, 8})
    for (double share : {0.0, 0.01, 0.3, 1.0})
      for (int64_t n : {0, 1, 31, 32, 63, 64, 65, 1000, 4096}) {
        const Bytes base = noise(n * size, 3), fresh = changed(base, size, share, 1, 4);
        std::vector<uint16_t> expected(4096 + kChangesSlack), got(4096 + kChangesSlack);
        const int64_t count =
            find_changes_portable(size)(base.data(), fresh.data(), n, 7 % (4097 - n), expected.data());
        expected.resize(count);
#ifdef __x86_64__
        if (!__builtin_cpu_supports("avx2")) continue;
        REQUIRE(find_changes_avx2(size)(base.data(), fresh.data(), n, 7 % (4097 - n), got.data()) == count);
        got.resize(count);
        REQUIRE((got == expected));
        if (!has_changes_avx512()) continue;
        got.assign(4096 + kChangesSlack, 0);
        REQUIRE(find_changes_avx512(size)(base.data(), fresh.data(), n, 7 % (4097 - n), got.data()) == count);
        got.resize(count);
        REQUIRE((got == expected));
#endif
      }
}

TEST_CASE("sizes: three bytes and a bit for a change of two, and less where changes are neighbours") {
  const int64_t n = 1 << 20;
  const Bytes base = noise(n * 2, 5);
  const Bytes spread = encode(whole(base, changed(base, 2, 0.02, 1, 6), 2));
  const Bytes together = encode(whole(base, changed(base, 2, 0.02, 64, 6), 2));
  const Bytes all = encode(whole(base, changed(base, 2, 1.0, 1, 6), 2));
  CHECK(static_cast<double>(spread.size()) <= 0.0315 * 2 * n);
  CHECK(static_cast<double>(together.size()) <= 0.0225 * 2 * n);
  CHECK(static_cast<double>(all.size()) <= 1.001 * 2 * n);
  CHECK(encode(whole(base, base, 2)).size() == 48 + 4 * n / kDeltaSegment);
}

TEST_CASE("a limit ends it early") {
  const Bytes base = noise(1 << 20, 7), fresh = changed(base, 2, 0.02, 1, 8);
  DeltaInput input = whole(base, fresh, 2);
  const auto nbytes = static_cast<int64_t>(encode(input).size());
  for (int64_t limit : {int64_t{0}, int64_t{100}, nbytes - 8, nbytes - 1, nbytes, nbytes + 1}) {
    input.limit = limit;
    auto encoded = delta_encode(input, threads_for);
    REQUIRE(encoded.is_ok());
    CHECK(encoded->within_limit() == (limit >= nbytes));
  }
}

TEST_CASE("ranges: pieces of one layout, applied to those of another") {
  // the 6 rows of 5000 elements of a matrix, of which columns 100 to 3100 count; and a dense target, in two pieces
  const int64_t pitch = 5000 * 2, row = 3000 * 2;
  const Bytes base = noise(6 * pitch, 9), fresh = changed(base, 2, 0.1, 7, 10);
  DeltaInput input;
  input.base = base.data();
  input.fresh = fresh.data();
  input.element_nbytes = 2;
  Bytes target(6 * row), expected(6 * row);
  for (int64_t r = 0; r < 6; ++r) {
    input.ranges.push_back({r * pitch + 200, row});
    input.ranges.push_back({0, 0});
    std::copy_n(base.begin() + r * pitch + 200, row, target.begin() + r * row);
    std::copy_n(fresh.begin() + r * pitch + 200, row, expected.begin() + r * row);
  }
  const Bytes blob = encode(input);
  CHECK((blob == encode(whole(target, expected, 2))));
  Bytes in_pieces = target;
  REQUIRE(applied(blob, in_pieces, {{0, 2222}, {2222, 6 * row - 2222}}).is_ok());
  CHECK((in_pieces == expected));
  Bytes there = base;
  REQUIRE(applied(blob, there, input.ranges).is_ok());
  for (int64_t i = 0; i < 6 * pitch; ++i) {
    const bool inside = i % pitch >= 200 && i % pitch < 200 + row;
    REQUIRE(there[i] == (inside ? fresh[i] : base[i]));
  }
  CHECK(applied(blob, there, {{0, 6 * row - 2}}).code() == Code::invalid_argument);
  CHECK(applied(blob, there, {{0, 6 * row - 1}}).code() == Code::invalid_argument);
  input.element_nbytes = 3;
  CHECK(delta_encode(input, serial_for).status().code() == Code::invalid_argument);
}

TEST_CASE("onto a copy of the base, in one go") {
  const Bytes base = noise(30000, 15), fresh = changed(base, 4, 0.1, 3, 16);
  const Bytes blob = encode(whole(base, fresh, 4));
  Bytes target(30000, std::byte{0x33});
  auto opened = delta_open(blob.data(), static_cast<int64_t>(blob.size()));
  REQUIRE(opened.is_ok());
  REQUIRE(delta_apply(*opened, target.data(), {{0, 16000}, {16000, 14000}}, threads_for, base.data()).is_ok());
  CHECK((target == fresh));
}

TEST_CASE("a blob that was changed anywhere is noticed, and nothing is written") {
  const Bytes base = noise(20000, 11), fresh = changed(base, 2, 0.05, 2, 12);
  const Bytes blob = encode(whole(base, fresh, 2));
  for (size_t i = 0; i < blob.size(); ++i) {
    Bytes bad = blob;
    bad[i] ^= std::byte{0x10};
    Bytes target = base;
    REQUIRE(applied(bad, target).code() == Code::corrupt);
    REQUIRE((target == base));
  }
  for (size_t n = 0; n < blob.size(); n += 7) {
    Bytes target = base;
    REQUIRE(applied(Bytes(blob.begin(), blob.begin() + static_cast<std::ptrdiff_t>(n)), target).code() ==
            Code::corrupt);
  }
}

TEST_CASE("a blob whose checksum was forged, too, writes nothing outside") {
  const Bytes base = noise(20000, 13), fresh = changed(base, 2, 0.05, 2, 14);
  const Bytes blob = encode(whole(base, fresh, 2));
  int refused = 0;
  for (size_t i = 16; i < blob.size(); ++i)
    for (int bit : {0, 7}) {
      Bytes bad = blob;
      bad[i] ^= static_cast<std::byte>(1 << bit);
      forge(bad);
      Bytes target = base;
      target.insert(target.end(), 16384, std::byte{0x77});  // behind it
      const Status status = applied(bad, target, {{0, 20000}});
      if (!status.is_ok()) ++refused;
      if (status.code() == Code::corrupt) REQUIRE(std::equal(base.begin(), base.end(), target.begin()));
      REQUIRE(std::all_of(target.begin() + 20000, target.end(), [](std::byte b) { return b == std::byte{0x77}; }));
    }
  CHECK(refused > 500);
}
