// The collectives of MooncakeBackend: each checks its arguments, then queues what is to be done with raw memory.
#include "torch/c10d_backend.h"
#include "torch/c10d_tensors.h"
#include "torch/compat.h"

namespace torch_mooncake::dist {
namespace {

using c10d::OpType;
using coll::Call;
using coll::ConstPiece;
using coll::Piece;

void commit_all(const std::vector<Writable>& outputs) {
  for (const auto& output : outputs) output.commit();
}

void check_alike(const TensorList& tensors, const at::Tensor& model, bool sizes, const char* op) {
  for (const auto& tensor : tensors) {
    check_tensor(tensor, op);
    TORCH_CHECK_TYPE(tensor.scalar_type() == model.scalar_type(), "mooncake: ", op, ": tensors of ",
                     tensor.scalar_type(), " and ", model.scalar_type());
    if (sizes) {
      TORCH_CHECK_VALUE(tensor.numel() == model.numel(), "mooncake: ", op, ": tensors of ", tensor.numel(), " and ",
                        model.numel(), " elements");
    }
  }
}

void check_world(size_t n, int size, const char* op) {
  TORCH_CHECK_VALUE(n == static_cast<size_t>(size), "mooncake: ", op, ": a list of ", size,
                    " tensors is expected, not ", n);
}

void check_root(int64_t root, const coll::Group& group, const char* op) {
  TORCH_CHECK_VALUE(root >= 0 && root < group.seats(), "mooncake: ", op, ": invalid root rank ", root, " of ",
                    group.seats());
  TORCH_CHECK_VALUE(group.rank_in(static_cast<int>(root)) >= 0, "mooncake: ", op, ": the root, rank ", root,
                    ", is not active");
}

// Lists and cuts have an item for each seat; what moves are those of the ranks that are there.
template <typename Item>
std::vector<Item> of_present(const coll::Group& group, const std::vector<Item>& by_seat) {
  std::vector<Item> out;
  for (int rank = 0; rank < group.size() && !by_seat.empty(); ++rank) out.push_back(by_seat[group.seat_of(rank)]);
  return out;
}
bool has_empty_seats(const coll::Group& group) { return group.size() < group.seats(); }

// Equal cuts of one contiguous tensor, a seat each.
std::vector<Piece> cuts(const at::Tensor& tensor, int n) {
  auto* base = static_cast<std::byte*>(tensor.mutable_data_ptr());
  const uint64_t each = tensor.nbytes() / n;
  std::vector<Piece> out;
  for (int i = 0; i < n; ++i) out.push_back({base + each * i, each});
  return out;
}

std::vector<ConstPiece> to_const(const std::vector<Piece>& pieces) {
  std::vector<ConstPiece> out;
  for (const auto& piece : pieces) out.push_back({piece.data, piece.nbytes});
  return out;
}

std::vector<ConstPiece> const_pieces(const TensorList& tensors) {
  std::vector<ConstPiece> out;
  for (const auto& tensor : tensors) out.push_back(const_piece_of(tensor));
  return out;
}

std::vector<Piece> pieces(const std::vector<Writable>& outputs) {
  std::vector<Piece> out;
  for (const auto& output : outputs) out.push_back(piece_of(output.memory()));
  return out;
}

TensorList readable_all(const TensorList& tensors) {
  TensorList out;
  for (const auto& tensor : tensors) out.push_back(readable(tensor));
  return out;
}

Status all_reduce_one(const Call& call, const at::Tensor& tensor, const c10d::ReduceOp& torch_op, coll::DType dtype,
                      coll::ReduceOp op) {
  if (torch_op.op_ == c10d::ReduceOp::PREMUL_SUM) copy_tensor(tensor, premultiplied(torch_op, tensor));
  const Writable memory(tensor, true);
  TM_TRY(coll::all_reduce(call, memory.memory().mutable_data_ptr(), tensor.numel(), dtype, op));
  memory.commit();
  return {};
}

// Sparse (COO) sums: every rank collects all indices and values, and adds them up in rank order.
Status all_reduce_sparse(const Call& call, const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  if (call.device) {  // by way of the host
    Call host = call;
    host.device = nullptr;
    const at::Tensor image = tensor.cpu();
    TM_TRY(all_reduce_sparse(host, image));
    tensor.copy_(image);
    return {};
  }
  const int n = call.group.size();
  const at::Tensor own = tensor.coalesce();
  const at::Tensor indices = own.indices().contiguous();  // int64 [sparse_dim, nnz]
  const at::Tensor values = own.values().contiguous();    // [nnz, dense sizes…]
  int64_t nnz = own._nnz();
  std::vector<int64_t> all_nnz(n);
  std::vector<Piece> counts;
  for (auto& count : all_nnz) counts.push_back({&count, sizeof count});
  TM_TRY(coll::all_gather(call, {&nnz, sizeof nnz}, counts));
  TensorList all_indices, all_values;
  std::vector<Piece> index_pieces, value_pieces;
  for (int64_t count : all_nnz) {
    auto sizes = values.sizes().vec();
    sizes[0] = count;
    all_indices.push_back(at::empty({indices.size(0), count}, indices.options()));
    all_values.push_back(at::empty(sizes, values.options()));
    index_pieces.push_back(piece_of(all_indices.back()));
    value_pieces.push_back(piece_of(all_values.back()));
  }
  TM_TRY(coll::all_gather(call, const_piece_of(indices), index_pieces));
  TM_TRY(coll::all_gather(call, const_piece_of(values), value_pieces));
  tensor.copy_(at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values, 0), tensor.sizes()).coalesce());
  return {};
}

