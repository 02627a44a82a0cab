// The pool's client. torch_mooncake/pool.py stands on it.

#include "python/pool.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "pool/client.h"
#include "pool/messages.h"
#include "python/memory.h"
#include "python/plain.h"

namespace torch_mooncake::python {

namespace {

using pool::Client;
using pool::ClientOptions;
using pool::ObjectPtr;

using VersionPair = std::pair<uint64_t, uint64_t>;
VersionPair pair_of(const pool::Version& v) { return {v.view, v.counter}; }

constexpr const char* kEngineCapsule = "torch_mooncake.Engine";
constexpr const char* kClientCapsule = "torch_mooncake.Client";

PyClient connect(std::string address, std::string token, std::string name, std::string host_id, nb::object engine,
                 double view_ttl_s, std::vector<std::string> transports, std::vector<std::string> nics,
                 std::string rdma, bool monitor, int64_t deadline_ns) {
  ClientOptions options;
  options.node_address = std::move(address);
  options.token = std::move(token);
  options.name = std::move(name);
  options.host_id = std::move(host_id);
  options.view_ttl_s = view_ttl_s;
  options.transports = std::move(transports);
  options.nics = std::move(nics);
  options.rdma = std::move(rdma);
  options.monitor = monitor;
  if (!engine.is_none()) options.engine = from_capsule<Engine>(engine, kEngineCapsule);
  auto peer = options.node_address;
  auto result = interruptible([options = std::move(options), deadline = deadline_at(deadline_ns)]() mutable {
    return Client::connect(std::move(options), deadline);
  });
  if (!result) raise(result.status(), peer);
  return PyClient(std::move(result).value());
}

constexpr const char* kPins[] = {"none", "soft", "hard"};
pool::Pin pin_named(const std::string& name) {
  for (uint8_t i = 0; i < 3; ++i)
    if (name == kPins[i]) return static_cast<pool::Pin>(i);
  raise({Code::invalid_argument, "a pin is \"soft\", \"hard\" or \"none\", not \"" + name + "\""});
}

pool::PutOptions put_options(bool sealed, std::string if_exists, uint32_t replicas, bool replicas_lenient,
                             std::string label, uint32_t part, uint32_t parts, std::string group, bool checksum,
                             uint64_t ttl_ms, std::string pin, std::string parent) {
  pool::PutOptions options;
  options.kind = sealed ? pool::Kind::sealed : pool::Kind::named;
  if (if_exists == "replace")
    options.if_exists = pool::IfExists::replace;
  else if (if_exists == "keep")
    options.if_exists = pool::IfExists::keep;
  else if (if_exists == "error")
    options.if_exists = pool::IfExists::error;
  else
    raise({Code::invalid_argument, "if_exists must be \"replace\", \"keep\" or \"error\", not \"" + if_exists + "\""});
  options.replicas = replicas;
  options.replicas_lenient = replicas_lenient;
  options.label = std::move(label);
  options.part = part;
  options.parts = parts;
  options.group = std::move(group);
  options.checksum = checksum;
  options.ttl_ms = ttl_ms;
  options.pin = pin_named(pin);
  options.parent = std::move(parent);
  return options;
}

// The named tuples that pool.py makes of outcomes: filled here, because a batch makes thousands.
struct ResultTypes {
  PyTypeObject *version = nullptr, *put_result = nullptr;
};
ResultTypes& result_types() {
  static ResultTypes types;
  return types;
}
nb::object named_tuple(PyTypeObject* type, std::initializer_list<PyObject*> items) {  // steals the items
  PyObject* tuple = type->tp_alloc(type, static_cast<Py_ssize_t>(items.size()));
  if (!tuple) throw nb::python_error();
  Py_ssize_t i = 0;
  for (PyObject* item : items) PyTuple_SET_ITEM(tuple, i++, item);
  PyObject_GC_UnTrack(
      tuple);  // of numbers, and of such tuples: no cycle; thousands would be gone through again and again
  return nb::steal(tuple);
}
nb::object put_result(const pool::PutOutcome& outcome, uint64_t nbytes) {
  nb::object version = named_tuple(result_types().version, {PyLong_FromUnsignedLongLong(outcome.version.view),
                                                            PyLong_FromUnsignedLongLong(outcome.version.counter)});
  return named_tuple(result_types().put_result,
                     {version.release().ptr(), PyBool_FromLong(outcome.stored), PyLong_FromUnsignedLongLong(nbytes)});
}

nb::object put(PyClient& client, std::string_view key, nb::bytes meta, nb::sequence data,
               const pool::PutOptions& options, int64_t deadline_ns) {
  Buffers buffers(data, /*writable=*/false);
  uint64_t nbytes = 0;
  for (const iovec& v : buffers.iov()) nbytes += v.iov_len;
  return put_result(
      unwrap(without_gil([&] {
        return client->put(key, {meta.c_str(), meta.size()}, buffers.iov(), options, deadline_at(deadline_ns));
      })),
      nbytes);
}

std::string_view text_of(PyObject* object) {
  Py_ssize_t nbytes = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &nbytes);
  if (!text) throw nb::python_error();
  return {text, static_cast<size_t>(nbytes)};
}

// (address, nbytes) or an object with the buffer protocol, which stays in place as long as this.
class Spans {
 public:
  explicit Spans(bool writable) : writable_(writable) {}
  ~Spans() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }
  Spans(const Spans&) = delete;
  Spans& operator=(const Spans&) = delete;
  iovec of(PyObject* item) {
    if (!writable_ && PyBytes_CheckExact(item))
      return {PyBytes_AS_STRING(item), static_cast<size_t>(PyBytes_GET_SIZE(item))};
    if (PyTuple_CheckExact(item) && PyTuple_GET_SIZE(item) == 2) {
      void* address = PyLong_AsVoidPtr(PyTuple_GET_ITEM(item, 0));
      const size_t nbytes = PyLong_AsSize_t(PyTuple_GET_ITEM(item, 1));
      if (PyErr_Occurred()) throw nb::python_error();
      return {address, nbytes};
    }
    Py_buffer view;
    if (PyObject_GetBuffer(item, &view, writable_ ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) throw nb::python_error();
    views_.push_back(view);
    return {view.buf, static_cast<size_t>(view.len)};
  }

 private:
  const bool writable_;
  std::vector<Py_buffer> views_;
};

nb::list put_entries(PyClient& client, const std::vector<pool::PutEntry>& entries, const pool::PutOptions& options,
                     int64_t deadline_ns) {
  auto outcomes = without_gil([&] { return client->put_many(entries, options, deadline_at(deadline_ns)); });
  nb::list out = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(entries.size())));
  for (size_t i = 0; i < entries.size(); ++i) {
    uint64_t nbytes = 0;
    for (const iovec& v : entries[i].data) nbytes += v.iov_len;
    nb::object item = outcomes[i].is_ok() ? put_result(*outcomes[i], nbytes) : make_exception(outcomes[i].status());
    PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), item.release().ptr());
  }
  return out;
}

