#include "memory/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace torch_mooncake {
namespace {

uint64_t meminfo(const std::string& field) {
  std::ifstream in("/proc/meminfo");
  std::string name;
  uint64_t kib = 0;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    if (words >> name >> kib && name == field + ":") return kib * 1024;
  }
  return UINT64_MAX;
}

std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream in(path);
  uint64_t value = 0;
  if (in >> value) return value;
  return {};  // absent, or the word "max"
}

uint64_t stat_field(const std::string& path, const std::string& field) {
  std::ifstream in(path);
  std::string name;
  uint64_t value = 0;
  while (in >> name >> value) {
    if (name == field) return value;
  }
  return 0;
}

struct Group {
  uint64_t limit = UINT64_MAX;
  uint64_t left = UINT64_MAX;
};

// The tightest of a cgroup and its parents. Inside a container our own path may not exist under the mount: then the
// mount's root is our group.
Group tightest(const std::string& root, std::string path, const char* limit_file, const char* used_file,
               const char* cache_field) {
  Group result;
  while (true) {
    std::string folder = root + path;
    if (auto limit = read_number(folder + "/" + limit_file)) {
      uint64_t used = read_number(folder + "/" + used_file).value_or(0);
      uint64_t cache = std::min(used, stat_field(folder + "/memory.stat", cache_field));
      result.limit = std::min(result.limit, *limit);
      result.left = std::min(result.left, *limit > used - cache ? *limit - (used - cache) : 0);
    }
    if (path.empty() || path == "/") return result;
    path = path.substr(0, path.rfind('/'));
  }
}

Group cgroup() {
  std::ifstream in("/proc/self/cgroup");
  Group result;
  for (std::string line; std::getline(in, line);) {
    Group group;
    if (line.rfind("0::", 0) == 0) {
      group = tightest("/sys/fs/cgroup", line.substr(3), "memory.max", "memory.current", "inactive_file");
    } else if (auto at = line.find(":memory:"); at != line.npos) {
      group = tightest("/sys/fs/cgroup/memory", line.substr(at + 8), "memory.limit_in_bytes", "memory.usage_in_bytes",
                       "total_inactive_file");
    }
    result.limit = std::min(result.limit, group.limit);
    result.left = std::min(result.left, group.left);
  }
  return result;
}

}  // namespace

uint64_t memory_limit() { return std::min(meminfo("MemTotal"), cgroup().limit); }
uint64_t memory_available() { return std::min(meminfo("MemAvailable"), cgroup().left); }

uint64_t page_size() {
  static const auto size = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace torch_mooncake