std::vector<Piece> cuts_of_present(const coll::Group& group, const at::Tensor& tensor) {
  return of_present(group, cuts(tensor, group.seats()));
}

// A list of splits along dim 0 as pieces of a contiguous tensor; empty splits: equal ones.
std::vector<Piece> split_pieces(const at::Tensor& tensor, const std::vector<int64_t>& splits, int n) {
  if (splits.empty()) return cuts(tensor, n);
  const int64_t rows = tensor.size(0);
  const uint64_t row_bytes = rows > 0 ? tensor.nbytes() / rows : 0;
  auto* at = static_cast<std::byte*>(tensor.mutable_data_ptr());
  std::vector<Piece> out;
  for (int64_t split : splits) {
    out.push_back({at, split * row_bytes});
    at += split * row_bytes;
  }
  return out;
}

void check_splits(const at::Tensor& tensor, const std::vector<int64_t>& splits, int n, const char* op) {
  check_tensor(tensor, op);
  TORCH_CHECK_VALUE(tensor.dim() > 0, "mooncake: ", op, ": tensors need a dimension to split");
  c10d::checkSplitSizes(splits, tensor, n);
  for (int64_t split : splits) TORCH_CHECK_VALUE(split >= 0, "mooncake: ", op, ": negative split size ", split);
}

}  // namespace

WorkPtr MooncakeBackend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor tensor = only(tensors, "broadcast");
  check_root(opts.rootRank, *seats_->group(), "broadcast");
  const int root = static_cast<int>(opts.rootRank);
  return run({OpType::BROADCAST, "mooncake:broadcast", "broadcast", opts.timeout, opts.asyncOp, tensors, tensors,
              rank_ == root},
             [tensor, root, me = rank_](const Call& call) -> Status {
               const Writable memory(tensor, me == root);
               TM_TRY(coll::broadcast(call, memory.memory().mutable_data_ptr(), memory.memory().nbytes(),
                                      call.group.rank_in(root)));
               if (me != root) memory.commit();
               return {};
             });
}

