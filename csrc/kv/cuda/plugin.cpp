#include "kv/cuda/plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace torch_mooncake::kv {
namespace {

Result<const CudaKernels*> load_plugin() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<void*>(&cuda_copy_pages), &self) == 0 || self.dli_fname == nullptr)
    return {Code::internal, "dladdr does not know this library"};
  std::string path = self.dli_fname;
  path = path.substr(0, path.find_last_of('/') + 1) + "libtorch_mooncake_cuda.so";
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    return {Code::unsupported, "the CUDA plug-in cannot be loaded (build with TM_CUDA=1): " + std::string(dlerror())};
  void* symbol = dlsym(handle, kCudaKernelsSymbol);
  if (symbol == nullptr) return {Code::version_mismatch, path + " belongs to another build: " + dlerror()};
  return reinterpret_cast<CudaKernelsFn*>(symbol)();
}

template <typename Call>
Status queue(void (*CudaKernels::*kernel)(const Call&, const CudaRun&, CudaVerdict*), const Call& call,
             const CudaRun& run) {
  static const Result<const CudaKernels*> plugin = load_plugin();
  TM_TRY(plugin.status());
  CudaVerdict verdict;
  (plugin.value()->*kernel)(call, run, &verdict);
  return {verdict.code, verdict.message};
}

}  // namespace

bool cuda_checks_ids() {
  static const bool checks = [] {
    const char* value = std::getenv("TM_CHECK_IDS");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return checks;
}

Status cuda_copy_pages(const PageCopy& copy, const CudaRun& where) {
  CudaRun run = where;
  run.check_ids = cuda_checks_ids();
  TM_TRY(check_copy(copy));
  if (copy.nbytes() == 0 && !run.check_ids) return {};
  return queue(&CudaKernels::copy_pages, copy, run);
}

Status cuda_quantize_pages(const PageScaling& call, const CudaRun& run) {
  if (call.blocks() == 0) return {};
  return queue(&CudaKernels::quantize_pages, call, run);
}

Status cuda_dequantize_pages(const PageScaling& call, const CudaRun& run) {
  if (call.blocks() == 0 || call.block_elements() == 0) return {};
  return queue(&CudaKernels::dequantize_pages, call, run);
}

Status cuda_hash_pages(const PageHashing& call, const CudaRun& run) {
  TM_TRY(check_hashing(call));
  if (call.num_tokens < call.page_size) return {};
  return queue(&CudaKernels::hash_pages, call, run);
}

Status cuda_delta_count(const DeltaOnDevice& call, const CudaRun& run) {
  if (call.elements == 0) return {};
  return queue(&CudaKernels::delta_count, call, run);
}

Status cuda_delta_write(const DeltaOnDevice& call, const CudaRun& run) {
  if (call.changed == 0) return {};
  return queue(&CudaKernels::delta_write, call, run);
}

Status cuda_delta_apply(const DeltaOnDevice& call, const CudaRun& run) {
  if (call.changed == 0) return {};
  return queue(&CudaKernels::delta_apply, call, run);
}

}  // namespace torch_mooncake::kv
