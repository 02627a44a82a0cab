#include "kv/cuda/plugin.h"

#include <dlfcn.h>

#include <string>

namespace torch_mooncake::kv {
namespace {

Result<CudaCopyPagesFn*> load_plugin() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<void*>(&cuda_copy_pages), &self) == 0 || self.dli_fname == nullptr)
    return {Code::internal, "dladdr does not know this library"};
  std::string path = self.dli_fname;
  path = path.substr(0, path.find_last_of('/') + 1) + "libtorch_mooncake_cuda.so";
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    return {Code::unsupported, "the CUDA plug-in cannot be loaded (build with TM_CUDA=1): " + std::string(dlerror())};
  void* symbol = dlsym(handle, kCudaCopyPagesSymbol);
  if (symbol == nullptr) return {Code::version_mismatch, path + " belongs to another build: " + dlerror()};
  return reinterpret_cast<CudaCopyPagesFn*>(symbol);
}

}  // namespace

Status cuda_copy_pages(const CudaPageCopy& copy) {
  static const Result<CudaCopyPagesFn*> plugin = load_plugin();
  TM_TRY(plugin.status());
  if (!copy.ids_on_device) TM_TRY(check_page_ids(copy.ids, copy.num_pages, copy.scatter));
  if (copy.ids.count == 0 || copy.page_nbytes == 0 || copy.num_layers == 0) return {};
  CudaVerdict verdict;
  (*plugin.value())(&copy, &verdict);
  return {verdict.code, verdict.message};
}

}  // namespace torch_mooncake::kv