WorkPtr MooncakeBackend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  const at::Tensor tensor = only(tensors, "all_reduce");
  const auto op = reduce_op_of(opts.reduceOp, tensor, "all_reduce");
  const auto dtype = dtype_of(tensor, "all_reduce");
  return run({OpType::ALLREDUCE, "mooncake:all_reduce", "all_reduce", opts.timeout, opts.asyncOp, tensors, tensors},
             [tensor, torch_op = opts.reduceOp, op, dtype](const Call& call) {
               return all_reduce_one(call, tensor, torch_op, dtype, op);
             });
}

WorkPtr MooncakeBackend::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(
      tensors.size() == 1 && tensors[0].is_sparse() && (tensors[0].device().is_cpu() || tensors[0].device().is_cuda()),
      "mooncake: all_reduce_sparse: one sparse (COO) tensor on cpu or cuda is expected");
  TORCH_CHECK_VALUE(opts.reduceOp.op_ == c10d::ReduceOp::SUM,
                    "mooncake: all_reduce: sparse tensors can only be summed");
  return run({OpType::_ALLREDUCE_SPARSE, "mooncake:sparse_all_reduce", "all_reduce (sparse)", opts.timeout,
              opts.asyncOp, tensors, tensors},
             [tensor = tensors[0]](const Call& call) { return all_reduce_sparse(call, tensor); });
}

WorkPtr MooncakeBackend::allreduce_coalesced(TensorList& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<std::pair<coll::DType, coll::ReduceOp>> kinds;
  for (const auto& tensor : tensors) {
    check_tensor(tensor, "all_reduce_coalesced");
    kinds.emplace_back(dtype_of(tensor, "all_reduce_coalesced"),
                       reduce_op_of(opts.reduceOp, tensor, "all_reduce_coalesced"));
  }
  return run({OpType::ALLREDUCE_COALESCED, "mooncake:all_reduce_coalesced", "all_reduce_coalesced", opts.timeout,
              opts.asyncOp, tensors, tensors},
             [tensors, torch_op = opts.reduceOp, kinds](const Call& call) -> Status {
               for (size_t i = 0; i < tensors.size(); ++i) {
                 TM_TRY(all_reduce_one(call, tensors[i], torch_op, kinds[i].first, kinds[i].second));
               }
               return {};
             });
}

WorkPtr MooncakeBackend::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor tensor = only(tensors, "reduce");
  check_root(opts.rootRank, *seats_->group(), "reduce");
  const auto op = reduce_op_of(opts.reduceOp, tensor, "reduce");
  const auto dtype = dtype_of(tensor, "reduce");
  const int root = static_cast<int>(opts.rootRank);
  return run({OpType::REDUCE, "mooncake:reduce", "reduce", opts.timeout, opts.asyncOp, tensors, tensors, rank_ != root},
             [tensor, torch_op = opts.reduceOp, op, dtype, root, me = rank_](const Call& call) -> Status {
               if (me != root) {
                 const at::Tensor in = readable(premultiplied(torch_op, tensor));
                 return coll::reduce(call, in.data_ptr(), in.numel(), dtype, op, call.group.rank_in(root));
               }
               if (torch_op.op_ == c10d::ReduceOp::PREMUL_SUM) copy_tensor(tensor, premultiplied(torch_op, tensor));
               const Writable memory(tensor, true);
               TM_TRY(coll::reduce(call, memory.memory().mutable_data_ptr(), tensor.numel(), dtype, op,
                                   call.group.rank_in(root)));
               memory.commit();
               return {};
             });
}

WorkPtr MooncakeBackend::allgather(std::vector<TensorList>& outputs, TensorList& inputs,
                                   const c10d::AllgatherOptions& opts) {
  const at::Tensor input = only(inputs, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "mooncake: all_gather: one list of outputs is expected");
  check_world(outputs[0].size(), size_, "all_gather");
  check_alike(outputs[0], input, false, "all_gather");
  TORCH_CHECK_VALUE(outputs[0][rank_].numel() == input.numel(), "mooncake: all_gather: own output of ",
                    outputs[0][rank_].numel(), " elements for an input of ", input.numel());
  return run({OpType::ALLGATHER, "mooncake:all_gather", "all_gather", opts.timeout, opts.asyncOp, outputs[0], inputs},
             [input, out = outputs[0]](const Call& call) -> Status {
               const at::Tensor in = readable(input);
               const auto outs = writable(of_present(call.group, out));
               TM_TRY(coll::all_gather(call, const_piece_of(in), pieces(outs)));
               commit_all(outs);
               return {};
             });
}

