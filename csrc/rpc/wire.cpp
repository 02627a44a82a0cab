#include "rpc/wire.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "rpc/auth.h"
#include "rpc/socket.h"

namespace torch_mooncake::rpc {
namespace {

std::string frame_of(FrameType type, std::string_view body) {
  FrameHeader header;
  header.type = type;
  header.body_bytes = static_cast<uint32_t>(body.size());
  auto raw = encode_header(header);
  std::string bytes(raw.data(), raw.size());
  return bytes.append(body);
}

}  // namespace

bool send_handshake_frame(int fd, FrameType type, std::string_view body) {
  std::string bytes = frame_of(type, body);
  ssize_t n;
  do {
    n = ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
  return n == static_cast<ssize_t>(bytes.size());
}

Status Wire::send(FrameType type, std::string_view body) {
  std::string bytes = frame_of(type, body);
  for (std::string_view left = bytes; !left.empty();) {
    ssize_t n = ::send(fd_, left.data(), left.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      left.remove_prefix(static_cast<size_t>(n));
    } else if (errno == EAGAIN) {
      TM_TRY(wait_ready(fd_, POLLOUT, deadline_, stop_));
    } else if (errno == EPIPE || errno == ECONNRESET) {
      return {};  // the reason may still be readable: expect() tells
    } else if (errno != EINTR) {
      return {Code::peer_lost, std::string("handshake: ") + ::strerror(errno)};
    }
  }
  return {};
}

Result<size_t> Wire::read_some(char* out, size_t nbytes) {
  while (true) {
    iovec piece{out, nbytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred))];
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t n = ::recvmsg(fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n > 0) {
      for (cmsghdr* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_CREDENTIALS) continue;
        ucred cred;
        std::memcpy(&cred, CMSG_DATA(h), sizeof cred);
        peer_pid_ = cred.pid;
      }
      return static_cast<size_t>(n);
    }
    if (n == 0) return {Code::peer_lost, "the other side closed the connection during the handshake"};
    if (errno == EAGAIN) {
      TM_TRY(wait_ready(fd_, POLLIN, deadline_, stop_));
    } else if (errno != EINTR) {
      return {Code::peer_lost, std::string("handshake: ") + ::strerror(errno)};
    }
  }
}

Result<std::string> Wire::expect(FrameType type, Stage stage) {
  FrameDecoder decoder(stage);
  char buffer[4096];
  while (true) {
    TM_ASSIGN(size_t n, read_some(buffer, std::min(decoder.needed(), sizeof buffer)));
    std::string_view in(buffer, n);
    auto step = decoder.push(in);
    if (step == FrameDecoder::Step::error) return decoder.status();
    if (step == FrameDecoder::Step::need_more) continue;
    if (decoder.header().type == FrameType::reject) return decode_reject(decoder.take_body());
    if (decoder.header().type != type) return {Code::corrupt, "a handshake frame out of turn"};
    return decoder.take_body();
  }
}

}  // namespace torch_mooncake::rpc
