// A TCP proxy on loopback, in front of an engine: what may happen to a connection on its way. It forwards bytes of each
// connection in both directions on threads of its own, until it is told otherwise.
//
// Connections are numbered as they come: with one session, 0 is its control lane, then come the lanes for bulk.
#pragma once

#include <doctest/doctest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "rpc/address.h"

namespace transfer_test {

class Proxy {
 public:
  explicit Proxy(const std::string& backend) {
    set_backend(backend);
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(::bind(listener_, reinterpret_cast<sockaddr*>(&any), sizeof any) == 0);
    REQUIRE(::listen(listener_, 64) == 0);
    address_ = torch_mooncake::rpc::local_address(listener_).to_string();
    acceptor_ = std::thread([this] { accept_all(); });
  }
  ~Proxy() {
    stop_ = true;
    acceptor_.join();
    ::close(listener_);
    for (auto& link : links_) {
      ::shutdown(link->near, SHUT_RDWR);
      ::shutdown(link->far, SHUT_RDWR);
      for (auto& thread : link->threads) thread.join();
      ::close(link->near);
      ::close(link->far);
    }
  }
  const std::string& address() const { return address_; }
  // Where later connections go; empty: they are closed at once.
  void set_backend(const std::string& address) {
    std::lock_guard lock(mutex_);
    backend_ = address;
  }
  std::vector<int64_t> arrivals_ns() {  // of all connections, also those closed at once
    std::lock_guard lock(mutex_);
    return arrivals_;
  }
  size_t count() {
    std::lock_guard lock(mutex_);
    return links_.size();
  }
  void hold(size_t i, bool held) { link(i).held = held; }  // swallows nothing, forwards nothing
  void reset(size_t i) {                                   // RST to both sides
    linger hard{1, 0};
    for (int fd : {link(i).near, link(i).far}) {
      ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
      // Disconnecting with an empty address sends the RST now, while the threads still hold the fd.
      sockaddr none{};
      none.sa_family = AF_UNSPEC;
      // (Not by connect(): a sanitizer would take that for a new descriptor.)
      ::syscall(SYS_connect, fd, &none, sizeof none);
    }
  }
  void half_close(size_t i) { ::shutdown(link(i).far, SHUT_WR); }  // the backend sees EOF, the dialler nothing

 private:
  struct Link {
    int near = -1, far = -1;
    std::atomic<bool> held{false};
    std::vector<std::thread> threads;
  };
  Link& link(size_t i) {
    std::lock_guard lock(mutex_);
    return *links_.at(i);
  }

  void accept_all() {
    while (!stop_) {
      pollfd ready{listener_, POLLIN, 0};
      if (::poll(&ready, 1, 20) <= 0) continue;
      int near = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (near < 0) continue;
      std::lock_guard lock(mutex_);
      arrivals_.push_back(torch_mooncake::steady_ns());
      int far = backend_.empty() ? -1 : dial();
      if (far < 0) {
        ::close(near);
        continue;
      }
      auto link = std::make_unique<Link>();
      link->near = near;
      link->far = far;
      auto* l = link.get();
      link->threads.emplace_back([this, l] { pump(*l, l->near, l->far); });
      link->threads.emplace_back([this, l] { pump(*l, l->far, l->near); });
      links_.push_back(std::move(link));
    }
  }
  int dial() {
    using namespace torch_mooncake;
    auto to = rpc::resolve(*rpc::parse_address(backend_), Deadline::after_ms(1000)).value().front();
    int fd = ::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(fd, to.get(), to.length) == 0) return fd;
    ::close(fd);
    return -1;
  }
  void pump(Link& link, int from, int to) {
    std::vector<char> buffer(256 << 10);
    while (!stop_) {
      pollfd ready{from, POLLIN, 0};
      if (link.held) {
        ::usleep(2000);
        continue;
      }
      if (::poll(&ready, 1, 20) <= 0) continue;
      if (link.held) continue;
      ssize_t n = ::recv(from, buffer.data(), buffer.size(), 0);
      if (n <= 0) {
        ::shutdown(to, SHUT_WR);
        return;
      }
      for (ssize_t done = 0; done < n;) {
        ssize_t sent = ::send(to, buffer.data() + done, static_cast<size_t>(n - done), MSG_NOSIGNAL);
        if (sent <= 0) {
          ::shutdown(from, SHUT_RD);
          return;
        }
        done += sent;
      }
    }
  }

  int listener_;
  std::string address_;
  std::atomic<bool> stop_{false};
  std::thread acceptor_;
  std::mutex mutex_;
  std::string backend_;
  std::vector<int64_t> arrivals_;
  std::vector<std::unique_ptr<Link>> links_;
};

}  // namespace transfer_test