namespace {
void check_gathered(const at::Tensor& output, const at::Tensor& input, int n, const char* op) {
  check_tensor(output, op);
  check_tensor(input, op);
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "mooncake: ", op, ": output of ", output.scalar_type(),
                   " for an input of ", input.scalar_type());
  TORCH_CHECK_VALUE(output.numel() == input.numel() * n, "mooncake: ", op, ": output of ", output.numel(),
                    " elements for ", n, " inputs of ", input.numel());
}

Status gather_into(const Call& call, const at::Tensor& output, const at::Tensor& input) {
  const at::Tensor in = readable(input);
  const Writable out(output, has_empty_seats(call.group));
  TM_TRY(coll::all_gather(call, const_piece_of(in), cuts_of_present(call.group, out.memory())));
  out.commit();
  return {};
}

Status reduce_from(const Call& call, const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& torch_op,
                   coll::DType dtype, coll::ReduceOp op) {
  const at::Tensor in = readable(premultiplied(torch_op, input));
  const Writable out(output, false);
  TM_TRY(coll::reduce_scatter(call, to_const(cuts_of_present(call.group, in)), piece_of(out.memory()), dtype, op));
  out.commit();
  return {};
}
}  // namespace

WorkPtr MooncakeBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  check_gathered(output, input, size_, "all_gather_into_tensor");
  return run({OpType::_ALLGATHER_BASE,
              "mooncake:_all_gather_base",
              "all_gather_into_tensor",
              opts.timeout,
              opts.asyncOp,
              {output},
              {input}},
             [output, input](const Call& call) { return gather_into(call, output, input); });
}

WorkPtr MooncakeBackend::allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                                             const c10d::AllgatherOptions& opts) {
  check_world(outputs.size(), size_, "all_gather_coalesced");
  TensorList flat;
  for (const auto& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "mooncake: all_gather_coalesced: ", list.size(), " outputs for ",
                      inputs.size(), " inputs");
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_tensor(inputs[i], "all_gather_coalesced");
      check_alike({list[i]}, inputs[i], true, "all_gather_coalesced");
      flat.push_back(list[i]);
    }
  }
  return run({OpType::ALLGATHER_COALESCED, "mooncake:all_gather_coalesced", "all_gather_coalesced", opts.timeout,
              opts.asyncOp, flat, inputs},
             [outputs, inputs](const Call& call) -> Status {
               for (size_t i = 0; i < inputs.size(); ++i) {
                 TensorList out;
                 for (const auto& list : outputs) out.push_back(list[i]);
                 const auto outs = writable(of_present(call.group, out));
                 const at::Tensor in = readable(inputs[i]);
                 TM_TRY(coll::all_gather(call, const_piece_of(in), pieces(outs)));
                 commit_all(outs);
               }
               return {};
             });
}

WorkPtr MooncakeBackend::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "mooncake: all_gather_into_tensor_coalesced: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_gathered(outputs[i], inputs[i], size_, "all_gather_into_tensor_coalesced");
  }
  return run({OpType::ALLGATHER_COALESCED, "mooncake:all_gather_into_tensor_coalesced",
              "all_gather_into_tensor_coalesced", opts.timeout, opts.asyncOp, outputs, inputs},
             [outputs, inputs](const Call& call) -> Status {
               for (size_t i = 0; i < inputs.size(); ++i) TM_TRY(gather_into(call, outputs[i], inputs[i]));
               return {};
             });
}

