// The verbs driver over a libibverbs of this test's own: what users set arrives in the calls of the library.
#if __has_include(<infiniband/verbs.h>)
#include <deque>

#include "transfer/rdma/verbs_library.h"
#include "transfer/support.h"

namespace transfer_test {
namespace {

using namespace torch_mooncake::transfer::rdma;

// One device with one Ethernet port; what it was asked for.
struct Library {
  ibv_device device{};
  verbs_context extended{};
  ibv_context& context = extended.context;
  ibv_comp_channel channel{};
  ibv_pd pd{};
  ibv_cq cq{};
  ibv_qp qp{};
  ibv_mr mr{};
  std::vector<std::pair<ibv_qp_attr, int>> modified;
  std::vector<ibv_qp_init_attr> created;
  std::vector<unsigned> rights, flags;
  std::deque<ibv_async_event> events;
  uint32_t odp_of_rc = 0;  // what the device can do with pages that are not there
  int create_error = 0, resize_error = 0;
  uint32_t most_inline_nbytes = 1024;
  bool gone = false;
  Verbs table{};

  static inline Library* one = nullptr;
  Library() {
    one = this;
    context.async_fd = channel.fd = -1;
    context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    extended.sz = sizeof extended;
    extended.query_device_ex = [](ibv_context*, const ibv_query_device_ex_input*, ibv_device_attr_ex* out, size_t) {
      out->odp_caps.general_caps = one->odp_of_rc ? IBV_ODP_SUPPORT : 0;
      out->odp_caps.per_transport_caps.rc_odp_caps = one->odp_of_rc;
      return 0;
    };
    context.ops.post_send = [](ibv_qp*, ibv_send_wr* first, ibv_send_wr**) {
      for (; first; first = first->next) one->flags.push_back(first->send_flags);
      return 0;
    };
    table.get_async_event = [](ibv_context*, ibv_async_event* out) {
      if (one->events.empty()) return -1;
      *out = one->events.front();
      one->events.pop_front();
      return 0;
    };
    table.ack_async_event = [](ibv_async_event*) {};
    table.reg_dmabuf_mr = [](ibv_pd*, uint64_t, size_t, uint64_t, int, int rights) {
      one->rights.push_back(static_cast<unsigned>(rights));
      return &one->mr;
    };
    qp.context = &context;
    qp.qp_num = 77;
    static ibv_device* list[] = {nullptr, nullptr};
    list[0] = &device;
    table.get_device_list = [](int* n) { return *n = 1, list; };
    table.free_device_list = [](ibv_device**) {};
    table.get_device_name = [](ibv_device*) { return "own0"; };
    table.open_device = [](ibv_device*) { return &one->context; };
    table.close_device = [](ibv_context*) { return 0; };
    table.query_device = [](ibv_context*, ibv_device_attr* out) {
      *out = {};
      out->phys_port_cnt = 1;
      out->max_cqe = 1 << 16;
      out->max_qp_rd_atom = out->max_qp_init_rd_atom = 16;
      out->max_mr_size = 1ull << 40;
      out->max_pkeys = 4;
      return 0;
    };
    table.query_port = [](ibv_context*, uint8_t, ibv_port_attr* out) {
      if (one->gone) return EIO;
      *out = {};
      out->state = IBV_PORT_ACTIVE;
      out->link_layer = IBV_LINK_LAYER_ETHERNET;
      out->active_mtu = IBV_MTU_4096;
      out->max_msg_sz = 1u << 30;
      out->gid_tbl_len = 4;
      return 0;
    };
    table.query_gid_ex = [](ibv_context*, uint32_t, uint32_t index, ibv_gid_entry* out, uint32_t, size_t) {
      *out = {};
      out->gid.raw[10] = out->gid.raw[11] = 0xff;
      out->gid.raw[12] = 10;
      out->gid.raw[15] = static_cast<uint8_t>(index + 1);
      out->gid_type = IBV_GID_TYPE_ROCE_V2;
      return 0;
    };
    table.query_pkey = [](ibv_context*, uint8_t, int index, __be16* out) {
      *out = __builtin_bswap16(static_cast<uint16_t>(0x8000 + index));
      return 0;
    };
    table.alloc_pd = [](ibv_context*) { return &one->pd; };
    table.dealloc_pd = [](ibv_pd*) { return 0; };
    table.create_comp_channel = [](ibv_context*) { return &one->channel; };
    table.destroy_comp_channel = [](ibv_comp_channel*) { return 0; };
    table.create_cq = [](ibv_context*, int, void*, ibv_comp_channel*, int) { return &one->cq; };
    table.resize_cq = [](ibv_cq*, int) { return one->resize_error; };
    table.destroy_cq = [](ibv_cq*) { return 0; };
    table.reg_mr_iova2 = [](ibv_pd*, void*, size_t, uint64_t, unsigned rights) {
      one->rights.push_back(rights);
      return &one->mr;
    };
    table.dereg_mr = [](ibv_mr*) { return 0; };
    table.create_qp = [](ibv_pd*, ibv_qp_init_attr* init) -> ibv_qp* {
      errno = one->create_error;
      if (errno == 0 && init->cap.max_inline_data > one->most_inline_nbytes) errno = EINVAL;
      if (errno != 0) return nullptr;
      one->created.push_back(*init);
      return &one->qp;
    };
    table.destroy_qp = [](ibv_qp*) { return 0; };
    table.modify_qp = [](ibv_qp*, ibv_qp_attr* attributes, int mask) {
      one->modified.emplace_back(*attributes, mask);
      return 0;
    };
  }

