// Chains of keys and pages of paged caches. torch_mooncake/kv/pool_kv.py stands on it.
#include <nanobind/stl/tuple.h>

#include "pool/kv_pages.h"
#include "pool/messages.h"
#include "python/pool.h"

namespace torch_mooncake::python {

namespace {

using pool::ObjectPtr;
using pool::PagedMemory;
using Layers = std::vector<std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>>;  // (address, stride, bytes)

// Immutable; the memory it points to is the caller's.
std::shared_ptr<PagedMemory> paged(const Layers& layers, uint64_t num_pages) {
  std::vector<std::vector<pool::PagePiece>> out;
  for (const auto& pieces : layers) {
    auto& of = out.emplace_back();
    for (const auto& [address, stride, nbytes] : pieces)
      of.push_back({reinterpret_cast<std::byte*>(address), stride, nbytes});
  }
  return std::make_shared<PagedMemory>(std::move(out), num_pages);
}

std::vector<ObjectPtr> objects_of(nb::sequence objects) {
  std::vector<ObjectPtr> out;
  for (nb::handle object : objects) out.push_back(nb::cast<PyObjectInfo&>(object).get());
  return out;
}

struct PyPagedMemory : Held<PagedMemory> {
  using Held::Held;
};

nb::list put_pages(PyClient& client, std::vector<std::string> keys, std::vector<nb::bytes> metas,
                   const PyPagedMemory& memory, std::vector<int64_t> pages, int64_t deadline_ns) {
  std::vector<std::string> descriptions;
  for (const nb::bytes& meta : metas) descriptions.emplace_back(meta.c_str(), meta.size());
  const auto outcomes = without_gil([&] {
    return pool::put_pages(*client.get(), keys, descriptions, *memory.get(), pages, deadline_at(deadline_ns));
  });
  nb::list out;
  for (const auto& outcome : outcomes)
    out.append(outcome.is_ok() ? nb::object(nb::bool_(outcome->stored)) : make_exception(outcome.status()));
  return out;
}

const char* medium_of(pool::Tier tier) { return tier == pool::Tier::ssd ? "disk" : "cpu"; }

}  // namespace

void bind_pool_chains(nb::module_& m) {
  m.attr("MAX_PIN_MS") = pool::kMaxPinMs;
  m.def(
      "match_prefix",
      [](PyClient& c, std::vector<std::string> keys, uint64_t pin_ms, int64_t deadline_ns) {
        return unwrap(without_gil([&] { return c->match_prefix(keys, pin_ms, deadline_at(deadline_ns)); }));
      },
      nb::arg("client"), nb::arg("keys"), nb::arg("pin_ms"), nb::arg("deadline_ns"));
  m.def(
      "refresh_keys",
      [](PyClient& c, std::vector<std::string> keys, bool unpin, int64_t deadline_ns) {
        check(without_gil([&] { return c->refresh_chain(keys, unpin, deadline_at(deadline_ns)); }));
      },
      nb::arg("client"), nb::arg("keys"), nb::arg("unpin"), nb::arg("deadline_ns"));
  m.def(
      "refresh_objects",
      [](PyClient& c, nb::sequence objects, bool unpin, int64_t deadline_ns) {
        const auto list = objects_of(objects);
        check(without_gil([&] { return c->refresh_chain(list, unpin, deadline_at(deadline_ns)); }));
      },
      nb::arg("client"), nb::arg("objects"), nb::arg("unpin"), nb::arg("deadline_ns"));
  m.def(
      "key_events",
      [](PyClient& c, uint64_t stream, uint64_t after, std::string prefix, uint32_t wait_ms, int64_t deadline_ns) {
        auto result =
            interruptible([client = c.get(), stream, after, prefix, wait_ms, until = deadline_at(deadline_ns)] {
              return client->events(stream, after, prefix, wait_ms, until);
            });
        const pool::KeyEvents found = unwrap(std::move(result));
        constexpr const char* kKinds[] = {"removed", "stored", "moved"};
        nb::list events;
        for (const auto& e : found.events)
          events.append(nb::make_tuple(kKinds[static_cast<size_t>(e.what)], to_bytes(e.hash), e.key,
                                       e.kind == pool::Kind::sealed, nb::make_tuple(e.version.view, e.version.counter),
                                       medium_of(e.tier)));
        return nb::make_tuple(found.stream, found.last, found.anew, events);
      },
      nb::arg("client"), nb::arg("stream"), nb::arg("after"), nb::arg("prefix"), nb::arg("wait_ms"),
      nb::arg("deadline_ns"), "(stream, last, anew, [(kind, hash, key, sealed, version, medium)])");
  m.def(
      "key_hashes",
      [](PyClient& c, std::vector<std::string> keys) {
        nb::list out;
        for (const std::string& key : keys) out.append(to_bytes(unwrap(c->key_hash(key))));
        return out;
      },
      nb::arg("client"), nb::arg("keys"));
  m.def(
      "key_media",
      [](PyClient& c, std::vector<std::string> keys, int64_t deadline_ns) {
        const auto tiers = unwrap(without_gil([&] { return c->tiers(keys, deadline_at(deadline_ns)); }));
        nb::list out;
        for (const auto& tier : tiers) out.append(tier ? nb::object(nb::str(medium_of(*tier))) : nb::none());
        return out;
      },
      nb::arg("client"), nb::arg("keys"), nb::arg("deadline_ns"), "\"cpu\", \"disk\" or None: not there.");
  nb::class_<PyPagedMemory>(m, "PagedMemory",
                            "A paged cache: of each layer its pieces of a page (address of page 0's, bytes from a page "
                            "to the next, bytes). The memory has to outlive it.")
      .def(
          "__init__",
          [](PyPagedMemory* self, Layers layers, uint64_t num_pages) {
            new (self) PyPagedMemory(paged(layers, num_pages));
          },
          nb::arg("layers"), nb::arg("num_pages"))
      .def_prop_ro("object_nbytes", [](PyPagedMemory& memory) { return memory->object_nbytes(); });
  m.def("put_pages", &put_pages, nb::arg("client"), nb::arg("keys"), nb::arg("metas"), nb::arg("memory"),
        nb::arg("pages"), nb::arg("deadline_ns"), "For each key whether it was stored, or an exception.");
  m.def(
      "read_pages",
      [](PyClient& c, nb::sequence objects, PyPagedMemory& memory, std::vector<int64_t> pages, int64_t deadline_ns) {
        const auto list = objects_of(objects);
        return unwrap(without_gil(
            [&] { return pool::read_pages(*c.get(), list, *memory.get(), pages, deadline_at(deadline_ns)); }));
      },
      nb::arg("client"), nb::arg("objects"), nb::arg("memory"), nb::arg("pages"), nb::arg("deadline_ns"),
      "How many were read before the first that was gone.");
  m.def(
      "read_page_layers",
      [](PyClient& c, nb::sequence objects, PyPagedMemory& memory, size_t first, size_t count,
         std::vector<int64_t> pages, int64_t deadline_ns) {
        const auto list = objects_of(objects);
        const auto outcomes = without_gil([&] {
          return pool::read_page_layers(*c.get(), list, *memory.get(), first, count, pages, deadline_at(deadline_ns));
        });
        nb::list out;
        for (const Status& outcome : outcomes) out.append(outcome.is_ok() ? nb::none() : make_exception(outcome));
        return out;
      },
      nb::arg("client"), nb::arg("objects"), nb::arg("memory"), nb::arg("first"), nb::arg("count"), nb::arg("pages"),
      nb::arg("deadline_ns"), "For each page None, or an exception.");
}

}  // namespace torch_mooncake::python
