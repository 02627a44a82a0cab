#include "python/memory.h"

#include <nanobind/ndarray.h>

#include "common/crc32c.h"
#include "memory/copy.h"

namespace torch_mooncake::python {

namespace {

using Ranges = nb::ndarray<const int64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

uint32_t crc32c_of(uint64_t address, Ranges offsets, Ranges sizes) {
  if (offsets.size() != sizes.size()) raise({Code::invalid_argument, "as many sizes as offsets are needed"});
  return without_gil([&] {
    uint32_t crc = 0;
    for (size_t i = 0; i < sizes.size(); ++i)
      crc = crc32c(reinterpret_cast<const std::byte*>(address) + offsets.data()[i],
                   static_cast<size_t>(sizes.data()[i]), crc);
    return crc;
  });
}

void copy_ranges(Ranges targets, Ranges sources, Ranges sizes) {
  if (targets.size() != sizes.size() || sources.size() != sizes.size())
    raise({Code::invalid_argument, "as many sizes as addresses are needed"});
  without_gil([&] {
    std::vector<CopyPiece> pieces(sizes.size());
    for (size_t i = 0; i < pieces.size(); ++i)
      pieces[i] = {reinterpret_cast<void*>(targets.data()[i]), reinterpret_cast<const void*>(sources.data()[i]),
                   static_cast<size_t>(sizes.data()[i])};
    CopyPool::shared().copy(pieces);
  });
}

// A Python buffer held in place (a bytearray cannot be resized meanwhile) and its address.
class Pinned {
 public:
  Pinned(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw nb::python_error();
  }
  ~Pinned() { PyBuffer_Release(&view_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  uint64_t address() const { return reinterpret_cast<uint64_t>(view_.buf); }
  uint64_t nbytes() const { return static_cast<uint64_t>(view_.len); }
  bool read_only() const { return view_.readonly != 0; }

 private:
  Py_buffer view_{};
};

int mapped_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  auto* mapped = nb::inst_ptr<Mapped>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, reinterpret_cast<void*>(mapped->address()),
                           static_cast<Py_ssize_t>(mapped->nbytes()), 0, flags);
}
PyType_Slot mapped_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(mapped_getbuffer)}, {0, nullptr}};

}  // namespace

void bind_memory(nb::module_& m) {
  nb::class_<Mapped>(m, "Mapped", nb::type_slots(mapped_slots), "Bytes of a pool object, with the buffer protocol.")
      .def_prop_ro("address", &Mapped::address)
      .def_prop_ro("nbytes", &Mapped::nbytes)
      .def_prop_ro("zero_copy", &Mapped::zero_copy)
      .def_prop_ro("read_only", &Mapped::read_only)
      .def("__len__", &Mapped::nbytes);

  m.def("crc32c", &crc32c_of, "CRC-32C of byte ranges of this process' memory, one after another.", nb::arg("address"),
        nb::arg("offsets"), nb::arg("sizes"));

  m.def("copy_ranges", &copy_ranges, "Copies byte ranges of this process' memory, by all copy threads; none overlap.",
        nb::arg("targets"), nb::arg("sources"), nb::arg("sizes"));

  nb::class_<Pinned>(m, "Pinned", "A buffer of Python's, held in place.")
      .def(nb::init<nb::handle, bool>(), nb::arg("buffer"), nb::arg("writable") = true)
      .def_prop_ro("address", &Pinned::address)
      .def_prop_ro("nbytes", &Pinned::nbytes)
      .def_prop_ro("read_only", &Pinned::read_only);
}

}  // namespace torch_mooncake::python
