#include "pool/node_options.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <set>

#include "common/fd.h"
#include "common/random.h"
#include "memory/host_memory.h"
#include "pool/election.h"
#include "pool/ssd/store.h"
#include "rpc/address.h"

namespace torch_mooncake::pool {
namespace {

constexpr uint64_t kLeastMemory = 1 << 20;

Status invalid(std::string message) { return {Code::invalid_argument, std::move(message)}; }

Status check_own_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return Status::from_errno("making " + path, errno);
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) return Status::from_errno(path, errno);
  if (!S_ISDIR(info.st_mode)) return {Code::auth, path + " is not a folder"};
  if (info.st_uid != ::geteuid())
    return {Code::auth, path + " belongs to uid " + std::to_string(info.st_uid) + ", not to us"};
  if (info.st_mode & 077) return {Code::auth, path + " is open to others: chmod 700 it"};
  return {};
}

}  // namespace

Result<uint64_t> parse_bytes(std::string_view text) {
  double number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string unit(rest, text.data() + text.size());
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  if (unit.ends_with("IB")) {
    unit.resize(unit.size() - 2);
  } else if (unit.ends_with("B")) {
    unit.pop_back();
  }
  const size_t power = unit.empty() ? 0 : std::string_view("KMGTP").find(unit) + 1;
  if (error != std::errc() || unit.size() > 1 || (!unit.empty() && power == 0))
    return invalid("\"" + std::string(text) + "\" is not a size: write 64G, 512M or a number of bytes");
  const double bytes = std::ldexp(number, static_cast<int>(10 * power));
  if (!(bytes >= 0) || bytes > 0x1p60) return invalid("\"" + std::string(text) + "\" is no size that memory can have");
  return static_cast<uint64_t>(bytes);
}

Result<NodeOptions> resolve_options(NodeOptions options) {
  if (options.runtime_dir.empty() || options.runtime_dir[0] != '/')
    return invalid("runtime-dir \"" + options.runtime_dir + "\": an absolute path is needed");
  auto fine = [](unsigned char c) { return std::isalnum(c) || c == '.' || c == '_' || c == '-' || c == '+'; };
  if (options.pool.empty() || options.pool.size() > 64 || options.pool[0] == '.' ||
      !std::all_of(options.pool.begin(), options.pool.end(), fine))
    return invalid("pool \"" + options.pool + "\": 1 to 64 letters, digits and . _ - +, not starting with a dot");
  const std::string socket = options.runtime_dir + "/" + options.pool + "/node.sock";
  if (socket.size() >= sizeof(sockaddr_un::sun_path))
    return invalid(socket + " is too long for a Unix socket: choose a shorter runtime-dir");
  for (const std::string& listen : options.listen)
    if (auto address = rpc::parse_address(listen); !address.is_ok()) return address.status().with("listen");
  if (!options.leader.empty())
    if (auto address = rpc::parse_address(options.leader); !address.is_ok()) return address.status().with("leader");
  if (!options.discovery.empty()) {
    if (!options.leader.empty()) return invalid("a leader and a discovery: one says who leads");
    if (auto election = open_election(options.discovery); !election.is_ok()) return election.status();
    if (options.listen.empty()) return invalid("discovery needs an address for the other nodes: listen");
  }
  if (options.host_id.size() > 256) return invalid("host-id is longer than 256 bytes");
  if (options.token.size() > 1024) return invalid("the token is longer than 1024 bytes");
  if (std::isnan(options.linger_s) || options.linger_s > 1e9) return invalid("linger-s is no time in seconds");
  if (!(options.drain_s >= 0 && options.drain_s <= 86'400)) return invalid("drain-s is 0 to 86400 seconds");
  if (options.ready_fd < -1) return invalid("ready-fd " + std::to_string(options.ready_fd));
  if (options.ready_fd >= 0 && ::fcntl(options.ready_fd, F_GETFD) < 0)
    return invalid("ready-fd " + std::to_string(options.ready_fd) + " is not open");
  std::set<std::string> folders;
  for (const SsdOptions& ssd : options.ssd) {
    if (ssd.path.empty() || ssd.path[0] != '/') return invalid("ssd \"" + ssd.path + "\": an absolute path is needed");
    if (ssd.limit_bytes < ssd::kLeastLimit)
      return invalid("ssd " + ssd.path + ": at least " + std::to_string(ssd::kLeastLimit >> 20) + " MiB are needed");
    if (!folders.insert(ssd.path).second) return invalid("ssd " + ssd.path + " is given twice");
  }
  const uint64_t limit = memory_limit();
  if (options.memory_bytes == 0) options.memory_bytes = limit / 4;
  if (options.memory_bytes < kLeastMemory)
    return invalid("memory of " + std::to_string(options.memory_bytes) + " bytes: at least 1 MiB is needed");
  if (options.memory_bytes > limit)
    return invalid("memory of " + std::to_string(options.memory_bytes) + " bytes: this host (or cgroup) has " +
                   std::to_string(limit));
  return options;
}

Result<std::string> prepare_folder(const NodeOptions& options) {
  // The parents of the runtime folder are the user's; made if absent, as mkdir -p.
  for (size_t at = options.runtime_dir.find('/', 1); at != std::string::npos;
       at = options.runtime_dir.find('/', at + 1)) {
    const std::string parent = options.runtime_dir.substr(0, at);
    if (::mkdir(parent.c_str(), 0700) != 0 && errno != EEXIST) return Status::from_errno("making " + parent, errno);
  }
  TM_TRY(check_own_folder(options.runtime_dir));
  const std::string folder = options.runtime_dir + "/" + options.pool;
  TM_TRY(check_own_folder(folder));
  return folder;
}

Result<std::string> load_or_make_token(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) {
    if (errno != ENOENT) return Status::from_errno("token file " + path, errno);
    unsigned char secret[32];
    random_bytes(secret, sizeof secret);
    const std::string token = to_hex(std::string_view(reinterpret_cast<char*>(secret), sizeof secret));
    const std::string fresh = path + ".new";
    ::unlink(fresh.c_str());
    UniqueFd out(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    const std::string line = token + "\n";
    if (!out.valid() || ::write(out.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size()) ||
        ::rename(fresh.c_str(), path.c_str()) != 0)
      return Status::from_errno("writing token file " + path, errno);
    return token;
  }
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return Status::from_errno("token file " + path, errno);
  if (info.st_uid != ::geteuid() || (info.st_mode & 077))
    return {Code::auth, "token file " + path + " is not ours alone: it must be ours and have mode 600"};
  char text[1026];
  const ssize_t n = ::read(fd.get(), text, sizeof text);
  if (n < 0) return Status::from_errno("token file " + path, errno);
  std::string token(text, static_cast<size_t>(n));
  while (!token.empty() && std::isspace(static_cast<unsigned char>(token.back()))) token.pop_back();
  if (token.size() < 16 || token.size() > 1024)
    return {Code::auth, "token file " + path + " has no token (16 to 1024 bytes)"};
  return token;
}

}  // namespace torch_mooncake::pool
