// libFuzzer: blobs of strangers. The first byte says whether the checksum is put right, so that what is behind it is
// reached; the rest is the blob. What is opened is applied to a target of its size, and to one in pieces: sanitizers
// see every write outside.
//
// Run with a folder for the corpus; `delta_fuzz --write-seeds FOLDER` puts well-formed examples there first.
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kv/delta.h"
#include "kv/xxh3.h"

using namespace torch_mooncake;
using namespace torch_mooncake::kv;

namespace {

constexpr int64_t kMost = 1 << 20;  // bytes of a target

void require(bool holds) {
  if (!holds) std::abort();
}

void write_seeds(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  int n = 0;
  for (int64_t size : {1, 2, 4, 8})
    for (int64_t elements : {0, 5, 5000})
      for (int64_t step : {1, 7, 300}) {
        std::vector<std::byte> base(static_cast<size_t>(elements * size)), fresh = base;
        for (int64_t i = 0; i < elements; i += step) fresh[static_cast<size_t>(i * size)] = std::byte{1};
        DeltaInput input;
        input.base = base.data();
        input.fresh = fresh.data();
        input.ranges = {{0, elements * size}};
        input.element_nbytes = size;
        auto encoded = delta_encode(input, serial_for);
        require(encoded.is_ok());
        std::string blob(static_cast<size_t>(encoded->nbytes()), '\0');
        encoded->write(reinterpret_cast<std::byte*>(blob.data()));
        std::ofstream(folder / ("delta" + std::to_string(n++)), std::ios::binary) << '\1' << blob;
      }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc == 3 && std::strcmp((*argv)[1], "--write-seeds") == 0) {
    write_seeds((*argv)[2]);
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::vector<std::byte> blob(size - 1);  // its own allocation, so that overreads are seen
  if (size > 1) std::memcpy(blob.data(), data + 1, size - 1);
  if (data[0] % 2 == 1 && blob.size() >= sizeof(DeltaHeader)) {
    const uint64_t sum = xxh3_128(blob.data() + 16, blob.size() - 16).low;
    std::memcpy(blob.data() + 8, &sum, 8);
  }
  auto opened = delta_open(blob.data(), static_cast<int64_t>(blob.size()));
  if (!opened) {
    require(opened.status().code() == Code::corrupt);
    return 0;
  }
  const int64_t nbytes = opened->elements * opened->element_nbytes;
  if (nbytes > kMost) return 0;
  std::vector<std::byte> target(static_cast<size_t>(nbytes)), pieces(static_cast<size_t>(2 * nbytes));
  require(delta_apply(*opened, target.data(), {{0, nbytes}}).is_ok());
  std::vector<DeltaRange> ranges;
  const int64_t step = 3 * opened->element_nbytes;
  for (int64_t at = 0; at < nbytes; at += step) ranges.push_back({2 * at, std::min(step, nbytes - at)});
  require(delta_apply(*opened, pieces.data(), ranges).is_ok());
  for (const DeltaRange& range : ranges)
    require(std::memcmp(pieces.data() + range.offset, target.data() + range.offset / 2,
                        static_cast<size_t>(range.nbytes)) == 0);
  require(delta_apply(*opened, target.data(), {{0, nbytes + opened->element_nbytes}}).code() == Code::invalid_argument);
  return 0;
}
