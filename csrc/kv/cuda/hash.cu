// The page hash chain on the GPU, a thread a prompt: for many prompts whose ids are on the device anyway. A chain is
// sequential; a single long one is quicker on the CPU.
#include <vector>

#include "kv/cuda/hash_index.h"
#include "kv/cuda/launch.h"

namespace torch_mooncake::kv::cuda {
namespace {

constexpr int kThreads = 32;  // prompts are few, processors many

// begin[p]: where prompt p's tokens begin, begin[prompts]: where they end; rows[p]: its first hash. nullptr: one
// prompt, of all tokens.
__global__ void __launch_bounds__(kThreads)
    hash_kernel(PageHashing call, const int64_t* __restrict__ begin, const int64_t* __restrict__ rows) {
  const int64_t prompt = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (prompt >= call.prompts) return;
  const int64_t first = begin == nullptr ? 0 : begin[prompt], row = begin == nullptr ? 0 : rows[prompt];
  const int64_t end = begin == nullptr ? call.num_tokens : begin[prompt + 1];
  hash_prompt(call, call.roots + prompt * call.root_stride, first, end - first, call.hashes + row * kPageHashNbytes);
}

// Tables of the kernel, from pageable memory: it has been read when this returns.
const int64_t* staged(const PageHashing& call, const CudaRun& run) {
  if (call.prompts == 1) return nullptr;
  cudaStream_t stream = stream_of(run);
  if (capturing(stream))
    refuse(Code::unsupported,
           "offsets lie on the host while a CUDA graph is captured, which would read them again at every replay");
  std::vector<int64_t> table(2 * (call.prompts + 1));
  int64_t row = 0;
  for (int64_t p = 0; p <= call.prompts; ++p) {
    table[p] = call.offsets[p];
    table[call.prompts + 1 + p] = row;
    if (p < call.prompts) row += (call.offsets[p + 1] - call.offsets[p]) / call.page_size;
  }
  check(cudaMemcpyAsync(run.workspace, table.data(), table.size() * 8, cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync of offsets");
  return static_cast<const int64_t*>(run.workspace);
}

}  // namespace

void hash_pages(const PageHashing& call, const CudaRun& run) {
  if (call.page_size >= INT32_MAX || call.prompts >= INT32_MAX)
    refuse(Code::unsupported, "2^31 tokens a page, or as many prompts, at once");
  const int64_t* begin = staged(call, run);
  const auto blocks = static_cast<uint32_t>((call.prompts + kThreads - 1) / kThreads);
  hash_kernel<<<blocks, kThreads, 0, stream_of(run)>>>(call, begin,
                                                       begin == nullptr ? nullptr : begin + call.prompts + 1);
  check(cudaGetLastError(), "hashing of pages");
}

}  // namespace torch_mooncake::kv::cuda
