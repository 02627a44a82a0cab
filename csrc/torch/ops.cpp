// Schemas of torch.ops.torch_mooncake.*, all of them, and what implements them. Meta kernels: torch_mooncake/ops.py.
#include <torch/csrc/stable/library.h>

#include "torch/ops_delta.h"
#include "torch/ops_hash.h"
#include "torch/ops_heads.h"
#include "torch/ops_pages.h"
#include "torch/ops_quantize.h"

using namespace torch_mooncake::ops;

// A page is pool[id], page_ids are int32 or int64 [n], and *page is the shape of a page. Pools have any strides,
// between pages and inside them: an NHD pool is read as HND through pool.transpose(). Lists of pages (out, pages) have
// any strides between pages; inside, a page is contiguous.
STABLE_TORCH_LIBRARY(torch_mooncake, m) {
  // pool [num_pages, *page] -> [n, *page], contiguous: out[i] = pool[page_ids[i]]
  m.def("gather_pages(Tensor pool, Tensor page_ids) -> Tensor");
  m.def("gather_pages.out(Tensor pool, Tensor page_ids, *, Tensor(a!) out) -> ()");
  // pool[page_ids[i]] = pages[i]; an id may occur once
  m.def("scatter_pages(Tensor(a!) pool, Tensor page_ids, Tensor pages) -> ()");
  // the same for a list of layers of one shape and dtype; out and pages are [layers, n, *page]
  m.def("gather_pages_layers(Tensor[] pools, Tensor page_ids, Tensor(a!) out) -> ()");
  m.def("scatter_pages_layers(Tensor(a!)[] pools, Tensor page_ids, Tensor pages) -> ()");

  // dst[l][dst_ids[i]] = src[l][src_ids[i]]; one tensor a layer, src [src_pages, *page], dst [dst_pages, *page], any
  // strides on both sides; dst_ids has an id once. src[l] and dst[l] may be the same tensor if no id is in both lists.
  m.def("copy_pages(Tensor[] src, Tensor src_ids, Tensor(a!)[] dst, Tensor dst_ids) -> ()");

  // KV heads from tensor-parallel degree source_tp to out_tp. sources: one tensor for each of source_ranks, of any
  // strides, with kv_heads / source_tp heads at dimension source_head_axis (one head if source_tp > kv_heads: rank r
  // has head r / (source_tp / kv_heads)). outs: one for each of out_ranks, of any strides: the shape of
  // sources.movedim(source_head_axis, out_head_axis), with the heads of its own rank. (NHD -> HND: heads from -2 to
  // -3.) Every head of an out comes from the first source that has it; a head that no source has is an error.
  m.def(
      "reshard_heads(Tensor[] sources, Tensor(a!)[] outs, int kv_heads, int source_head_axis, int out_head_axis, "
      "int[] source_ranks, int source_tp, int[] out_ranks, int out_tp) -> ()");

  // pages fp32, fp16 or bf16, any strides; scale_axes: the ascending dimensions that have scales of their own, 0 among
  // them: [0, 2] for pages [n, N, H, D]. dtype float8_e4m3fn or int8 (csrc/kv/quantize.h says which bits).
  // -> q: pages' shape, contiguous; scales: float32 [pages.size(a) for a in scale_axes], contiguous
  m.def("quantize_pages(Tensor pages, int[] scale_axes, ScalarType dtype) -> (Tensor, Tensor)");
  // q: float8_e4m3fn or int8, any strides; scales contiguous
  m.def("quantize_pages.out(Tensor pages, int[] scale_axes, *, Tensor(a!) q, Tensor(b!) scales) -> ()");
  // q [*shape], scales [q.size(a) for a in scale_axes] -> [*shape] of dtype (fp32, fp16, bf16), contiguous; out: any
  // strides
  m.def("dequantize_pages(Tensor q, Tensor scales, int[] scale_axes, ScalarType dtype) -> Tensor");
  m.def("dequantize_pages.out(Tensor q, Tensor scales, int[] scale_axes, *, Tensor(a!) out) -> ()");

  // weight [*batch, rows, columns], fp32, fp16 or bf16, any strides; a scale for each block of block_rows x block_cols
  // (-1: all of them; blocks at the edges are smaller). dtype float8_e4m3fn or int8; the arithmetic of quantize_pages.
  // -> q: weight's shape, contiguous; scales: float32 [*batch, ceil(rows / block_rows), ceil(columns / block_cols)]
  m.def("quantize_blocks(Tensor weight, int block_rows, int block_cols, ScalarType dtype) -> (Tensor, Tensor)");
  // q: any strides; scales contiguous
  m.def("quantize_blocks.out(Tensor weight, int block_rows, int block_cols, *, Tensor(a!) q, Tensor(b!) scales) -> ()");

  // base, fresh: of one shape and dtype (elements of 1, 2, 4 or 8 bytes), contiguous -> uint8 [nbytes] on the CPU: a
  // blob of the elements whose bits differ (csrc/kv/delta.h), [0] if it would have more than `limit` bytes (-1: any)
  m.def("delta_encode(Tensor base, Tensor fresh, int limit) -> Tensor");
  // blob uint8 [nbytes] on the CPU; target: as many elements of the same size as base had, contiguous
  m.def("delta_apply(Tensor blob, Tensor(a!) target) -> ()");
  // Looks at a blob as delta_apply does -> int64 [segments + 2, 2] on the CPU. Row 0: elements, bytes of one; row 1 +
  // s: where the tokens and the values of segment s are, in bytes from the blob's start; last row: where they would be
  // of one more.
  m.def("delta_table(Tensor blob) -> Tensor");
  // Fills in the header of a blob whose other parts are there.
  m.def("delta_seal(Tensor(a!) blob, int elements, int element_nbytes, int token_nbytes, int changed) -> ()");
  // The same of bytes that lie in several places, on the CPU: base, fresh and target uint8 [n]; offsets, nbytes int64
  // [ranges], whole elements, one range after the other. The two arrays of a delta have the same ranges; the target may
  // have others. What a delta does not change is taken from `base`, which is like target and another one, if it is
  // given.
  m.def(
      "delta_encode_ranges(Tensor base, Tensor fresh, Tensor offsets, Tensor nbytes, int element_nbytes, int limit) -> "
      "Tensor");
  m.def("delta_apply_ranges(Tensor blob, Tensor(a!) target, Tensor offsets, Tensor nbytes, Tensor? base) -> ()");

  // token_ids int64 or int32 [n], root uint8 [16] -> uint8 [n / page_size, 16]: the chain of csrc/kv/page_hash.h
  m.def("hash_pages(Tensor token_ids, int page_size, Tensor root) -> Tensor");
  // Many prompts, one after the other in token_ids [n]: prompt p is [offsets[p], offsets[p + 1]), offsets int64 on the
  // CPU [prompts + 1] from 0 to n. roots uint8 [16] for all or [prompts, 16]. -> uint8 [n / page_size, 16]: the hashes
  // of prompt 0, of prompt 1, ...; rows behind the last one are zero.
  m.def("hash_pages_batch(Tensor token_ids, Tensor offsets, int page_size, Tensor roots) -> Tensor");
}

