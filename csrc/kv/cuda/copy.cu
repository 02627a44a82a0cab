// The copy of pages on the GPU: every region in one launch, whatever the strides. What a thread does: copy_index.h.
#include "kv/cuda/copy_plan.h"
#include "kv/cuda/launch.h"

namespace torch_mooncake::kv::cuda {
namespace {

template <int kNbytes, bool kStrided, typename Table>
__global__ void __launch_bounds__(kCopyThreads, 4)
    copy_kernel(const __grid_constant__ Table table, const __grid_constant__ CopyShape shape) {
  copy_tiles<kNbytes, kStrided>(table, shape, blockIdx.x, gridDim.x, threadIdx.x);
}

template <int kNbytes, bool kStrided, typename Table>
void launch(const PageCopy& copy, const void* src_ids, const void* dst_ids, cudaStream_t stream) {
  constexpr auto kKernel = copy_kernel<kNbytes, kStrided, Table>;
  const auto total = static_cast<int64_t>(copy.regions.size());
  const int64_t at_once = regions_per_launch(copy, Table::kCapacity);
  for (int64_t first = 0; first < total; first += at_once) {
    const int64_t regions = std::min(at_once, total - first);
    Table table;
    std::copy_n(copy.regions.data() + first, regions, table.region);
    CopyShape shape = plan_copy(copy, kNbytes, regions);
    shape.src_ids = src_ids;
    shape.dst_ids = dst_ids;
    const uint32_t blocks = grid_for<kKernel>(shape.tiles(), kCopyThreads);
    shape.set_grid(blocks);
    kKernel<<<blocks, kCopyThreads, 0, stream>>>(table, shape);
    check(cudaGetLastError(), "copy of pages");
  }
}

template <int kNbytes>
void launch(const PageCopy& copy, const void* src_ids, const void* dst_ids, cudaStream_t stream) {
  const bool strided = copy.page.num_dims > 0;
  if (copy.regions.size() <= SmallCopyTable::kCapacity)
    return strided ? launch<kNbytes, true, SmallCopyTable>(copy, src_ids, dst_ids, stream)
                   : launch<kNbytes, false, SmallCopyTable>(copy, src_ids, dst_ids, stream);
  return strided ? launch<kNbytes, true, LargeCopyTable>(copy, src_ids, dst_ids, stream)
                 : launch<kNbytes, false, LargeCopyTable>(copy, src_ids, dst_ids, stream);
}

// The ids on the device: where they are, or staged from pageable memory, which has been read when this returns.
const void* staged(const PageIds& ids, const char* name, char*& workspace, cudaStream_t stream) {
  const int64_t nbytes = CudaCopyWorkspace::staged_nbytes(ids);
  if (nbytes == 0) return ids.data;
  if (capturing(stream))
    refuse(Code::unsupported,
           "%s lie on the host while a CUDA graph is captured, which would read them again at every replay: "
           "pass them as a CUDA tensor",
           name);
  void* to = workspace;
  workspace += nbytes;
  check(cudaMemcpyAsync(to, ids.data, ids.count * (ids.wide ? 8 : 4), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync of page ids");
  return to;
}

}  // namespace

void copy_pages(const PageCopy& copy, const CudaRun& run) {
  cudaStream_t stream = stream_of(run);
  auto* workspace = static_cast<char*>(run.workspace);
  const void* src_ids = staged(copy.src_ids, copy.src_ids_name, workspace, stream);
  const void* dst_ids = staged(copy.dst_ids, copy.dst_ids_name, workspace, stream);
  if (run.check_ids && (copy.src_ids.on_device || copy.dst_ids.on_device)) check_device_ids(copy, workspace, stream);
  if (copy.nbytes() == 0) return;
  const int nbytes = access_nbytes(copy);
  if (!copy_fits(copy, nbytes))
    refuse(Code::unsupported, "%lld pages of %lld bytes in accesses of %d bytes: the CUDA copy counts to 2^31",
           static_cast<long long>(copy.count()), static_cast<long long>(copy.page.page_nbytes()), nbytes);
  switch (nbytes) {
    case 16:
      return launch<16>(copy, src_ids, dst_ids, stream);
    case 8:
      return launch<8>(copy, src_ids, dst_ids, stream);
    case 4:
      return launch<4>(copy, src_ids, dst_ids, stream);
    case 2:
      return launch<2>(copy, src_ids, dst_ids, stream);
    default:
      return launch<1>(copy, src_ids, dst_ids, stream);
  }
}

}  // namespace torch_mooncake::kv::cuda
