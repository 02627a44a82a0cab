#include "topology/nic_watch.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace torch_mooncake {

Result<std::unique_ptr<NicWatch>> NicWatch::start(std::function<void()> changed) {
  std::unique_ptr<NicWatch> watch(new NicWatch);
  watch->netlink_.reset(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE));
  sockaddr_nl address{};
  address.nl_family = AF_NETLINK;
  address.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR;
  if (!watch->netlink_.valid() ||
      ::bind(watch->netlink_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    return Status::from_errno("watching the network interfaces", errno);
  watch->stop_.reset(::eventfd(0, EFD_CLOEXEC));
  if (!watch->stop_.valid()) return Status::from_errno("eventfd", errno);
  watch->changed_ = std::move(changed);
  watch->pid_ = ::getpid();
  watch->thread_ = std::thread([raw = watch.get()] { raw->run(); });
  ::pthread_setname_np(watch->thread_.native_handle(), "tm-nics");
  return watch;
}

NicWatch::~NicWatch() {
  if (!thread_.joinable()) return;
  if (::getpid() != pid_) {
    thread_.detach();
    return;
  }
  uint64_t one = 1;
  while (::write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

void NicWatch::run() {
  while (true) {
    pollfd ready[2] = {{netlink_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (::poll(ready, 2, -1) < 0) continue;
    if (ready[1].revents != 0) return;
    // What has changed is read anew from the kernel; an overrun (ENOBUFS) is a change like any other.
    char messages[16 << 10];
    while (::recv(netlink_.get(), messages, sizeof messages, 0) > 0) {
    }
    changed_();
  }
}

}  // namespace torch_mooncake
