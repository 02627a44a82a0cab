#include "topology/sysfs.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <regex>

namespace torch_mooncake::sysfs {

namespace fs = std::filesystem;

std::string read(const std::string& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
  return line;
}

std::optional<int64_t> read_int(const std::string& file) {
  std::string text = read(file);
  bool hex = text.rfind("0x", 0) == 0;
  const char *begin = text.data() + (hex ? 2 : 0), *end = text.data() + text.size();
  int64_t value = 0;
  auto [stop, error] = std::from_chars(begin, end, value, hex ? 16 : 10);
  if (error != std::errc{} || stop != end || begin == end) return {};
  return value;
}

std::vector<std::string> list(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

std::string real_path(const std::string& path) {
  std::error_code error;
  auto real = fs::canonical(path, error);
  return error ? std::string() : real.string();
}

std::vector<std::string> pci_components(const std::string& real) {
  static const std::regex pattern("pci[0-9a-f]{4,8}:[0-9a-f]{2}|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7]");
  std::vector<std::string> found;
  for (auto& part : fs::path(real))
    if (std::regex_match(part.string(), pattern)) found.push_back(part.string());
  return found;
}

int numa_node(const std::string& real) {
  for (fs::path folder = real; folder.has_relative_path(); folder = folder.parent_path()) {
    if (auto node = read_int((folder / "numa_node").string())) return *node < 0 ? -1 : static_cast<int>(*node);
    if (folder.filename().string().rfind("pci", 0) == 0) break;
  }
  return -1;
}

}  // namespace torch_mooncake::sysfs
