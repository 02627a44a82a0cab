#include "torch/ops_heads.h"

#include "kv/heads.h"
#include "torch/ops_tensors.h"

namespace torch_mooncake::ops {
namespace {

int64_t axis_of(int64_t axis, int64_t dim, const char* name) {
  if (axis < -dim || axis >= dim) refuse(name, " is ", axis, ", not in [", -dim, ", ", dim, ")");
  return axis < 0 ? axis + dim : axis;
}

// As torch.movedim: what is at `from` comes to lie at `to`, the others keep their order.
std::vector<int64_t> move(std::vector<int64_t> values, int64_t from, int64_t to) {
  int64_t moved = values[from];
  values.erase(values.begin() + from);
  values.insert(values.begin() + to, moved);
  return values;
}

std::vector<int64_t> strides_of(const Tensor& t) { return {t.strides().begin(), t.strides().end()}; }

int64_t heads_per_rank(int64_t tp, int64_t kv_heads, const char* side) {
  auto heads = kv::heads_of_rank(0, tp, kv_heads, side);
  raise(heads.status());
  return heads->count;
}

}  // namespace

void reshard_heads(const std::vector<Tensor>& sources, const std::vector<Tensor>& outs, int64_t kv_heads,
                   int64_t source_head_axis, int64_t out_head_axis, const std::vector<int64_t>& source_ranks,
                   int64_t source_tp, const std::vector<int64_t>& out_ranks, int64_t out_tp) {
  if (sources.size() != source_ranks.size())
    refuse("source_ranks has ", source_ranks.size(), " ranks for ", sources.size(), " sources");
  if (outs.size() != out_ranks.size()) refuse("out_ranks has ", out_ranks.size(), " ranks for ", outs.size(), " outs");
  auto plan = kv::plan_heads(source_ranks, source_tp, out_ranks, out_tp, kv_heads);
  raise(plan.status());
  if (outs.empty()) return;

  const Tensor& first = sources[0];  // the plan knows of one
  require_cpu_or_cuda(first, "sources[0]");
  const int64_t source_axis = axis_of(source_head_axis, first.dim(), "source_head_axis");
  const int64_t out_axis = axis_of(out_head_axis, first.dim(), "out_head_axis");
  std::vector<int64_t> source_shape = shape_of(first);
  source_shape[source_axis] = heads_per_rank(source_tp, kv_heads, "source");
  std::vector<int64_t> out_shape = source_shape;
  out_shape[source_axis] = heads_per_rank(out_tp, kv_heads, "out");
  out_shape = move(out_shape, source_axis, out_axis);

  auto check = [&](const std::vector<Tensor>& tensors, const char* list, const std::vector<int64_t>& shape) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::string name = std::string(list) + "[" + std::to_string(i) + "]";
      require_same_dtype(tensors[i], name, first, "sources[0]");
      require_same_device(tensors[i], name, first, "sources[0]");
      require_shape(tensors[i], name, shape);
    }
  };
  check(sources, "sources", source_shape);
  check(outs, "outs", out_shape);
  const std::vector<Range> read = ranges_of(sources), written = ranges_of(outs);
  for (size_t o = 0; o < outs.size(); ++o) {
    const std::string name = "outs[" + std::to_string(o) + "]";
    require_own_places(outs[o], name);
    for (size_t s = 0; s < sources.size(); ++s)
      if (written[o].shares(read[s])) refuse(name, " and sources[", s, "] share memory");
    for (size_t k = 0; k < o; ++k)
      if (written[o].shares(written[k])) refuse("outs[", k, "] and ", name, " share memory");
  }
  if (first.numel() == 0 || outs[0].numel() == 0) return;

  // Pages are the first dimension where that is not the heads'; a piece of heads of all of them is one region.
  const bool paged = source_axis != 0 && out_axis != 0;
  const int64_t pages = paged ? first.size(0) : 1;
  const auto element_nbytes = static_cast<int64_t>(first.element_size());
  std::vector<int64_t> sizes = source_shape;
  sizes[source_axis] = plan->heads_per_piece;
  if (paged) sizes.erase(sizes.begin());
  const kv::PageIds all{nullptr, pages, true, false};
  Copies copies(all, "pages", pages, all, "pages", pages);
  for (const kv::HeadPiece& piece : plan->pieces) {
    const Tensor &source = sources[piece.source], &out = outs[piece.out];
    // out's strides in the order of source's dimensions
    const std::vector<int64_t> from = strides_of(source), to = move(strides_of(out), out_axis, source_axis);
    const kv::CopyRegion region{data_of(source, false) + piece.source_head * from[source_axis] * element_nbytes,
                                data_of(out, true) + piece.out_head * to[source_axis] * element_nbytes};
    const int skip = paged ? 1 : 0;
    copies.add(region, sizes, element_nbytes, paged ? from[0] : 0, from.data() + skip, paged ? to[0] : 0,
               to.data() + skip);
  }
  copies.run(first);
}

}  // namespace torch_mooncake::ops
