#include "pool/node_args.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <map>

#include "common/fd.h"
#include "pool/node_options.h"

namespace torch_mooncake::pool {
namespace {

Status invalid(const std::string& name, const std::string& what) {
  return {Code::invalid_argument, name + ": " + what};
}

template <typename T>
Status parse_number(const std::string& name, const std::string& text, T& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error == std::errc() && end == text.data() + text.size()) return {};
  return invalid(name, "\"" + text + "\" is not a number");
}

Status read_token(const std::string& name, const std::string& path, std::string& out) {
  if (::access(path.c_str(), F_OK) != 0) return invalid(name, path + " does not exist");
  auto token = load_or_make_token(path);
  if (!token.is_ok()) return token.status().with(name);
  out = std::move(token).value();
  return {};
}

std::string default_runtime_dir() {
  const char* base = std::getenv("XDG_RUNTIME_DIR");
  if (base && base[0] == '/' && ::access(base, W_OK) == 0) return std::string(base) + "/torch_mooncake";
  return "/tmp/torch_mooncake-" + std::to_string(::geteuid());
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    size_t begin = text.find_first_not_of(' ', at), end = comma;
    while (end > begin && text[end - 1] == ' ') --end;
    if (begin < end) out.push_back(text.substr(begin, end - begin));
    at = comma + 1;
  }
  return out;
}

Status set(NodeOptions& options, const std::string& name, const std::string& value) {
  if (name == "--runtime-dir") {
    options.runtime_dir = value;
  } else if (name == "--pool") {
    options.pool = value;
  } else if (name == "--listen") {
    options.listen.push_back(value);
  } else if (name == "--leader") {
    options.leader = value;
  } else if (name == "--discovery") {
    options.discovery = value;
  } else if (name == "--token-file") {
    return read_token(name, value, options.token);
  } else if (name == "--host-id") {
    options.host_id = value;
  } else if (name == "--transports") {
    options.transports = split(value);
  } else if (name == "--nics") {
    options.nics = split(value);
  } else if (name == "--rdma") {
    options.rdma = value;
  } else if (name == "--memory") {
    auto nbytes = parse_bytes(value);
    if (!nbytes.is_ok()) return nbytes.status().with(name);
    options.memory_bytes = *nbytes;
  } else if (name == "--ssd") {
    // PATH:SIZE, several separated by commas.
    for (size_t at = 0; at <= value.size();) {
      const size_t comma = std::min(value.find(',', at), value.size()), colon = value.rfind(':', comma);
      if (colon == std::string::npos || colon <= at) return invalid(name, "\"" + value + "\": PATH:SIZE is needed");
      auto nbytes = parse_bytes(std::string_view(value).substr(colon + 1, comma - colon - 1));
      if (!nbytes.is_ok()) return nbytes.status().with(name);
      options.ssd.push_back({value.substr(at, colon - at), *nbytes});
      at = comma + 1;
    }
  } else if (name == "--linger-s" || name == "--linger") {
    return parse_number(name, value, options.linger_s);
  } else if (name == "--drain-s") {
    return parse_number(name, value, options.drain_s);
  } else if (name == "--ready-fd") {
    return parse_number(name, value, options.ready_fd);
  } else {
    return invalid(name, "no such option (see --help)");
  }
  return {};
}

Status from_environment(NodeOptions& options) {
  options.runtime_dir = default_runtime_dir();
  static const std::map<const char*, const char*> kNames{{"TM_RUNTIME_DIR", "--runtime-dir"},
                                                         {"TM_POOL", "--pool"},
                                                         {"TM_MEMORY", "--memory"},
                                                         {"TM_SSD", "--ssd"},
                                                         {"TM_LINGER_S", "--linger-s"},
                                                         {"TM_HOST_ID", "--host-id"},
                                                         {"TM_DISCOVERY", "--discovery"},
                                                         {"TM_TRANSPORTS", "--transports"},
                                                         {"TM_NICS", "--nics"},
                                                         {"TM_RDMA", "--rdma"}};
  for (const auto& [variable, option] : kNames) {
    const char* value = std::getenv(variable);
    if (!value || !*value) continue;
    if (Status s = set(options, option, value); !s) return s.with(variable);
  }
  if (const char* token = std::getenv("TM_TOKEN")) options.token = token;
  return {};
}

}  // namespace