WorkPtr MooncakeBackend::gather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::GatherOptions& opts) {
  const at::Tensor input = only(inputs, "gather");
  check_root(opts.rootRank, *seats_->group(), "gather");
  const int root = static_cast<int>(opts.rootRank);
  TensorList out;
  if (rank_ == root) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "mooncake: gather: one list of outputs is expected at the root");
    check_world(outputs[0].size(), size_, "gather");
    check_alike(outputs[0], input, true, "gather");
    out = outputs[0];
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "mooncake: gather: only the root has outputs");
  }
  return run({OpType::GATHER, "mooncake:gather", "gather", opts.timeout, opts.asyncOp, out, inputs},
             [input, out, root](const Call& call) -> Status {
               const at::Tensor in = readable(input);
               const auto outs = writable(of_present(call.group, out));
               std::vector<void*> memory;
               for (const auto& output : outs) memory.push_back(output.memory().mutable_data_ptr());
               TM_TRY(coll::gather(call, in.const_data_ptr(), in.nbytes(), memory, call.group.rank_in(root)));
               commit_all(outs);
               return {};
             });
}

WorkPtr MooncakeBackend::scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                 const c10d::ScatterOptions& opts) {
  const at::Tensor output = only(outputs, "scatter");
  check_root(opts.rootRank, *seats_->group(), "scatter");
  const int root = static_cast<int>(opts.rootRank);
  TensorList in;
  if (rank_ == root) {
    TORCH_CHECK_VALUE(inputs.size() == 1, "mooncake: scatter: one list of inputs is expected at the root");
    check_world(inputs[0].size(), size_, "scatter");
    check_alike(inputs[0], output, true, "scatter");
    in = inputs[0];
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "mooncake: scatter: only the root has inputs");
  }
  return run({OpType::SCATTER, "mooncake:scatter", "scatter", opts.timeout, opts.asyncOp, outputs, in},
             [output, in, root](const Call& call) -> Status {
               const TensorList ins = readable_all(of_present(call.group, in));
               std::vector<const void*> memory;
               for (const auto& tensor : ins) memory.push_back(tensor.const_data_ptr());
               const Writable out(output, false);
               TM_TRY(coll::scatter(call, memory, out.memory().mutable_data_ptr(), out.memory().nbytes(),
                                    call.group.rank_in(root)));
               out.commit();
               return {};
             });
}

WorkPtr MooncakeBackend::reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                        const c10d::ReduceScatterOptions& opts) {
  const at::Tensor output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "mooncake: reduce_scatter: one list of inputs is expected");
  check_world(inputs[0].size(), size_, "reduce_scatter");
  check_alike(inputs[0], output, false, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs[0][rank_].numel() == output.numel(), "mooncake: reduce_scatter: output of ", output.numel(),
                    " elements for an input of ", inputs[0][rank_].numel());
  const auto op = reduce_op_of(opts.reduceOp, output, "reduce_scatter");
  const auto dtype = dtype_of(output, "reduce_scatter");
  return run({OpType::REDUCE_SCATTER, "mooncake:reduce_scatter", "reduce_scatter", opts.timeout, opts.asyncOp, outputs,
              inputs[0]},
             [output, in = inputs[0], torch_op = opts.reduceOp, op, dtype](const Call& call) -> Status {
               TensorList ins;
               for (const auto& tensor : of_present(call.group, in))
                 ins.push_back(readable(premultiplied(torch_op, tensor)));
               const Writable out(output, false);
               TM_TRY(coll::reduce_scatter(call, const_pieces(ins), piece_of(out.memory()), dtype, op));
               out.commit();
               return {};
             });
}

