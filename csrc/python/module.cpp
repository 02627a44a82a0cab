// torch_mooncake._core: everything torch-free, for Python.

#include "common/failpoint.h"
#include "python/support.h"

#ifndef TM_VERSION
#define TM_VERSION "0"
#endif

NB_MODULE(_core, m) {
  using namespace torch_mooncake::python;
  nb::set_leak_warnings(false);  // objects of a default context may outlive the module's teardown
  m.attr("VERSION") = TM_VERSION;
  m.def(
      "set_failpoints", [](const std::string& spec) { torch_mooncake::set_failpoints(spec); }, nb::arg("spec"),
      "Replace what TM_FAILPOINTS says, for tests.");
  bind_memory(m);
  bind_transfer(m);
  bind_plain(m);
  bind_pool(m);
  bind_pool_chains(m);
  bind_topology(m);
  // Registered before the package's own: it runs after they have closed what is open.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&park_threads));
}