nb::list put_many(PyClient& client, nb::list keys, nb::list metas, nb::list datas, const pool::PutOptions& options,
                  int64_t deadline_ns) {
  const size_t n = keys.size();
  if (metas.size() != n || datas.size() != n) raise({Code::invalid_argument, "keys, metas and datas differ in length"});
  Spans spans(/*writable=*/false);
  std::vector<iovec> iov;
  std::vector<size_t> ends(n);
  for (size_t i = 0; i < n; ++i) {
    PyObject* data = PyList_GET_ITEM(datas.ptr(), static_cast<Py_ssize_t>(i));
    if (PyList_CheckExact(data)) {
      for (Py_ssize_t k = 0; k < PyList_GET_SIZE(data); ++k) iov.push_back(spans.of(PyList_GET_ITEM(data, k)));
    } else {
      iov.push_back(spans.of(data));
    }
    ends[i] = iov.size();
  }
  std::vector<pool::PutEntry> entries(n);
  for (size_t i = 0; i < n; ++i) {
    const size_t begin = i == 0 ? 0 : ends[i - 1];
    nb::handle meta(PyList_GET_ITEM(metas.ptr(), static_cast<Py_ssize_t>(i)));
    if (!PyBytes_Check(meta.ptr())) raise({Code::invalid_argument, "metadata is bytes"});
    entries[i] = {text_of(PyList_GET_ITEM(keys.ptr(), static_cast<Py_ssize_t>(i))),
                  {PyBytes_AS_STRING(meta.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(meta.ptr()))},
                  {iov.data() + begin, ends[i] - begin}};
  }
  return put_entries(client, entries, options, deadline_ns);
}

