#include "torch/ops_tensors.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace torch_mooncake::ops {

void raise(const Status& status) {
  if (status.is_ok()) return;
  if (status.code() == Code::out_of_bounds) throw std::out_of_range(status.message());
  if (status.code() == Code::invalid_argument) throw std::invalid_argument(status.message());
  throw std::runtime_error(status.message());
}

std::string shape_text(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (size_t d = 0; d < sizes.size(); ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + "]";
}
std::string shape_text(const Tensor& t) { return shape_text(shape_of(t)); }

std::string device_text(const Tensor& t) {
  return t.is_cpu() ? "cpu" : (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

std::vector<int64_t> shape_of(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }

void require_cpu_or_cuda(const Tensor& t, const std::string& name) {
  if (!t.is_cpu() && !t.is_cuda()) refuse(name, " is on ", device_text(t), ": cpu or cuda is needed");
}

void require_same_device(const Tensor& t, const std::string& name, const Tensor& first, const std::string& first_name) {
  if (t.is_cpu() != first.is_cpu() || t.get_device_index() != first.get_device_index())
    refuse(name, " is on ", device_text(t), " but ", first_name, " on ", device_text(first));
}

void require_same_dtype(const Tensor& t, const std::string& name, const Tensor& first, const std::string& first_name) {
  if (t.scalar_type() != first.scalar_type()) refuse(name, " and ", first_name, " differ in dtype");
}

void require_shape(const Tensor& t, const std::string& name, const std::vector<int64_t>& expected) {
  if (shape_of(t) != expected) refuse(name, " has shape ", shape_text(t), ", expected ", shape_text(expected));
}

bool contiguous_from(const Tensor& t, int64_t first) {
  int64_t expected = 1;
  for (int64_t d = t.dim() - 1; d >= first; --d) {
    if (t.size(d) == 0) return true;
    if (t.size(d) != 1 && t.stride(d) != expected) return false;
    expected *= t.size(d);
  }
  return true;
}

void require_own_places(const Tensor& t, const std::string& name) {
  std::vector<kv::Extent> dims;
  for (int64_t d = 0; d < t.dim(); ++d) dims.push_back({t.size(d), t.stride(d)});
  if (kv::places_overlap(dims, 1))
    refuse(name, " is written, but its elements overlap: shape ", shape_text(t), ", strides ",
           shape_text({t.strides().begin(), t.strides().end()}));
}

Range::Range(const Tensor& t) : begin(data_of(t, false)), strides(t.strides().begin(), t.strides().end()) {
  const auto element_nbytes = static_cast<int64_t>(t.element_size());
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * strides[d];
  const int64_t nbytes = t.numel() == 0 ? 0 : (last + 1) * element_nbytes;
  end = begin + nbytes;
  solid = nbytes == t.numel() * element_nbytes;
}

std::vector<Range> ranges_of(const std::vector<Tensor>& tensors) { return {tensors.begin(), tensors.end()}; }

std::byte* data_of(const Tensor& t, bool written) {
  return static_cast<std::byte*>(written ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr()));
}

Ids::Ids(const Tensor& page_ids, const char* name, const Tensor& pool, const char* pool_name) : tensor(page_ids) {
  ScalarType type = page_ids.scalar_type();
  if (page_ids.dim() != 1) refuse(name, " has to be one-dimensional, not of shape ", shape_text(page_ids));
  if (type != ScalarType::Int && type != ScalarType::Long) refuse(name, " has to be int32 or int64");
  if (!page_ids.is_cpu() && !(page_ids.is_cuda() && page_ids.get_device_index() == pool.get_device_index()))
    refuse(name, " is on ", device_text(page_ids), " but ", pool_name, " on ", device_text(pool));
  if (!contiguous_from(tensor, 0)) tensor = torch::stable::contiguous(tensor);
  view = {tensor.const_data_ptr(), tensor.numel(), type == ScalarType::Long, tensor.is_cuda()};
  static constexpr int64_t kNone = 0;
  if (view.data == nullptr) view.data = &kNone;  // no ids, which is not "every page"
}

void torch_parallel_for(int64_t n, int64_t grain, const kv::ParallelBody& fn) {
  torch::stable::parallel_for(0, n, grain, fn);
}

// torch's current stream, from the CUDA half of torch, which a CPU build of it does not have: hence no link.
static void* current_cuda_stream(int32_t device) {
  using Fn = AOTITorchError(int32_t, void**);
  static auto* const fn = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return torch_cuda ? reinterpret_cast<Fn*>(dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  if (fn == nullptr || fn(device, &stream) != 0) throw std::runtime_error("torch has no current CUDA stream");
  return stream;
}

CudaCall::CudaCall(const Tensor& on, int64_t workspace_nbytes)
    : guard_(on.get_device_index()),
      stream_(current_cuda_stream(on.get_device_index())),
      workspace_(torch::stable::new_empty(on, {workspace_nbytes}, ScalarType::Byte)) {}

Copies::Copies(kv::PageIds src_ids, const char* src_name, int64_t src_pages, kv::PageIds dst_ids, const char* dst_name,
               int64_t dst_pages) {
  common_.src_ids = src_ids;
  common_.dst_ids = dst_ids;
  common_.src_pages = src_pages;
  common_.dst_pages = dst_pages;
  common_.src_ids_name = src_name;
  common_.dst_ids_name = dst_name;
}

static bool alike(const kv::PageCopy& a, const kv::PageCopy& b) {
  auto same_dim = [](const kv::CopyDim& x, const kv::CopyDim& y) {
    return x.size == y.size && x.src_stride == y.src_stride && x.dst_stride == y.dst_stride;
  };
  return a.page.run_nbytes == b.page.run_nbytes && a.page.num_dims == b.page.num_dims && a.in_place == b.in_place &&
         a.src_page_stride == b.src_page_stride && a.dst_page_stride == b.dst_page_stride &&
         std::equal(a.page.dims, a.page.dims + a.page.num_dims, b.page.dims, same_dim);
}

void Copies::add(kv::CopyRegion region, const std::vector<int64_t>& sizes, int64_t element_nbytes,
                 int64_t src_page_stride, const int64_t* src_strides, int64_t dst_page_stride,
                 const int64_t* dst_strides, bool in_place) {
  std::vector<kv::CopyDim> dims;
  for (size_t d = 0; d < sizes.size(); ++d)
    dims.push_back({sizes[d], src_strides[d] * element_nbytes, dst_strides[d] * element_nbytes});
  auto page = kv::make_pattern(dims, element_nbytes);
  raise(page.status());
  kv::PageCopy copy = common_;
  copy.page = *page;
  copy.in_place = in_place;
  copy.src_page_stride = src_page_stride * element_nbytes;
  copy.dst_page_stride = dst_page_stride * element_nbytes;
  for (Group& group : groups_)
    if (alike(group.copy, copy)) {
      group.regions.push_back(region);
      return;
    }
  groups_.push_back({copy, {region}});
}

void Copies::run(const Tensor& on) const {
  std::vector<kv::PageCopy> copies;
  for (const Group& group : groups_) {
    copies.push_back(group.copy);
    copies.back().regions = group.regions;
  }
  if (copies.empty()) copies.push_back(common_);  // the ids are looked at all the same
  if (copies.size() > 1)                          // nothing may be written before all is known to be good
    for (const kv::PageCopy& copy : copies) raise(kv::check_copy(copy));
  for (const kv::PageCopy& copy : copies) {
    if (on.is_cpu()) {
      raise(kv::copy_pages(copy, torch_parallel_for));
    } else {
      CudaCall call(on, kv::CudaCopyWorkspace::nbytes(copy));
      raise(kv::cuda_copy_pages(copy, call.run()));
    }
  }
}

}  // namespace torch_mooncake::ops