  std::shared_ptr<Device> open(const char* settings) {
    auto devices = must(verbs_driver(table)->open_devices(NicFilter(), must(RdmaOptions::parse(settings))));
    REQUIRE(devices.size() == 1);
    return devices.front();
  }
  // The three states of a queue pair, as it was brought into them towards a NIC with packets of 4096 bytes.
  void connect(Device& device) {
    modified.clear();
    auto pair = must(device.make_queue_pair(128, 0));
    auto gids = device.gids();
    REQUIRE(!gids.empty());
    REQUIRE_OK(pair->connect({.lid = 5, .number = 9, .first_packet = 3, .mtu = 4096}, gids.front(), gids.front()));
    REQUIRE(modified.size() == 3);
  }
};

}  // namespace

TEST_CASE("settings reach the library") {
  Library library;
  auto device = library.open("sl=3,tc=106,pkey=0x8002,gid=2,mtu=1024,timeout=18,retries=2,relaxed=1,mr=65536");
  library.connect(*device);
  auto &init = library.modified[0].first, &ready = library.modified[1].first, &sends = library.modified[2].first;
  CHECK(init.pkey_index == 2);
  CHECK((library.modified[0].second & IBV_QP_PKEY_INDEX) != 0);
  CHECK(ready.ah_attr.sl == 3);
  CHECK(ready.ah_attr.grh.traffic_class == 106);
  CHECK(ready.ah_attr.grh.sgid_index == 2);
  CHECK(ready.ah_attr.is_global == 1);
  CHECK(ready.path_mtu == IBV_MTU_1024);
  CHECK(ready.dest_qp_num == 9);
  CHECK(ready.rq_psn == 3);
  CHECK((library.modified[1].second & IBV_QP_AV) != 0);
  CHECK(sends.timeout == 18);
  CHECK(sends.retry_cnt == 2);
  CHECK((library.modified[2].second & (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT)) == (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT));
  CHECK(device->info().max_mr_nbytes == 65536);
  char byte = 0;
  (void)must(device->register_memory(&byte, 1, true, false));
  CHECK(library.rights.back() == (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING));
  (void)must(device->register_dmabuf(3, 0, 1, 0, false, true));
  CHECK(library.rights.back() == (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING));
}

TEST_CASE("and without settings, what the manual says") {
  Library library;
  auto device = library.open("");
  library.connect(*device);
  auto &init = library.modified[0].first, &ready = library.modified[1].first, &sends = library.modified[2].first;
  CHECK(init.pkey_index == 0);
  CHECK(ready.ah_attr.sl == 0);
  CHECK(ready.ah_attr.grh.traffic_class == 0);
  CHECK(ready.path_mtu == IBV_MTU_4096);
  CHECK(sends.timeout == 14);
  CHECK(sends.retry_cnt == 6);
  CHECK(sends.rnr_retry == 7);
  CHECK(device->gids().size() == 4);
  char byte = 0;
  (void)must(device->register_memory(&byte, 1, true, true));
  CHECK(library.rights.back() == (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE));
  (void)must(device->register_dmabuf(3, 0, 1, 0, true, false));
  CHECK(library.rights.back() == (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ));
}

TEST_CASE("a device that has no more queue pairs, or none for us, is busy; one that is gone says so") {
  Library library;
  auto device = library.open("qps=2");
  for (int error : {ENOMEM, ENOSPC, EAGAIN, EINVAL}) {
    library.create_error = error;
    const auto made = device->make_queue_pair(1, 1);
    CHECK(made.status().code() == (error == EINVAL ? Status::from_errno("", EINVAL).code() : Code::busy));
  }
  library.create_error = 0;
  auto one = must(device->make_queue_pair(1, 1)), two = must(device->make_queue_pair(1, 1));
  CHECK(device->make_queue_pair(1, 1).status().code() == Code::busy);
  one.reset();
  two = must(device->make_queue_pair(1, 1));
  CHECK_FALSE(device->gone());
  library.gone = true;
  CHECK(device->gone());
}

TEST_CASE("pages come by themselves where the device brings them, if the user says so") {
  constexpr uint32_t kRead = IBV_ODP_SUPPORT_READ, kBoth = IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_WRITE;
  for (uint32_t offered : {0u, kRead, kBoth}) {
    for (bool wanted : {false, true}) {
      CAPTURE(offered);
      CAPTURE(wanted);
      Library library;
      library.odp_of_rc = offered;
      auto device = library.open(wanted ? "odp=1" : "");
      const bool taken = wanted && (offered & IBV_ODP_SUPPORT_WRITE) != 0;
      CHECK(device->info().page_faults == taken);
      char byte = 0;
      (void)must(device->register_memory(&byte, 1, true, false));
      CHECK(((library.rights.back() & IBV_ACCESS_ON_DEMAND) != 0) == taken);
    }
  }
}

TEST_CASE("what the device says by itself") {
  Library library;
  auto device = library.open("");
  auto says = [&](ibv_event_type type, int port = 1) {
    ibv_async_event event{};
    event.event_type = type;
    event.element.port_num = port;
    library.events.push_back(event);
    return device->next_event();
  };
  CHECK(says(IBV_EVENT_PORT_ERR) == Device::Event::port_down);
  CHECK(says(IBV_EVENT_PORT_ACTIVE) == Device::Event::port_up);
  CHECK_FALSE(says(IBV_EVENT_PORT_ERR, 2).has_value());
  CHECK(says(IBV_EVENT_DEVICE_FATAL) == Device::Event::fatal);
  CHECK(says(IBV_EVENT_CQ_ERR) == Device::Event::fatal);
  CHECK_FALSE(says(IBV_EVENT_GID_CHANGE).has_value());
  CHECK_FALSE(says(IBV_EVENT_QP_FATAL).has_value());  // its requests end with an error
  library.gone = true;
  CHECK(says(IBV_EVENT_GID_CHANGE) == Device::Event::fatal);
}

TEST_CASE("a provider that copies less is asked for less; one whose queues do not grow has no more pairs") {
  for (uint32_t most : {1024u, 32u}) {
    Library library;
    library.most_inline_nbytes = most;
    auto device = library.open("");
    auto pair = must(device->make_queue_pair(128, 0));
    WorkRequest request{};
    request.opcode = Opcode::write;
    request.nbytes = 16;
    request.inlined = true;
    REQUIRE_OK(pair->post({&request, 1}));
    CHECK(((library.flags.back() & IBV_SEND_INLINE) != 0) == (most > 64));
  }
  Library library;
  auto device = library.open("");
  library.resize_error = EOPNOTSUPP;
  std::vector<std::unique_ptr<QueuePair>> pairs;
  for (;;) {
    auto made = device->make_queue_pair(128, 64);
    if (!made) {
      CHECK(made.status().code() == Code::busy);
      break;
    }
    pairs.push_back(std::move(*made));
  }
  CHECK(pairs.size() == 4096 / (128 + 64));
}

TEST_CASE("devices that are neither InfiniBand nor RoCE are refused in words") {
  Library library;
  library.device.transport_type = IBV_TRANSPORT_IWARP;
  auto devices = verbs_driver(library.table)->open_devices(NicFilter(), {});
  CHECK(devices.status().code() == Code::unsupported);
  CHECK(devices.status().message().find("own0 is neither InfiniBand nor RoCE") != std::string::npos);
}

}  // namespace transfer_test
#endif
