// Names of KV pages: a chain of XXH3-128 over token ids, free of torch. The hash of a prompt's page i is XXH3-128, seed
// 0, in canonical (big-endian) byte order, of 16 bytes (the hash of page i - 1, for the first page the root) followed
// by the page's token ids as little-endian int64. Only full pages have a hash.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/status.h"
#include "kv/parallel.h"

namespace torch_mooncake::kv {

inline constexpr int64_t kPageHashNbytes = 16;

// Prompt p is tokens [offsets[p], offsets[p + 1]). Its hashes follow those of prompt p - 1 in `hashes`.
struct PageHashing {
  const void* tokens = nullptr;
  bool wide = true;  // int64, else int32
  int64_t num_tokens = 0;
  const int64_t* offsets = nullptr;  // [prompts + 1], on the host, ascending from 0 to num_tokens
  int64_t prompts = 0;
  int64_t page_size = 0;           // tokens, at least 1
  const uint8_t* roots = nullptr;  // [prompts, 16]
  int64_t root_stride = 0;         // bytes from one prompt's root to the next; 0: one root for all
  uint8_t* hashes = nullptr;       // [sum over prompts of (length / page_size), 16]
};

// `invalid_argument` for a page size below 1 and for offsets that do not ascend or leave the tokens.
TM_API Status check_hashing(const PageHashing& call);

// CPU; prompts are shared out between threads, one prompt's chain is one thread's.
TM_API Status hash_pages(const PageHashing& call, const ParallelFor& parallel_for = serial_for);

}  // namespace torch_mooncake::kv
