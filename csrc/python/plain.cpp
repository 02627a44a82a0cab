#include "python/plain.h"

#include <unordered_map>

namespace torch_mooncake::python {
namespace {

// DLPack 1.x as far as it is used here; the layout is that standard's.
struct DlType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  DlType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DlExchange {
  uint32_t major, minor;
  DlExchange* older;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(PyObject*, DlTensor*);
  void* current_stream;
};
constexpr int32_t kDlCpu = 1, kDlCudaHost = 3;
constexpr uint8_t kDlComplex = 5;  // may be lazily conjugated, which DLPack does not tell

constexpr size_t kForms = 1024;  // remembered

struct State {
  PyTypeObject *tensor = nullptr, *parameter = nullptr;  // torch's, once it is imported
  const DlExchange* exchange = nullptr;
  PyObject* describe = nullptr;  // value -> (metadata, nbytes), or None if it cannot be put
  PyObject* is_neg = nullptr;    // the method's name
  std::unordered_map<std::string, std::shared_ptr<const PlainForm>> forms;
  std::string last_key;
  std::shared_ptr<const PlainForm> last;
};
State& state() {
  static auto* one = new State;  // outlives the interpreter's teardown
  return *one;
}

const std::shared_ptr<const PlainForm>& form_of(PyObject* value, std::string key) {
  State& s = state();
  if (s.last && key == s.last_key) return s.last;
  auto it = s.forms.find(key);
  if (it == s.forms.end()) {
    if (s.forms.size() >= kForms) s.forms.clear();
    PlainForm form;
    if (const nb::object pair = nb::handle(s.describe)(nb::handle(value)); !pair.is_none())
      form = {to_string(nb::cast<nb::bytes>(pair[0])), nb::cast<uint64_t>(pair[1])};
    it = s.forms.emplace(key, std::make_shared<const PlainForm>(std::move(form))).first;
  }
  s.last_key = std::move(key);
  return s.last = it->second;
}

template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

bool plain_tensor(PyObject* value, PlainValue& out) {
  const State& s = state();
  DlTensor tensor{};
  if (s.exchange->tensor_from_object(value, &tensor) != 0) {
    PyErr_Clear();  // sparse, of an unknown dtype, a wrapper of some transform: whoever encodes it says what it is
    return false;
  }
  if ((tensor.device_type != kDlCpu && tensor.device_type != kDlCudaHost) || tensor.dtype.code == kDlComplex)
    return false;
  uint64_t count = 1;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != static_cast<int64_t>(count)) return false;
    count *= static_cast<uint64_t>(tensor.shape[i]);
  }
  const uint64_t nbytes = count * tensor.dtype.bits * tensor.dtype.lanes / 8;
  if (nbytes == 0 || tensor.data == nullptr) return false;
  std::string key;  // before anything else runs: the tensor's shape is the tensor's
  append(key, tensor.dtype);
  for (int32_t i = 0; i < tensor.ndim; ++i) append(key, tensor.shape[i]);
  const nb::object negated = nb::steal(PyObject_CallMethodNoArgs(value, s.is_neg));  // lazily
  if (!negated.is_valid()) throw nb::python_error();
  if (negated.ptr() != Py_False) return false;
  out.form = form_of(value, std::move(key));
  out.data = {static_cast<std::byte*>(tensor.data) + tensor.byte_offset, nbytes};
  return out.form->nbytes == nbytes;
}

bool plain_value(PyObject* value, PlainValue& out) {
  const State& s = state();
  if (PyBytes_CheckExact(value)) {
    const auto nbytes = static_cast<uint64_t>(PyBytes_GET_SIZE(value));
    std::string key = "bytes";  // no tensor's key has this length
    append(key, nbytes);
    out.form = form_of(value, std::move(key));
    out.data = {PyBytes_AS_STRING(value), nbytes};
    return true;
  }
  const PyTypeObject* type = Py_TYPE(value);
  return s.exchange && (type == s.tensor || type == s.parameter) && plain_tensor(value, out);
}

nb::object plain_one(nb::handle value) {
  PlainValue one;
  if (!plain_value(value.ptr(), one)) return nb::none();
  const nb::tuple data = nb::make_tuple(reinterpret_cast<uintptr_t>(one.data.iov_base), one.data.iov_len);
  return nb::make_tuple(to_bytes(one.form->meta), data);
}

nb::object plain_batch(nb::list values, bool writable) {
  PlainBatch batch;
  batch.keep = nb::steal(PyList_AsTuple(values.ptr()));
  batch.items.resize(nb::len(batch.keep));
  for (size_t i = 0; i < batch.items.size(); ++i) {
    PyObject* value = PyTuple_GET_ITEM(batch.keep.ptr(), static_cast<Py_ssize_t>(i));
    if ((writable && PyBytes_Check(value)) || !plain_value(value, batch.items[i])) return nb::none();
  }
  return nb::cast(std::move(batch));
}

void set_tensor_types(nb::type_object tensor, nb::type_object parameter) {
  State& s = state();
  const nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
  if (capsule.is_none()) return;
  auto* exchange = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!exchange) PyErr_Clear();  // not what we know: no tensor is plain then
  while (exchange && exchange->major > 1) exchange = exchange->older;
  if (!exchange || exchange->major != 1 || !exchange->tensor_from_object) return;
  s.tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
  s.parameter = reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr());
  s.exchange = exchange;
}

}  // namespace

void bind_plain(nb::module_& m) {
  state().is_neg = PyUnicode_InternFromString("is_neg");
  nb::class_<PlainBatch>(m, "PlainBatch", "Values whose bytes lie in one piece each, with their descriptions.");
  m.def(
      "set_plain_describer", [](nb::callable describe) { state().describe = describe.inc_ref().ptr(); },
      nb::arg("describe"), "tensors.py's, from a plain value to its (metadata, nbytes).");
  m.def("set_tensor_types", &set_tensor_types, nb::arg("tensor"), nb::arg("parameter"),
        "torch's, once it is imported: until then no tensor is plain.");
  m.def(
      "plain", &plain_one, nb::arg("value").none(),
      nb::sig("def plain(value: typing.Any) -> tuple[bytes, tuple[int, int]] | None"),
      "(metadata, (address, nbytes)) of bytes, or of a dense CPU tensor as it is; None for everything else. The value "
      "has to stay until it has been put.");
  m.def("plain_batch", &plain_batch, nb::arg("values"), nb::arg("writable"),
        nb::sig("def plain_batch(values: list, writable: bool) -> PlainBatch | None"),
        "None if one of them is not plain, or is bytes and is to be written.");
}

}  // namespace torch_mooncake::python
