// Reads and writes: every form of a list of slices becomes batches of extents, without a Python object a slice.

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>

#include "python/event.h"
#include "python/transfer.h"

namespace torch_mooncake::python {

namespace {

using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<nb::ro, nb::ndim<1>, nb::device::cpu>;  // int32 or int64, any stride

struct PyCompletions : Held<Completions> {
  using Held::Held;
};

using Stream = std::optional<std::pair<int, uint64_t>>;  // CUDA device, cudaStream_t

struct How {
  bool write;
  int64_t deadline_ns;
  nb::bytes notify;
  bool background;
  nb::object keep;
  Stream stream;
};

PyOp submit(PyEngine& engine, std::vector<Batch> batches, How how) {
  OpOptions options;
  options.deadline = deadline_at(how.deadline_ns);
  options.notify = to_string(how.notify);
  options.priority = how.background ? Priority::background : Priority::foreground;
  if (how.stream) options.stream = StreamOrder{how.stream->first, how.stream->second};
  if (!how.keep.is_none()) options.keep = keep_alive(std::move(how.keep));
  return PyOp(unwrap(without_gil([&] {
    return engine->transfer(how.write ? Direction::write : Direction::read, std::move(batches), std::move(options));
  })));
}

// Offsets and sizes are caller's numbers: a negative one is out of bounds, not 2^64 - n.
uint64_t unsigned_or_raise(int64_t value, const char* what) {
  if (value < 0) raise({Code::out_of_bounds, std::string(what) + " is negative: " + std::to_string(value)});
  return static_cast<uint64_t>(value);
}

PyOp transfer_one(PyEngine& engine, bool write, PyRegion& local, int64_t local_offset, PyRemoteRegion& remote,
                  int64_t remote_offset, int64_t nbytes, int64_t deadline_ns, nb::bytes notify, bool background,
                  nb::object keep, Stream stream) {
  std::vector<Batch> batches(1);
  batches[0] = {local.get(),
                remote.get(),
                {{unsigned_or_raise(local_offset, "local offset"), unsigned_or_raise(remote_offset, "remote offset"),
                  unsigned_or_raise(nbytes, "nbytes")}}};
  return submit(engine, std::move(batches),
                {write, deadline_ns, std::move(notify), background, std::move(keep), stream});
}

// A small op that is over on return; None if it is not of that kind, or fails its checks: transfer_one() then says why.
// Keeps the GIL: 64 KiB are copied sooner than another thread would give it back.
nb::object transfer_now(PyEngine& engine, bool write, PyRegion& local, int64_t local_offset, PyRemoteRegion& remote,
                        int64_t remote_offset, int64_t nbytes) {
  drain_released();
  if (local_offset < 0 || remote_offset < 0 || nbytes < 0) return nb::none();
  Batch batch{local.get(), remote.get(), {{uint64_t(local_offset), uint64_t(remote_offset), uint64_t(nbytes)}}};
  OpOptions options;
  options.deadline = Deadline::never();
  auto op = engine->transfer_now(write ? Direction::write : Direction::read, batch, options);
  return op ? nb::cast(PyOp(std::move(op), true)) : nb::none();
}

// items: (local, local offset, remote, remote offset, nbytes).
PyOp transfer_list(PyEngine& engine, bool write, nb::list items, int64_t deadline_ns, nb::bytes notify, bool background,
                   nb::object keep, Stream stream) {
  std::vector<Batch> batches;
  for (nb::handle item : items) {
    auto& local = nb::cast<PyRegion&>(item[0]).get();
    auto& remote = nb::cast<PyRemoteRegion&>(item[2]).get();
    if (batches.empty() || batches.back().local != local || batches.back().remote != remote)
      batches.push_back({local, remote, {}});
    batches.back().extents.push_back({unsigned_or_raise(nb::cast<int64_t>(item[1]), "local offset"),
                                      unsigned_or_raise(nb::cast<int64_t>(item[3]), "remote offset"),
                                      unsigned_or_raise(nb::cast<int64_t>(item[4]), "nbytes")});
  }
  return submit(engine, std::move(batches),
                {write, deadline_ns, std::move(notify), background, std::move(keep), stream});
}

// One slice for each pair of offsets; `sizes` has one element for all, or one for each.
PyOp transfer_offsets(PyEngine& engine, bool write, PyRegion& local, Offsets local_offsets, PyRemoteRegion& remote,
                      Offsets remote_offsets, Offsets sizes, int64_t deadline_ns, nb::bytes notify, bool background,
                      nb::object keep, Stream stream) {
  const size_t n = local_offsets.shape(0);
  if (remote_offsets.shape(0) != n || (sizes.shape(0) != n && sizes.shape(0) != 1))
    raise({Code::invalid_argument, "local_offsets has " + std::to_string(n) + " elements, remote_offsets " +
                                       std::to_string(remote_offsets.shape(0)) + ", nbytes " +
                                       std::to_string(sizes.shape(0))});
  std::vector<Batch> batches;
  if (n > 0) batches.push_back({local.get(), remote.get(), std::vector<Extent>(n)});
  const size_t step = sizes.shape(0) == 1 ? 0 : 1;
  const int64_t *from = local_offsets.data(), *to = remote_offsets.data(), *size = sizes.data();
  for (size_t i = 0; i < n; ++i)
    batches[0].extents[i] = {unsigned_or_raise(from[i], "local offset"), unsigned_or_raise(to[i], "remote offset"),
                             unsigned_or_raise(size[i * step], "nbytes")};
  return submit(engine, std::move(batches),
                {write, deadline_ns, std::move(notify), background, std::move(keep), stream});
}

// ---- Pages

// One side of a paged transfer: where page i begins, the same in every base.
struct PageOffsets {
  std::vector<uint64_t> offsets;
  uint64_t greatest = 0;
  size_t greatest_at = 0;
};

template <typename Int>
void spread(const void* data, int64_t step, uint64_t stride, std::vector<uint64_t>& out, uint64_t& greatest) {
  auto* ids = static_cast<const Int*>(data);
  for (size_t i = 0; i < out.size(); ++i) {
    auto id = static_cast<uint64_t>(static_cast<int64_t>(ids[static_cast<int64_t>(i) * step]));  // negative: huge
    greatest = std::max(greatest, id);
    out[i] = id * stride;
  }
}

PageOffsets page_offsets(const char* side, const std::optional<Ids>& ids, size_t count, uint64_t stride) {
  PageOffsets out;
  out.offsets.resize(count);
  uint64_t greatest = 0;
  if (!ids) {
    for (size_t i = 0; i < count; ++i) out.offsets[i] = i * stride;
    greatest = count == 0 ? 0 : count - 1;
  } else if (ids->shape(0) != count) {
    raise({Code::invalid_argument, std::string(side) + " has " + std::to_string(ids->shape(0)) + " page ids for " +
                                       std::to_string(count) + " pages"});
  } else if (ids->dtype() == nb::dtype<int64_t>()) {
    spread<int64_t>(ids->data(), ids->stride(0), stride, out.offsets, greatest);
  } else if (ids->dtype() == nb::dtype<int32_t>()) {
    spread<int32_t>(ids->data(), ids->stride(0), stride, out.offsets, greatest);
  } else {
    raise({Code::invalid_argument, std::string(side) + ": page ids must be int32 or int64"});
  }
  if (greatest >> 63) raise({Code::out_of_bounds, std::string(side) + ": a page id is negative"});
  if (stride != 0 && greatest > UINT64_MAX / 2 / stride)
    raise(
        {Code::out_of_bounds, std::string(side) + ": page " + std::to_string(greatest) + " lies beyond every region"});
  out.greatest = greatest * stride;
  return out;
}

void check_pages(const char* side, const PageOffsets& pages, uint64_t page_nbytes, uint64_t stride, uint64_t nbytes) {
  if (pages.offsets.empty() || (page_nbytes <= nbytes && pages.greatest <= nbytes - page_nbytes)) return;
  std::string page = stride == 0 ? "a page" : "page " + std::to_string(pages.greatest / stride);
  raise({Code::out_of_bounds, std::string(side) + ": " + page + ", bytes " + std::to_string(pages.greatest) + " + " +
                                  std::to_string(page_nbytes) + ", leaves its base of " + std::to_string(nbytes) +
                                  " bytes"});
}

// locals, remotes: (region, offset, nbytes) of each base; base i here goes with base i there. Without ids: 0, 1, …
PyOp transfer_pages(PyEngine& engine, bool write, nb::list locals, std::optional<Ids> local_ids, int64_t local_stride,
                    nb::list remotes, std::optional<Ids> remote_ids, int64_t remote_stride, int64_t count,
                    int64_t page_nbytes, int64_t deadline_ns, nb::bytes notify, bool background, nb::object keep,
                    Stream stream) {
  const uint64_t nbytes = unsigned_or_raise(page_nbytes, "nbytes");
  const uint64_t strides[] = {unsigned_or_raise(local_stride, "stride"), unsigned_or_raise(remote_stride, "stride")};
  const size_t n = unsigned_or_raise(count, "count");
  auto from = page_offsets("local", local_ids, n, strides[0]);
  auto to = page_offsets("remote", remote_ids, n, strides[1]);
  if (nb::len(locals) != nb::len(remotes))
    raise({Code::invalid_argument, std::to_string(nb::len(locals)) + " local bases do not match " +
                                       std::to_string(nb::len(remotes)) + " remote ones"});
  std::vector<Batch> batches;
  batches.reserve(nb::len(locals));
  for (size_t b = 0; b < nb::len(locals); ++b) {
    nb::handle local = locals[b], remote = remotes[b];
    const auto local_base = nb::cast<uint64_t>(local[1]), remote_base = nb::cast<uint64_t>(remote[1]);
    check_pages("local", from, nbytes, strides[0], nb::cast<uint64_t>(local[2]));
    check_pages("remote", to, nbytes, strides[1], nb::cast<uint64_t>(remote[2]));
    batches.push_back({nb::cast<PyRegion&>(local[0]).get(), nb::cast<PyRemoteRegion&>(remote[0]).get(), {}});
    auto& extents = batches.back().extents;
    extents.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      Extent page{local_base + from.offsets[i], remote_base + to.offsets[i], nbytes};
      if (!extents.empty()) {  // runs of adjacent pages become one extent
        auto& last = extents.back();
        if (last.local_offset + last.nbytes == page.local_offset &&
            last.remote_offset + last.nbytes == page.remote_offset) {
          last.nbytes += nbytes;
          continue;
        }
      }
      extents.push_back(page);
    }
  }
  return submit(engine, std::move(batches),
                {write, deadline_ns, std::move(notify), background, std::move(keep), stream});
}

// ---- Ops

void wait_op(PyOp& op, int64_t deadline_ns) {
  if (!op->ended()) {
    Status waited = in_slices(deadline_at(deadline_ns), [&](Deadline slice) {
      Status status = op->wait(slice);
      return op->ended() ? Status() : status;
    });
    if (!op->ended())
      raise(
          {Code::deadline_exceeded, "the wait is over and the operation goes on (" + std::to_string(op->bytes_done()) +
                                        " of " + std::to_string(op->nbytes()) + " bytes)"},
          op->peers(), op->bytes_done());
  }
  if (Status status = op->status(); !status) raise(status, op->peers(), op->bytes_done());
}

const char* state_name(OpState state) {
  switch (state) {
    case OpState::pending:
      return "pending";
    case OpState::done:
      return "done";
    case OpState::failed:
      return "failed";
    case OpState::timeout:
      return "timeout";
    case OpState::cancelled:
      return "cancelled";
  }
  return "unknown";
}

}  // namespace