WorkPtr MooncakeBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& opts) {
  check_gathered(input, output, size_, "reduce_scatter_tensor");
  const auto op = reduce_op_of(opts.reduceOp, output, "reduce_scatter_tensor");
  const auto dtype = dtype_of(output, "reduce_scatter_tensor");
  return run({OpType::_REDUCE_SCATTER_BASE,
              "mooncake:_reduce_scatter_base",
              "reduce_scatter_tensor",
              opts.timeout,
              opts.asyncOp,
              {output},
              {input}},
             [output, input, torch_op = opts.reduceOp, op, dtype](const Call& call) {
               return reduce_from(call, output, input, torch_op, dtype, op);
             });
}

WorkPtr MooncakeBackend::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                         const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "mooncake: reduce_scatter_tensor_coalesced: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  std::vector<std::pair<coll::DType, coll::ReduceOp>> kinds;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_gathered(inputs[i], outputs[i], size_, "reduce_scatter_tensor_coalesced");
    kinds.emplace_back(dtype_of(outputs[i], "reduce_scatter_tensor_coalesced"),
                       reduce_op_of(opts.reduceOp, outputs[i], "reduce_scatter_tensor_coalesced"));
  }
  return run({compat::kReduceScatterTensorCoalesced, "mooncake:reduce_scatter_tensor_coalesced",
              "reduce_scatter_tensor_coalesced", opts.timeout, opts.asyncOp, outputs, inputs},
             [outputs, inputs, torch_op = opts.reduceOp, kinds](const Call& call) -> Status {
               for (size_t i = 0; i < inputs.size(); ++i) {
                 TM_TRY(reduce_from(call, outputs[i], inputs[i], torch_op, kinds[i].first, kinds[i].second));
               }
               return {};
             });
}

WorkPtr MooncakeBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                       std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  check_splits(output, output_splits, size_, "all_to_all_single");
  check_splits(input, input_splits, size_, "all_to_all_single");
  check_alike({output}, input, false, "all_to_all_single");
  return run({OpType::ALLTOALL_BASE,
              "mooncake:all_to_all",
              "all_to_all_single",
              opts.timeout,
              opts.asyncOp,
              {output},
              {input}},
             [output, input, output_splits, input_splits](const Call& call) -> Status {
               const at::Tensor in = readable(input);
               const Writable out(output, has_empty_seats(call.group));
               const int n = call.group.seats();
               TM_TRY(coll::all_to_all(call, of_present(call.group, to_const(split_pieces(in, input_splits, n))),
                                       of_present(call.group, split_pieces(out.memory(), output_splits, n))));
               out.commit();
               return {};
             });
}

WorkPtr MooncakeBackend::alltoall(TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& opts) {
  check_world(outputs.size(), size_, "all_to_all");
  check_world(inputs.size(), size_, "all_to_all");
  check_alike(outputs, inputs[0], false, "all_to_all");
  check_alike(inputs, inputs[0], false, "all_to_all");
  return run({OpType::ALLTOALL, "mooncake:all_to_all", "all_to_all", opts.timeout, opts.asyncOp, outputs, inputs},
             [outputs, inputs](const Call& call) -> Status {
               const TensorList ins = readable_all(of_present(call.group, inputs));
               const auto outs = writable(of_present(call.group, outputs));
               TM_TRY(coll::all_to_all(call, const_pieces(ins), pieces(outs)));
               commit_all(outs);
               return {};
             });
}

WorkPtr MooncakeBackend::barrier(const c10d::BarrierOptions& opts) {
  std::optional<c10::Device> device;
  if (opts.device && opts.device->is_cuda()) device = *opts.device;
  return run({OpType::BARRIER, "mooncake:barrier", "barrier", opts.timeout, opts.asyncOp, {}, {}, false, device},
             [](const Call& call) { return coll::barrier(call); });
}

void MooncakeBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  (void)wait_all_ranks;  // every absent rank is named either way
  run({OpType::BARRIER, "mooncake:monitored_barrier", "monitored_barrier", opts.timeout, false, {}, {}},
      [](const Call& call) { return coll::monitored_barrier(call); })
      ->wait();
}

}  // namespace torch_mooncake::dist