nb::list put_plain(PyClient& client, nb::list keys, const PlainBatch& batch, const pool::PutOptions& options,
                   int64_t deadline_ns) {
  const size_t n = keys.size();
  if (batch.items.size() != n) raise({Code::invalid_argument, "keys and values differ in number"});
  std::vector<pool::PutEntry> entries(n);
  for (size_t i = 0; i < n; ++i)
    entries[i] = {text_of(PyList_GET_ITEM(keys.ptr(), static_cast<Py_ssize_t>(i))),
                  batch.items[i].form->meta,
                  {&batch.items[i].data, 1}};
  return put_entries(client, entries, options, deadline_ns);
}

std::vector<ObjectPtr> objects_of(nb::list list) {
  std::vector<ObjectPtr> out;
  out.reserve(list.size());
  for (nb::handle item : list) out.push_back(nb::cast<PyObjectInfo&>(item).get());
  return out;
}

nb::list read_many(PyClient& client, nb::list objects, nb::list outs, int64_t deadline_ns) {
  if (objects.size() != outs.size()) raise({Code::invalid_argument, "objects and outs differ in length"});
  Spans spans(/*writable=*/true);
  std::vector<iovec> iov;
  iov.reserve(outs.size());
  for (nb::handle out : outs) iov.push_back(spans.of(out.ptr()));
  std::vector<pool::ReadEntry> entries;
  entries.reserve(outs.size());
  size_t i = 0;
  for (nb::handle object : objects) {
    entries.push_back({nb::cast<PyObjectInfo&>(object).get(), 0, {&iov[i], iov[i].iov_len ? size_t{1} : size_t{0}}});
    ++i;
  }
  auto statuses = without_gil([&] { return client->read_many(entries, deadline_at(deadline_ns)); });
  nb::list out;
  for (const Status& s : statuses) {
    if (s.is_ok())
      out.append(nb::none());
    else
      out.append(make_exception(s));
  }
  return out;
}

nb::object located(const Result<ObjectPtr>& result) {
  if (!result) return make_exception(result.status());
  return nb::cast(PyObjectInfo(result.value()));
}

// None where the object is of that form and was read; the object where it was found only; an exception.
nb::list get_plain(PyClient& client, nb::list keys, const PlainBatch& batch, int64_t deadline_ns) {
  const size_t n = keys.size();
  if (batch.items.size() != n) raise({Code::invalid_argument, "keys and values differ in number"});
  std::vector<std::string> names(n);
  for (size_t i = 0; i < n; ++i) names[i] = text_of(PyList_GET_ITEM(keys.ptr(), static_cast<Py_ssize_t>(i)));
  std::vector<Result<ObjectPtr>> found;
  std::vector<bool> read(n);
  without_gil([&] {
    found = client->locate_many(names, deadline_at(deadline_ns));
    for (size_t i = 0; i < n; ++i) {
      if (!found[i].is_ok()) continue;
      const PlainValue& value = batch.items[i];
      const pool::ObjectInfo& info = (*found[i])->info();
      if (info.parts.size() != 1 || info.meta != value.form->meta || info.nbytes != value.data.iov_len) continue;
      const Status s = client->read(*found[i], 0, {&value.data, 1}, deadline_at(deadline_ns));
      read[i] = s.is_ok();
      if (!s.is_ok() && s.code() != Code::key_not_found) found[i] = s;  // superseded: whoever looks again finds out
    }
  });
  nb::list out = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(n)));
  for (size_t i = 0; i < n; ++i) {
    nb::object item = read[i] ? nb::object(nb::none()) : located(found[i]);
    PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), item.release().ptr());
  }
  return out;
}

