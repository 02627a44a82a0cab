// The functions used of libibverbs.so.1, found by dlopen: nothing links it. Only for files that were compiled with its
// headers. Posting and polling go through ibv_context.ops, as the header's inline functions do.
#pragma once

#include <infiniband/verbs.h>

#include <memory>

#include "common/status.h"
#include "transfer/rdma/driver.h"

// The header's inline wrappers call these by name; here everything goes through the table.
#undef ibv_reg_mr
#undef ibv_query_port

namespace torch_mooncake::transfer::rdma {

struct Verbs {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  int (*query_port)(ibv_context*, uint8_t, ibv_port_attr*);
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::ibv_query_pkey) query_pkey;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_resize_cq) resize_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_get_async_event) get_async_event;
  decltype(&::ibv_ack_async_event) ack_async_event;
  decltype(&::ibv_wc_status_str) wc_status_str;
  // Newer; null where this library lacks them. The first also knows rights that a device may ignore (rdma-core 28),
  // the others came with 34 and 32.
  ibv_mr* (*reg_mr_iova2)(ibv_pd*, void*, size_t, uint64_t, unsigned int);
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int);
  int (*query_gid_ex)(ibv_context*, uint32_t port, uint32_t index, ibv_gid_entry*, uint32_t flags, size_t entry_size);
};

// Once; the same answer ever after. unsupported: what to install.
Result<const Verbs*> load_verbs();
// A driver over that table, which outlives it: for tests.
std::shared_ptr<Driver> verbs_driver(const Verbs& verbs);

}  // namespace torch_mooncake::transfer::rdma
