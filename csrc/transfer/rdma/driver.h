// The verbs that the RDMA transport needs, so that libibverbs (verbs_driver.h) and a fake stand behind one interface.
//
// Ownership: a Device outlives its Registrations and QueuePairs. Threads: registering, creating and destroying are safe
// from any thread and may block for as long as the kernel does; post() and post_receives() of one queue pair, and
// poll() of one device, want one caller at a time. After Device::Event::fatal nothing completes any more, and
// destroying still works: it is what takes the memory back from the NIC.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/api.h"
#include "common/bytes.h"
#include "common/status.h"
#include "topology/filter.h"
#include "topology/topology.h"
#include "transfer/rdma/gid.h"
#include "transfer/rdma/options.h"

namespace torch_mooncake::transfer::rdma {

struct DeviceInfo {
  std::string name;  // "mlx5_0"; "mlx4_0:2" for its second port
  bool port_up = false;
  uint64_t max_mr_nbytes = 0;  // the most that one registration holds
  uint64_t max_message_nbytes = 0;
  uint32_t max_work_requests = 0;
  uint32_t max_inline_nbytes = 0;
  uint32_t mtu = 0;            // bytes
  uint64_t speed_mbps = 0;     // 0: unknown
  bool page_faults = false;    // it takes them (ODP), and was asked to
  bool relaxed_order = false;  // its writes into memory may pass each other
  int numa_node = -1;          // -1: unknown
  PciPath pci{};               // empty: not on PCIe
};

// Where a queue pair is reached, as the other side's NIC wants it.
struct QueuePairAddress {
  uint16_t lid = 0;
  uint32_t number = 0, first_packet = 0, mtu = 0;
  void encode(ByteWriter& out) const;
  static QueuePairAddress decode(ByteReader& in);
};

// Memory that a NIC may touch until this goes; the destructor returns when it touches it no more.
class Registration {
 public:
  virtual ~Registration() = default;
  virtual uint32_t local_key() const = 0;
  virtual uint32_t remote_key() const = 0;
};

enum class Opcode : uint8_t { write, read, write_with_immediate };

struct WorkRequest {
  uint64_t id;
  Opcode opcode;
  bool signalled;  // gives a completion also when it goes well; all before it on its queue pair are then done
  bool inlined;    // a write whose bytes are copied by post()
  uint32_t nbytes;
  uint32_t local_key, remote_key, immediate;
  uint64_t local, remote;  // addresses
};

// invalid_request: one that goes well on no rail, as our own NIC may not touch its memory, or theirs refuses its form.
enum class Outcome : uint8_t { done, flushed, remote_access, invalid_request, retries_exceeded, failed };

struct Completion {
  uint64_t id;  // of the work request; nothing if `received`
  uint32_t queue_pair;
  Outcome outcome;
  bool received;  // a peer's immediate
  uint32_t immediate;
  std::string detail{};  // the driver's words for a failure
};

// One reliable connection. Destroying it fences: its NIC touches no memory for it afterwards.
class QueuePair {
 public:
  virtual ~QueuePair() = default;
  virtual QueuePairAddress address() const = 0;
  // To the state in which both sides can send, towards `remote` at `remote_gid`, from our GID.
  virtual Status connect(const QueuePairAddress& remote, const Gid& our_gid, const Gid& remote_gid) = 0;
  // Everything posted and not done completes as flushed, unsignalled requests too, in order.
  virtual void fail() = 0;
  // All or none; one doorbell. Errors: io (the queue pair takes no more).
  virtual Status post(std::span<const WorkRequest> requests) = 0;
  virtual Status post_receives(uint32_t count) = 0;  // for immediates
};

class Device {
 public:
  enum class Event : uint8_t { port_up, port_down, fatal };

  virtual ~Device() = default;
  virtual DeviceInfo info() const = 0;
  // Those of its port that connections may use, as they are now: an interface's come and go with its addresses.
  virtual std::vector<Gid> gids() const = 0;
  // Rights are those of peers; this process reads and, unless the pages themselves forbid it, writes.
  virtual Result<std::unique_ptr<Registration>> register_memory(void* data, uint64_t nbytes, bool readable,
                                                                bool writable) = 0;
  // The same of bytes [offset, offset + nbytes) of a dmabuf, which requests name as if they began at `address`; the
  // descriptor may be closed afterwards. unsupported: not by this driver.
  virtual Result<std::unique_ptr<Registration>> register_dmabuf(int fd, uint64_t offset, uint64_t nbytes,
                                                                uint64_t address, bool readable, bool writable) = 0;
  // busy: it has as many as it can, or as the options allow.
  virtual Result<std::unique_ptr<QueuePair>> make_queue_pair(uint32_t work_requests, uint32_t receives) = 0;
  // Up to out.size() completions; how many.
  virtual size_t poll(std::span<Completion> out) = 0;
  // Makes completion_fd() readable at the next completion. Poll once more after it, before sleeping.
  virtual Status arm() = 0;
  virtual int completion_fd() const = 0;
  virtual void clear_completion_fd() = 0;
  virtual int event_fd() const = 0;
  virtual std::optional<Event> next_event() = 0;
  // It has died or was taken away, as far as can be told now: nothing of it works any more.
  virtual bool gone() const { return false; }
};

class TM_API Driver {
 public:
  virtual ~Driver() = default;
  // Those that the filter allows and that have a usable port, by name, opened. Unsupported, with the reason in words,
  // if there is none.
  virtual Result<std::vector<std::shared_ptr<Device>>> open_devices(const NicFilter& filter,
                                                                    const RdmaOptions& options) = 0;
  // How many NUMA nodes the host has, and on which these bytes are; -1: on none yet, or it cannot be told.
  virtual int numa_nodes() const;
  virtual int numa_node_of(const void* data, uint64_t nbytes) const;
};

}  // namespace torch_mooncake::transfer::rdma