nb::list map_many(PyClient& client, nb::list objects, bool read_only, int64_t deadline_ns) {
  const auto list = objects_of(objects);
  auto results = without_gil([&] { return client->map_many(list, read_only, deadline_at(deadline_ns)); });
  nb::list out;
  for (auto& result : results) {
    if (result.is_ok())
      out.append(nb::cast(new Mapped(std::move(result->data), result->nbytes, result->zero_copy, read_only),
                          nb::rv_policy::take_ownership));
    else
      out.append(make_exception(result.status()));
  }
  return out;
}

nb::list outcomes_of(const std::vector<Result<bool>>& results) {
  nb::list out;
  for (const auto& result : results) {
    if (result.is_ok())
      out.append(nb::bool_(*result));
    else
      out.append(make_exception(result.status()));
  }
  return out;
}

nb::list remove_many(PyClient& client, nb::list keys, nb::object only, int64_t deadline_ns) {
  std::vector<pool::RemoveEntry> entries;
  for (nb::handle key : keys) entries.push_back({text_of(key.ptr()), {}});
  if (!only.is_none()) {
    const auto versions = nb::cast<std::vector<VersionPair>>(only);
    if (versions.size() != entries.size()) raise({Code::invalid_argument, "keys and versions differ in length"});
    for (size_t i = 0; i < entries.size(); ++i) entries[i].only = pool::Version{versions[i].first, versions[i].second};
  }
  auto results = without_gil([&] { return client->remove_many(entries, deadline_at(deadline_ns)); });
  return outcomes_of(results);
}

pool::GetOptions get_options(std::optional<VersionPair> at_least, std::string label) {
  pool::GetOptions options;
  if (at_least) options.at_least = pool::Version{at_least->first, at_least->second};
  options.label = std::move(label);
  return options;
}

nb::list quotas_of(const std::vector<pool::Quota>& quotas) {
  nb::list out;
  for (const pool::Quota& quota : quotas) {
    nb::dict d;
    d["prefix"] = quota.prefix;
    d["limit_bytes"] = quota.limit_bytes;
    d["used_bytes"] = quota.used_bytes;
    out.append(std::move(d));
  }
  return out;
}

