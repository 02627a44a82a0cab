// Status and Result<T>: how every torch-free function reports failure. No exceptions cross a room's border; Python
// turns a Status into the matching tm.Error subclass.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "common/api.h"

namespace torch_mooncake {

enum class Code : uint8_t {
  ok = 0,
  invalid_argument,   // the caller's mistake: sizes, names, types
  out_of_bounds,      // a slice leaves its region
  key_not_found,      // missing, which is not the same as failed
  key_exists,         // if_exists="error"
  pool_full,          // no room within the deadline; message has sizes
  pool_unavailable,   // no node, or the leader is lost
  peer_lost,          // the other process died or its connection broke
  deadline_exceeded,  // time ran out; the op is over all the same
  cancelled,
  auth,              // wrong token, or not allowed
  version_mismatch,  // the two sides speak different protocol versions
  corrupt,           // bytes do not match their checksum or generation
  layout_mismatch,   // two sides describe their tensors differently
  busy,              // memory is still reachable by somebody: kept in quarantine
  closed,            // used after close()
  forked,            // used in a forked child
  unsupported,       // unknown transport, absent capability
  io,                // a system call failed; message has errno's text
  internal,          // a bug: please report
};

TM_API const char* code_name(Code code);

class [[nodiscard]] TM_API Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status ok() { return {}; }
  // Status from errno, "what: strerror".
  static Status from_errno(std::string_view what, int err);

  bool is_ok() const { return code_ == Code::ok; }
  explicit operator bool() const { return is_ok(); }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // A second attempt may succeed (peer_lost, deadline_exceeded, pool_full, pool_unavailable, busy).
  bool retryable() const;
  std::string to_string() const;  // "PEER_LOST: message"

  // The same status with context in front: status.with("reading key a").
  Status with(std::string_view context) const;

 private:
  Code code_ = Code::ok;
  std::string message_;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {}  // NOLINT
  Result(Code code, std::string message) : status_(code, std::move(message)) {}
  bool is_ok() const { return value_.has_value(); }
  explicit operator bool() const { return is_ok(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace torch_mooncake

#define TM_CONCAT_(a, b) a##b
#define TM_CONCAT(a, b) TM_CONCAT_(a, b)
// Return early with the failed status.
#define TM_TRY(expr)                                                           \
  do {                                                                         \
    if (::torch_mooncake::Status tm_s_ = (expr); !tm_s_.is_ok()) return tm_s_; \
  } while (0)
// TM_ASSIGN(auto x, f()): declare x from a Result or return its status.
#define TM_ASSIGN_(tmp, decl, expr)      \
  auto tmp = (expr);                     \
  if (!tmp.is_ok()) return tmp.status(); \
  decl = std::move(tmp).value()
#define TM_ASSIGN(decl, expr) TM_ASSIGN_(TM_CONCAT(tm_r_, __LINE__), decl, expr)
