// The CUDA plug-in with its kernels on the CPU, in memory of the fake device (fake_cuda.cpp), which the host can reach:
// so that the operators' way from tensors to kernels runs as it is. The launches of csrc/kv/cuda/*.cu themselves do
// not.
#include <cstdio>
#include <cstring>

#include "kv/as_the_gpu_does.h"
#include "kv/cuda/plugin.h"

namespace torch_mooncake::kv {
namespace {

// As copy.cu: through the workspace, where a mistake of its size would show.
const void* staged(const PageIds& ids, std::byte*& workspace) {
  const int64_t nbytes = CudaCopyWorkspace::staged_nbytes(ids);
  if (nbytes == 0) return ids.data;
  std::byte* to = workspace;
  workspace += nbytes;
  return std::memcpy(to, ids.data, ids.count * (ids.wide ? 8 : 4));
}

void copy(const PageCopy& given, const CudaRun& run, CudaVerdict* out) {
  PageCopy copy = given;
  auto* workspace = static_cast<std::byte*>(run.workspace);
  copy.src_ids.data = staged(given.src_ids, workspace);
  copy.dst_ids.data = staged(given.dst_ids, workspace);
  const int nbytes = cuda::access_nbytes(copy);
  if (copy.nbytes() == 0) return;
  if (cuda::copy_fits(copy, nbytes)) return copy_as_the_gpu_does(copy, nbytes, 3);
  out->code = Code::unsupported;
  std::snprintf(out->message, sizeof out->message, "does not fit");
}

void quantize(const PageScaling& call, const CudaRun&, CudaVerdict*) { scale_as_the_gpu_does(call, true); }
void dequantize(const PageScaling& call, const CudaRun&, CudaVerdict*) { scale_as_the_gpu_does(call, false); }
void hash(const PageHashing& call, const CudaRun&, CudaVerdict*) { hash_as_the_gpu_does(call); }

// As delta.cu: through the workspace.
void count(const DeltaOnDevice& call, const CudaRun& run, CudaVerdict*) {
  DeltaOnDevice there = call;
  there.directory = static_cast<DeltaEntry*>(run.workspace);
  delta_count_as_the_gpu_does(there);
  std::memcpy(call.directory, there.directory, CudaDeltaWorkspace::count_nbytes(call.elements));
}
DeltaOnDevice staged(const DeltaOnDevice& call, const CudaRun& run) {
  const CudaDeltaWorkspace space(call, run.workspace);
  std::memcpy(space.segments, call.segments, space.segments_nbytes);
  DeltaOnDevice there = call;
  there.segments = space.segments;
  there.tokens = space.tokens;
  there.values = space.values;
  return there;
}
void write(const DeltaOnDevice& call, const CudaRun& run, CudaVerdict*) {
  const DeltaOnDevice there = staged(call, run);
  delta_write_as_the_gpu_does(there);
  std::memcpy(call.tokens, there.tokens, call.token_nbytes);
  std::memcpy(call.values, there.values, call.changed * call.element_nbytes);
}
void apply(const DeltaOnDevice& call, const CudaRun& run, CudaVerdict*) {
  const DeltaOnDevice there = staged(call, run);
  std::memcpy(there.tokens, call.tokens, call.token_nbytes);
  std::memcpy(there.values, call.values, call.changed * call.element_nbytes);
  delta_apply_as_the_gpu_does(there);
}

}  // namespace
}  // namespace torch_mooncake::kv

extern "C" TM_API const torch_mooncake::kv::CudaKernels* torch_mooncake_cuda_kernels_4() {
  using namespace torch_mooncake::kv;
  static const CudaKernels kernels{copy, quantize, dequantize, hash, count, write, apply};
  return &kernels;
}
