#include "transfer/rdma/verbs_driver.h"

#if !__has_include(<infiniband/verbs.h>)

namespace torch_mooncake::transfer::rdma {

std::shared_ptr<Driver> verbs_driver() {
  struct Absent final : Driver {
    Result<std::vector<std::shared_ptr<Device>>> open_devices() override {
      return Status(Code::unsupported, "this build has no RDMA: libibverbs-dev was not installed when it was made");
    }
  };
  static auto driver = std::make_shared<Absent>();
  return driver;
}

}  // namespace torch_mooncake::transfer::rdma

#else

#include <dlfcn.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "common/log.h"
#include "common/random.h"

// The header's inline wrappers call these by name; here everything goes through the table.
#undef ibv_reg_mr
#undef ibv_query_port

namespace torch_mooncake::transfer::rdma {
namespace {

// The functions used, from libibverbs.so.1. Posting and polling go through ibv_context.ops, as in the header.
struct Verbs {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  int (*query_port)(ibv_context*, uint8_t, ibv_port_attr*);
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int);  // since rdma-core 34; else null
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_get_async_event) get_async_event;
  decltype(&::ibv_ack_async_event) ack_async_event;
  decltype(&::ibv_wc_status_str) wc_status_str;
};

Result<const Verbs*> load() {
  static Status error;
  static const Verbs* verbs = []() -> const Verbs* {
    void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      error = {Code::unsupported, std::string("RDMA needs libibverbs (apt install ibverbs-providers): ") + dlerror()};
      return nullptr;
    }
    auto table = std::make_unique<Verbs>();
    auto find = [&](auto& slot, const char* name) {
      slot = reinterpret_cast<std::decay_t<decltype(slot)>>(dlsym(library, name));
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
    find(table->alloc_pd, "ibv_alloc_pd");
    find(table->dealloc_pd, "ibv_dealloc_pd");
    find(table->reg_mr, "ibv_reg_mr");
    find(table->dereg_mr, "ibv_dereg_mr");
    find(table->create_comp_channel, "ibv_create_comp_channel");
    find(table->destroy_comp_channel, "ibv_destroy_comp_channel");
    find(table->create_cq, "ibv_create_cq");
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
    table->reg_dmabuf_mr = reinterpret_cast<decltype(table->reg_dmabuf_mr)>(dlsym(library, "ibv_reg_dmabuf_mr"));
    return table.release();
  }();
  if (verbs == nullptr) return error;
  return verbs;
}

constexpr int kCompletions = 4096;
constexpr uint8_t kPort = 1;
constexpr uint8_t kTimeout = 14, kRetries = 7, kReceiverRetries = 7;  // 67 ms a try; receiver not ready: for ever

Status failed(const char* what, int error) { return Status::from_errno(what, error ? error : EIO); }

void set_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

class VerbsDevice;

class VerbsRegistration final : public Registration {
 public:
  VerbsRegistration(std::shared_ptr<VerbsDevice> device, const Verbs& verbs, ibv_mr* mr)
      : device_(std::move(device)), verbs_(verbs), mr_(mr) {}
  ~VerbsRegistration() override {
    if (int error = verbs_.dereg_mr(mr_)) log::error("transfer", failed("ibv_dereg_mr", error).to_string());
  }
  uint32_t local_key() const override { return mr_->lkey; }
  uint32_t remote_key() const override { return mr_->rkey; }

 private:
  const std::shared_ptr<VerbsDevice> device_;
  const Verbs& verbs_;
  ibv_mr* const mr_;
};

class VerbsPair final : public QueuePair {
 public:
  VerbsPair(std::shared_ptr<VerbsDevice> device, const Verbs& verbs, ibv_qp* qp, QueuePairAddress address,
            uint8_t gid_index)
      : device_(std::move(device)), verbs_(verbs), qp_(qp), address_(address), gid_index_(gid_index) {}
  ~VerbsPair() override {
    if (int error = verbs_.destroy_qp(qp_)) log::error("transfer", failed("ibv_destroy_qp", error).to_string());
  }
  QueuePairAddress address() const override { return address_; }

