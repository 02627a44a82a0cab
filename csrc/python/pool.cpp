// The pool's client. torch_mooncake/pool.py stands on it.

#include "python/pool.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "pool/client.h"
#include "pool/messages.h"
#include "python/memory.h"

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
                 double view_ttl_s, bool monitor, int64_t deadline_ns) {
  ClientOptions options;
  options.node_address = std::move(address);
  options.token = std::move(token);
  options.name = std::move(name);
  options.host_id = std::move(host_id);
  options.view_ttl_s = view_ttl_s;
  options.monitor = monitor;
  if (!engine.is_none()) options.engine = from_capsule<Engine>(engine, kEngineCapsule);
  auto peer = options.node_address;
  auto result = interruptible([options = std::move(options), deadline = deadline_at(deadline_ns)]() mutable {
    return Client::connect(std::move(options), deadline);
  });
  if (!result) raise(result.status(), peer);
  return PyClient(std::move(result).value());
}

nb::tuple put(PyClient& client, std::string key, nb::bytes meta, nb::sequence data, bool sealed, std::string if_exists,
              uint32_t replicas, bool replicas_lenient, std::string label, uint32_t part, uint32_t parts,
              std::string group, bool checksum, uint64_t ttl_ms, int64_t deadline_ns) {
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
  Buffers buffers(data, /*writable=*/false);
  auto outcome = unwrap(without_gil([&] {
    return client->put(key, {meta.c_str(), meta.size()}, buffers.iov(), options, deadline_at(deadline_ns));
  }));
  return nb::make_tuple(pair_of(outcome.version), outcome.stored);
}

pool::GetOptions get_options(std::optional<VersionPair> at_least, std::string label) {
  pool::GetOptions options;
  if (at_least) options.at_least = pool::Version{at_least->first, at_least->second};
  options.label = std::move(label);
  return options;
}

nb::object located(const Result<ObjectPtr>& result) {
  if (!result) return make_exception(result.status());
  return nb::cast(PyObjectInfo(result.value()));
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
    d["is_home"] = n.is_home;
    d["fenced_bytes"] = n.fenced_bytes;
    d["starts"] = n.starts;
    d["clients"] = n.clients;
    d["waiting"] = n.waiting;
    d["reservations"] = n.reservations;
    d["refusals"] = n.refusals;
    d["lookups"] = n.lookups;
    d["misses"] = n.misses;
    d["commits"] = n.commits;
    d["removals"] = n.removals;
    d["draining"] = n.draining;
    d["ready"] = n.ready;
    d["unready"] = n.unready;
    nodes.append(std::move(d));
  }
  nb::dict d;
  d["view"] = s.view;
  d["keys"] = s.keys;
  d["client_maps"] = s.client_maps;
  d["client_mapped_bytes"] = s.client_mapped_bytes;
  d["client_read_bytes"] = s.client_read_bytes;
  d["nodes"] = std::move(nodes);
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
      .def_prop_ro("left_ms", [](PyObjectInfo& o) { return o->info().left_ms; })
      .def_prop_ro("label", [](PyObjectInfo& o) { return o->info().label; })
      .def_prop_ro("replicas", [](PyObjectInfo& o) { return o->info().replicas.size(); })
      .def_prop_ro("local", [](PyObjectInfo& o) { return o->local(); });

  nb::class_<PyClient>(m, "Client")
      .def_static("connect", &connect, nb::kw_only(), nb::arg("address"), nb::arg("token"), nb::arg("name"),
                  nb::arg("host_id"), nb::arg("engine").none(), nb::arg("view_ttl_s"), nb::arg("monitor") = false,
                  nb::arg("deadline_ns"))
      .def("capsule", [](PyClient& c) { return to_capsule(c.get(), kClientCapsule); })
      .def("engine_capsule", [](PyClient& c) { return to_capsule(c->engine(), kEngineCapsule); })
      .def("put", &put, nb::arg("key"), nb::arg("meta"), nb::arg("data"), nb::kw_only(), nb::arg("sealed"),
           nb::arg("if_exists"), nb::arg("replicas"), nb::arg("replicas_lenient"), nb::arg("label"), nb::arg("part"),
           nb::arg("parts"), nb::arg("group"), nb::arg("checksum"), nb::arg("ttl_ms"), nb::arg("deadline_ns"))
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
      .def("stat", &stat, nb::arg("deadline_ns"), nb::arg("here") = false)
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
