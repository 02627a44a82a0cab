#include "transfer/rdma/verbs_driver.h"

#if !__has_include(<infiniband/verbs.h>)

namespace torch_mooncake::transfer::rdma {

std::shared_ptr<Driver> verbs_driver() {
  struct Absent final : Driver {
    Result<std::vector<std::shared_ptr<Device>>> open_devices(const NicFilter&, const RdmaOptions&) override {
      return Status(Code::unsupported, "this build has no RDMA: libibverbs-dev was not installed when it was made");
    }
  };
  static auto driver = std::make_shared<Absent>();
  return driver;
}

}  // namespace torch_mooncake::transfer::rdma

#else

#include <fcntl.h>
#include <net/if.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "common/log.h"
#include "common/random.h"
#include "topology/sysfs.h"
#include "topology/topology.h"
#include "transfer/rdma/verbs_library.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr int kCompletions = 4096;       // of a queue to begin with; it grows with the queue pairs
constexpr uint8_t kReceiverRetries = 7;  // for ever: receivers have credit for what is sent to them
constexpr uint8_t kReads = 16;           // that a queue pair has under way

Status failed(const char* what, int error) { return Status::from_errno(what, error ? error : EIO); }

void set_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

// Gbit/s of a lane by the code of its speed, and lanes by the code of the width.
uint64_t speed_mbps(const ibv_port_attr& port) {
  uint64_t lane = 0;
  switch (port.active_speed) {
    case 1:
      lane = 2500;
      break;
    case 2:
      lane = 5000;
      break;
    case 4:
    case 8:
      lane = 10000;
      break;
    case 16:
      lane = 14000;
      break;
    case 32:
      lane = 25000;
      break;
    case 64:
      lane = 50000;
      break;
    case 128:
      lane = 100000;
      break;
    default:
      return 0;
  }
  switch (port.active_width) {
    case 1:
      return lane;
    case 2:
      return lane * 4;
    case 4:
      return lane * 8;
    case 8:
      return lane * 12;
    case 16:
      return lane * 2;
    default:
      return 0;
  }
}

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
            int completions, uint32_t inline_nbytes)
      : device_(std::move(device)),
        verbs_(verbs),
        qp_(qp),
        address_(address),
        completions_(completions),
        inline_nbytes_(inline_nbytes) {}
  ~VerbsPair() override;
  QueuePairAddress address() const override { return address_; }
  Status connect(const QueuePairAddress& remote, const Gid& our_gid, const Gid& remote_gid) override;
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
      const bool copied = from.inlined && from.nbytes <= inline_nbytes_;
      to.send_flags = (from.signalled ? IBV_SEND_SIGNALED : 0) | (copied ? IBV_SEND_INLINE : 0);
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
  const int completions_;         // that it may have in the device's queue
  const uint32_t inline_nbytes_;  // that the provider copies when a request is posted
  std::vector<Entry> list_;
};

