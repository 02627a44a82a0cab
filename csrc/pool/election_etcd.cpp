// The election in etcd, over its HTTP gateway: a request a connection, JSON with bytes in base64.
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "common/fd.h"
#include "pool/election.h"
#include "pool/election_text.h"

namespace torch_mooncake::pool {
namespace {

constexpr int64_t kAnswerMs = 2000;  // of one host
constexpr size_t kAnswerBytes = 1 << 20;
constexpr const char* kFolder = "torch_mooncake.pool";  // no engine's record has such a name

struct Address {
  sockaddr_storage at{};
  socklen_t size = 0;
  int protocol = 0;
};

struct Host {
  std::string name, port;
  std::vector<Address> addresses = {};
  bool failed = false;  // all of them
};

Status silent(const Host& host, const std::string& why) {
  return {Code::io, "etcd at " + host.name + ":" + host.port + " does not answer: " + why};
}

Status wait_for(int fd, short events, Deadline deadline, const Host& host) {
  pollfd p{fd, events, 0};
  for (;;) {
    const int n = ::poll(&p, 1, deadline.remaining_ms());
    if (n > 0) return {};
    if (n == 0) return silent(host, "in time");
    if (errno != EINTR) return silent(host, "poll");
  }
}

// The time that is one's, of those that are still to have their turn.
Deadline share(Deadline deadline, size_t left) {
  return deadline.is_never() ? deadline
                             : Deadline::at_ns(steady_ns() + deadline.remaining_ns() / static_cast<int64_t>(left));
}

// No deadline holds for a name that is looked up: once, and again only when all that was found has failed.
Status resolve(Host& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.name.c_str(), host.port.c_str(), &hints, &found); error != 0)
    return host.addresses.empty() ? silent(host, ::gai_strerror(error)) : Status{};
  host.addresses.clear();
  for (const addrinfo* a = found; a; a = a->ai_next) {
    Address& address = host.addresses.emplace_back();
    std::memcpy(&address.at, a->ai_addr, a->ai_addrlen);
    address.size = a->ai_addrlen;
    address.protocol = a->ai_protocol;
  }
  ::freeaddrinfo(found);
  host.failed = false;
  return {};
}

Result<UniqueFd> dial(Host& host, Deadline deadline) {
  if (host.addresses.empty() || host.failed) TM_TRY(resolve(host));
  Status last = silent(host, "no address");
  for (size_t left = host.addresses.size(); left > 0; --left) {
    const Address& address = host.addresses[0];  // the one that has answered last
    UniqueFd fd(::socket(address.at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, address.protocol));
    const auto* to = reinterpret_cast<const sockaddr*>(&address.at);
    if (fd.valid() && (::connect(fd.get(), to, address.size) == 0 || errno == EINPROGRESS)) {
      const Status done = wait_for(fd.get(), POLLOUT, share(deadline, left), host);
      int error = 0;
      socklen_t size = sizeof error;
      if (done.is_ok() && ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0) return fd;
      last = done.is_ok() ? silent(host, "connection refused") : done;
    } else if (fd.valid()) {
      last = silent(host, "connection refused");
    }
    std::rotate(host.addresses.begin(), host.addresses.begin() + 1, host.addresses.end());
  }
  host.failed = true;
  return last;
}

// HTTP 1.0: the answer ends with the connection, and comes in one piece.
Result<std::string> post(Host& host, const std::string& path, const std::string& body, Deadline deadline) {
  deadline = min(deadline, Deadline::after_ms(kAnswerMs));
  TM_ASSIGN(UniqueFd fd, dial(host, deadline));
  const std::string request = "POST /v3/" + path + " HTTP/1.0\r\nHost: " + host.name +
                              "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
                              "\r\n\r\n" + body;
  for (size_t sent = 0; sent < request.size();) {
    TM_TRY(wait_for(fd.get(), POLLOUT, deadline, host));
    const ssize_t n = ::send(fd.get(), request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN && errno != EINTR) return silent(host, "it hangs up");
    if (n > 0) sent += static_cast<size_t>(n);
  }
  std::string answer;
  for (char buffer[4096];;) {
    TM_TRY(wait_for(fd.get(), POLLIN, deadline, host));
    const ssize_t n = ::recv(fd.get(), buffer, sizeof buffer, 0);
    if (n == 0) break;
    if (n < 0 && errno != EAGAIN && errno != EINTR) return silent(host, "it hangs up");
    if (n > 0) answer.append(buffer, static_cast<size_t>(n));
    if (answer.size() > kAnswerBytes) return silent(host, "its answer does not end");
  }
  const size_t head = answer.find("\r\n\r\n");
  if (!answer.starts_with("HTTP/1.") || head == std::string::npos || answer.size() < 12)
    return silent(host, "not in HTTP");
  const std::string status = answer.substr(9, 3);
  answer.erase(0, head + 4);
  // A lease that is not there is told as an error.
  if (status == "404" || answer.find("requested lease not found") != std::string::npos)
    return {Code::key_not_found, "etcd knows the lease no more"};
  if (status != "200") return silent(host, "status " + status + " for " + path);
  return answer;
}

