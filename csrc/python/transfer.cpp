// Engine, regions, peers and ops. The Python classes of torch_mooncake/transfer.py stand on these.

#include "python/transfer.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>

#include <cmath>

#include "common/random.h"
#include "memory/shared_heap.h"
#include "python/memory.h"

namespace torch_mooncake::python {

namespace {

constexpr const char* kEngineCapsule = "torch_mooncake.Engine";

PyEngine make_engine(std::vector<std::string> listen, std::string token, std::vector<std::string> transports,
                     std::string host_id, std::string socket_dir, std::string name, std::string role, int lanes,
                     int io_threads, std::vector<std::string> nics, std::string rdma, uint64_t foreground_rate,
                     uint64_t background_rate) {
  EngineOptions options;
  options.rpc.name = std::move(name);
  options.rpc.role = std::move(role);
  options.rpc.token = std::move(token);
  options.rpc.host_id = std::move(host_id);
  options.rpc.socket_dir = std::move(socket_dir);
  options.rpc.io_threads = io_threads;
  options.listen = std::move(listen);
  options.transports = std::move(transports);
  options.lanes = lanes;
  options.nics = std::move(nics);
  options.rdma = std::move(rdma);
  options.foreground_rate = foreground_rate;
  options.background_rate = background_rate;
  return PyEngine(unwrap(without_gil([&] { return Engine::create(std::move(options)); })));
}

PyRegion register_memory(PyEngine& engine, uint64_t address, uint64_t nbytes, nb::object keep, bool readable,
                         bool writable, std::string label) {
  RegionOptions options{readable, writable, keep_alive(std::move(keep)), std::move(label)};
  auto* data = reinterpret_cast<void*>(address);
  // The engine itself recognises memory of the shared heap.
  return PyRegion(unwrap(without_gil([&] { return engine->register_memory(data, nbytes, std::move(options)); })));
}

PyRegion register_cuda(PyEngine& engine, uint64_t address, uint64_t nbytes, nb::object keep, bool readable,
                       bool writable, std::string label) {
  RegionOptions options{readable, writable, keep_alive(std::move(keep)), std::move(label)};
  auto* data = reinterpret_cast<void*>(address);
  return PyRegion(unwrap(without_gil([&] { return engine->register_cuda(data, nbytes, std::move(options)); })));
}

PyRegion register_file(PyEngine& engine, std::string path, int fd, std::optional<uint64_t> nbytes, bool create,
                       bool readable, bool writable, std::string label) {
  FileOptions file{std::move(path), fd, nbytes, writable, create};
  RegionOptions options{readable, writable, nullptr, std::move(label)};
  return PyRegion(unwrap(without_gil([&] { return engine->register_file(std::move(file), std::move(options)); })));
}

const char* kind_name(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::host:
      return "host";
    case MemoryKind::file:
      return "file";
    case MemoryKind::cuda:
      return "cuda";
  }
  return "unknown";
}

nb::dict facts_of(const std::vector<std::pair<std::string, Fact>>& facts) {
  nb::dict d;
  for (auto& [name, fact] : facts) d[name.c_str()] = std::visit([](auto& v) { return nb::cast(v); }, fact);
  return d;
}

nb::list lanes_of(const std::vector<LaneStats>& lanes) {
  nb::list out;
  for (auto& lane : lanes) {
    nb::dict d;
    d["peer"] = lane.peer;
    d["peer_id"] = to_hex(lane.peer_id);
    d["transport"] = lane.transport;
    d["lane"] = lane.lane;
    d["rail"] = lane.rail;
    d["alive"] = lane.alive;
    d["bytes_sent"] = lane.bytes_sent;
    d["bytes_received"] = lane.bytes_received;
    d["queued_bytes"] = lane.queued_bytes;
    d["facts"] = facts_of(lane.facts);
    out.append(d);
  }
  return out;
}

nb::dict outcomes_of(const Outcomes& outcomes) {
  nb::dict d;
  d["done"] = outcomes.done;
  d["failed"] = outcomes.failed;
  d["timeout"] = outcomes.timeout;
  d["cancelled"] = outcomes.cancelled;
  return d;
}

nb::list latencies_of(const std::vector<OpStats>& latencies) {
  nb::list out;
  for (auto& s : latencies) {
    nb::dict d;
    d["direction"] = s.direction;
    d["transport"] = s.transport;
    d["up_to_nbytes"] = s.up_to_nbytes == UINT64_MAX ? nb::none() : nb::cast(s.up_to_nbytes);
    d["ops"] = s.ops;
    d["nbytes"] = s.nbytes;
    d["latency_sum_s"] = static_cast<double>(s.latency_sum_ns) * 1e-9;
    d["latency"] = std::vector<uint64_t>(s.latency.begin(), s.latency.end());
    out.append(d);
  }
  return out;
}

nb::dict stats_of(PyEngine& engine) {
  auto s = without_gil([&] { return engine->stats(); });
  nb::dict d;
  d["ops"] = s.ops;
  d["ops_failed"] = s.ops_failed;
  d["ops_in_flight"] = s.ops_in_flight;
  d["reads"] = outcomes_of(s.reads);
  d["writes"] = outcomes_of(s.writes);
  d["latencies"] = latencies_of(s.latencies);
  d["resent_slices"] = s.resent_slices;
  d["failovers"] = s.failovers;
  d["mover_queue"] = s.mover_queue;
  d["callback_queue"] = s.callback_queue;
  d["lanes"] = lanes_of(s.lanes);
  d["notifications"] = s.notifications;
  d["bytes_sent"] = s.bytes_sent;
  d["bytes_received"] = s.bytes_received;
  d["regions"] = s.regions;
  d["quarantined_regions"] = s.quarantined_regions;
  d["sessions"] = s.sessions;
  return d;
}

nb::dict explain_peer(PyEngine& engine, PyPeer& peer) {
  auto said = without_gil([&] { return engine->explain(peer.get()); });
  nb::list paths;
  for (auto& path : said.paths) {
    nb::list sizes;
    for (auto& rule : path.sizes) {
      nb::dict d;
      d["direction"] = rule.direction;
      d["up_to_nbytes"] = rule.up_to_nbytes == UINT64_MAX ? nb::none() : nb::cast(rule.up_to_nbytes);
      d["how"] = rule.how;
      sizes.append(d);
    }
    nb::dict d;
    d["transport"] = path.transport;
    d["option"] = path.option;
    d["serves"] = path.serves;
    d["no_read"] = path.no_read;
    d["no_write"] = path.no_write;
    d["sizes"] = sizes;
    d["facts"] = facts_of(path.facts);
    d["lanes"] = lanes_of(path.lanes);
    paths.append(d);
  }
  nb::dict d;
  d["peer"] = said.peer;
  d["alive"] = said.alive;
  d["same_host"] = said.same_host;
  d["not_same_host_because"] = said.not_same_host_because;
  d["read"] = said.read;
  d["write"] = said.write;
  d["paths"] = paths;
  return d;
}

// Shared memory with the buffer protocol, for tm.empty(shared=True).
class SharedBuffer {
 public:
  explicit SharedBuffer(uint64_t nbytes)
      : data_(unwrap(without_gil([&] { return SharedHeap::instance().allocate(nbytes); }))), nbytes_(nbytes) {}
  ~SharedBuffer() { SharedHeap::instance().free(data_); }
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;
  void* data() const { return data_; }
  uint64_t nbytes() const { return nbytes_; }

