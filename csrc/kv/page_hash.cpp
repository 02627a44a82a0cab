#include "kv/page_hash.h"

#include <cstring>
#include <string>
#include <vector>

#include "kv/xxh3.h"

namespace torch_mooncake::kv {
namespace {

constexpr int64_t kGrainTokens = 16 << 10;  // tens of microseconds: what a thread's wake-up is worth

// One prompt's chain; `page` has room for the hash before and the tokens of a page.
void hash_chain(const PageHashing& call, int64_t prompt, uint8_t* hashes, std::vector<uint8_t>* page) {
  uint8_t* tokens = page->data() + kPageHashNbytes;
  const int64_t end = call.offsets[prompt + 1] - call.page_size;
  std::memcpy(page->data(), call.roots + prompt * call.root_stride, kPageHashNbytes);
  for (int64_t first = call.offsets[prompt]; first <= end; first += call.page_size, hashes += kPageHashNbytes) {
    if (call.wide) {
      std::memcpy(tokens, static_cast<const int64_t*>(call.tokens) + first, static_cast<size_t>(call.page_size) * 8);
    } else {
      const int32_t* narrow = static_cast<const int32_t*>(call.tokens) + first;
      for (int64_t i = 0; i < call.page_size; ++i) {
        int64_t token = narrow[i];
        std::memcpy(tokens + 8 * i, &token, 8);
      }
    }
    xxh3_128(page->data(), page->size()).write(page->data());
    std::memcpy(hashes, page->data(), kPageHashNbytes);
  }
}

}  // namespace

Status check_hashing(const PageHashing& call) {
  if (call.page_size < 1)
    return {Code::invalid_argument, "page_size must be at least 1, not " + std::to_string(call.page_size)};
  if (call.offsets[0] != 0)
    return {Code::invalid_argument, "offsets[0] is " + std::to_string(call.offsets[0]) + ", not 0"};
  for (int64_t p = 0; p < call.prompts; ++p)
    if (call.offsets[p + 1] < call.offsets[p])
      return {Code::invalid_argument, "offsets[" + std::to_string(p + 1) + "] is " +
                                          std::to_string(call.offsets[p + 1]) + ", less than the one before it, " +
                                          std::to_string(call.offsets[p])};
  if (call.offsets[call.prompts] != call.num_tokens)
    return {Code::invalid_argument, "offsets end at " + std::to_string(call.offsets[call.prompts]) + ", token_ids at " +
                                        std::to_string(call.num_tokens)};
  return {};
}

Status hash_pages(const PageHashing& call, const ParallelFor& parallel_for) {
  TM_TRY(check_hashing(call));
  if (call.num_tokens < call.page_size) return {};
  std::vector<int64_t> first_hash(static_cast<size_t>(call.prompts) + 1);
  for (int64_t p = 0; p < call.prompts; ++p)
    first_hash[p + 1] = first_hash[p] + (call.offsets[p + 1] - call.offsets[p]) / call.page_size;
  const int64_t mean_tokens = call.num_tokens / call.prompts + 1;
  parallel_for(call.prompts, kGrainTokens / mean_tokens + 1, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> page(static_cast<size_t>(kPageHashNbytes + 8 * call.page_size));
    for (int64_t p = begin; p < end; ++p) hash_chain(call, p, call.hashes + first_hash[p] * kPageHashNbytes, &page);
  });
  return {};
}

}  // namespace torch_mooncake::kv
