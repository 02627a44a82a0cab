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
  std::array<Completion, 64> batch;
  int64_t spin_until = 0, next_tick = 0;
  while (!stopping_) {
    int64_t now = steady_ns();
    if (watching_ && now >= next_tick) {
      watching_ = false;  // before asking: who calls watch() from now on is heard
      for (auto& client : clients())
        if (client->tick(now)) watching_ = true;
      next_tick = now + kTickMs * 1'000'000;
    }
    if (size_t n = device_->poll(batch)) {
      for (size_t i = 0; i < n; ++i) dispatch(batch[i]);
      spin_until = steady_ns() + kSpinNs;
      continue;
    }
    if (now < spin_until) continue;
    if (Status armed = device_->arm(); !armed) log::error("transfer", info_.name + ": " + armed.to_string());
    if (size_t n = device_->poll(batch)) {  // what came before it was armed
      for (size_t i = 0; i < n; ++i) dispatch(batch[i]);
      continue;
    }
    sleep();
  }
}

void Nic::sleep() {
  pollfd fds[] = {{device_->completion_fd(), POLLIN, 0}, {device_->event_fd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  if (poll(fds, 3, watching_ ? kTickMs : -1) <= 0) return;
  if (fds[0].revents) device_->clear_completion_fd();
  if (fds[1].revents) take_events();
  uint64_t n;
  if (fds[2].revents) (void)!read(wake_.get(), &n, sizeof n);
}

void Nic::dispatch(const Completion& completion) {
  std::shared_ptr<Client> client;
  {
    std::lock_guard lock(mutex_);
    auto it = clients_.find(completion.queue_pair);
    if (it != clients_.end()) client = it->second.lock();
  }
  if (client) client->completed(completion);
}

void Nic::take_events() {
  while (auto event = device_->next_event()) {
    bool up = *event == Device::Event::port_up;
    up_ = up;
    if (up) continue;
    log::warning("transfer", info_.name + (*event == Device::Event::fatal ? " has died" : ": port down"));
    for (auto& client : clients()) client->port_down();
  }
}

}  // namespace torch_mooncake::transfer::rdma
