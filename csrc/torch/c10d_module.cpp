// torch_mooncake._c10d: the backend for torch.distributed. Belongs to the torch (major.minor) it was built against;
// torch_mooncake.distributed compares BUILT_FOR_TORCH before it imports anything else from here.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/c10d_backend.h"

namespace py = pybind11;
using torch_mooncake::dist::MooncakeBackend;

PYBIND11_MODULE(_c10d, m) {
  m.attr("BUILT_FOR_TORCH") = TM_BUILT_TORCH;
  py::module_::import("torch._C._distributed_c10d");  // Store, Backend, Work

  py::class_<MooncakeBackend::Options, c10d::Backend::Options, c10::intrusive_ptr<MooncakeBackend::Options>>(
      m, "MooncakeBackendOptions",
      "Options of the \"mooncake\" process group.\n\n"
      "timeout: of every operation (timedelta); host: address this rank listens on; host_id: ranks with equal ids may\n"
      "share memory (empty: the boot id); transports: what may carry bytes, in order of preference; algorithms: what "
      "to\n"
      "use instead of the built-in choice, \"all_reduce=ring,broadcast=flat/tree\"; rank 0's hold for the group.")
      .def(py::init([](std::chrono::milliseconds timeout, std::string host, std::string host_id,
                       std::vector<std::string> transports, std::string algorithms) {
             auto options = c10::make_intrusive<MooncakeBackend::Options>(timeout);
             options->host = std::move(host);
             options->host_id = std::move(host_id);
             options->transports = std::move(transports);
             options->algorithms = std::move(algorithms);
             return options;
           }),
           py::arg("timeout") = kBackendDefaultTimeout, py::arg("host") = "", py::arg("host_id") = "",
           py::arg("transports") = std::vector<std::string>{"local", "shm", "tcp"}, py::arg("algorithms") = "")
      .def_readwrite("host", &MooncakeBackend::Options::host)
      .def_readwrite("host_id", &MooncakeBackend::Options::host_id)
      .def_readwrite("transports", &MooncakeBackend::Options::transports)
      .def_readwrite("algorithms", &MooncakeBackend::Options::algorithms);

  py::class_<MooncakeBackend, c10d::Backend, c10::intrusive_ptr<MooncakeBackend>>(m, "MooncakeBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::vector<int64_t> global_ranks, c10::intrusive_ptr<MooncakeBackend::Options> options) {
             return c10::make_intrusive<MooncakeBackend>(store, rank, size, std::move(global_ranks),
                                                         std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("global_ranks"), py::arg("options"),
           py::call_guard<py::gil_scoped_release>())
      .def("_explain", &MooncakeBackend::explain, py::call_guard<py::gil_scoped_release>(),
           "JSON: the hosts, the algorithm of each collective and why, the bytes so far.");

  m.def(
      "leave_all",
      [](double timeout_s) { torch_mooncake::coll::Hub::leave_all(torch_mooncake::Deadline::after_s(timeout_s)); },
      py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>(),
      "Leaves every group of this process, so that the other ranks do not take its end for a crash.");
}