  Status connect(const QueuePairAddress& remote) override {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = kPort;
    a.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    if (int error = verbs_.modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
      return failed("ibv_modify_qp to INIT", error);
    a = {};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = mtu_code(std::min(remote.mtu, address_.mtu));
    a.dest_qp_num = remote.number;
    a.rq_psn = remote.first_packet;
    a.max_dest_rd_atomic = 16;
    a.min_rnr_timer = 12;
    a.ah_attr.is_global = 1;
    std::memcpy(a.ah_attr.grh.dgid.raw, remote.gid.data(), remote.gid.size());
    a.ah_attr.grh.sgid_index = gid_index_;
    a.ah_attr.grh.hop_limit = 64;
    a.ah_attr.dlid = remote.lid;
    a.ah_attr.port_num = kPort;
    if (int error = verbs_.modify_qp(qp_, &a,
                                     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                         IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
      return failed("ibv_modify_qp to RTR", error);
    a = {};
    a.qp_state = IBV_QPS_RTS;
    a.timeout = kTimeout;
    a.retry_cnt = kRetries;
    a.rnr_retry = kReceiverRetries;
    a.sq_psn = address_.first_packet;
    a.max_rd_atomic = 16;
    if (int error = verbs_.modify_qp(qp_, &a,
                                     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                         IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
      return failed("ibv_modify_qp to RTS", error);
    return {};
  }

  void fail() override {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_ERR;
    (void)verbs_.modify_qp(qp_, &a, IBV_QP_STATE);  // fails on a dead device: flush_late() destroys it then
  }

  Status post(std::span<const WorkRequest> requests) override {
    list_.resize(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      auto& from = requests[i];
      auto& [to, piece] = list_[i];
      to = {};
      piece = {from.local, from.nbytes, from.local_key};
      to.wr_id = from.id;
      to.next = i + 1 < requests.size() ? &list_[i + 1].request : nullptr;
      to.sg_list = &piece;
      to.num_sge = from.nbytes > 0;
      to.opcode = from.opcode == Opcode::read    ? IBV_WR_RDMA_READ
                  : from.opcode == Opcode::write ? IBV_WR_RDMA_WRITE
                                                 : IBV_WR_RDMA_WRITE_WITH_IMM;
      to.send_flags = (from.signalled ? IBV_SEND_SIGNALED : 0) | (from.inlined ? IBV_SEND_INLINE : 0);
      to.imm_data = __builtin_bswap32(from.immediate);
      to.wr.rdma.remote_addr = from.remote;
      to.wr.rdma.rkey = from.remote_key;
    }
    ibv_send_wr* bad = nullptr;
    if (int error = qp_->context->ops.post_send(qp_, &list_[0].request, &bad)) return failed("ibv_post_send", error);
    return {};
  }

  Status post_receives(uint32_t count) override {
    for (uint32_t i = 0; i < count; ++i) {
      ibv_recv_wr request{}, *bad = nullptr;
      if (int error = qp_->context->ops.post_recv(qp_, &request, &bad)) return failed("ibv_post_recv", error);
    }
    return {};
  }

 private:
  static ibv_mtu mtu_code(uint32_t nbytes) {
    return nbytes >= 4096   ? IBV_MTU_4096
           : nbytes >= 2048 ? IBV_MTU_2048
           : nbytes >= 1024 ? IBV_MTU_1024
           : nbytes >= 512  ? IBV_MTU_512
                            : IBV_MTU_256;
  }
  struct Entry {
    ibv_send_wr request;
    ibv_sge piece;
  };
  const std::shared_ptr<VerbsDevice> device_;
  const Verbs& verbs_;
  ibv_qp* const qp_;
  const QueuePairAddress address_;
  const uint8_t gid_index_;
  std::vector<Entry> list_;
};

class VerbsDevice final : public Device, public std::enable_shared_from_this<VerbsDevice> {
 public:
  static Result<std::shared_ptr<VerbsDevice>> open(const Verbs& verbs, ibv_device* device) {
    std::shared_ptr<VerbsDevice> out(new VerbsDevice(verbs));
    out->info_.name = verbs.get_device_name(device);
    TM_TRY(out->open(device).with(out->info_.name));
    return out;
  }

  ~VerbsDevice() override {
    if (cq_) verbs_.destroy_cq(cq_);
    if (channel_) verbs_.destroy_comp_channel(channel_);
    if (pd_) verbs_.dealloc_pd(pd_);
    if (context_) verbs_.close_device(context_);
  }

  DeviceInfo info() const override { return info_; }

  Result<std::unique_ptr<Registration>> register_memory(void* data, uint64_t nbytes, bool readable,
                                                        bool writable) override {
    int rights =
        IBV_ACCESS_LOCAL_WRITE | (readable ? IBV_ACCESS_REMOTE_READ : 0) | (writable ? IBV_ACCESS_REMOTE_WRITE : 0);
    ibv_mr* mr = verbs_.reg_mr(pd_, data, nbytes, rights);
    if (mr == nullptr && !writable) mr = verbs_.reg_mr(pd_, data, nbytes, readable ? IBV_ACCESS_REMOTE_READ : 0);
    if (mr == nullptr) return failed("ibv_reg_mr", errno);
    return std::unique_ptr<Registration>(new VerbsRegistration(shared_from_this(), verbs_, mr));
  }

  Result<std::unique_ptr<Registration>> register_dmabuf(int fd, uint64_t offset, uint64_t nbytes, uint64_t address,
                                                        bool readable, bool writable) override {
    if (!verbs_.reg_dmabuf_mr) return Status(Code::unsupported, "this libibverbs has no ibv_reg_dmabuf_mr");
    int rights =
        IBV_ACCESS_LOCAL_WRITE | (readable ? IBV_ACCESS_REMOTE_READ : 0) | (writable ? IBV_ACCESS_REMOTE_WRITE : 0);
    ibv_mr* mr = verbs_.reg_dmabuf_mr(pd_, offset, nbytes, address, fd, rights);
    if (mr == nullptr) return failed("ibv_reg_dmabuf_mr", errno);
    return std::unique_ptr<Registration>(new VerbsRegistration(shared_from_this(), verbs_, mr));
  }

  Result<std::unique_ptr<QueuePair>> make_queue_pair(uint32_t work_requests, uint32_t receives) override {
    ibv_qp_init_attr init{};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = init.recv_cq = cq_;
    init.cap = {work_requests, std::max(1u, receives), 1, 1, info_.max_inline_nbytes};
    ibv_qp* qp = verbs_.create_qp(pd_, &init);
    if (qp == nullptr) return failed("ibv_create_qp", errno);
    QueuePairAddress address;
    ibv_port_attr port{};
    ibv_gid gid{};
    if (verbs_.query_port(context_, kPort, &port) == 0) address.lid = port.lid;
    if (verbs_.query_gid(context_, kPort, gid_index_, &gid) == 0)
      std::memcpy(address.gid.data(), gid.raw, address.gid.size());
    address.number = qp->qp_num;
    address.first_packet = static_cast<uint32_t>(random_u64() & 0xff'ffff);
    address.mtu = info_.mtu;
    return std::unique_ptr<QueuePair>(new VerbsPair(shared_from_this(), verbs_, qp, address, gid_index_));
  }

  size_t poll(std::span<Completion> out) override {
    ibv_wc batch[64];
    int n = context_->ops.poll_cq(cq_, static_cast<int>(std::min<size_t>(out.size(), 64)), batch);
    for (int i = 0; i < n; ++i) {
      auto& wc = batch[i];
      bool received = wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
      out[i] = {wc.wr_id, wc.qp_num, outcome_of(wc.status), received, __builtin_bswap32(wc.imm_data), ""};
      if (wc.status != IBV_WC_SUCCESS) out[i].detail = verbs_.wc_status_str(wc.status);
    }
    return n > 0 ? static_cast<size_t>(n) : 0;
  }

  Status arm() override {
    if (int error = context_->ops.req_notify_cq(cq_, 0)) return failed("ibv_req_notify_cq", error);
    return {};
  }
  int completion_fd() const override { return channel_->fd; }
  void clear_completion_fd() override {
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    unsigned int n = 0;
    while (verbs_.get_cq_event(channel_, &cq, &context) == 0) ++n;
    if (n > 0) verbs_.ack_cq_events(cq_, n);
  }
  int event_fd() const override { return context_->async_fd; }
  std::optional<Event> next_event() override {
    ibv_async_event event{};
    while (verbs_.get_async_event(context_, &event) == 0) {
      auto type = event.event_type;
      verbs_.ack_async_event(&event);
      if (type == IBV_EVENT_PORT_ACTIVE) return Event::port_up;
      if (type == IBV_EVENT_PORT_ERR) return Event::port_down;
      if (type == IBV_EVENT_DEVICE_FATAL) return Event::fatal;
    }
    return std::nullopt;
  }

 private:
  explicit VerbsDevice(const Verbs& verbs) : verbs_(verbs) {}

  Status open(ibv_device* device) {
    context_ = verbs_.open_device(device);
    if (context_ == nullptr) return failed("ibv_open_device", errno);
    ibv_device_attr limits{};
    if (int error = verbs_.query_device(context_, &limits)) return failed("ibv_query_device", error);
    ibv_port_attr port{};
    if (int error = verbs_.query_port(context_, kPort, &port)) return failed("ibv_query_port", error);
    info_.port_up = port.state == IBV_PORT_ACTIVE;
    info_.max_mr_nbytes = limits.max_mr_size;
    info_.max_message_nbytes = port.max_msg_sz;
    info_.max_work_requests = static_cast<uint32_t>(limits.max_qp_wr);
    info_.max_inline_nbytes = 64;
    info_.mtu = 128u << port.active_mtu;
    choose_gid(port);
    pd_ = verbs_.alloc_pd(context_);
    if (pd_ == nullptr) return failed("ibv_alloc_pd", errno);
    channel_ = verbs_.create_comp_channel(context_);
    if (channel_ == nullptr) return failed("ibv_create_comp_channel", errno);
    cq_ = verbs_.create_cq(context_, std::min(kCompletions, limits.max_cqe), nullptr, channel_, 0);
    if (cq_ == nullptr) return failed("ibv_create_cq", errno);
    set_nonblocking(channel_->fd);
    set_nonblocking(context_->async_fd);
    return {};
  }

  // An IPv4-mapped GID if there is one (RoCE v2 that can be routed), else the last that is set, else 0 (InfiniBand).
  void choose_gid(const ibv_port_attr& port) {
    for (int i = 0; i < port.gid_tbl_len; ++i) {
      ibv_gid gid{};
      if (verbs_.query_gid(context_, kPort, i, &gid) != 0) continue;
      static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
      bool set = std::any_of(std::begin(gid.raw), std::end(gid.raw), [](uint8_t byte) { return byte != 0; });
      bool mapped = std::memcmp(gid.raw, kMapped, sizeof kMapped) == 0;
      if (set && (mapped || port.link_layer == IBV_LINK_LAYER_ETHERNET)) gid_index_ = static_cast<uint8_t>(i);
      if (set && mapped) best_ = gid_index_;
    }
    if (best_) gid_index_ = *best_;
  }

  static Outcome outcome_of(ibv_wc_status status) {
    switch (status) {
      case IBV_WC_SUCCESS:
        return Outcome::done;
      case IBV_WC_WR_FLUSH_ERR:
        return Outcome::flushed;
      case IBV_WC_REM_ACCESS_ERR:
        return Outcome::remote_access;
      case IBV_WC_RETRY_EXC_ERR:
      case IBV_WC_RNR_RETRY_EXC_ERR:
        return Outcome::retries_exceeded;
      default:
        return Outcome::failed;
    }
  }

  const Verbs& verbs_;
  DeviceInfo info_;
  uint8_t gid_index_ = 0;
  std::optional<uint8_t> best_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
};

class VerbsDriver final : public Driver {
 public:
  Result<std::vector<std::shared_ptr<Device>>> open_devices() override {
    TM_ASSIGN(auto* verbs, load());
    int n = 0;
    ibv_device** list = verbs->get_device_list(&n);
    if (list == nullptr) return Status(Code::unsupported, failed("no RDMA: ibv_get_device_list", errno).message());
    std::vector<std::shared_ptr<Device>> out;
    std::string why = n == 0 ? "the kernel has no RDMA device" : "";
    for (int i = 0; i < n; ++i) {
      auto device = VerbsDevice::open(*verbs, list[i]);
      if (device && (*device)->info().port_up) {
        out.push_back(std::move(*device));
        continue;
      }
      why += (why.empty() ? "" : "; ") +
             (device ? (*device)->info().name + ": its port is down" : device.status().message());
    }
    verbs->free_device_list(list);
    if (out.empty()) return Status(Code::unsupported, "RDMA cannot be used: " + why);
    return out;
  }
};

}  // namespace

std::shared_ptr<Driver> verbs_driver() {
  static auto driver = std::make_shared<VerbsDriver>();
  return driver;
}

}  // namespace torch_mooncake::transfer::rdma

#endif
