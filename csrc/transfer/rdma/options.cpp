#include "transfer/rdma/options.h"

#include <cerrno>
#include <cstdlib>
#include <string>

namespace torch_mooncake::transfer::rdma {
namespace {

Status set(RdmaOptions& options, std::string_view name, const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const uint64_t value = strtoull(text.c_str(), &end, 0);
  const bool number = !text.empty() && text[0] != '-' && *end == '\0' && errno == 0;
  auto store = [&](auto& field, uint64_t least, uint64_t most) -> Status {
    if (!number || value < least || value > most)
      return {Code::invalid_argument, "rdma: " + std::string(name) + " must be " + std::to_string(least) + " .. " +
                                          std::to_string(most) + ", not '" + text + "'"};
    field = static_cast<std::decay_t<decltype(field)>>(value);
    return {};
  };
  if (name == "sl") return store(options.service_level, 0, 15);
  if (name == "tc") return store(options.traffic_class, 0, 255);
  if (name == "pkey") return store(options.pkey, 1, 0xffff);
  if (name == "gid") return store(options.gid_index, 0, 255);
  if (name == "timeout") return store(options.timeout, 1, 31);
  if (name == "retries") return store(options.retries, 0, 7);
  if (name == "relaxed") return store(options.relaxed_ordering, 0, 1);
  if (name == "odp") return store(options.on_demand, 0, 1);
  if (name == "lazy") return store(options.lazy, 0, 1);
  if (name == "mr") return store(options.max_mr_nbytes, 4096, UINT64_MAX);
  if (name == "qps") return store(options.max_queue_pairs, 2, 1 << 20);
  if (name == "mtu") {
    TM_TRY(store(options.mtu, 256, 4096));
    if ((options.mtu & (options.mtu - 1)) == 0) return {};
    return {Code::invalid_argument, "rdma: mtu must be 256, 512, 1024, 2048 or 4096, not " + text};
  }
  return {Code::invalid_argument, "rdma: nothing is called '" + std::string(name) +
                                      "'; there are sl, tc, pkey, gid, mtu, timeout, retries, relaxed, odp, lazy, mr, "
                                      "qps"};
}

}  // namespace

Result<RdmaOptions> RdmaOptions::parse(std::string_view text) {
  RdmaOptions options;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    const auto entry = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
    const size_t equals = entry.find('=');
    if (equals == entry.npos)
      return Status(Code::invalid_argument, "rdma: '" + std::string(entry) + "' is not of the form name=value");
    TM_TRY(set(options, entry.substr(0, equals), std::string(entry.substr(equals + 1))));
  }
  return options;
}

}  // namespace torch_mooncake::transfer::rdma