class EtcdElection final : public Election {
 public:
  EtcdElection(std::vector<Host> hosts, const std::string& folder)
      : hosts_(std::move(hosts)), leader_key_(folder + "/leader"), view_key_(folder + "/view") {}

  Result<std::optional<Leader>> leader(Deadline deadline) override {
    TM_ASSIGN(auto answer, ask("kv/range", "{\"key\":" + quoted(leader_key_) + "}", deadline));
    seen_lease_ = json_field(answer, "lease").value_or("");
    const auto value = json_field(answer, "value");
    if (!value) return std::optional<Leader>{};
    TM_ASSIGN(Leader found, decode<Leader>(from_base64(*value)));
    return std::optional<Leader>(std::move(found));
  }

  Status end_seen(Deadline deadline) override { return revoke(seen_lease_, deadline); }

  Result<std::optional<Won>> campaign(const Leader& self, Deadline deadline) override {
    const int64_t sent_ns = steady_ns();
    TM_ASSIGN(auto granted, ask("lease/grant", "{\"TTL\":" + std::to_string(kLeadS) + "}", deadline));
    const std::string lease = json_field(granted, "ID").value_or("");
    const auto ttl_s = json_number(granted, "TTL");
    if (lease.empty() || !ttl_s) return Status(Code::io, "etcd gave no lease: " + granted.substr(0, 200));
    const std::string key = quoted(leader_key_);
    TM_ASSIGN(auto answer, ask("kv/txn",
                               "{\"compare\":[{\"key\":" + key +
                                   ",\"target\":\"CREATE\",\"result\":\"EQUAL\",\"create_revision\":\"0\"}],"
                                   "\"success\":[{\"request_put\":{\"key\":" +
                                   key + ",\"value\":" + quoted(encode(self)) + ",\"lease\":\"" + lease + "\"}}]}",
                               deadline));
    const auto revision = json_number(answer, "revision");
    if (json_field(answer, "succeeded") != "true" || !revision) {
      (void)revoke(lease, deadline);  // or it ends by itself
      return std::optional<Won>{};
    }
    lease_ = lease;
    term_ = *revision;
    return std::optional<Won>(Won{term_, until(sent_ns, *ttl_s)});
  }

  Result<int64_t> renew(Deadline deadline) override {
    const int64_t sent_ns = steady_ns();
    TM_ASSIGN(auto answer, ask("lease/keepalive", "{\"ID\":\"" + lease_ + "\"}", deadline));
    const auto ttl_s = json_number(answer, "TTL");
    if (json_field(answer, "ID") != lease_) return Status(Code::io, "not of a lease: " + answer.substr(0, 200));
    if (ttl_s.value_or(0) == 0) return Status(Code::key_not_found, "the leader's lease has run out");
    return until(sent_ns, *ttl_s);
  }

  // What etcd was asked and has not answered it may carry out later: it names the revision that it replaces.
  Status note(const LastView& view, Deadline deadline) override {
    if (!view_revision_) TM_TRY(last_view(deadline).status());
    const std::string replaced = std::to_string(*std::exchange(view_revision_, std::nullopt));
    TM_ASSIGN(auto answer, ask("kv/txn",
                               "{\"compare\":[{\"key\":" + quoted(leader_key_) +
                                   ",\"target\":\"CREATE\",\"result\":\"EQUAL\",\"create_revision\":\"" +
                                   std::to_string(term_) + "\"},{\"key\":" + quoted(view_key_) +
                                   ",\"target\":\"MOD\",\"result\":\"EQUAL\",\"mod_revision\":\"" + replaced +
                                   "\"}],\"success\":[{\"request_put\":{\"key\":" + quoted(view_key_) +
                                   ",\"value\":" + quoted(encode(view)) + "}}]}",
                               deadline));
    if (json_field(answer, "succeeded") == "true") {
      view_revision_ = json_number(answer, "revision");
      return {};
    }
    TM_ASSIGN(auto held, ask("kv/range", "{\"key\":" + quoted(leader_key_) + "}", deadline));
    if (json_number(held, "create_revision") == term_) return {Code::io, "etcd has just written an earlier view"};
    return {Code::key_not_found, "another node leads, or none"};
  }

