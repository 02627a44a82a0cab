#include "common/status.h"

#include <cstring>

namespace torch_mooncake {

const char* code_name(Code code) {
  switch (code) {
    case Code::ok:
      return "OK";
    case Code::invalid_argument:
      return "INVALID_ARGUMENT";
    case Code::out_of_bounds:
      return "OUT_OF_BOUNDS";
    case Code::key_not_found:
      return "KEY_NOT_FOUND";
    case Code::key_exists:
      return "KEY_EXISTS";
    case Code::pool_full:
      return "POOL_FULL";
    case Code::pool_unavailable:
      return "POOL_UNAVAILABLE";
    case Code::peer_lost:
      return "PEER_LOST";
    case Code::deadline_exceeded:
      return "DEADLINE_EXCEEDED";
    case Code::cancelled:
      return "CANCELLED";
    case Code::auth:
      return "AUTH";
    case Code::version_mismatch:
      return "VERSION_MISMATCH";
    case Code::corrupt:
      return "CORRUPT";
    case Code::layout_mismatch:
      return "LAYOUT_MISMATCH";
    case Code::busy:
      return "BUSY";
    case Code::closed:
      return "CLOSED";
    case Code::forked:
      return "FORKED";
    case Code::unsupported:
      return "UNSUPPORTED";
    case Code::io:
      return "IO";
    case Code::internal:
      return "INTERNAL";
  }
  return "UNKNOWN";
}

Status Status::from_errno(std::string_view what, int err) {
  char buffer[128];
  // The GNU strerror_r returns the text, which may or may not lie in the buffer.
  const char* text = ::strerror_r(err, buffer, sizeof buffer);
  return {Code::io, std::string(what) + ": " + text};
}

bool Status::retryable() const {
  switch (code_) {
    case Code::peer_lost:
    case Code::deadline_exceeded:
    case Code::pool_full:
    case Code::pool_unavailable:
    case Code::busy:
      return true;
    default:
      return false;
  }
}

std::string Status::to_string() const {
  if (is_ok()) return "OK";
  return std::string(code_name(code_)) + ": " + message_;
}

Status Status::with(std::string_view context) const {
  if (is_ok()) return *this;
  return {code_, std::string(context) + ": " + message_};
}

}  // namespace torch_mooncake
