// The page hash chain on the GPU, a thread a prompt: for many prompts whose ids are on the device anyway. A chain is
// sequential; a single long one is quicker on the CPU.
#include <vector>

#include "kv/cuda/hash_index.h"
#include "kv/cuda/launch.h"

namespace torch_mooncake::kv::cuda {
namespace {

constexpr int kThreads = 32;  // prompts are few, processors many

// begin[p]: where prompt p's tokens begin, begin[prompts]: where they end; rows[p]: its first hash.
__global__ void __launch_bounds__(kThreads)
    hash_kernel(PageHashing call, const int64_t* __restrict__ begin, const int64_t* __restrict__ rows) {
  const int64_t prompt = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (prompt >= call.prompts) return;
  hash_prompt(call, call.roots + prompt * call.root_stride, begin[prompt], begin[prompt + 1] - begin[prompt],
              call.hashes + rows[prompt] * kPageHashNbytes);
}

}  // namespace

void hash_pages(const PageHashing& call, const CudaRun& run) {
  cudaStream_t stream = stream_of(run);
  if (capturing(stream))
    refuse(Code::unsupported, "offsets lie on the host while a CUDA graph is captured, which would read them again");
  if (call.page_size >= INT32_MAX || call.prompts >= INT32_MAX)
    refuse(Code::unsupported, "2^31 tokens a page, or as many prompts, at once");
  std::vector<int64_t> table(2 * (call.prompts + 1));
  int64_t row = 0;
  for (int64_t p = 0; p <= call.prompts; ++p) {
    table[p] = call.offsets[p];
    table[call.prompts + 1 + p] = row;
    if (p < call.prompts) row += (call.offsets[p + 1] - call.offsets[p]) / call.page_size;
  }
  // From pageable memory: it has been read when this returns.
  check(cudaMemcpyAsync(run.workspace, table.data(), table.size() * 8, cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync of offsets");
  const auto* begin = static_cast<const int64_t*>(run.workspace);
  const auto blocks = static_cast<uint32_t>((call.prompts + kThreads - 1) / kThreads);
  hash_kernel<<<blocks, kThreads, 0, stream>>>(call, begin, begin + call.prompts + 1);
  check(cudaGetLastError(), "hashing of pages");
}

}  // namespace torch_mooncake::kv::cuda
