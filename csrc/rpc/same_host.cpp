#include "rpc/same_host.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>

#include "common/random.h"

namespace torch_mooncake::rpc {
namespace {

constexpr const char* kPrefix = "engine-";
constexpr int64_t kYoungSeconds = 10;  // it may be bound and not listen yet

bool nobody_listens(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode)) return false;
  if (::time(nullptr) - info.st_mtime < kYoungSeconds) return false;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return false;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 && errno == ECONNREFUSED;
}

void sweep(const std::string& folder) {
  std::error_code ignored;  // another engine may sweep at the same time
  for (auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    auto name = entry.path().filename().string();
    if (name.starts_with(kPrefix) && name.ends_with(".sock") && nobody_listens(entry.path().string()))
      (void)::unlink(entry.path().c_str());
  }
}

}  // namespace

Result<Listener> open_abstract_door(const Id128& engine) {
  Address address;
  address.kind = Address::Kind::unix;
  address.path = "@torch-mooncake-" + to_hex(engine);
  return open_listener(address, true);
}

Result<Listener> open_file_door(const std::string& folder, const Id128& engine) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return Status::from_errno("mkdir " + folder, errno);
  struct stat info;
  if (::lstat(folder.c_str(), &info) != 0) return Status::from_errno(folder, errno);
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 022) != 0)
    return {Code::auth, folder + " is not a folder that only we can write"};
  sweep(folder);
  Address address;
  address.kind = Address::Kind::unix;
  address.path = folder + "/" + kPrefix + to_hex(engine).substr(0, 16) + ".sock";
  return open_listener(address, true);
}

}  // namespace torch_mooncake::rpc
