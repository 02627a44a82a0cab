// torch_mooncake._c10d: the backend for torch.distributed. Belongs to the torch (major.minor) it was built against;
// torch_mooncake.distributed compares BUILT_FOR_TORCH before it imports anything else from here.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/c10d_nccl.h"
#include "torch/c10d_tensors.h"

namespace py = pybind11;
using torch_mooncake::dist::MooncakeBackend;

PYBIND11_MODULE(_c10d, m) {
  m.attr("BUILT_FOR_TORCH") = TM_BUILT_TORCH;
  py::module_::import("torch._C._distributed_c10d");  // Store, Backend, Work

  py::class_<MooncakeBackend::Options, c10d::Backend::Options, c10::intrusive_ptr<MooncakeBackend::Options>>(
      m, "MooncakeBackendOptions",
      "Options of the \"mooncake\" process group.\n\n"
      "timeout: of every operation (timedelta); host: address this rank listens on; host_id: ranks with equal ids may\n"
      "share memory (empty: the boot id); transports: what may carry bytes, in order of preference; heartbeat,\n"
      "heartbeat_timeout: period, and silence after which a rank is lost (timedeltas, those of the process' first\n"
      "group); join: contact() of a running group whose lost rank this process replaces; algorithms: what to use\n"
      "instead of the built-in choice, \"all_reduce=ring,broadcast=flat/tree\"; rank 0's hold for the group.")
      .def(py::init([](std::chrono::milliseconds timeout, std::string host, std::string host_id,
                       std::vector<std::string> transports, std::chrono::milliseconds heartbeat,
                       std::chrono::milliseconds heartbeat_timeout, std::string join) {
             auto options = c10::make_intrusive<MooncakeBackend::Options>(timeout);
             options->heartbeat = heartbeat;
             options->heartbeat_timeout = heartbeat_timeout;
             options->join = std::move(join);
             options->host = std::move(host);
             options->host_id = std::move(host_id);
             options->transports = std::move(transports);
             return options;
           }),
           py::arg("timeout") = kBackendDefaultTimeout, py::arg("host") = "", py::arg("host_id") = "",
           py::arg("transports") = std::vector<std::string>{"local", "shm", "tcp"},
           py::arg("heartbeat") = std::chrono::milliseconds(500),
           py::arg("heartbeat_timeout") = std::chrono::milliseconds(5000), py::arg("join") = "")
      .def_readwrite("host", &MooncakeBackend::Options::host)
      .def_readwrite("host_id", &MooncakeBackend::Options::host_id)
      .def_readwrite("transports", &MooncakeBackend::Options::transports)
      .def_readwrite("nics", &MooncakeBackend::Options::nics)
      .def_readwrite("rdma", &MooncakeBackend::Options::rdma)
      .def_readwrite("cuda", &MooncakeBackend::Options::cuda)
      .def_readwrite("cuda_staged_bytes", &MooncakeBackend::Options::cuda_staged_bytes)
      .def_readwrite("heartbeat", &MooncakeBackend::Options::heartbeat)
      .def_readwrite("heartbeat_timeout", &MooncakeBackend::Options::heartbeat_timeout)
      .def_readwrite("own_timeout", &MooncakeBackend::Options::own_timeout)
      .def_readwrite("algorithms", &MooncakeBackend::Options::algorithms)
      .def_readwrite("join", &MooncakeBackend::Options::join)
      .def("__deepcopy__", [](const MooncakeBackend::Options& self, const py::object&) {
        return c10::make_intrusive<MooncakeBackend::Options>(self);  // torch's split_group copies its parent's
      });

  py::class_<MooncakeBackend, c10d::Backend, c10::intrusive_ptr<MooncakeBackend>>(m, "MooncakeBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::vector<int64_t> global_ranks, c10::intrusive_ptr<MooncakeBackend::Options> options) {
             return MooncakeBackend::create(store, rank, size, std::move(global_ranks), std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("global_ranks"), py::arg("options"),
           py::call_guard<py::gil_scoped_release>())
      .def("_explain", &MooncakeBackend::explain, py::call_guard<py::gil_scoped_release>(),
           "JSON: the hosts, the algorithm of each collective and why, the bytes so far.")
      .def_property_readonly("options", &MooncakeBackend::getBackendOptions)
      .def("active_ranks", &MooncakeBackend::active_ranks, "The ranks that take part.")
      .def("waiting_ranks", &MooncakeBackend::waiting_ranks, "The ranks that a replacement has asked to be.")
      .def("contact", &MooncakeBackend::contact, "What a replacement needs to know to join. Holds the group's secret.")
      .def("reseat", &MooncakeBackend::reseat, py::arg("remove"), py::arg("admit"), py::arg("at_least"),
           py::arg("timeout"), py::call_guard<py::gil_scoped_release>(),
           "Called by all that stay: goes on without `remove` and what was lost, and with replacements for `admit`.\n"
           "Returns the active ranks.")
      .def(
          "monitored_barrier",
          [](MooncakeBackend& self, std::chrono::milliseconds timeout, bool wait_all_ranks) {
            c10d::BarrierOptions options;
            options.timeout = timeout;
            self.monitoredBarrier(options, wait_all_ranks);
          },
          py::arg("timeout"), py::arg("wait_all_ranks") = false, py::call_guard<py::gil_scoped_release>());

  using torch_mooncake::dist::DenseByNccl;
  py::class_<DenseByNccl, c10d::Backend, c10::intrusive_ptr<DenseByNccl>>(
      m, "DenseByNccl", "A MooncakeBackend whose dense collectives of CUDA tensors are a ProcessGroupNCCL's.")
      .def(py::init([](DenseByNccl::Ptr mooncake, DenseByNccl::Ptr nccl) {
             return c10::make_intrusive<DenseByNccl>(std::move(mooncake), std::move(nccl));
           }),
           py::arg("mooncake"), py::arg("nccl"))
      .def_property_readonly("mooncake", &DenseByNccl::ours)
      .def_property_readonly("nccl", &DenseByNccl::nccl);

  m.def(
      "_reduce_tensors",
      [](const at::Tensor& out, const std::vector<at::Tensor>& in, const c10d::ReduceOp& op) {
        using namespace torch_mooncake::dist;
        reduce_tensors(out, in, dtype_of(out, "reduce"), reduce_op_of(op, out, "reduce"));
      },
      py::arg("out"), py::arg("inputs"), py::arg("op"), py::call_guard<py::gil_scoped_release>(),
      "What CUDA tensors are reduced with, on tensors of any device: for tests.");

  m.def(
      "leave_all",
      [](double timeout_s) { torch_mooncake::coll::Hub::leave_all(torch_mooncake::Deadline::after_s(timeout_s)); },
      py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>(),
      "Leaves every group of this process, so that the other ranks do not take its end for a crash.");
}
