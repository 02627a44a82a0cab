#include "torch/ops_pages.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <sstream>
#include <stdexcept>
#include <string>

#include "kv/cuda/plugin.h"
#include "kv/pages.h"

namespace torch_mooncake::ops {
namespace {

using torch::headeronly::ScalarType;

// std::invalid_argument is ValueError in Python, std::out_of_range is IndexError.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

void raise(const Status& status) {
  if (status.is_ok()) return;
  if (status.code() == Code::out_of_bounds) throw std::out_of_range(status.message());
  if (status.code() == Code::invalid_argument) throw std::invalid_argument(status.message());
  throw std::runtime_error(status.message());
}

std::string shape_text(const int64_t* sizes, int64_t dim) {
  std::string text = "[";
  for (int64_t d = 0; d < dim; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + "]";
}
std::string shape_text(const Tensor& t) { return shape_text(t.sizes().data(), t.dim()); }

std::string device_text(const Tensor& t) {
  return t.is_cpu() ? "cpu" : (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

// Dimensions from `first` on lie densely, in order: what one page, or one layer's list of pages, has to be.
bool contiguous_from(const Tensor& t, int64_t first) {
  int64_t expected = 1;
  for (int64_t d = t.dim() - 1; d >= first; --d) {
    if (t.size(d) == 0) return true;
    if (t.size(d) != 1 && t.stride(d) != expected) return false;
    expected *= t.size(d);
  }
  return true;
}

void require_contiguous_pages(const Tensor& t, int64_t first, const char* name) {
  if (!contiguous_from(t, first))
    refuse(name, ": each page has to be contiguous, but shape ", shape_text(t), " has strides ",
           shape_text(t.strides().data(), t.dim()));
}

// The ids where they are, or a dense int64 copy of strided ones.
struct Ids {
  explicit Ids(const Tensor& page_ids, const Tensor& pool) : tensor(page_ids) {
    ScalarType type = page_ids.scalar_type();
    if (page_ids.dim() != 1) refuse("page_ids has to be one-dimensional, not of shape ", shape_text(page_ids));
    if (type != ScalarType::Int && type != ScalarType::Long) refuse("page_ids has to be int32 or int64");
    if (!page_ids.is_cpu() && !(page_ids.is_cuda() && page_ids.get_device_index() == pool.get_device_index()))
      refuse("page_ids is on ", device_text(page_ids), " but pool on ", device_text(pool));
    if (!contiguous_from(tensor, 0)) tensor = torch::stable::contiguous(tensor);
    view = {tensor.const_data_ptr(), tensor.numel(), type == ScalarType::Long};
  }
  Tensor tensor;  // keeps the memory alive
  kv::PageIds view;
};

struct Call {
  std::vector<kv::PageLayer> layers;
  int64_t num_pages = 0;
  int64_t page_nbytes = 0;
};

void run_cpu(const Call& call, const kv::PageIds& ids, bool scatter) {
  auto parallel_for = [](int64_t n, int64_t grain, const kv::ParallelBody& fn) {
    torch::stable::parallel_for(0, n, grain, fn);
  };
  auto verb = scatter ? kv::scatter_pages : kv::gather_pages;
  raise(verb(call.layers, ids, call.num_pages, call.page_nbytes, parallel_for));
}

// torch's current stream, from the CUDA half of torch, which a CPU build of it does not have: hence no link.
void* current_cuda_stream(int32_t device) {
  using Fn = AOTITorchError(int32_t, void**);
  static auto* const fn = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return torch_cuda ? reinterpret_cast<Fn*>(dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  if (fn == nullptr || fn(device, &stream) != 0) throw std::runtime_error("torch has no current CUDA stream");
  return stream;
}

void run_cuda(const Call& call, const Tensor& pool, const Ids& ids, bool scatter) {
  torch::stable::accelerator::DeviceGuard guard(pool.get_device_index());
  kv::CudaPageCopy copy{call.layers.data(),
                        static_cast<int64_t>(call.layers.size()),
                        ids.view,
                        ids.tensor.is_cuda(),
                        call.num_pages,
                        call.page_nbytes,
                        scatter,
                        nullptr,
                        current_cuda_stream(pool.get_device_index())};
  // Of the caching allocator, on the current stream: safe to give back as soon as the work is queued.
  Tensor workspace = torch::stable::new_empty(pool, {copy.workspace_nbytes()}, ScalarType::Byte);
  copy.workspace = workspace.mutable_data_ptr();
  raise(kv::cuda_copy_pages(copy));
}

// Dense ranges that intersect; interleaved views (K and V of one pool) may lie between each other.
bool overlap(const kv::PageLayer& layer, const Call& call, int64_t count) {
  if (layer.pool_stride_nbytes != call.page_nbytes || layer.pages_stride_nbytes != call.page_nbytes) return false;
  return layer.pool < layer.pages + count * call.page_nbytes &&
         layer.pages < layer.pool + call.num_pages * call.page_nbytes;
}

// pools[l] [num_pages, *page] against one layer `list` [n, *page], or all layers [layers, n, *page].
void copy(const std::vector<Tensor>& pools, const Tensor& page_ids, const Tensor& list, bool layered, bool scatter) {
  const char* list_name = scatter ? "pages" : "out";
  const char* pool_name = layered ? "pools[0]" : "pool";
  int64_t lead = layered ? 2 : 1;
  if (layered && (list.dim() < 1 || list.size(0) != static_cast<int64_t>(pools.size())))
    refuse(list_name, " has shape ", shape_text(list), " for ", pools.size(), " pools: the first size is the layers'");
  if (pools.empty()) return;
  const Tensor& first = pools[0];
  if (first.dim() < 1) refuse(pool_name, " has no dimension: expected [num_pages, *page]");
  if (!first.is_cpu() && !first.is_cuda()) refuse(pool_name, " is on ", device_text(first), ": cpu or cuda is needed");
  Ids ids(page_ids, first);

  std::vector<int64_t> expected(first.sizes().begin(), first.sizes().end());
  expected[0] = ids.view.count;
  if (layered) expected.insert(expected.begin(), static_cast<int64_t>(pools.size()));
  if (std::vector<int64_t>(list.sizes().begin(), list.sizes().end()) != expected)
    refuse(list_name, " has shape ", shape_text(list), ", expected ", shape_text(expected.data(), expected.size()));
  require_contiguous_pages(list, lead, list_name);

  auto element_nbytes = static_cast<int64_t>(first.element_size());
  Call call{{}, first.size(0), element_nbytes};
  for (int64_t d = 1; d < first.dim(); ++d) call.page_nbytes *= first.size(d);
  auto check_like_first = [&](const Tensor& t, const std::string& name) {
    if (t.scalar_type() != first.scalar_type()) refuse(name, " and ", pool_name, " differ in dtype");
    if (t.is_cpu() != first.is_cpu() || t.get_device_index() != first.get_device_index())
      refuse(name, " is on ", device_text(t), " but ", pool_name, " on ", device_text(first));
  };
  check_like_first(list, list_name);

  // One written element decides that a tensor is written; torch's copy-on-write tensors are resolved by that call.
  auto pointer = [](const Tensor& t, bool written) {
    return static_cast<std::byte*>(written ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr()));
  };
  std::byte* list_data = pointer(list, !scatter);
  for (size_t l = 0; l < pools.size(); ++l) {
    std::string name = layered ? "pools[" + std::to_string(l) + "]" : "pool";
    check_like_first(pools[l], name);
    if (shape_text(pools[l]) != shape_text(first))
      refuse(name, " has shape ", shape_text(pools[l]), ", pools[0] has ", shape_text(first));
    require_contiguous_pages(pools[l], 1, name.c_str());
    int64_t layer_offset = layered ? static_cast<int64_t>(l) * list.stride(0) * element_nbytes : 0;
    call.layers.push_back({pointer(pools[l], scatter), pools[l].stride(0) * element_nbytes, list_data + layer_offset,
                           list.stride(lead - 1) * element_nbytes});
    for (size_t k = 0; scatter && k < l; ++k)
      if (call.layers[k].pool == call.layers[l].pool && call.page_nbytes > 0)
        refuse("pools[", k, "] and ", name, " are the same memory: a page can be written once");
    if (ids.view.count > 0 && call.num_pages > 0 && overlap(call.layers.back(), call, ids.view.count))
      refuse(list_name, " and ", name, " share memory");
  }
  if (first.is_cpu()) {
    if (!ids.tensor.is_cpu()) refuse("page_ids is on ", device_text(ids.tensor), " but pool on cpu");
    run_cpu(call, ids.view, scatter);
  } else {
    run_cuda(call, first, ids, scatter);
  }
}

}  // namespace

Tensor gather_pages(const Tensor& pool, const Tensor& page_ids) {
  if (pool.dim() < 1) refuse("pool has no dimension: expected [num_pages, *page]");
  std::vector<int64_t> shape(pool.sizes().begin(), pool.sizes().end());
  shape[0] = page_ids.numel();
  Tensor out = torch::stable::new_empty(pool, shape);
  copy({pool}, page_ids, out, false, false);
  return out;
}

void gather_pages_out(const Tensor& pool, const Tensor& page_ids, const Tensor& out) {
  copy({pool}, page_ids, out, false, false);
}

void scatter_pages(const Tensor& pool, const Tensor& page_ids, const Tensor& pages) {
  copy({pool}, page_ids, pages, false, true);
}

void gather_pages_layers(const std::vector<Tensor>& pools, const Tensor& page_ids, const Tensor& out) {
  copy(pools, page_ids, out, true, false);
}

void scatter_pages_layers(const std::vector<Tensor>& pools, const Tensor& page_ids, const Tensor& pages) {
  copy(pools, page_ids, pages, true, true);
}

}  // namespace torch_mooncake::ops
