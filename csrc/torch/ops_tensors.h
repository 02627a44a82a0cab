// What the operators share: errors that name the argument, views of tensors as the torch-free kernels take them, and
// the way to either device.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kv/cuda/plugin.h"
#include "kv/pages.h"

namespace torch_mooncake::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// std::invalid_argument is ValueError in Python, std::out_of_range is IndexError.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}
void raise(const Status& status);

std::string shape_text(const std::vector<int64_t>& sizes);
std::string shape_text(const Tensor& t);
std::string device_text(const Tensor& t);
std::vector<int64_t> shape_of(const Tensor& t);

void require_cpu_or_cuda(const Tensor& t, const std::string& name);
void require_same_device(const Tensor& t, const std::string& name, const Tensor& first, const std::string& first_name);
void require_same_dtype(const Tensor& t, const std::string& name, const Tensor& first, const std::string& first_name);
void require_shape(const Tensor& t, const std::string& name, const std::vector<int64_t>& expected);

// Dimensions from `first` on lie densely, in order.
bool contiguous_from(const Tensor& t, int64_t first);
// No element of a tensor that is written lies where another one does.
void require_own_places(const Tensor& t, const std::string& name);

// Where a tensor's elements lie: bytes from the first to behind the last. `solid`: all of them are the tensor's.
struct Range {
  explicit Range(const Tensor& t);
  // For tensors that are read and written in one call. Views that lie between each other's elements (K and V of one
  // pool) share nothing; two solid ranges that intersect do, and so do two views of the same elements.
  bool shares(const Range& other) const {
    if (begin >= other.end || other.begin >= end) return false;
    return (solid && other.solid) || same_places(other);
  }
  bool same_places(const Range& other) const { return begin == other.begin && strides == other.strides; }
  const std::byte* begin;
  const std::byte* end;
  bool solid;
  std::vector<int64_t> strides;
};
std::vector<Range> ranges_of(const std::vector<Tensor>& tensors);

// The tensor's first element. One that is written is asked for as such: torch's copy-on-write tensors are resolved
// then.
std::byte* data_of(const Tensor& t, bool written);

// int32 or int64 ids where they are, or a dense copy of strided ones. Not for CPU tensors when they are on a GPU.
struct Ids {
  Ids(const Tensor& page_ids, const char* name, const Tensor& pool, const char* pool_name);
  Tensor tensor;  // keeps the memory alive
  kv::PageIds view;
};

void torch_parallel_for(int64_t n, int64_t grain, const kv::ParallelBody& fn);

// A device's current stream and a workspace on it. The workspace is of the caching allocator, on that stream: safe to
// give back as soon as the work is queued. While it lives, the device is the current one.
class CudaCall {
 public:
  CudaCall(const Tensor& on, int64_t workspace_nbytes);
  kv::CudaRun run() const { return {workspace_.mutable_data_ptr(), stream_}; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
  Tensor workspace_;
};

// Copies with the same ids, from several tensors to several others.
class Copies {
 public:
  Copies(kv::PageIds src_ids, const char* src_name, int64_t src_pages, kv::PageIds dst_ids, const char* dst_name,
         int64_t dst_pages);
  // Pages with these sizes inside; strides in elements, from `src_strides` and `dst_strides` on for the same
  // dimensions. The caller keeps the tensors alive.
  void add(kv::CopyRegion region, const std::vector<int64_t>& sizes, int64_t element_nbytes, int64_t src_page_stride,
           const int64_t* src_strides, int64_t dst_page_stride, const int64_t* dst_strides, bool in_place = false);
  // Checks everything, then copies: on the CPU, or on the device of `on`.
  void run(const Tensor& on) const;

 private:
  struct Group {
    kv::PageCopy copy;
    std::vector<kv::CopyRegion> regions;
  };
  kv::PageCopy common_;
  std::vector<Group> groups_;  // regions whose pages lie alike: one launch each
};

}  // namespace torch_mooncake::ops
