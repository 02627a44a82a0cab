// The border between the CPU-only library and the CUDA plug-in, which nvcc compiles and dlopen finds: plain data only.
#pragma once

#include <cstdint>

#include "kv/pages.h"

namespace torch_mooncake::kv {

struct CudaPageCopy {
  const PageLayer* layers;  // host array; the pointers in it are device memory
  int64_t num_layers;
  PageIds ids;         // on the host or on the device
  bool ids_on_device;  // then they are checked there, and the call waits for the verdict
  int64_t num_pages;
  int64_t page_nbytes;
  bool scatter;
  void* workspace;  // device memory, workspace_nbytes() of it, 16-byte aligned, used on `stream` only
  void* stream;     // cudaStream_t; the copy is queued there and is not waited for

  // A verdict (two words), then the ids if they come from the host, then one bit a page to find duplicates.
  static constexpr int64_t kVerdictNbytes = 16;
  int64_t ids_nbytes() const { return ids_on_device ? 0 : (ids.count * (ids.wide ? 8 : 4) + 15) / 16 * 16; }
  int64_t bitmap_nbytes() const { return ids_on_device && scatter ? (num_pages + 31) / 32 * 4 : 0; }
  int64_t workspace_nbytes() const { return kVerdictNbytes + ids_nbytes() + bitmap_nbytes(); }
};

struct CudaVerdict {
  Code code = Code::ok;
  char message[256] = "";
};

// The plug-in's one symbol; the number changes with these structs.
inline constexpr char kCudaCopyPagesSymbol[] = "torch_mooncake_cuda_copy_pages_1";
using CudaCopyPagesFn = void(const CudaPageCopy*, CudaVerdict*);

// Checks the host's part, loads the plug-in on first use (beside this library; `unsupported` where it was not built)
// and queues the copy. The current CUDA device must be the tensors'.
TM_API Status cuda_copy_pages(const CudaPageCopy& copy);

}  // namespace torch_mooncake::kv
