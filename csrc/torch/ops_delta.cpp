#include "torch/ops_delta.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "kv/delta.h"
#include "torch/ops_tensors.h"

namespace torch_mooncake::ops {
namespace {

// What a blob says is the caller's to answer for, as any other argument is.
void raise_of_blob(const Status& status) {
  if (status.code() == Code::corrupt) throw std::invalid_argument(status.message());
  raise(status);
}

Tensor new_bytes(int64_t nbytes) {
  const std::vector<int64_t> shape{nbytes};
  return torch::stable::empty(shape, ScalarType::Byte, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CPU, 0));
}

int64_t element_nbytes_of(const Tensor& t, const char* name) {
  const auto nbytes = static_cast<int64_t>(t.element_size());
  if (nbytes > 8) refuse(name, " has elements of ", nbytes, " bytes: 1, 2, 4 or 8 are needed");
  return nbytes;
}

void require_contiguous(const Tensor& t, const char* name) {
  if (!contiguous_from(t, 0)) refuse(name, " has to be contiguous");
}

void require_bytes(const Tensor& t, const char* name) {
  if (t.scalar_type() != ScalarType::Byte || t.dim() != 1) refuse(name, " has to be uint8 of one dimension");
  if (!t.is_cpu()) refuse(name, " is on ", device_text(t), ": it has to be on the cpu");
  require_contiguous(t, name);
}

kv::DeltaBlob opened(const Tensor& blob) {
  require_bytes(blob, "blob");
  auto found = kv::delta_open(data_of(blob, false), blob.numel(), torch_parallel_for);
  raise_of_blob(found.status());
  return std::move(*found);
}

Tensor blob_of(const Result<kv::DeltaEncoded>& encoded) {
  raise(encoded.status());
  if (!encoded.value().within_limit()) return new_bytes(0);
  Tensor blob = new_bytes(encoded.value().nbytes());
  encoded.value().write(data_of(blob, true));
  return blob;
}

Tensor encode_on_device(const Tensor& base, const Tensor& fresh, int64_t limit) {
  kv::DeltaOnDevice call;
  call.base = data_of(base, false);
  call.fresh = data_of(fresh, false);
  call.elements = base.numel();
  call.element_nbytes = static_cast<int64_t>(base.element_size());
  const int64_t segments = kv::delta_segments(call.elements);
  std::vector<kv::DeltaEntry> directory(static_cast<size_t>(segments));
  call.directory = directory.data();
  {
    CudaCall cuda(base, kv::CudaDeltaWorkspace::count_nbytes(call.elements));
    raise(kv::cuda_delta_count(call, cuda.run()));
  }
  std::vector<kv::DeltaSegment> table;
  for (const kv::DeltaEntry& entry : directory) {
    table.push_back({call.token_nbytes, call.changed, entry.changed});
    call.token_nbytes += entry.token_nbytes;
    call.changed += entry.changed;
  }
  table.push_back({call.token_nbytes, call.changed, 0});
  call.segments = table.data();
  const auto sizes = kv::DeltaSizes::of(call.elements, call.element_nbytes, call.token_nbytes, call.changed);
  if (limit >= 0 && sizes.nbytes > limit) return new_bytes(0);
  Tensor blob = new_bytes(sizes.nbytes);
  std::byte* to = data_of(blob, true);
  std::copy_n(reinterpret_cast<const std::byte*>(directory.data()), segments * sizeof(kv::DeltaEntry),
              to + sizeof(kv::DeltaHeader));
  call.tokens = reinterpret_cast<uint8_t*>(to + sizes.tokens_at);
  call.values = to + sizes.values_at;
  CudaCall cuda(base, kv::CudaDeltaWorkspace(call, nullptr).nbytes);
  raise(kv::cuda_delta_write(call, cuda.run()));
  kv::delta_seal(to, call.elements, call.element_nbytes, call.token_nbytes, call.changed);
  return blob;
}

std::vector<kv::DeltaRange> ranges_of(const Tensor& offsets, const Tensor& nbytes, int64_t within, const char* what) {
  for (const auto& [t, name] : {std::pair(&offsets, "offsets"), std::pair(&nbytes, "nbytes")}) {
    if (t->scalar_type() != ScalarType::Long || t->dim() != 1 || !t->is_cpu())
      refuse(name, " has to be int64 of one dimension, on the cpu");
    require_contiguous(*t, name);
  }
  require_shape(nbytes, "nbytes", shape_of(offsets));
  const auto* at = static_cast<const int64_t*>(offsets.const_data_ptr());
  const auto* n = static_cast<const int64_t*>(nbytes.const_data_ptr());
  std::vector<kv::DeltaRange> ranges;
  for (int64_t i = 0; i < offsets.numel(); ++i) {
    if (at[i] < 0 || n[i] < 0 || at[i] > within || n[i] > within - at[i])
      throw std::out_of_range("range " + std::to_string(i) + " is " + std::to_string(n[i]) + " bytes at " +
                              std::to_string(at[i]) + ", " + what + " has " + std::to_string(within));
    ranges.push_back({at[i], n[i]});
  }
  return ranges;
}

}  // namespace

