#if __has_include(<infiniband/verbs.h>)

#include "transfer/rdma/verbs_library.h"

#include <dlfcn.h>

#include <memory>
#include <string>

namespace torch_mooncake::transfer::rdma {

Result<const Verbs*> load_verbs() {
  static Status error;
  static const Verbs* verbs = []() -> const Verbs* {
    void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      error = {Code::unsupported, std::string("RDMA needs libibverbs (apt install ibverbs-providers): ") + dlerror()};
      return nullptr;
    }
    auto table = std::make_unique<Verbs>();
    auto find_newer = [&](auto& slot, const char* name) {
      slot = reinterpret_cast<std::decay_t<decltype(slot)>>(dlsym(library, name));
    };
    auto find = [&](auto& slot, const char* name) {
      find_newer(slot, name);
      if (slot == nullptr) error = {Code::unsupported, std::string("libibverbs has no ") + name};
    };
    find(table->get_device_list, "ibv_get_device_list");
    find(table->free_device_list, "ibv_free_device_list");
    find(table->get_device_name, "ibv_get_device_name");
    find(table->open_device, "ibv_open_device");
    find(table->close_device, "ibv_close_device");
    find(table->query_device, "ibv_query_device");
    find(table->query_port, "ibv_query_port");
    find(table->query_gid, "ibv_query_gid");
    find(table->query_pkey, "ibv_query_pkey");
    find(table->alloc_pd, "ibv_alloc_pd");
    find(table->dealloc_pd, "ibv_dealloc_pd");
    find(table->reg_mr, "ibv_reg_mr");
    find(table->dereg_mr, "ibv_dereg_mr");
    find(table->create_comp_channel, "ibv_create_comp_channel");
    find(table->destroy_comp_channel, "ibv_destroy_comp_channel");
    find(table->create_cq, "ibv_create_cq");
    find(table->resize_cq, "ibv_resize_cq");
    find(table->destroy_cq, "ibv_destroy_cq");
    find(table->get_cq_event, "ibv_get_cq_event");
    find(table->ack_cq_events, "ibv_ack_cq_events");
    find(table->create_qp, "ibv_create_qp");
    find(table->modify_qp, "ibv_modify_qp");
    find(table->destroy_qp, "ibv_destroy_qp");
    find(table->get_async_event, "ibv_get_async_event");
    find(table->ack_async_event, "ibv_ack_async_event");
    find(table->wc_status_str, "ibv_wc_status_str");
    if (!error) return nullptr;
    find_newer(table->reg_mr_iova2, "ibv_reg_mr_iova2");
    find_newer(table->reg_dmabuf_mr, "ibv_reg_dmabuf_mr");
    find_newer(table->query_gid_ex, "_ibv_query_gid_ex");
    return table.release();
  }();
  if (verbs == nullptr) return error;
  return verbs;
}

}  // namespace torch_mooncake::transfer::rdma

#endif
