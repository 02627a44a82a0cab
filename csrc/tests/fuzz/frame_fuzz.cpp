// libFuzzer: everything that reads bytes of strangers. The first byte picks the part; the rest is its input.
//
// Run with a folder for the corpus; `frame_fuzz --write-seeds FOLDER` puts well-formed examples there first.
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "common/random.h"
#include "rpc/address.h"
#include "rpc/auth.h"
#include "rpc/frame.h"
#include "rpc/session.h"

using namespace torch_mooncake;
using namespace torch_mooncake::rpc;

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

// Whatever arrives, in pieces of any size: no body beyond its limit, no read past the input, errors are final.
void fuzz_decoder(Stage stage, std::string_view input) {
  size_t piece = input.empty() ? 1 : 1 + static_cast<unsigned char>(input[0]);
  FrameDecoder decoder(stage);
  while (!input.empty()) {
    std::string part(input.substr(0, piece));  // its own allocation, so that overreads are seen
    input.remove_prefix(part.size());
    std::string_view in = part;
    while (!in.empty()) {
      require(decoder.needed() > 0);
      auto step = decoder.push(in);
      if (step == FrameDecoder::Step::error) {
        require(!decoder.status().is_ok());
        return;
      }
      if (step == FrameDecoder::Step::need_more) break;
      std::string body = decoder.take_body();
      require(body.size() == decoder.header().body_bytes);
      if (stage == Stage::unproven) require(body.size() <= 512);
    }
  }
}

void fuzz_identity(std::string_view input) {
  ByteReader reader(input);
  auto identity = Identity::decode(reader);
  if (!reader.done()) return;
  ByteWriter writer;
  identity.encode(writer);
  require(writer.take() == input);  // one encoding for each identity
}

void fuzz_acceptor(std::string_view input) {
  ByteReader reader(input);
  std::string hello = reader.get_string(), proof = reader.get_string();
  AcceptorHandshake acceptor(Id128{}, "secret", [](const Id128&) { return std::optional(Digest{}); });
  if (!acceptor.on_hello(hello)) return;
  require(!acceptor.on_proof(proof).is_ok() || acceptor.claim());  // nobody guesses a proof of the token
}

void fuzz_initiator(std::string_view input) {
  ByteReader reader(input);
  std::string challenge = reader.get_string(), welcome = reader.get_string();
  InitiatorHandshake initiator(Id128{}, "secret", "tcp://x:1");
  initiator.hello();
  if (!initiator.on_challenge(challenge)) return;
  require(!initiator.on_welcome(welcome).is_ok());
}

void fuzz_address(std::string_view input) {
  auto address = parse_address(input);
  if (!address) return;
  auto again = parse_address(address->to_string());
  require(again.is_ok() && again->to_string() == address->to_string());
}

void write_seeds(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  int n = 0;
  auto write = [&](char part, const std::string& input) {
    std::ofstream(folder / ("seed" + std::to_string(n++)), std::ios::binary) << part << input;
  };
  auto frame = [](FrameType type, const std::string& body, uint64_t payload = 0) {
    FrameHeader h{type, 0, 400, static_cast<uint32_t>(body.size()), payload, 1};
    auto raw = encode_header(h);
    return std::string(raw.data(), raw.size()) + body;
  };
  InitiatorHandshake initiator(random_id(), "secret", "tcp://127.0.0.1:1");
  AcceptorHandshake acceptor(random_id(), "secret", [](const Id128&) { return std::optional<Digest>(); });
  std::string hello = initiator.hello(), challenge = *acceptor.on_hello(hello);
  std::string proof = *initiator.on_challenge(challenge), welcome = *acceptor.on_proof(proof);
  write(0, frame(FrameType::hello, hello) + frame(FrameType::proof, proof));
  write(0, frame(FrameType::reject, encode_reject({Code::auth, "wrong token"})));
  write(2, frame(FrameType::call, "body") + frame(FrameType::ping, "") + frame(FrameType::bulk, "b", 0));
  Identity identity;
  identity.addresses = {"tcp://127.0.0.1:1", "unix://@x"};
  ByteWriter w;
  identity.encode(w);
  std::string encoded = w.take();
  write(1, frame(FrameType::ready, encoded));
  write(3, encoded);
  ByteWriter a, i;
  a.put(std::string_view(hello)).put(std::string_view(proof));
  i.put(std::string_view(challenge)).put(std::string_view(welcome));
  write(4, a.take());
  write(5, i.take());
  for (const char* text : {"tcp://[::1]:80", "host:1", "unix:///a/b", "unix://@a", "rdma://x"}) write(6, text);
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc == 3 && std::strcmp((*argv)[1], "--write-seeds") == 0) {
    write_seeds((*argv)[2]);
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 8) {
    case 0:
      fuzz_decoder(Stage::unproven, input);
      break;
    case 1:
      fuzz_decoder(Stage::proven, input);
      break;
    case 2:
      fuzz_decoder(Stage::session, input);
      break;
    case 3:
      fuzz_identity(input);
      break;
    case 4:
      fuzz_acceptor(input);
      break;
    case 5:
      fuzz_initiator(input);
      break;
    case 6:
      fuzz_address(input);
      break;
    case 7:
      require(!decode_reject(input).is_ok());
      break;
  }
  return 0;
}