Tensor delta_encode(const Tensor& base, const Tensor& fresh, int64_t limit) {
  require_cpu_or_cuda(base, "base");
  require_same_dtype(fresh, "fresh", base, "base");
  require_same_device(fresh, "fresh", base, "base");
  require_shape(fresh, "fresh", shape_of(base));
  require_contiguous(base, "base");
  require_contiguous(fresh, "fresh");
  const int64_t element_nbytes = element_nbytes_of(base, "base");
  if (base.is_cuda()) return encode_on_device(base, fresh, limit);
  kv::DeltaInput input;
  input.base = data_of(base, false);
  input.fresh = data_of(fresh, false);
  input.ranges = {{0, base.numel() * element_nbytes}};
  input.element_nbytes = element_nbytes;
  input.limit = limit;
  return blob_of(kv::delta_encode(input, torch_parallel_for));
}

void delta_apply(const Tensor& blob, const Tensor& target) {
  require_cpu_or_cuda(target, "target");
  require_contiguous(target, "target");
  const kv::DeltaBlob found = opened(blob);
  const int64_t element_nbytes = element_nbytes_of(target, "target");
  if (found.element_nbytes != element_nbytes || found.elements != target.numel())
    refuse("the delta is of ", found.elements, " elements of ", found.element_nbytes, " bytes, target has ",
           target.numel(), " of ", element_nbytes);
  if (target.is_cpu()) {
    if (Range(target).shares(Range(blob))) refuse("target and blob share memory");
    const std::vector<kv::DeltaRange> whole{{0, target.numel() * element_nbytes}};
    return raise(kv::delta_apply(found, data_of(target, true), whole, torch_parallel_for));
  }
  kv::DeltaOnDevice call;
  call.target = data_of(target, true);
  call.elements = found.elements;
  call.element_nbytes = element_nbytes;
  call.token_nbytes = found.token_nbytes;
  call.changed = found.changed;
  call.segments = found.segments.data();
  call.tokens = const_cast<uint8_t*>(found.tokens);
  call.values = const_cast<std::byte*>(found.values);
  CudaCall cuda(target, kv::CudaDeltaWorkspace(call, nullptr).nbytes);
  raise(kv::cuda_delta_apply(call, cuda.run()));
}

Tensor delta_table(const Tensor& blob) {
  const kv::DeltaBlob found = opened(blob);
  const auto sizes = kv::DeltaSizes::of(found.elements, found.element_nbytes, found.token_nbytes, found.changed);
  const std::vector<int64_t> shape{static_cast<int64_t>(found.segments.size()) + 1, 2};
  Tensor table = torch::stable::new_empty(blob, shape, ScalarType::Long);
  auto* row = static_cast<int64_t*>(table.mutable_data_ptr());
  *row++ = found.elements;
  *row++ = found.element_nbytes;
  for (const kv::DeltaSegment& segment : found.segments) {
    *row++ = sizes.tokens_at + segment.token;
    *row++ = sizes.values_at + segment.value * found.element_nbytes;
  }
  return table;
}

void delta_seal(const Tensor& blob, int64_t elements, int64_t element_nbytes, int64_t token_nbytes, int64_t changed) {
  require_bytes(blob, "blob");
  for (int64_t n : {elements, element_nbytes, token_nbytes, changed})
    if (n < 0 || n > blob.numel() * kv::kDeltaSegment) refuse("a delta of ", n, " in ", blob.numel(), " bytes");
  require_shape(blob, "blob", {kv::DeltaSizes::of(elements, element_nbytes, token_nbytes, changed).nbytes});
  kv::delta_seal(data_of(blob, true), elements, element_nbytes, token_nbytes, changed);
}

Tensor delta_encode_ranges(const Tensor& base, const Tensor& fresh, const Tensor& offsets, const Tensor& nbytes,
                           int64_t element_nbytes, int64_t limit) {
  require_bytes(base, "base");
  require_bytes(fresh, "fresh");
  require_shape(fresh, "fresh", shape_of(base));
  kv::DeltaInput input;
  input.base = data_of(base, false);
  input.fresh = data_of(fresh, false);
  input.ranges = ranges_of(offsets, nbytes, base.numel(), "base");
  input.element_nbytes = element_nbytes;
  input.limit = limit;
  return blob_of(kv::delta_encode(input, torch_parallel_for));
}

void delta_apply_ranges(const Tensor& blob, const Tensor& target, const Tensor& offsets, const Tensor& nbytes,
                        const std::optional<Tensor>& base) {
  require_bytes(target, "target");
  if (base.has_value()) {
    require_bytes(*base, "base");
    require_shape(*base, "base", shape_of(target));
    if (Range(target).shares(Range(*base))) refuse("target and base share memory");
  }
  const auto ranges = ranges_of(offsets, nbytes, target.numel(), "target");
  const kv::DeltaBlob found = opened(blob);
  if (Range(target).shares(Range(blob))) refuse("target and blob share memory");
  raise(kv::delta_apply(found, data_of(target, true), ranges, torch_parallel_for,
                        base.has_value() ? data_of(*base, false) : nullptr));
}

}  // namespace torch_mooncake::ops