class VerbsDevice final : public Device, public std::enable_shared_from_this<VerbsDevice> {
 public:
  static Result<std::shared_ptr<VerbsDevice>> open(const Verbs& verbs, ibv_device* device, uint8_t port,
                                                   const NicFilter& filter, const RdmaOptions& options) {
    std::shared_ptr<VerbsDevice> out(new VerbsDevice(verbs, port, filter, options));
    out->info_.name = verbs.get_device_name(device);
    if (port > 1) out->info_.name += ":" + std::to_string(port);
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
  int ports() const { return ports_; }

  std::vector<Gid> gids() const override {
    std::vector<Gid> out;
    for (int i = 0; i < gid_count_ && i < 256; ++i) {
      if (options_.gid_index >= 0 && options_.gid_index != i) continue;
      auto gid = query_gid(static_cast<uint8_t>(i));
      bool set = std::any_of(gid.raw.begin() + 8, gid.raw.end(), [](uint8_t byte) { return byte != 0; });
      if (set && (!ethernet_ || filter_.allows(gid.ip()))) out.push_back(gid);
    }
    return out;
  }

  // What the filter knows a NIC by.
  ::torch_mooncake::Nic described() const {
    ::torch_mooncake::Nic nic;
    nic.name = info_.name;
    nic.up = info_.port_up;
    nic.rdma_devices = {info_.name, info_.name.substr(0, info_.name.find(':'))};
    for (auto& gid : gids()) {
      char name[IF_NAMESIZE];
      if (gid.interface != 0 && if_indextoname(gid.interface, name)) nic.name = name;
      if (ethernet_) nic.addresses.push_back(gid.ip());
    }
    return nic;
  }

  Result<std::unique_ptr<Registration>> register_memory(void* data, uint64_t nbytes, bool readable,
                                                        bool writable) override {
    auto reg = [&](unsigned int rights) {
      if (!verbs_.reg_mr_iova2) return verbs_.reg_mr(pd_, data, nbytes, static_cast<int>(rights));
      return verbs_.reg_mr_iova2(pd_, data, nbytes, reinterpret_cast<uint64_t>(data), rights | extra_rights_);
    };
    const unsigned int remote = remote_rights(readable, writable);
    ibv_mr* mr = reg(IBV_ACCESS_LOCAL_WRITE | remote);
    if (mr == nullptr && !writable) mr = reg(remote);  // pages that this process may only read
    if (mr == nullptr) return failed("ibv_reg_mr", errno);
    return std::unique_ptr<Registration>(new VerbsRegistration(shared_from_this(), verbs_, mr));
  }

  Result<std::unique_ptr<Registration>> register_dmabuf(int fd, uint64_t offset, uint64_t nbytes, uint64_t address,
                                                        bool readable, bool writable) override {
    if (!verbs_.reg_dmabuf_mr) return Status(Code::unsupported, "this libibverbs has no ibv_reg_dmabuf_mr");
    unsigned int rights = IBV_ACCESS_LOCAL_WRITE | remote_rights(readable, writable);
    if (info_.relaxed_order) rights |= IBV_ACCESS_RELAXED_ORDERING;
    ibv_mr* mr = verbs_.reg_dmabuf_mr(pd_, offset, nbytes, address, fd, static_cast<int>(rights));
    if (mr == nullptr) return failed("ibv_reg_dmabuf_mr", errno);
    return std::unique_ptr<Registration>(new VerbsRegistration(shared_from_this(), verbs_, mr));
  }

  Result<std::unique_ptr<QueuePair>> make_queue_pair(uint32_t work_requests, uint32_t receives) override {
    const int completions = static_cast<int>(work_requests + receives);
    TM_TRY(reserve(completions));
    ibv_qp_init_attr init{};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = init.recv_cq = cq_;
    ibv_qp* qp = nullptr;
    int error = EINVAL;
    for (uint32_t inline_nbytes :
         {info_.max_inline_nbytes, 0u}) {  // none: for providers that copy none, or not so many
      if (qp != nullptr || error != EINVAL) break;
      init.cap = {work_requests, std::max(1u, receives), 1, 1, inline_nbytes};
      qp = verbs_.create_qp(pd_, &init);
      error = errno;
    }
    if (qp == nullptr) {
      release(completions);
      Status status = failed("ibv_create_qp", error);
      if (error == ENOMEM || error == ENOSPC || error == EAGAIN) return Status(Code::busy, status.message());
      return status;
    }
    ibv_port_attr port{};
    QueuePairAddress address;
    if (verbs_.query_port(context_, port_, &port) == 0) address.lid = port.lid;
    address.number = qp->qp_num;
    address.first_packet = static_cast<uint32_t>(random_u64() & 0xff'ffff);
    address.mtu = info_.mtu;
    return std::unique_ptr<QueuePair>(
        new VerbsPair(shared_from_this(), verbs_, qp, address, completions, init.cap.max_inline_data));
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
      const auto type = event.event_type;
      const bool of_port = type == IBV_EVENT_PORT_ACTIVE || type == IBV_EVENT_PORT_ERR;
      const bool other = of_port && event.element.port_num != port_;
      verbs_.ack_async_event(&event);
      if (other) continue;
      if (type == IBV_EVENT_PORT_ACTIVE) return Event::port_up;
      if (type == IBV_EVENT_PORT_ERR) return Event::port_down;
      // After CQ_ERR nothing is heard of any pair. Of an error of one pair its completions tell.
      if (type == IBV_EVENT_DEVICE_FATAL || type == IBV_EVENT_CQ_ERR) return Event::fatal;
      // One that is taken away may say no more than that its addresses have gone.
      ibv_port_attr port{};
      if (type == IBV_EVENT_GID_CHANGE && verbs_.query_port(context_, port_, &port) != 0) return Event::fatal;
    }
    return std::nullopt;
  }
  bool gone() const override {
    ibv_port_attr port{};
    return verbs_.query_port(context_, port_, &port) != 0;
  }

 private:
  friend class VerbsPair;
  VerbsDevice(const Verbs& verbs, uint8_t port, const NicFilter& filter, const RdmaOptions& options)
      : verbs_(verbs), port_(port), filter_(filter), options_(options) {}

  Status open(ibv_device* device) {
    context_ = verbs_.open_device(device);
    if (context_ == nullptr) return failed("ibv_open_device", errno);
    ibv_device_attr limits{};
    if (int error = verbs_.query_device(context_, &limits)) return failed("ibv_query_device", error);
    ibv_port_attr port{};
    if (int error = verbs_.query_port(context_, port_, &port)) return failed("ibv_query_port", error);
    ports_ = limits.phys_port_cnt;
    ethernet_ = port.link_layer == IBV_LINK_LAYER_ETHERNET;
    gid_count_ = port.gid_tbl_len;
    most_completions_ = limits.max_cqe;
    reads_ = static_cast<uint8_t>(std::clamp(std::min(limits.max_qp_rd_atom, limits.max_qp_init_rd_atom), 1, +kReads));
    info_.port_up = port.state == IBV_PORT_ACTIVE;
    info_.max_mr_nbytes = options_.max_mr_nbytes ? std::min(options_.max_mr_nbytes, limits.max_mr_size)  //
                                                 : limits.max_mr_size;
    info_.max_message_nbytes = port.max_msg_sz;
    info_.max_work_requests = static_cast<uint32_t>(limits.max_qp_wr);
    info_.max_inline_nbytes = 64;
    info_.mtu = std::min(options_.mtu, 128u << port.active_mtu);
    info_.speed_mbps = speed_mbps(port);
    const auto place = sysfs::real_path("/sys/class/infiniband/" + std::string(verbs_.get_device_name(device)) +
                                        "/device");  // Soft-RoCE has none
    if (!place.empty()) {
      info_.numa_node = sysfs::numa_node(place);
      info_.pci = sysfs::pci_components(place);
    }
    if (options_.on_demand) info_.page_faults = takes_page_faults();
    if (info_.page_faults) extra_rights_ |= IBV_ACCESS_ON_DEMAND;
    info_.relaxed_order = options_.relaxed_ordering && verbs_.reg_mr_iova2;
    if (info_.relaxed_order) extra_rights_ |= IBV_ACCESS_RELAXED_ORDERING;  // one that devices may ignore
    TM_TRY(find_pkey(limits.max_pkeys));
    pd_ = verbs_.alloc_pd(context_);
    if (pd_ == nullptr) return failed("ibv_alloc_pd", errno);
    channel_ = verbs_.create_comp_channel(context_);
    if (channel_ == nullptr) return failed("ibv_create_comp_channel", errno);
    completions_ = std::min(kCompletions, most_completions_);
    cq_ = verbs_.create_cq(context_, completions_, nullptr, channel_, 0);
    if (cq_ == nullptr) return failed("ibv_create_cq", errno);
    set_nonblocking(channel_->fd);
    set_nonblocking(context_->async_fd);
    return {};
  }

  // As ibv_query_device_ex() asks, which is a function of the header.
  bool takes_page_faults() const {
    verbs_context* extended = verbs_get_ctx_op(context_, query_device_ex);
    ibv_device_attr_ex attributes{};
    if (!extended || extended->query_device_ex(context_, nullptr, &attributes, sizeof attributes) != 0) return false;
    constexpr uint32_t kNeeded = IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ;
    return attributes.odp_caps.general_caps & IBV_ODP_SUPPORT &&
           (attributes.odp_caps.per_transport_caps.rc_odp_caps & kNeeded) == kNeeded;
  }

  Status find_pkey(int count) {
    if (options_.pkey == 0) return {};
    for (int i = 0; i < count; ++i) {
      __be16 found = 0;
      if (verbs_.query_pkey(context_, port_, i, &found) != 0) break;
      if (__builtin_bswap16(found) != options_.pkey) continue;
      pkey_index_ = static_cast<uint16_t>(i);
      return {};
    }
    return {Code::unsupported, "its port has no partition key " + std::to_string(options_.pkey)};
  }

  Gid query_gid(uint8_t index) const {
    Gid out;
    out.index = index;
    out.kind = ethernet_ ? GidKind::roce_v2 : GidKind::infiniband;
    ibv_gid_entry entry{};
    if (verbs_.query_gid_ex && verbs_.query_gid_ex(context_, port_, index, &entry, 0, sizeof entry) == 0) {
      std::memcpy(out.raw.data(), entry.gid.raw, out.raw.size());
      out.interface = entry.ndev_ifindex;
      if (ethernet_ && entry.gid_type == IBV_GID_TYPE_ROCE_V1) out.kind = GidKind::roce_v1;
      return out;
    }
    ibv_gid gid{};
    if (!verbs_.query_gid_ex && verbs_.query_gid(context_, port_, index, &gid) == 0)
      std::memcpy(out.raw.data(), gid.raw, out.raw.size());
    return out;
  }

  static unsigned int remote_rights(bool readable, bool writable) {
    unsigned int out = 0;
    if (readable) out |= IBV_ACCESS_REMOTE_READ;
    if (writable) out |= IBV_ACCESS_REMOTE_WRITE;
    return out;
  }

  // Room for the completions of one more queue pair: a queue that overflows loses them all.
  Status reserve(int completions) {
    std::lock_guard lock(mutex_);
    if (pairs_ >= options_.max_queue_pairs)
      return {Code::busy, "it has " + std::to_string(pairs_) + " queue pairs, as many as it may (rdma: qps)"};
    if (reserved_ + completions > completions_) {
      int more = std::min(std::max(2 * completions_, reserved_ + completions), most_completions_);
      if (more < reserved_ + completions) return {Code::busy, "its completion queue cannot hold more queue pairs"};
      if (int error = verbs_.resize_cq(cq_, more)) {
        Status status = failed("ibv_resize_cq", error);
        if (error == EOPNOTSUPP || error == ENOSYS) return {Code::busy, status.message()};  // as many as it has
        return status;
      }
      completions_ = more;
    }
    reserved_ += completions;
    ++pairs_;
    return {};
  }
  void release(int completions) {
    std::lock_guard lock(mutex_);
    reserved_ -= completions;
    --pairs_;
  }

  static Outcome outcome_of(ibv_wc_status status) {
    switch (status) {
      case IBV_WC_SUCCESS:
        return Outcome::done;
      case IBV_WC_WR_FLUSH_ERR:
        return Outcome::flushed;
      case IBV_WC_REM_ACCESS_ERR:
        return Outcome::remote_access;
      case IBV_WC_LOC_PROT_ERR:
      case IBV_WC_LOC_LEN_ERR:
      case IBV_WC_REM_INV_REQ_ERR:
        return Outcome::invalid_request;
      case IBV_WC_RETRY_EXC_ERR:
      case IBV_WC_RNR_RETRY_EXC_ERR:
        return Outcome::retries_exceeded;
      default:
        return Outcome::failed;
    }
  }

  const Verbs& verbs_;
  const uint8_t port_;
  const NicFilter filter_;
  const RdmaOptions options_;
  DeviceInfo info_;
  bool ethernet_ = false;
  uint8_t reads_ = 1;
  uint16_t pkey_index_ = 0;
  int ports_ = 1, gid_count_ = 0, most_completions_ = 0;
  unsigned int extra_rights_ = 0;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  std::mutex mutex_;
  int completions_ = 0, reserved_ = 0;  // what the queue holds, and what its queue pairs may put into it
  uint32_t pairs_ = 0;
};

VerbsPair::~VerbsPair() {
  if (int error = verbs_.destroy_qp(qp_)) log::error("transfer", failed("ibv_destroy_qp", error).to_string());
  device_->release(completions_);
}

Status VerbsPair::connect(const QueuePairAddress& remote, const Gid& our_gid, const Gid& remote_gid) {
  const auto& options = device_->options_;
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_INIT;
  a.port_num = device_->port_;
  a.pkey_index = device_->pkey_index_;
  a.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  if (int error = verbs_.modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
    return failed("ibv_modify_qp to INIT", error);
  a = {};
  a.qp_state = IBV_QPS_RTR;
  a.path_mtu = mtu_code(std::min(remote.mtu, address_.mtu));
  a.dest_qp_num = remote.number;
  a.rq_psn = remote.first_packet;
  a.max_dest_rd_atomic = device_->reads_;
  a.min_rnr_timer = 12;  // 0.64 ms
  // Within a subnet of InfiniBand the local identifier is enough, and routers are not asked.
  a.ah_attr.is_global = device_->ethernet_ || !std::equal(our_gid.raw.begin(), our_gid.raw.begin() + 8,  //
                                                          remote_gid.raw.begin());
  std::memcpy(a.ah_attr.grh.dgid.raw, remote_gid.raw.data(), remote_gid.raw.size());
  a.ah_attr.grh.sgid_index = our_gid.index;
  a.ah_attr.grh.hop_limit = 64;
  a.ah_attr.grh.traffic_class = options.traffic_class;
  a.ah_attr.sl = options.service_level;
  a.ah_attr.dlid = remote.lid;
  a.ah_attr.port_num = device_->port_;
  if (int error = verbs_.modify_qp(qp_, &a,
                                   IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
    return failed("ibv_modify_qp to RTR", error).with(our_gid.to_string() + " to " + remote_gid.to_string());
  a = {};
  a.qp_state = IBV_QPS_RTS;
  a.timeout = options.timeout;
  a.retry_cnt = options.retries;
  a.rnr_retry = kReceiverRetries;
  a.sq_psn = address_.first_packet;
  a.max_rd_atomic = device_->reads_;
  if (int error = verbs_.modify_qp(qp_, &a,
                                   IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                       IBV_QP_MAX_QP_RD_ATOMIC))
    return failed("ibv_modify_qp to RTS", error);
  return {};
}

class VerbsDriver final : public Driver {
 public:
  explicit VerbsDriver(const Verbs* verbs = nullptr) : verbs_(verbs) {}
  Result<std::vector<std::shared_ptr<Device>>> open_devices(const NicFilter& filter,
                                                            const RdmaOptions& options) override {
    const Verbs* verbs = verbs_;
    if (!verbs) {
      TM_ASSIGN(verbs, load_verbs());
    }
    int n = 0;
    ibv_device** list = verbs->get_device_list(&n);
    if (list == nullptr) return Status(Code::unsupported, failed("no RDMA: ibv_get_device_list", errno).message());
    std::vector<std::shared_ptr<Device>> out;
    std::string why = n == 0 ? "the kernel has no RDMA device" : "";
    auto refuse = [&](const std::string& reason) { why += (why.empty() ? "" : "; ") + reason; };
    for (int i = 0; i < n; ++i) {
      if (list[i]->transport_type != IBV_TRANSPORT_IB) {  // iWARP needs librdmacm; EFA has no reliable connections
        refuse(verbs->get_device_name(list[i]) + std::string(" is neither InfiniBand nor RoCE"));
        continue;
      }
      int ports = 1;
      for (int port = 1; port <= ports; ++port) {
        auto device = VerbsDevice::open(*verbs, list[i], static_cast<uint8_t>(port), filter, options);
        if (!device) {
          refuse(device.status().message());
          continue;
        }
        ports = (*device)->ports();
        const auto& name = (*device)->info().name;
        if (!(*device)->info().port_up)
          refuse(name + ": its port is down");
        else if (!filter.allows((*device)->described()))
          refuse(name + ": the settings (nics) leave it out");
        else if ((*device)->gids().empty())
          refuse(name + ": its port has no GID" + (options.gid_index < 0 ? "" : " of that index (rdma: gid)"));
        else
          out.push_back(std::move(*device));
      }
    }
    verbs->free_device_list(list);
    if (out.empty()) return Status(Code::unsupported, "RDMA cannot be used: " + why);
    std::sort(out.begin(), out.end(), [](auto& a, auto& b) { return a->info().name < b->info().name; });
    return out;
  }

 private:
  const Verbs* const verbs_;  // null: the process'
};

}  // namespace

std::shared_ptr<Driver> verbs_driver() {
  static auto driver = std::make_shared<VerbsDriver>();
  return driver;
}

std::shared_ptr<Driver> verbs_driver(const Verbs& verbs) { return std::make_shared<VerbsDriver>(&verbs); }

}  // namespace torch_mooncake::transfer::rdma

#endif