std::string node_usage() {
  return "usage: torch-mooncake-node [options]\n"
         "Lends memory of this host to the pool, and runs until it is told to stop (SIGTERM) or nobody uses it.\n"
         "\n"
         "  --runtime-dir DIR   folder (0700, ours) of this host's nodes            [TM_RUNTIME_DIR]\n"
         "  --pool NAME         name of the pool on this host, \"default\"            [TM_POOL]\n"
         "  --memory SIZE       bytes to lend, such as 64G; a quarter of the memory [TM_MEMORY]\n"
         "  --ssd PATH:SIZE     folder of our own on an SSD for what the memory has no room for; may be repeated "
         "[TM_SSD]\n"
         "  --listen ADDRESS    listen here too, such as tcp://0.0.0.0:7400; may be repeated\n"
         "  --leader ADDRESS    join the pool that this node leads; without, be the leader\n"
         "  --discovery URL     etcd://HOST:PORT[,...][/PREFIX]: the nodes elect their leader there [TM_DISCOVERY]\n"
         "  --token-file FILE   the pool's secret (mode 600); without, TM_TOKEN or the one in the pool's folder\n"
         "  --host-id NAME      what makes two processes neighbours; the boot id    [TM_HOST_ID]\n"
         "  --transports LIST   what may carry bytes, local,shm,tcp; rdma takes all memory at once [TM_TRANSPORTS]\n"
         "  --nics LIST         which NICs, such as mlx5_*,!docker*; all           [TM_NICS]\n"
         "  --rdma SETTINGS     of the transport rdma, such as sl=3,tc=106          [TM_RDMA]\n"
         "  --linger-s SECONDS  exit so long after the last client, 60; < 0: never  [TM_LINGER_S]\n"
         "  --drain-s SECONDS   the longest that it takes to leave when told to stop, 30\n"
         "  --ready-fd FD       where \"ready ADDRESS...\" or \"error TEXT\" is written\n"
         "  --help, --version\n"
         "\n"
         "Exit codes: 0 stopped or unused, 1 failed, 2 bad options, 3 the pool has a node on this host already.\n";
}

Result<NodeArgs> parse_node_args(const std::vector<std::string>& args) {
  NodeArgs out;
  for (const std::string& arg : args) {
    out.help |= arg == "--help" || arg == "-h";
    out.version |= arg == "--version";
  }
  if (out.help || out.version) return out;
  TM_TRY(from_environment(out.options));
  // What the command line says of SSDs replaces what the environment says.
  for (const std::string& arg : args)
    if (arg == "--ssd" || arg.starts_with("--ssd=")) out.options.ssd.clear();
  for (size_t i = 0; i < args.size(); ++i) {
    const size_t equals = args[i].starts_with("--") ? args[i].find('=') : std::string::npos;
    const std::string name = args[i].substr(0, equals);
    if (!name.starts_with("--")) return invalid(name, "not an option (see --help)");
    if (equals != std::string::npos) {
      TM_TRY(set(out.options, name, args[i].substr(equals + 1)));
    } else {
      // An unknown option is told as such, also at the end of the line.
      if (i + 1 == args.size()) {
        NodeOptions scratch;
        const Status known = set(scratch, name, "");
        if (!known && known.message().find("no such option") != std::string::npos) return known;
        return invalid(name, "a value is missing");
      }
      TM_TRY(set(out.options, name, args[++i]));
    }
  }
  return out;
}

}  // namespace torch_mooncake::pool