static void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("gather_pages", TORCH_BOX(&gather_pages));
  m.impl("gather_pages.out", TORCH_BOX(&gather_pages_out));
  m.impl("scatter_pages", TORCH_BOX(&scatter_pages));
  m.impl("gather_pages_layers", TORCH_BOX(&gather_pages_layers));
  m.impl("scatter_pages_layers", TORCH_BOX(&scatter_pages_layers));
  m.impl("copy_pages", TORCH_BOX(&copy_pages));
  m.impl("reshard_heads", TORCH_BOX(&reshard_heads));
  m.impl("quantize_pages", TORCH_BOX(&quantize_pages));
  m.impl("quantize_pages.out", TORCH_BOX(&quantize_pages_out));
  m.impl("dequantize_pages", TORCH_BOX(&dequantize_pages));
  m.impl("dequantize_pages.out", TORCH_BOX(&dequantize_pages_out));
  m.impl("quantize_blocks", TORCH_BOX(&quantize_blocks));
  m.impl("quantize_blocks.out", TORCH_BOX(&quantize_blocks_out));
  m.impl("delta_encode", TORCH_BOX(&delta_encode));
  m.impl("delta_apply", TORCH_BOX(&delta_apply));
  m.impl("delta_table", TORCH_BOX(&delta_table));
  m.impl("delta_seal", TORCH_BOX(&delta_seal));
  m.impl("delta_encode_ranges", TORCH_BOX(&delta_encode_ranges));
  m.impl("delta_apply_ranges", TORCH_BOX(&delta_apply_ranges));
  m.impl("hash_pages", TORCH_BOX(&hash_pages));
  m.impl("hash_pages_batch", TORCH_BOX(&hash_pages_batch));
}

STABLE_TORCH_LIBRARY_IMPL(torch_mooncake, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(torch_mooncake, CUDA, m) { implement(m); }