nb::dict stat(PyClient& client, int64_t deadline_ns, bool here) {
  auto s = unwrap(without_gil([&] { return client->stat(deadline_at(deadline_ns), here); }));
  nb::list nodes;
  for (const auto& n : s.nodes) {
    nb::dict d;
    d["id"] = to_bytes(n.id).attr("hex")();
    d["address"] = n.address;
    d["host_id"] = n.host_id;
    d["limit_bytes"] = n.limit_bytes;
    d["used_bytes"] = n.used_bytes;
    d["limbo_bytes"] = n.limbo_bytes;
    d["prepared_bytes"] = n.prepared_bytes;
    d["extents"] = n.extents;
    d["evictions"] = n.evictions;
    d["pinned"] = n.pinned;
    d["soft_pinned_bytes"] = n.soft_pinned_bytes;
    d["hard_pinned_bytes"] = n.hard_pinned_bytes;
    d["is_home"] = n.is_home;
    d["fenced_bytes"] = n.fenced_bytes;
    d["granted_bytes"] = n.granted_bytes;
    d["starts"] = n.starts;
    d["clients"] = n.clients;
    d["waiting"] = n.waiting;
    d["reservations"] = n.reservations;
    d["refusals"] = n.refusals;
    d["lookups"] = n.lookups;
    d["misses"] = n.misses;
    d["commits"] = n.commits;
    d["removals"] = n.removals;
    d["copies"] = n.copies;
    d["copied_bytes"] = n.copied_bytes;
    d["to_copy"] = n.to_copy;
    d["draining"] = n.draining;
    d["ready"] = n.ready;
    d["unready"] = n.unready;
    nb::dict ssd;
    ssd["limit_bytes"] = n.ssd.limit_bytes;
    ssd["used_bytes"] = n.ssd.used_bytes;
    ssd["records"] = n.ssd.records;
    ssd["record_bytes"] = n.ssd.record_bytes;
    ssd["demotions"] = n.ssd.demotions;
    ssd["promotions"] = n.ssd.promotions;
    ssd["dropped"] = n.ssd.dropped;
    ssd["refused"] = n.ssd.refused;
    ssd["reclaimed"] = n.ssd.reclaimed;
    ssd["errors"] = n.ssd.errors;
    ssd["corrupt"] = n.ssd.corrupt;
    ssd["out_of_service"] = n.ssd.out_of_service;
    d["ssd"] = std::move(ssd);
    nodes.append(std::move(d));
  }
  nb::dict d;
  d["view"] = s.view;
  d["keys"] = s.keys;
  d["client_maps"] = s.client_maps;
  d["client_mapped_bytes"] = s.client_mapped_bytes;
  d["client_read_bytes"] = s.client_read_bytes;
  d["nodes"] = std::move(nodes);
  d["quotas"] = quotas_of(s.quotas);
  return d;
}

}  // namespace

