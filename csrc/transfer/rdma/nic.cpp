#include "transfer/rdma/nic.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>

#include "common/clock.h"
#include "common/log.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr int64_t kSpinNs = 50'000;
constexpr int kTickMs = 10;

}  // namespace

Nic::Nic(std::shared_ptr<Device> device, uint32_t index)
    : device_(std::move(device)),
      index_(index),
      info_(device_->info()),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      up_(info_.port_up) {
  sigset_t all, before;  // signals of the process belong to the user's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Nic::stop() {
  if (stopping_.exchange(true)) return;
  watch();
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();
  else
    thread_.join();
}

void Nic::add(uint32_t queue_pair, std::weak_ptr<Client> client) {
  std::lock_guard lock(mutex_);
  clients_[queue_pair] = std::move(client);
}

void Nic::remove(uint32_t queue_pair) {
  std::lock_guard lock(mutex_);
  clients_.erase(queue_pair);
}

void Nic::watch() {
  watching_ = true;
  uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);  // full: it is awake already
}

std::vector<std::shared_ptr<Nic::Client>> Nic::clients() const {
  std::vector<std::shared_ptr<Client>> out;
  std::lock_guard lock(mutex_);
  for (auto& [number, weak] : clients_)
    if (auto client = weak.lock()) out.push_back(std::move(client));
  return out;
}

void Nic::run() {
  pthread_setname_np(pthread_self(), "tm-rdma");
  int64_t spin_until = 0, next_tick = 0;
  while (!stopping_) {
    int64_t now = steady_ns();
    if (watching_ && now >= next_tick) {
      watching_ = false;  // before asking: who calls watch() from now on is heard
      for (auto& client : clients())
        if (client->tick(now)) watching_ = true;
      next_tick = now + kTickMs * 1'000'000;
    }
    if (poll() > 0) {
      spin_until = steady_ns() + kSpinNs;
      continue;
    }
    if (now < spin_until) continue;
    if (!gone_) {
      arm();
      if (poll() > 0) continue;  // what came before it was armed
    }
    sleep();
  }
}

// Completions of one queue pair are handed over together.
size_t Nic::poll() {
  std::array<Completion, 64> batch;
  const size_t n = device_->poll(batch);
  for (size_t begin = 0, end = 0; begin < n; begin = end) {
    while (end < n && batch[end].queue_pair == batch[begin].queue_pair) ++end;
    std::shared_ptr<Client> client;
    {
      std::lock_guard lock(mutex_);
      auto it = clients_.find(batch[begin].queue_pair);
      if (it != clients_.end()) client = it->second.lock();
    }
    if (client) client->completed(std::span(batch).subspan(begin, end - begin));
  }
  return n;
}

void Nic::arm() {
  const Status armed = device_->arm();
  deaf_ = !armed;
  if (armed) return;
  if (device_->gone()) return lost(armed.to_string());
  if (deafness_.pass()) log::error("transfer", info_.name + ": " + armed.to_string());
}

// A device that is gone may leave its descriptors readable, or broken, for ever: they are not looked at any more.
void Nic::sleep() {
  constexpr short kBroken = POLLERR | POLLHUP | POLLNVAL;
  pollfd fds[] = {{wake_.get(), POLLIN, 0}, {device_->completion_fd(), POLLIN, 0}, {device_->event_fd(), POLLIN, 0}};
  if (::poll(fds, gone_ ? 1 : 3, watching_ || (deaf_ && !gone_) ? kTickMs : -1) <= 0) return;
  uint64_t n;
  if (fds[0].revents) (void)!read(wake_.get(), &n, sizeof n);
  if (fds[1].revents) device_->clear_completion_fd();
  if (fds[2].revents) take_events();
  if ((fds[1].revents | fds[2].revents) & kBroken) lost("its descriptors are closed");
}

void Nic::lost(const std::string& why) {
  up_ = false;
  if (gone_.exchange(true)) return;
  log::warning("transfer", info_.name + " has died, or was taken away: " + why);
  for (auto& client : clients()) client->port_down();
}

void Nic::take_events() {
  while (auto event = device_->next_event()) {
    if (*event == Device::Event::fatal) {
      lost("so its driver says");
    } else if (!gone_) {
      up_ = *event == Device::Event::port_up;
      if (up_) continue;
      log::warning("transfer", info_.name + ": port down");
      for (auto& client : clients()) client->port_down();
    }
  }
}

}  // namespace torch_mooncake::transfer::rdma
