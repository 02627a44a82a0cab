#include "pool/keeper_link.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace torch_mooncake::pool {
namespace {

constexpr size_t kMaxFds = 16;  // a first hold has three, later ones one
constexpr size_t kMaxText = 8192;

std::string encode(const LinkMessage& m) {
  ByteWriter out;
  out.put(m.type).put(m.number).put(std::string_view(m.text).substr(0, kMaxText));
  out.put(static_cast<uint32_t>(m.segments.size()));
  for (const auto& s : m.segments) out.put(s.role).put(s.tag).put(s.id);
  return out.take();
}

}  // namespace

Status KeeperLink::send(const LinkMessage& message, const std::vector<int>& fds) {
  std::string body = encode(message);
  iovec iov{body.data(), body.size()};
  msghdr header{};
  header.msg_iov = &iov;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
  if (fds.size() > kMaxFds) return {Code::invalid_argument, "too many fds for one message"};
  if (!fds.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size() * sizeof(int));
  }
  ssize_t n;
  do {
    n = ::sendmsg(fd_.get(), &header, MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  if (n >= 0) return {};
  if (errno == EPIPE || errno == ECONNRESET) return {Code::peer_lost, "the other end of the keeper's link is gone"};
  return Status::from_errno("keeper link", errno);
}

Result<LinkMessage> KeeperLink::receive(bool wait) {
  std::array<char, kMaxText + 1024> body;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
  iovec iov{body.data(), body.size()};
  msghdr header{};
  header.msg_iov = &iov;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t n;
  do {
    n = ::recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
  } while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {Code::busy, "nothing there"};
  if (n < 0 && errno != ECONNRESET) return Status::from_errno("keeper link", errno);
  if (n <= 0) return {Code::peer_lost, "the other end of the keeper's link is gone"};

  LinkMessage m;
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      m.fds.emplace_back(fd);
    }
  }
  ByteReader in({body.data(), static_cast<size_t>(n)});
  m.type = in.get<LinkMessage::Type>();
  m.number = in.get<uint32_t>();
  m.text = in.get_string();
  m.segments.resize(in.get_count(1 + 8 + 16));
  for (auto& s : m.segments) {
    s.role = in.get<SegmentRole>();
    s.tag = in.get<uint64_t>();
    s.id = in.get_id();
  }
  if (!in.done() || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) ||
      (m.type == LinkMessage::Type::hold && m.fds.size() != m.segments.size()))
    return {Code::io, "a message of the keeper's link arrived cut (out of file descriptors?)"};
  return m;
}

Status KeeperLink::hold(const std::vector<HeldSegment>& segments) {
  LinkMessage m{LinkMessage::Type::hold, 0, {}, {}, {}};
  std::vector<int> fds;
  for (const HeldSegment& s : segments) {
    m.segments.push_back({s.role, s.tag, s.segment->id()});
    fds.push_back(s.segment->fd());
  }
  return send(m, fds);
}

Status KeeperLink::release(const HeldSegment& segment) {
  return send({LinkMessage::Type::release, 0, {}, {{segment.role, segment.tag, segment.segment->id()}}, {}});
}

Status KeeperLink::wait_for_stop() {
  for (;;) {
    auto m = receive(true);
    if (!m.is_ok()) return m.status();
    if (m->type == LinkMessage::Type::stop) return {};
  }
}

}  // namespace torch_mooncake::pool