void bind_pool(nb::module_& m) {
  m.attr("MAX_KEY_BYTES") = pool::kMaxKeyBytes;
  m.attr("MAX_META_BYTES") = pool::kMaxMetaBytes;
  m.attr("MAX_PARTS") = pool::kMaxParts;
  m.attr("MAX_TTL_MS") = pool::kMaxTtlMs;

  nb::class_<PyObjectInfo>(m, "Object", "A found version of a key.")
      .def_prop_ro("key", [](PyObjectInfo& o) { return to_bytes(o->info().key); })
      .def_prop_ro("sealed", [](PyObjectInfo& o) { return o->info().kind == pool::Kind::sealed; })
      .def_prop_ro("version", [](PyObjectInfo& o) { return pair_of(o->info().version); })
      .def_prop_ro("nbytes", [](PyObjectInfo& o) { return o->info().nbytes; })
      .def_prop_ro("meta", [](PyObjectInfo& o) { return to_bytes(o->info().meta); })
      .def_prop_ro("parts",
                   [](PyObjectInfo& o) {
                     nb::list out;
                     for (const auto& p : o->info().parts)
                       out.append(nb::make_tuple(p.offset, p.nbytes, to_bytes(p.meta)));
                     return out;
                   })
      .def_prop_ro(
          "single",
          [](PyObjectInfo& o) -> nb::object {
            const pool::ObjectInfo& info = o->info();
            if (info.parts.size() != 1) return nb::none();
            return nb::make_tuple(to_bytes(info.meta), info.nbytes);
          },
          nb::for_getter(nb::sig("def single(self, /) -> tuple[bytes, int] | None")),
          "(meta, nbytes) of an object of one writer, else None.")
      .def_prop_ro("pin", [](PyObjectInfo& o) { return kPins[static_cast<size_t>(o->info().pin)]; })
      .def_prop_ro("left_ms", [](PyObjectInfo& o) { return o->info().left_ms; })
      .def_prop_ro("label", [](PyObjectInfo& o) { return o->info().label; })
      .def_prop_ro("replicas", [](PyObjectInfo& o) { return o->info().replicas.size(); })
      .def_prop_ro("tiers",  // of the replicas (of part 0), when they were looked up
                   [](PyObjectInfo& o) {
                     nb::list tiers;
                     for (const auto& r : o->info().replicas) tiers.append(r.tier == pool::Tier::ssd ? "ssd" : "dram");
                     return tiers;
                   })
      .def_prop_ro("local", [](PyObjectInfo& o) { return o->local(); });

  m.def(
      "set_result_types",
      [](nb::type_object version, nb::type_object put_result) {
        result_types() = {reinterpret_cast<PyTypeObject*>(version.inc_ref().ptr()),
                          reinterpret_cast<PyTypeObject*>(put_result.inc_ref().ptr())};
      },
      nb::arg("version"), nb::arg("put_result"), "pool.py's named tuples.");

  nb::class_<pool::PutOptions>(m, "PutOptions", "What a put does, whatever it puts.")
      .def(
          "__init__",
          [](pool::PutOptions* self, bool sealed, std::string if_exists, uint32_t replicas, bool replicas_lenient,
             std::string label, uint32_t part, uint32_t parts, std::string group, bool checksum, uint64_t ttl_ms,
             std::string pin, std::string parent) {
            new (self) pool::PutOptions(put_options(sealed, std::move(if_exists), replicas, replicas_lenient,
                                                    std::move(label), part, parts, std::move(group), checksum, ttl_ms,
                                                    std::move(pin), std::move(parent)));
          },
          nb::kw_only(), nb::arg("sealed") = false, nb::arg("if_exists") = "replace", nb::arg("replicas") = 1,
          nb::arg("replicas_lenient") = false, nb::arg("label") = "", nb::arg("part") = 0, nb::arg("parts") = 1,
          nb::arg("group") = "", nb::arg("checksum") = false, nb::arg("ttl_ms") = 0, nb::arg("pin") = "none",
          nb::arg("parent") = "");

  nb::class_<PyClient>(m, "Client")
      .def_static("connect", &connect, nb::kw_only(), nb::arg("address"), nb::arg("token"), nb::arg("name"),
                  nb::arg("host_id"), nb::arg("engine").none(), nb::arg("view_ttl_s"),
                  nb::arg("transports") = std::vector<std::string>{"local", "shm", "tcp"},
                  nb::arg("nics") = std::vector<std::string>(), nb::arg("rdma") = "", nb::arg("monitor") = false,
                  nb::arg("deadline_ns"))
      .def("capsule", [](PyClient& c) { return to_capsule(c.get(), kClientCapsule); })
      .def("engine_capsule", [](PyClient& c) { return to_capsule(c->engine(), kEngineCapsule); })
      .def("put", &put, nb::arg("key"), nb::arg("meta"), nb::arg("data"), nb::arg("options"), nb::arg("deadline_ns"),
           nb::sig("def put(self, key: str, meta: bytes, data: collections.abc.Sequence[object], options: PutOptions, "
                   "deadline_ns: int) -> typing.Any"))
      .def("put_many", &put_many, nb::arg("keys"), nb::arg("metas"), nb::arg("datas"), nb::arg("options"),
           nb::arg("deadline_ns"),
           "One PutResult or exception for each key. A data is bytes-like, (address, nbytes), or a list of these.")
      .def("put_plain", &put_plain, nb::arg("keys"), nb::arg("values"), nb::arg("options"), nb::arg("deadline_ns"),
           "One PutResult or exception for each key.")
      .def("read_many", &read_many, nb::arg("objects"), nb::arg("outs"), nb::arg("deadline_ns"),
           "All of each object into (address, nbytes) or a buffer. None or an exception for each.")
      .def("get_plain", &get_plain, nb::arg("keys"), nb::arg("values"), nb::arg("deadline_ns"),
           "Looks up, and reads into those values whose form it is: None, Object or an exception each.")
      .def("map_many", &map_many, nb::arg("objects"), nb::arg("read_only"), nb::arg("deadline_ns"),
           "One Mapped or exception for each object.")
      .def("remove_many", &remove_many, nb::arg("keys"), nb::arg("only").none(), nb::arg("deadline_ns"),
           "Whether each was there, or an exception.")
      .def(
          "locate",
          [](PyClient& c, std::string key, std::optional<VersionPair> at_least, std::string label,
             int64_t deadline_ns) {
            return PyObjectInfo(unwrap(without_gil(
                [&] { return c->locate(key, get_options(at_least, std::move(label)), deadline_at(deadline_ns)); })));
          },
          nb::arg("key"), nb::arg("at_least").none(), nb::arg("label"), nb::arg("deadline_ns"))
      .def(
          "locate_many",
          [](PyClient& c, std::vector<std::string> keys, int64_t deadline_ns) {
            auto results = without_gil([&] { return c->locate_many(keys, deadline_at(deadline_ns)); });
            nb::list out;
            for (const auto& result : results) out.append(located(result));
            return out;
          },
          nb::arg("keys"), nb::arg("deadline_ns"), "One Object or exception for each key.")
      .def(
          "peek_many",
          [](PyClient& c, std::vector<std::string> keys, int64_t deadline_ns) {
            auto results = without_gil([&] { return c->peek_many(keys, deadline_at(deadline_ns)); });
            nb::list out;
            for (const auto& result : results) out.append(located(result));
            return out;
          },
          nb::arg("keys"), nb::arg("deadline_ns"),
          "As locate_many, and no use: what is on an SSD stays there, and its bytes cannot be read.")
      .def(
          "wait",
          [](PyClient& c, std::string key, std::optional<VersionPair> at_least, std::string label,
             int64_t deadline_ns) {
            return PyObjectInfo(unwrap(
                interruptible([client = c.get(), key, options = get_options(at_least, std::move(label)),
                               deadline = deadline_at(deadline_ns)] { return client->wait(key, options, deadline); })));
          },
          nb::arg("key"), nb::arg("at_least").none(), nb::arg("label"), nb::arg("deadline_ns"))
      .def(
          "read",
          [](PyClient& c, PyObjectInfo& object, uint64_t offset, nb::sequence out, int64_t deadline_ns) {
            Buffers buffers(out, /*writable=*/true);
            check(without_gil([&] { return c->read(object.get(), offset, buffers.iov(), deadline_at(deadline_ns)); }));
          },
          nb::arg("object"), nb::arg("offset"), nb::arg("out"), nb::arg("deadline_ns"))
      .def(
          "read_ranges",
          [](PyClient& c, PyObjectInfo& object, nb::bytes ranges, uint64_t address, uint64_t nbytes,
             int64_t deadline_ns) {
            struct Triple {
              int64_t offset, at, nbytes;
            };
            if (ranges.size() % sizeof(Triple) != 0) raise({Code::invalid_argument, "ranges are triples of int64"});
            const auto* triples = reinterpret_cast<const Triple*>(ranges.c_str());
            auto* base = reinterpret_cast<std::byte*>(address);
            std::vector<pool::ReadRange> list;
            list.reserve(ranges.size() / sizeof(Triple));
            for (size_t i = 0; i < ranges.size() / sizeof(Triple); ++i) {
              const Triple& t = triples[i];
              if (t.offset < 0 || t.at < 0 || t.nbytes < 0 || static_cast<uint64_t>(t.at) > nbytes)
                raise({Code::invalid_argument, "a range to be read is negative or leaves its memory"});
              list.push_back({static_cast<uint64_t>(t.offset), base + t.at, static_cast<uint64_t>(t.nbytes)});
            }
            check(without_gil([&] {
              return c->read_ranges(object.get(), list, {base, nbytes}, deadline_at(deadline_ns));
            }));
          },
          nb::arg("object"), nb::arg("ranges"), nb::arg("address"), nb::arg("nbytes"), nb::arg("deadline_ns"),
          "(offset in the object, offset in the memory, nbytes) of each, as int64 in native order.")
      .def(
          "map",
          [](PyClient& c, PyObjectInfo& object, bool read_only, int64_t deadline_ns) {
            auto mapped =
                unwrap(without_gil([&] { return c->map(object.get(), read_only, deadline_at(deadline_ns)); }));
            return new Mapped(std::move(mapped.data), mapped.nbytes, mapped.zero_copy, read_only);
          },
          nb::arg("object"), nb::arg("read_only"), nb::arg("deadline_ns"))
      .def(
          "exists",
          [](PyClient& c, std::vector<std::string> keys, int64_t deadline_ns) {
            nb::list out;
            auto found = unwrap(without_gil([&] { return c->exists(keys, deadline_at(deadline_ns)); }));
            for (bool yes : found) out.append(yes);
            return out;
          },
          nb::arg("keys"), nb::arg("deadline_ns"))
      .def(
          "remove",
          [](PyClient& c, std::string key, int64_t deadline_ns, std::optional<VersionPair> only) {
            std::optional<pool::Version> version;
            if (only) version = pool::Version{only->first, only->second};
            return unwrap(without_gil([&] { return c->remove(key, deadline_at(deadline_ns), version); }));
          },
          nb::arg("key"), nb::arg("deadline_ns"), nb::arg("only").none() = nb::none())
      .def(
          "keys",
          [](PyClient& c, std::string prefix, int64_t deadline_ns) {
            return unwrap(without_gil([&] { return c->keys(prefix, deadline_at(deadline_ns)); }));
          },
          nb::arg("prefix"), nb::arg("deadline_ns"))
      .def(
          "pin_many",
          [](PyClient& c, std::vector<std::string> keys, std::string pin, int64_t deadline_ns) {
            const pool::Pin level = pin_named(pin);
            auto results = without_gil([&] { return c->pin_many(keys, level, deadline_at(deadline_ns)); });
            return outcomes_of(results);
          },
          nb::arg("keys"), nb::arg("pin"), nb::arg("deadline_ns"))
      .def(
          "set_quota",
          [](PyClient& c, std::string prefix, uint64_t limit_bytes, int64_t deadline_ns) {
            const pool::Quota quota{std::move(prefix), limit_bytes, 0};
            return quotas_of(unwrap(without_gil([&] { return c->set_quota(quota, deadline_at(deadline_ns)); })));
          },
          nb::arg("prefix"), nb::arg("limit_bytes"), nb::arg("deadline_ns"), "All quotas there are then.")
      .def("stat", &stat, nb::arg("deadline_ns"), nb::arg("here") = false)
      .def(
          "drained",
          [](PyClient& c, int64_t deadline_ns) {
            auto drained = unwrap(without_gil([&] { return c->drained(deadline_at(deadline_ns)); }));
            nb::dict d;
            d["moved"] = drained.moved;
            d["moved_bytes"] = drained.moved_bytes;
            d["left"] = drained.left;
            d["why"] = drained.why;
            return d;
          },
          nb::arg("deadline_ns"),
          "Wait until the node at our address, which drain() was told to leave, has moved its objects; what has become "
          "of them.")
      .def(
          "drain",
          [](PyClient& c, int64_t deadline_ns) {
            check(without_gil([&] { return c->drain(deadline_at(deadline_ns)); }));
          },
          nb::arg("deadline_ns"))
      .def_prop_ro("alive", [](PyClient& c) { return c->alive(); })
      .def("close", [](PyClient& c) {
        without_gil([&] { c->close(); });
        drain_released();
      });
}

}  // namespace torch_mooncake::python