 private:
  void* data_;
  uint64_t nbytes_;
};

int shared_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  auto* buffer = nb::inst_ptr<SharedBuffer>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, buffer->data(), static_cast<Py_ssize_t>(buffer->nbytes()), 0, flags);
}
PyType_Slot shared_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(shared_getbuffer)}, {0, nullptr}};

}  // namespace

void bind_transfer(nb::module_& m) {
  nb::list bounds;
  for (int i = 0; i + 1 < OpStats::kBuckets; ++i) bounds.append(std::ldexp(1e-9, OpStats::kFirstBucketLog2Ns + i));
  m.attr("LATENCY_BOUNDS_S") = nb::tuple(bounds);

  m.def("file_io", &file_io_choice, "What carries file I/O here: \"io_uring\", or \"threads (why)\".");

  nb::class_<SharedBuffer>(m, "SharedBuffer", nb::type_slots(shared_slots), "Memory that same-host peers can map.")
      .def(nb::init<uint64_t>(), nb::arg("nbytes"))
      .def_prop_ro("nbytes", &SharedBuffer::nbytes);

  nb::class_<PyRegion>(m, "Region")
      .def_prop_ro("nbytes", [](PyRegion& r) { return r->nbytes(); })
      .def_prop_ro("kind", [](PyRegion& r) { return kind_name(r->kind()); })
      .def_prop_ro("address", [](PyRegion& r) { return reinterpret_cast<uint64_t>(r->data()); })
      .def_prop_ro("id", [](PyRegion& r) { return r->id(); })
      .def_prop_ro("shared", [](PyRegion& r) { return r->shared(); })
      .def_prop_ro("generation", [](PyRegion& r) { return r->generation(); })
      .def("descriptor", [](PyRegion& r) { return to_bytes(r->descriptor()); });

  nb::class_<PyRemoteRegion>(m, "RemoteRegion")
      .def_prop_ro("nbytes", [](PyRemoteRegion& r) { return r->nbytes(); })
      .def_prop_ro("transport", [](PyRemoteRegion& r) { return r->transport(); })
      .def(
          "lease",
          [](PyRemoteRegion& r) -> std::optional<Mapped> {
            auto data = without_gil([&] { return r->lease(); });
            if (!data) return std::nullopt;
            return Mapped(std::const_pointer_cast<std::byte>(std::move(data)), r->nbytes(), true, true);
          },
          "The region's bytes where they lie, for reading only; None if they are not in this process.");

  nb::class_<PyPeer>(m, "Peer")
      .def_prop_ro("name", [](PyPeer& p) { return p->identity().name; })
      .def_prop_ro("id", [](PyPeer& p) { return to_bytes(p->identity().engine); })
      .def_prop_ro("host_id", [](PyPeer& p) { return p->identity().host_id; })
      .def_prop_ro("pid", [](PyPeer& p) { return p->identity().pid; })
      .def_prop_ro("addresses", [](PyPeer& p) { return p->identity().addresses; })
      .def_prop_ro("alive", [](PyPeer& p) { return p->alive(); })
      .def_prop_ro("same_host", [](PyPeer& p) { return p->same_host(); })
      .def(
          "open",
          [](PyPeer& p, nb::bytes descriptor, int64_t deadline_ns) {
            auto result = interruptible([peer = p.get(), d = to_string(descriptor),
                                         deadline = deadline_at(deadline_ns)] { return peer->open(d, deadline); });
            if (!result) raise(result.status(), p->identity().name);
            return PyRemoteRegion(std::move(result).value());
          },
          nb::arg("descriptor"), nb::arg("deadline_ns"))
      .def(
          "call",
          [](PyPeer& p, uint16_t method, nb::bytes body, int64_t deadline_ns) {
            auto result =
                interruptible([peer = p.get(), method, b = to_string(body), deadline = deadline_at(deadline_ns)] {
                  return peer->session()->call_sync(method, b, deadline);
                });
            if (!result) raise(result.status(), p->identity().name);
            return nb::bytes(result->body.data(), result->body.size());
          },
          "A control message by its number, for programs that speak the protocol themselves.", nb::arg("method"),
          nb::arg("body"), nb::arg("deadline_ns"))
      .def("close", [](PyPeer& p) { without_gil([&] { p->close(); }); });

  nb::class_<PyEngine> engine(m, "Engine");
  bind_ops(m, engine);
  engine
      .def_static("create", &make_engine, nb::kw_only(), nb::arg("listen"), nb::arg("token"), nb::arg("transports"),
                  nb::arg("host_id"), nb::arg("socket_dir"), nb::arg("name"), nb::arg("role"), nb::arg("lanes"),
                  nb::arg("io_threads"), nb::arg("nics"), nb::arg("rdma"), nb::arg("foreground_rate"),
                  nb::arg("background_rate"))
      .def_static(
          "from_capsule", [](nb::capsule capsule) { return PyEngine(from_capsule<Engine>(capsule, kEngineCapsule)); },
          nb::arg("capsule"))
      .def("capsule", [](PyEngine& e) { return to_capsule(e.get(), kEngineCapsule); })
      .def_prop_ro("addresses", [](PyEngine& e) { return e->addresses(); })
      .def_prop_ro("listening", [](PyEngine& e) { return e->rpc().self().addresses; })
      .def_prop_ro("name", [](PyEngine& e) { return e->rpc().self().name; })
      .def_prop_ro("id", [](PyEngine& e) { return to_bytes(e->id()); })
      .def(
          "listen",
          [](PyEngine& e, std::string address) { return unwrap(without_gil([&] { return e->listen(address); })); },
          nb::arg("address"))
      .def("register", &register_memory, nb::arg("address"), nb::arg("nbytes"), nb::arg("keep").none(),
           nb::arg("readable"), nb::arg("writable"), nb::arg("label"))
      .def("register_cuda", &register_cuda, nb::arg("address"), nb::arg("nbytes"), nb::arg("keep").none(),
           nb::arg("readable"), nb::arg("writable"), nb::arg("label"))
      .def("register_file", &register_file, nb::arg("path"), nb::arg("fd"), nb::arg("nbytes").none(), nb::arg("create"),
           nb::arg("readable"), nb::arg("writable"), nb::arg("label"))
      .def(
          "self_peer",
          [](PyEngine& e, int64_t deadline_ns) {
            return PyPeer(unwrap(interruptible(
                [engine = e.get(), deadline = deadline_at(deadline_ns)] { return engine->self_peer(deadline); })));
          },
          nb::arg("deadline_ns"))
      .def(
          "region_at",
          [](PyEngine& e, uint64_t address, uint64_t nbytes) -> std::optional<PyRegion> {
            auto region = e->region_at(reinterpret_cast<void*>(address), nbytes);
            if (!region) return std::nullopt;
            return PyRegion(std::move(region));
          },
          nb::arg("address"), nb::arg("nbytes"))
      .def(
          "forget_address", [](PyEngine& e, PyRegion& region) { e->forget_address(region.get()); }, nb::arg("region"))
      .def(
          "deregister",
          [](PyEngine& e, PyRegion& region, int64_t deadline_ns) {
            // Most regions are in nobody's use: no thread for a wait that does not come.
            auto at_once = without_gil([&] { return e->deregister(region.get(), Deadline::at_ns(0)); });
            if (at_once.code() != Code::busy) return check(at_once);
            check(interruptible([engine = e.get(), r = region.get(), deadline = deadline_at(deadline_ns)] {
              return engine->deregister(r, deadline);
            }));
          },
          nb::arg("region"), nb::arg("deadline_ns"))
      .def(
          "connect",
          [](PyEngine& e, std::string address, int64_t deadline_ns) {
            auto result = interruptible([engine = e.get(), address, deadline = deadline_at(deadline_ns)] {
              return engine->connect(address, deadline);
            });
            if (!result) raise(result.status(), address);
            return PyPeer(std::move(result).value());
          },
          nb::arg("address"), nb::arg("deadline_ns"))
      .def(
          "next_notification",
          [](PyEngine& e, int64_t deadline_ns) {
            auto note =
                unwrap(in_slices(deadline_at(deadline_ns), [&](Deadline d) { return e->next_notification(d); }));
            return nb::make_tuple(to_bytes(note.from_engine), note.from_name, to_bytes(note.data));
          },
          nb::arg("deadline_ns"))
      .def(
          "transport_for", [](PyEngine& e, PyPeer& p) { return e->transport_for(p.get()); }, nb::arg("peer"))
      .def("explain", &explain_peer, nb::arg("peer"))
      .def("stats", &stats_of)
      .def("close", [](PyEngine& e) {
        without_gil([&] { e->close(); });
        drain_released();
      });
}

}  // namespace torch_mooncake::python
