#include "torch/ops_pages.h"

#include <torch/csrc/stable/ops.h>

#include "torch/ops_tensors.h"

namespace torch_mooncake::ops {
namespace {

// Name of the tensor of a layer.
std::string name_of(const char* list, size_t layer) { return std::string(list) + "[" + std::to_string(layer) + "]"; }

std::vector<int64_t> page_shape(const Tensor& pool) { return {pool.sizes().begin() + 1, pool.sizes().end()}; }

void require_contiguous_pages(const Tensor& t, int64_t first, const char* name) {
  if (!contiguous_from(t, first))
    refuse(name, ": each page has to be contiguous, but shape ", shape_text(t), " has strides ",
           shape_text({t.strides().begin(), t.strides().end()}));
}

// pools[l] [num_pages, *page] against one layer `list` [n, *page], or all layers [layers, n, *page].
void copy(const std::vector<Tensor>& pools, const Tensor& page_ids, const Tensor& list, bool layered, bool scatter) {
  const char* list_name = scatter ? "pages" : "out";
  const char* pool_name = layered ? "pools[0]" : "pool";
  const int64_t lead = layered ? 2 : 1;
  if (layered && (list.dim() < 1 || list.size(0) != static_cast<int64_t>(pools.size())))
    refuse(list_name, " has shape ", shape_text(list), " for ", pools.size(), " pools: the first size is the layers'");
  if (pools.empty()) return;
  const Tensor& first = pools[0];
  if (first.dim() < 1) refuse(pool_name, " has no dimension: expected [num_pages, *page]");
  require_cpu_or_cuda(first, pool_name);
  Ids ids(page_ids, "page_ids", first, pool_name);

  std::vector<int64_t> expected = shape_of(first);
  expected[0] = ids.view.count;
  if (layered) expected.insert(expected.begin(), static_cast<int64_t>(pools.size()));
  require_shape(list, list_name, expected);
  require_contiguous_pages(list, lead, list_name);
  require_same_dtype(list, list_name, first, pool_name);
  require_same_device(list, list_name, first, pool_name);

  const int64_t num_pages = first.size(0), count = ids.view.count;
  const auto element_nbytes = static_cast<int64_t>(first.element_size());
  const kv::PageIds places{nullptr, count, true, false};
  Copies copies(scatter ? places : ids.view, "page_ids", scatter ? count : num_pages, scatter ? ids.view : places,
                "page_ids", scatter ? num_pages : count);
  std::byte* list_data = data_of(list, !scatter);
  const Range list_range(list);
  std::vector<std::byte*> written;
  for (size_t l = 0; l < pools.size(); ++l) {
    const Tensor& pool = pools[l];
    const std::string name = layered ? name_of("pools", l) : "pool";
    require_same_dtype(pool, name, first, pool_name);
    require_same_device(pool, name, first, pool_name);
    if (shape_of(pool) != shape_of(first))
      refuse(name, " has shape ", shape_text(pool), ", ", pool_name, " has ", shape_text(first));
    if (list_range.shares(Range(pool))) refuse(list_name, " and ", name, " share memory");
    std::byte* in_pool = data_of(pool, scatter);
    for (size_t k = 0; scatter && k < written.size(); ++k)
      if (written[k] == in_pool && pool.numel() > 0)
        refuse("pools[", k, "] and ", name, " are the same memory: a page can be written once");
    written.push_back(in_pool);
    std::byte* in_list = list_data + (layered ? static_cast<int64_t>(l) * list.stride(0) * element_nbytes : 0);
    const int64_t *pool_strides = pool.strides().data(), *list_strides = list.strides().data() + lead - 1;
    if (scatter)
      copies.add({in_list, in_pool}, page_shape(pool), element_nbytes, list_strides[0], list_strides + 1,
                 pool_strides[0], pool_strides + 1);
    else
      copies.add({in_pool, in_list}, page_shape(pool), element_nbytes, pool_strides[0], pool_strides + 1,
                 list_strides[0], list_strides + 1);
  }
  copies.run(first);
}

}  // namespace

Tensor gather_pages(const Tensor& pool, const Tensor& page_ids) {
  if (pool.dim() < 1) refuse("pool has no dimension: expected [num_pages, *page]");
  std::vector<int64_t> shape = shape_of(pool);
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

void copy_pages(const std::vector<Tensor>& src, const Tensor& src_ids, const std::vector<Tensor>& dst,
                const Tensor& dst_ids) {
  if (src.size() != dst.size()) refuse("src has ", src.size(), " layers, dst ", dst.size());
  if (src.empty()) return;
  const Tensor& first = src[0];
  if (first.dim() < 1) refuse("src[0] has no dimension: expected [num_pages, *page]");
  require_cpu_or_cuda(first, "src[0]");
  if (dst[0].dim() < 1) refuse("dst[0] has no dimension: expected [num_pages, *page]");
  const Ids from(src_ids, "src_ids", first, "src[0]"), to(dst_ids, "dst_ids", first, "src[0]");
  const std::vector<int64_t> page = page_shape(first), src_shape = shape_of(first);
  std::vector<int64_t> dst_shape = src_shape;
  dst_shape[0] = dst[0].size(0);

  std::vector<Range> read, written;
  Copies copies(from.view, "src_ids", src_shape[0], to.view, "dst_ids", dst_shape[0]);
  for (size_t l = 0; l < src.size(); ++l) {
    const std::string src_name = name_of("src", l), dst_name = name_of("dst", l);
    for (const auto& [t, name] : {std::pair{&src[l], &src_name}, {&dst[l], &dst_name}}) {
      require_same_dtype(*t, *name, first, "src[0]");
      require_same_device(*t, *name, first, "src[0]");
    }
    require_shape(src[l], src_name, src_shape);
    require_shape(dst[l], dst_name, dst_shape);
    std::byte* in_dst = data_of(dst[l], true);
    std::byte* in_src = data_of(src[l], false);
    const int64_t *src_strides = src[l].strides().data(), *dst_strides = dst[l].strides().data();
    read.emplace_back(src[l]);
    written.emplace_back(dst[l]);
    const bool in_place = src_shape == dst_shape && read[l].same_places(written[l]);
    copies.add({in_src, in_dst}, page, static_cast<int64_t>(first.element_size()), src_strides[0], src_strides + 1,
               dst_strides[0], dst_strides + 1, in_place);
  }
  for (size_t l = 0; l < dst.size(); ++l)
    for (size_t k = 0; k < dst.size(); ++k) {
      if (k < l && written[k].shares(written[l]))
        refuse(name_of("dst", k), " and ", name_of("dst", l), " are the same memory: a page can be written once");
      if (read[k].shares(written[l]) && !(k == l && src_shape == dst_shape && read[k].same_places(written[l])))
        refuse(name_of("src", k), " and ", name_of("dst", l), " share memory");
    }
  copies.run(first);
}

}  // namespace torch_mooncake::ops