void bind_ops(nb::module_& m, nb::class_<PyEngine>& engine) {
  nb::class_<PyCompletions>(m, "Completions",
                            "What an event loop watches: ops that it awaits say here that they ended.")
      .def("__init__",
           [](PyCompletions* self) {
             auto completions = std::make_shared<Completions>();
             if (completions->fileno() < 0) raise(Status::from_errno("eventfd", errno));
             new (self) PyCompletions(std::move(completions));
           })
      .def("fileno", [](PyCompletions& c) { return c->fileno(); })
      .def("take", [](PyCompletions& c) { return c->take(); });

  nb::class_<PyOp>(m, "Op")
      .def("done", [](PyOp& op) { return op->ended(); })
      .def("wait", &wait_op, nb::arg("deadline_ns"))
      .def(
          "watch", [](PyOp& op, PyCompletions& c, uint64_t tag) { return op->watch(c.get(), tag); },
          nb::arg("completions"), nb::arg("tag"))
      .def("cancel", [](PyOp& op) { without_gil([&] { op->cancel(); }); })
      .def_prop_ro("state", [](PyOp& op) { return state_name(op->state()); })
      .def_prop_ro("nbytes", [](PyOp& op) { return op->nbytes(); })
      .def_prop_ro("bytes_done", [](PyOp& op) { return op->bytes_done(); })
      .def_prop_ro("transport", [](PyOp& op) { return op->transport(); })
      .def_prop_ro("peers", [](PyOp& op) { return op->peers(); })
      .def_prop_ro("remote_quiescent", [](PyOp& op) { return op->remote_quiescent(); });

  engine
      .def("transfer_one", &transfer_one, nb::arg("write"), nb::arg("local"), nb::arg("local_offset"),
           nb::arg("remote"), nb::arg("remote_offset"), nb::arg("nbytes"), nb::arg("deadline_ns"), nb::arg("notify"),
           nb::arg("background"), nb::arg("keep").none(), nb::arg("stream").none() = nb::none())
      .def("transfer_now", &transfer_now,
           nb::sig("def transfer_now(self, write: bool, local: Region, local_offset: int, remote: RemoteRegion, "
                   "remote_offset: int, nbytes: int, /) -> Op | None"))
      .def("transfer_list", &transfer_list, nb::arg("write"), nb::arg("items"), nb::arg("deadline_ns"),
           nb::arg("notify"), nb::arg("background"), nb::arg("keep").none(), nb::arg("stream").none() = nb::none())
      .def("transfer_offsets", &transfer_offsets, nb::arg("write"), nb::arg("local"), nb::arg("local_offsets"),
           nb::arg("remote"), nb::arg("remote_offsets"), nb::arg("sizes"), nb::arg("deadline_ns"), nb::arg("notify"),
           nb::arg("background"), nb::arg("keep").none(), nb::arg("stream").none() = nb::none())
      .def("transfer_pages", &transfer_pages, nb::arg("write"), nb::arg("locals"), nb::arg("local_ids").none(),
           nb::arg("local_stride"), nb::arg("remotes"), nb::arg("remote_ids").none(), nb::arg("remote_stride"),
           nb::arg("count"), nb::arg("nbytes"), nb::arg("deadline_ns"), nb::arg("notify"), nb::arg("background"),
           nb::arg("keep").none(), nb::arg("stream").none() = nb::none())
      .def(
          "watch_notifications",
          [](PyEngine& e, PyCompletions& c, uint64_t tag) { return e->watch_notifications(c.get(), tag); },
          nb::arg("completions"), nb::arg("tag"));
}

}  // namespace torch_mooncake::python
