#include "torch/ops_quantize.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "torch/ops_tensors.h"

namespace torch_mooncake::ops {
namespace {

bool is_wide(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}
bool is_narrow(ScalarType type) { return type == ScalarType::Float8_e4m3fn || type == ScalarType::Char; }

}  // namespace

kv::WideType wide_type(ScalarType type) {
  if (type == ScalarType::Float) return kv::WideType::fp32;
  return type == ScalarType::Half ? kv::WideType::fp16 : kv::WideType::bf16;
}
kv::NarrowType narrow_type(ScalarType type) {
  return type == ScalarType::Char ? kv::NarrowType::int8 : kv::NarrowType::fp8_e4m3fn;
}

void require_wide(ScalarType type, const char* what) {
  if (!is_wide(type)) refuse(what, " has to be float32, float16 or bfloat16");
}
void require_narrow(ScalarType type, const char* what) {
  if (!is_narrow(type)) refuse(what, " has to be float8_e4m3fn or int8");
}

namespace {

void check_axes(const std::vector<int64_t>& scale_axes, int64_t dim) {
  for (size_t i = 0; i < scale_axes.size(); ++i) {
    if (scale_axes[i] < 0 || scale_axes[i] >= dim)
      refuse("scale_axes[", i, "] is ", scale_axes[i], ", not in [0, ", dim, ")");
    if (i > 0 && scale_axes[i] <= scale_axes[i - 1])
      refuse("scale_axes ", shape_text(scale_axes), " have to ascend, each once");
  }
  if (scale_axes.empty() || scale_axes[0] != 0)
    refuse("scale_axes ", shape_text(scale_axes), " have to begin with 0: pages have scales of their own");
}

std::vector<int64_t> scale_shape(const Tensor& t, const std::vector<int64_t>& scale_axes) {
  std::vector<int64_t> shape;
  for (int64_t axis : scale_axes) shape.push_back(t.size(axis));
  return shape;
}

// `written` is the one of wide and narrow that the call fills.
kv::PageScaling make_call(const Tensor& wide, const char* wide_name, const Tensor& narrow, const char* narrow_name,
                          const Tensor& scales, const std::vector<int64_t>& scale_axes, bool quantize) {
  const Tensor& given = quantize ? wide : narrow;
  const char* given_name = quantize ? wide_name : narrow_name;
  const Tensor& written = quantize ? narrow : wide;
  const char* written_name = quantize ? narrow_name : wide_name;
  require_cpu_or_cuda(given, given_name);
  require_wide(wide.scalar_type(), wide_name);
  require_narrow(narrow.scalar_type(), narrow_name);
  if (scales.scalar_type() != ScalarType::Float) refuse("scales has to be float32");
  check_axes(scale_axes, given.dim());
  require_shape(written, written_name, shape_of(given));
  require_shape(scales, "scales", scale_shape(given, scale_axes));
  if (!contiguous_from(scales, 0)) refuse("scales has to be contiguous");
  require_same_device(written, written_name, given, given_name);
  require_same_device(scales, "scales", given, given_name);
  require_own_places(written, written_name);
  if (Range(written).shares(Range(given))) refuse(written_name, " and ", given_name, " share memory");

  kv::PageScaling call;
  call.wide_type = wide_type(wide.scalar_type());
  call.narrow_type = narrow_type(narrow.scalar_type());
  call.wide = data_of(wide, !quantize);
  call.narrow = data_of(narrow, quantize);
  call.scales = reinterpret_cast<float*>(data_of(scales, quantize));

  // Strides of the contiguous scales, 0 for the other dimensions.
  std::vector<int64_t> scale_strides(static_cast<size_t>(given.dim()), 0);
  int64_t step = 1;
  for (auto axis = scale_axes.rbegin(); axis != scale_axes.rend(); ++axis) {
    scale_strides[*axis] = step;
    step *= given.size(*axis);
  }
  size_t block_axes = 0;  // the leading dimensions that all have scales
  while (block_axes < scale_axes.size() && scale_axes[block_axes] == static_cast<int64_t>(block_axes)) ++block_axes;

  std::vector<kv::QuantizeDim> dims;
  auto add = [&](size_t from, size_t to) {
    const size_t first = dims.size();
    for (size_t d = from; d < to; ++d) {
      const kv::QuantizeDim dim{given.size(static_cast<int64_t>(d)), wide.stride(static_cast<int64_t>(d)),
                                narrow.stride(static_cast<int64_t>(d)), scale_strides[d]};
      if (dim.size == 1) continue;
      if (dims.size() > first) {
        kv::QuantizeDim& outer = dims.back();
        if (outer.wide_stride == dim.size * dim.wide_stride && outer.narrow_stride == dim.size * dim.narrow_stride &&
            outer.scale_stride == dim.size * dim.scale_stride) {
          outer = {outer.size * dim.size, dim.wide_stride, dim.narrow_stride, dim.scale_stride};
          continue;
        }
      }
      dims.push_back(dim);
    }
  };
  add(0, block_axes);
  call.block_dims = static_cast<int>(dims.size());
  add(block_axes, static_cast<size_t>(given.dim()));
  if (dims.size() > kv::kMaxQuantizeDims)
    refuse(given_name, " has ", dims.size(), " dimensions that do not merge into fewer: at most ", kv::kMaxQuantizeDims,
           " can be taken");
  call.num_dims = static_cast<int>(dims.size());
  std::copy(dims.begin(), dims.end(), call.dims);
  for (size_t i = block_axes; i < scale_axes.size(); ++i) call.groups_per_block *= given.size(scale_axes[i]);
  return call;
}

void quantize(const Tensor& pages, const std::vector<int64_t>& scale_axes, const Tensor& q, const Tensor& scales) {
  const kv::PageScaling call = make_call(pages, "pages", q, "q", scales, scale_axes, true);
  if (pages.is_cpu()) return raise(kv::quantize_pages(call, torch_parallel_for));
  CudaCall cuda(pages, 0);
  raise(kv::cuda_quantize_pages(call, cuda.run()));
}

void dequantize(const Tensor& q, const Tensor& scales, const std::vector<int64_t>& scale_axes, const Tensor& out) {
  const kv::PageScaling call = make_call(out, "out", q, "q", scales, scale_axes, false);
  if (q.is_cpu()) return raise(kv::dequantize_pages(call, torch_parallel_for));
  CudaCall cuda(q, 0);
  raise(kv::cuda_dequantize_pages(call, cuda.run()));
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_pages(const Tensor& pages, const std::vector<int64_t>& scale_axes,
                                          ScalarType dtype) {
  require_wide(pages.scalar_type(), "pages");
  require_narrow(dtype, "dtype");
  check_axes(scale_axes, pages.dim());
  Tensor q = torch::stable::new_empty(pages, shape_of(pages), dtype);
  Tensor scales = torch::stable::new_empty(pages, scale_shape(pages, scale_axes), ScalarType::Float);
  quantize(pages, scale_axes, q, scales);
  return {q, scales};
}

void quantize_pages_out(const Tensor& pages, const std::vector<int64_t>& scale_axes, const Tensor& q,
                        const Tensor& scales) {
  quantize(pages, scale_axes, q, scales);
}

Tensor dequantize_pages(const Tensor& q, const Tensor& scales, const std::vector<int64_t>& scale_axes,
                        ScalarType dtype) {
  require_wide(dtype, "dtype");
  Tensor out = torch::stable::new_empty(q, shape_of(q), dtype);
  dequantize(q, scales, scale_axes, out);
  return out;
}

void dequantize_pages_out(const Tensor& q, const Tensor& scales, const std::vector<int64_t>& scale_axes,
                          const Tensor& out) {
  dequantize(q, scales, scale_axes, out);
}

}  // namespace torch_mooncake::ops
