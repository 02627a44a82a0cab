// Schemas of torch.ops.torch_mooncake.*, all of them, and what implements them. Meta kernels: torch_mooncake/ops.py.
#include <torch/csrc/stable/library.h>

#include "torch/ops_pages.h"

using namespace torch_mooncake::ops;

// A page is pool[id]. `pool` may have any stride between pages; inside, a page is contiguous. n = page_ids.numel().
STABLE_TORCH_LIBRARY(torch_mooncake, m) {
  // pool [num_pages, *page], page_ids [n] int32 or int64 -> [n, *page]
  m.def("gather_pages(Tensor pool, Tensor page_ids) -> Tensor");
  m.def("gather_pages.out(Tensor pool, Tensor page_ids, *, Tensor(a!) out) -> ()");
  // pool[page_ids[i]] = pages[i]; an id may occur once
  m.def("scatter_pages(Tensor(a!) pool, Tensor page_ids, Tensor pages) -> ()");
  // the same for a list of layers of one shape and dtype; out and pages are [layers, n, *page]
  m.def("gather_pages_layers(Tensor[] pools, Tensor page_ids, Tensor(a!) out) -> ()");
  m.def("scatter_pages_layers(Tensor(a!)[] pools, Tensor page_ids, Tensor pages) -> ()");
}

static void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("gather_pages", TORCH_BOX(&gather_pages));
  m.impl("gather_pages.out", TORCH_BOX(&gather_pages_out));
  m.impl("scatter_pages", TORCH_BOX(&scatter_pages));
  m.impl("gather_pages_layers", TORCH_BOX(&gather_pages_layers));
  m.impl("scatter_pages_layers", TORCH_BOX(&scatter_pages_layers));
}

STABLE_TORCH_LIBRARY_IMPL(torch_mooncake, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(torch_mooncake, CUDA, m) { implement(m); }