  Status resign(Deadline deadline) override { return revoke(lease_, deadline); }

  Result<LastView> last_view(Deadline deadline) override {
    TM_ASSIGN(auto answer, ask("kv/range", "{\"key\":" + quoted(view_key_) + "}", deadline));
    view_revision_ = json_number(answer, "mod_revision").value_or(0);
    const auto value = json_field(answer, "value");
    if (!value) return LastView{};
    return decode<LastView>(from_base64(*value));
  }

 private:
  static std::string quoted(const std::string& bytes) { return '"' + to_base64(bytes) + '"'; }
  static int64_t until(int64_t sent_ns, uint64_t ttl_s) {
    return sent_ns + static_cast<int64_t>(std::min<uint64_t>(ttl_s, kLeadS)) * 900'000'000;
  }

  Status revoke(const std::string& lease, Deadline deadline) {
    if (lease.empty()) return {};
    const Status s = ask("lease/revoke", "{\"ID\":\"" + lease + "\"}", deadline).status();
    return s.code() == Code::key_not_found ? Status{} : s;
  }

  // Of the first host that answers; that one is asked first from then on.
  Result<std::string> ask(const std::string& path, const std::string& body, Deadline deadline) {
    Result<std::string> answer = Status(Code::io, "no host");
    for (size_t i = 0; i < hosts_.size(); ++i) {
      answer = post(hosts_[0], path, body, share(deadline, hosts_.size() - i));
      if (answer.is_ok() || answer.status().code() != Code::io) return answer;
      std::rotate(hosts_.begin(), hosts_.begin() + 1, hosts_.end());
      if (deadline.expired()) break;
    }
    return answer;
  }

  std::vector<Host> hosts_;
  const std::string leader_key_, view_key_;
  std::string lease_, seen_lease_;
  uint64_t term_ = 0;
  std::optional<uint64_t> view_revision_;  // of the view, 0: there is none; unknown after a note that was not answered
};

}  // namespace

bool LastView::has(const NodeId& node) const {
  return std::find(members.begin(), members.end(), node) != members.end();
}

Result<std::unique_ptr<Election>> open_election(const std::string& url) {
  const std::string scheme = "etcd://";
  if (!url.starts_with(scheme)) return {Code::unsupported, "discovery \"" + url + "\": etcd://host:port is known"};
  const size_t slash = std::min(url.find('/', scheme.size()), url.size());
  std::string places = url.substr(scheme.size(), slash - scheme.size()), prefix = url.substr(slash);
  while (prefix.ends_with('/')) prefix.pop_back();
  std::vector<Host> hosts;
  for (size_t at = 0; at <= places.size();) {
    const size_t comma = std::min(places.find(',', at), places.size());
    std::string place = places.substr(at, comma - at);
    at = comma + 1;
    Host host{place, "2379"};
    const size_t colon = place.rfind(':');
    if (colon != std::string::npos && place.find(']', colon) == std::string::npos)
      host = {place.substr(0, colon), place.substr(colon + 1)};
    if (host.name.starts_with('[') && host.name.ends_with(']')) host.name = host.name.substr(1, host.name.size() - 2);
    uint16_t port = 0;
    const char* end = host.port.data() + host.port.size();
    if (host.name.empty() || std::from_chars(host.port.data(), end, port).ptr != end || port == 0)
      return {Code::invalid_argument, "discovery \"" + url + "\" names no host, or no port"};
    hosts.push_back(std::move(host));
  }
  return std::unique_ptr<Election>(std::make_unique<EtcdElection>(std::move(hosts), prefix + "/" + kFolder));
}

}  // namespace torch_mooncake::pool
