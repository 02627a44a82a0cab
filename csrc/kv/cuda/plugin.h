// The border between the CPU-only library and the CUDA plug-in, which nvcc compiles and dlopen finds: plain data only.
// The calls are the CPU's (kv/pages.h, quantize.h, page_hash.h) with device pointers in them, and CudaRun beside them;
// deltas have one of their own.
#pragma once

#include <cstdint>

#include "kv/delta.h"
#include "kv/page_hash.h"
#include "kv/pages.h"
#include "kv/quantize.h"

namespace torch_mooncake::kv {

// Where a call runs. Work is queued on the stream and is not waited for.
struct CudaRun {
  void* workspace;         // device memory, as many bytes as the call needs, 16-byte aligned, used on `stream` only
  void* stream;            // cudaStream_t
  bool check_ids = false;  // set by cuda_copy_pages()
};

// TM_CHECK_IDS=1 in the environment when this is first asked: page ids that lie on the device are checked there as the
// CPU checks its own, for which the host waits. Otherwise nobody looks at them beforehand: the kernels skip ids out of
// range (neither read nor written), do not wait, and can be captured in a CUDA graph.
TM_API bool cuda_checks_ids();

// Of a copy: the ids that come from the host, then, if ids are checked, a verdict and one bit a page of dst.
struct CudaCopyWorkspace {
  static constexpr int64_t kVerdictNbytes = 16;
  static int64_t staged_nbytes(const PageIds& ids) {
    return ids.on_device || ids.data == nullptr ? 0 : (ids.count * (ids.wide ? 8 : 4) + 15) / 16 * 16;
  }
  static int64_t bitmap_nbytes(const PageCopy& copy) { return (copy.dst_pages + 127) / 128 * 16; }
  static int64_t nbytes(const PageCopy& copy) {
    return staged_nbytes(copy.src_ids) + staged_nbytes(copy.dst_ids) +
           (cuda_checks_ids() ? kVerdictNbytes + bitmap_nbytes(copy) : 0);
  }
};

// Of a hashing: where each prompt's tokens begin, and where its hashes do.
inline int64_t cuda_workspace_nbytes(const PageHashing& call) { return (call.prompts + 1) * 16; }

// A delta of arrays on the device; what the blob consists of is on the host. delta_count() fills in the directory,
// delta_write() the tokens and the values, delta_apply() the target. All wait for the stream.
struct DeltaOnDevice {
  const std::byte* base = nullptr;   // device: counted and written
  const std::byte* fresh = nullptr;  // device: the same
  std::byte* target = nullptr;       // device: applied to
  int64_t elements = 0, element_nbytes = 1, token_nbytes = 0, changed = 0;
  DeltaEntry* directory = nullptr;         // host, [segments]
  const DeltaSegment* segments = nullptr;  // host, [segments + 1]
  uint8_t* tokens = nullptr;               // host
  std::byte* values = nullptr;             // host
};

// Of a delta: the directory; or where the segments are, the values and the tokens.
struct CudaDeltaWorkspace {
  CudaDeltaWorkspace(const DeltaOnDevice& call, void* workspace)
      : segments_nbytes((delta_segments(call.elements) + 1) * static_cast<int64_t>(sizeof(DeltaSegment))),
        segments(static_cast<DeltaSegment*>(workspace)),
        values(static_cast<std::byte*>(workspace) + segments_nbytes),
        tokens(reinterpret_cast<uint8_t*>(values) + call.changed * call.element_nbytes),
        nbytes(segments_nbytes + call.changed * call.element_nbytes + call.token_nbytes) {}
  static int64_t count_nbytes(int64_t elements) {
    return delta_segments(elements) * static_cast<int64_t>(sizeof(DeltaEntry));
  }
  int64_t segments_nbytes;
  DeltaSegment* segments;
  std::byte* values;
  uint8_t* tokens;
  int64_t nbytes;
};

struct CudaVerdict {
  Code code = Code::ok;
  char message[256] = "";
};

// What the plug-in has.
struct CudaKernels {
  void (*copy_pages)(const PageCopy&, const CudaRun&, CudaVerdict*);
  void (*quantize_pages)(const PageScaling&, const CudaRun&, CudaVerdict*);
  void (*dequantize_pages)(const PageScaling&, const CudaRun&, CudaVerdict*);
  void (*hash_pages)(const PageHashing&, const CudaRun&, CudaVerdict*);
  void (*delta_count)(const DeltaOnDevice&, const CudaRun&, CudaVerdict*);
  void (*delta_write)(const DeltaOnDevice&, const CudaRun&, CudaVerdict*);
  void (*delta_apply)(const DeltaOnDevice&, const CudaRun&, CudaVerdict*);
};

// The plug-in's one symbol; the number changes with these structs.
inline constexpr char kCudaKernelsSymbol[] = "torch_mooncake_cuda_kernels_4";
using CudaKernelsFn = const CudaKernels*();

// Each checks the host's part as the CPU's twin does, loads the plug-in on first use (beside this library;
// `unsupported` where it was not built) and queues the work. The current CUDA device must be the tensors'.
TM_API Status cuda_copy_pages(const PageCopy& copy, const CudaRun& run);
TM_API Status cuda_quantize_pages(const PageScaling& call, const CudaRun& run);
TM_API Status cuda_dequantize_pages(const PageScaling& call, const CudaRun& run);
TM_API Status cuda_hash_pages(const PageHashing& call, const CudaRun& run);
TM_API Status cuda_delta_count(const DeltaOnDevice& call, const CudaRun& run);
TM_API Status cuda_delta_write(const DeltaOnDevice& call, const CudaRun& run);
TM_API Status cuda_delta_apply(const DeltaOnDevice& call, const CudaRun& run);

}  // namespace torch_mooncake::kv
