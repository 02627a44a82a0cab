// The plug-in's one symbol. No exception crosses the border.
#include <exception>

#include "kv/cuda/launch.h"

namespace torch_mooncake::kv::cuda {
namespace {

template <typename Call, void (*kRun)(const Call&, const CudaRun&)>
void guarded(const Call& call, const CudaRun& run, CudaVerdict* out) {
  try {
    kRun(call, run);
  } catch (const Refused& refused) {
    out->code = refused.code;
    std::snprintf(out->message, sizeof out->message, "%s", refused.message);
  } catch (const Failed& failed) {
    out->code = Code::internal;
    std::snprintf(out->message, sizeof out->message, "%s: %s", failed.what, cudaGetErrorString(failed.error));
  } catch (const std::exception& error) {
    out->code = Code::internal;
    std::snprintf(out->message, sizeof out->message, "%s", error.what());
  }
}

}  // namespace
}  // namespace torch_mooncake::kv::cuda

extern "C" TM_API const torch_mooncake::kv::CudaKernels* torch_mooncake_cuda_kernels_4() {
  using namespace torch_mooncake::kv;
  using cuda::guarded;
  static const CudaKernels kernels{
      guarded<PageCopy, cuda::copy_pages>,          guarded<PageScaling, cuda::quantize_pages>,
      guarded<PageScaling, cuda::dequantize_pages>, guarded<PageHashing, cuda::hash_pages>,
      guarded<DeltaOnDevice, cuda::delta_count>,    guarded<DeltaOnDevice, cuda::delta_write>,
      guarded<DeltaOnDevice, cuda::delta_apply>};
  return &kernels;
}
