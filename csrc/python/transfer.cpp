// Engine, regions, peers and ops. The Python classes of torch_mooncake/transfer.py stand on these.

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>

#include <cmath>

#include "memory/shared_heap.h"
#include "python/event.h"
#include "transfer/engine.h"

namespace torch_mooncake::python {

namespace {

using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct PyRegion : Held<Region> {
  using Held::Held;
};
struct PyRemoteRegion : Held<RemoteRegion> {
  using Held::Held;
};
struct PyPeer : Held<Peer> {
  using Held::Held;
};
struct PyOp : Held<Op> {
  PyOp(OpPtr op, std::string peer_name) : Held(std::move(op)), peer(std::move(peer_name)) {}
  std::string peer;
};
struct PyEngine : Held<Engine> {
  using Held::Held;
};

constexpr const char* kEngineCapsule = "torch_mooncake.Engine";

PyEngine make_engine(std::vector<std::string> listen, std::string token, std::vector<std::string> transports,
                     std::string host_id, std::string name, std::string role, int lanes, int io_threads,
                     std::vector<std::string> nics) {
  EngineOptions options;
  options.rpc.name = std::move(name);
  options.rpc.role = std::move(role);
  options.rpc.token = std::move(token);
  options.rpc.host_id = std::move(host_id);
  options.rpc.io_threads = io_threads;
  options.listen = std::move(listen);
  options.transports = std::move(transports);
  options.lanes = lanes;
  options.nics = std::move(nics);
  return PyEngine(unwrap(without_gil([&] { return Engine::create(std::move(options)); })));
}

PyRegion register_memory(PyEngine& engine, uint64_t address, uint64_t nbytes, nb::object keep, bool readable,
                         bool writable, std::string label) {
  RegionOptions options{readable, writable, keep_alive(std::move(keep)), std::move(label)};
  auto* data = reinterpret_cast<void*>(address);
  // The engine itself recognises memory of the shared heap.
  return PyRegion(unwrap(without_gil([&] { return engine->register_memory(data, nbytes, std::move(options)); })));
}

struct Submit {
  bool write;
  int64_t deadline_ns;
  nb::bytes notify;
  EventFd* event;
};

PyOp submit(PyEngine& engine, std::vector<Slice> slices, const std::string& peer, const Submit& how) {
  OpOptions options;
  options.deadline = deadline_at(how.deadline_ns);
  options.notify = to_string(how.notify);
  if (how.event) options.on_end = [fd = how.event->shared()](const Status&) { EventFd::signal(*fd); };
  return PyOp(unwrap(without_gil([&] {
                return how.write ? engine->write(std::move(slices), std::move(options))
                                 : engine->read(std::move(slices), std::move(options));
              })),
              peer);
}

const std::string& peer_name(const PyRemoteRegion& remote) { return remote->peer()->identity().name; }

// Offsets and sizes are caller's numbers: a negative one is out of bounds, not 2^64 - n.
uint64_t unsigned_or_raise(int64_t value, const char* what) {
  if (value < 0) raise({Code::out_of_bounds, std::string(what) + " is negative: " + std::to_string(value)});
  return static_cast<uint64_t>(value);
}

PyOp transfer_one(PyEngine& engine, bool write, PyRegion& local, int64_t local_offset, PyRemoteRegion& remote,
                  int64_t remote_offset, int64_t nbytes, int64_t deadline_ns, nb::bytes notify, EventFd* event) {
  std::vector<Slice> slices{{local.get(), unsigned_or_raise(local_offset, "local offset"), remote.get(),
                             unsigned_or_raise(remote_offset, "remote offset"), unsigned_or_raise(nbytes, "nbytes")}};
  return submit(engine, std::move(slices), peer_name(remote), {write, deadline_ns, std::move(notify), event});
}

// items: (local, local offset, remote, remote offset, nbytes).
PyOp transfer_list(PyEngine& engine, bool write, nb::list items, int64_t deadline_ns, nb::bytes notify,
                   EventFd* event) {
  std::vector<Slice> slices;
  slices.reserve(nb::len(items));
  std::string peer;
  for (nb::handle item : items) {
    auto& local = nb::cast<PyRegion&>(item[0]);
    auto& remote = nb::cast<PyRemoteRegion&>(item[2]);
    if (slices.empty()) peer = peer_name(remote);
    slices.push_back({local.get(), unsigned_or_raise(nb::cast<int64_t>(item[1]), "local offset"), remote.get(),
                      unsigned_or_raise(nb::cast<int64_t>(item[3]), "remote offset"),
                      unsigned_or_raise(nb::cast<int64_t>(item[4]), "nbytes")});
  }
  return submit(engine, std::move(slices), peer, {write, deadline_ns, std::move(notify), event});
}

// One slice for each pair of offsets; `sizes` has one element for all, or one for each.
PyOp transfer_offsets(PyEngine& engine, bool write, PyRegion& local, Offsets local_offsets, PyRemoteRegion& remote,
                      Offsets remote_offsets, Offsets sizes, int64_t deadline_ns, nb::bytes notify, EventFd* event) {
  const size_t n = local_offsets.shape(0);
  if (remote_offsets.shape(0) != n || (sizes.shape(0) != n && sizes.shape(0) != 1))
    raise({Code::invalid_argument, "local_offsets has " + std::to_string(n) + " elements, remote_offsets " +
                                       std::to_string(remote_offsets.shape(0)) + ", nbytes " +
                                       std::to_string(sizes.shape(0))});
  std::vector<Slice> slices;
  slices.reserve(n);
  const size_t step = sizes.shape(0) == 1 ? 0 : 1;
  const int64_t *from = local_offsets.data(), *to = remote_offsets.data(), *size = sizes.data();
  for (size_t i = 0; i < n; ++i)
    slices.push_back({local.get(), unsigned_or_raise(from[i], "local offset"), remote.get(),
                      unsigned_or_raise(to[i], "remote offset"), unsigned_or_raise(size[i * step], "nbytes")});
  return submit(engine, std::move(slices), peer_name(remote), {write, deadline_ns, std::move(notify), event});
}

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
          op.peer, op->bytes_done());
  }
  if (Status status = op->status(); !status) raise(status, op.peer, op->bytes_done());
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

  nb::class_<SharedBuffer>(m, "SharedBuffer", nb::type_slots(shared_slots), "Memory that same-host peers can map.")
      .def(nb::init<uint64_t>(), nb::arg("nbytes"))
      .def_prop_ro("nbytes", &SharedBuffer::nbytes);

  nb::class_<PyRegion>(m, "Region")
      .def_prop_ro("nbytes", [](PyRegion& r) { return r->nbytes(); })
      .def_prop_ro("address", [](PyRegion& r) { return reinterpret_cast<uint64_t>(r->data()); })
      .def_prop_ro("id", [](PyRegion& r) { return r->id(); })
      .def_prop_ro("generation", [](PyRegion& r) { return r->generation(); })
      .def("descriptor", [](PyRegion& r) { return to_bytes(r->descriptor()); });

  nb::class_<PyRemoteRegion>(m, "RemoteRegion")
      .def_prop_ro("nbytes", [](PyRemoteRegion& r) { return r->nbytes(); })
      .def_prop_ro("transport", [](PyRemoteRegion& r) { return r->transport(); });

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
      .def("close", [](PyPeer& p) { without_gil([&] { p->close(); }); });

  nb::class_<PyOp>(m, "Op")
      .def("done", [](PyOp& op) { return op->ended(); })
      .def("wait", &wait_op, nb::arg("deadline_ns"))
      .def("cancel", [](PyOp& op) { without_gil([&] { op->cancel(); }); })
      .def_prop_ro("state", [](PyOp& op) { return state_name(op->state()); })
      .def_prop_ro("nbytes", [](PyOp& op) { return op->nbytes(); })
      .def_prop_ro("bytes_done", [](PyOp& op) { return op->bytes_done(); })
      .def_prop_ro("transport", [](PyOp& op) { return op->transport(); })
      .def_prop_ro("remote_quiescent", [](PyOp& op) { return op->remote_quiescent(); });

  nb::class_<PyEngine>(m, "Engine")
      .def_static("create", &make_engine, nb::kw_only(), nb::arg("listen"), nb::arg("token"), nb::arg("transports"),
                  nb::arg("host_id"), nb::arg("name"), nb::arg("role"), nb::arg("lanes"), nb::arg("io_threads"),
                  nb::arg("nics"))
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
      .def(
          "deregister",
          [](PyEngine& e, PyRegion& region, int64_t deadline_ns) {
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
      .def("transfer_one", &transfer_one, nb::arg("write"), nb::arg("local"), nb::arg("local_offset"),
           nb::arg("remote"), nb::arg("remote_offset"), nb::arg("nbytes"), nb::arg("deadline_ns"), nb::arg("notify"),
           nb::arg("event").none())
      .def("transfer_list", &transfer_list, nb::arg("write"), nb::arg("items"), nb::arg("deadline_ns"),
           nb::arg("notify"), nb::arg("event").none())
      .def("transfer_offsets", &transfer_offsets, nb::arg("write"), nb::arg("local"), nb::arg("local_offsets"),
           nb::arg("remote"), nb::arg("remote_offsets"), nb::arg("sizes"), nb::arg("deadline_ns"), nb::arg("notify"),
           nb::arg("event").none())
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
