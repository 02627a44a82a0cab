// Reading sysfs, tolerantly: what is missing or malformed is empty.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_mooncake::sysfs {

std::string read(const std::string& file);                         // the first line, trimmed
std::optional<int64_t> read_int(const std::string& file);          // decimal, or hexadecimal after 0x
std::vector<std::string> list(const std::string& folder);          // names, sorted
std::string real_path(const std::string& path);                    // empty if there is none
std::vector<std::string> pci_components(const std::string& real);  // "pci0000:00", "0000:00:01.0", …
// numa_node of the device folder or of the nearest folder above that knows it.
int numa_node(const std::string& real);

}  // namespace torch_mooncake::sysfs
