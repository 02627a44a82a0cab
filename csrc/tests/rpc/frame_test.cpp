// The codec by itself: round trips, every split of a stream, every flipped bit of a header, limits by stage.
#include "rpc/frame.h"

#include <doctest/doctest.h>

#include "common/random.h"
#include "rpc/auth.h"
#include "rpc/endpoint.h"
#include "rpc/session.h"

using namespace torch_mooncake;
using namespace torch_mooncake::rpc;

static std::string frame(FrameType type, std::string body, uint64_t payload = 0) {
  FrameHeader h;
  h.type = type;
  h.method = 400;
  h.id = 7;
  h.body_bytes = static_cast<uint32_t>(body.size());
  h.payload_bytes = payload;
  auto raw = encode_header(h);
  return std::string(raw.data(), raw.size()) + body;
}

TEST_CASE("decoder: a stream in pieces of any size gives the same frames") {
  std::string stream = frame(FrameType::call, "hello") + frame(FrameType::ping, "") +
                       frame(FrameType::post, std::string(1000, 'x')) + frame(FrameType::bulk, "b", 0);
  for (size_t piece = 1; piece <= stream.size(); ++piece) {
    FrameDecoder decoder(Stage::session);
    std::vector<std::string> bodies;
    for (size_t at = 0; at < stream.size(); at += piece) {
      std::string_view in = std::string_view(stream).substr(at, piece);
      while (!in.empty()) {
        auto step = decoder.push(in);
        REQUIRE(step != FrameDecoder::Step::error);
        if (step == FrameDecoder::Step::frame) bodies.push_back(decoder.take_body());
      }
    }
    REQUIRE(bodies == std::vector<std::string>{"hello", "", std::string(1000, 'x'), "b"});
  }
}

TEST_CASE("decoder: needed() never leads into the next frame") {
  std::string stream = frame(FrameType::call, "hello") + frame(FrameType::post, "next");
  FrameDecoder decoder(Stage::session);
  size_t at = 0;
  while (true) {
    std::string_view in = std::string_view(stream).substr(at, decoder.needed());
    at += in.size();
    if (decoder.push(in) == FrameDecoder::Step::frame) break;
  }
  CHECK(at == kHeaderBytes + 5);
}

TEST_CASE("header: limits and types by stage; foreign bytes are recognised from the first") {
  auto accepts = [](FrameType type, Stage stage, uint32_t body, uint64_t payload = 0) {
    FrameHeader h;
    h.type = type;
    h.body_bytes = body;
    h.payload_bytes = payload;
    auto raw = encode_header(h);
    return decode_header({raw.data(), raw.size()}, stage).is_ok();
  };
  CHECK(accepts(FrameType::hello, Stage::unproven, kMaxBodyBeforeAuth));
  CHECK_FALSE(accepts(FrameType::hello, Stage::unproven, kMaxBodyBeforeAuth + 1));
  CHECK_FALSE(accepts(FrameType::hello, Stage::session, 10));
  CHECK_FALSE(accepts(FrameType::call, Stage::unproven, 0));
  CHECK_FALSE(accepts(FrameType::call, Stage::proven, 0));
  CHECK_FALSE(accepts(FrameType::hot_call, Stage::proven, 0));
  CHECK(accepts(FrameType::call, Stage::session, kMaxBody));
  CHECK(accepts(FrameType::hot_call, Stage::session, kMaxBody));
  CHECK_FALSE(accepts(FrameType::call, Stage::session, kMaxBody + 1));
  CHECK_FALSE(accepts(FrameType::call, Stage::session, 0, 1));
  CHECK(accepts(FrameType::bulk, Stage::session, 10, kMaxPayload));
  CHECK_FALSE(accepts(FrameType::bulk, Stage::session, 10, kMaxPayload + 1));
  CHECK_FALSE(accepts(FrameType::ready, Stage::unproven, 10));
  CHECK(accepts(FrameType::ready, Stage::proven, 1000));
  CHECK_FALSE(accepts(static_cast<FrameType>(99), Stage::session, 0));

  FrameDecoder decoder(Stage::unproven);
  std::string_view get = "G";
  CHECK(decoder.push(get) == FrameDecoder::Step::error);
  CHECK(decoder.status().code() == Code::corrupt);
  CHECK(decoder.push(get) == FrameDecoder::Step::error);  // final
}

TEST_CASE("identity: round trip, and every truncation fails") {
  Identity id;
  id.engine = random_id();
  id.host_id = "host";
  id.name = "name";
  id.role = "role";
  id.pid = 42;
  id.nonce_address = 0x1234567890;
  id.nonce = random_id();
  id.addresses = {"tcp://127.0.0.1:1", "unix://@x"};
  ByteWriter w;
  id.encode(w);
  std::string bytes = w.take();
  ByteReader r(bytes);
  auto back = Identity::decode(r);
  CHECK(r.done());
  CHECK(back.engine == id.engine);
  CHECK(back.addresses == id.addresses);
  CHECK(back.pid == 42);
  for (size_t n = 0; n < bytes.size(); ++n) {
    ByteReader cut(std::string_view(bytes).substr(0, n));
    (void)Identity::decode(cut);
    REQUIRE_FALSE(cut.done());
  }
}

TEST_CASE("handshake: agree on a session; a lane proves its key; every single flipped bit is caught") {
  auto run = [](std::optional<size_t> flip_message, size_t flip_bit) {
    std::vector<Digest> none;
    InitiatorHandshake i(random_id(), "token", "tcp://a:1");
    AcceptorHandshake a(random_id(), "token", [](const Id128&) { return std::optional<Digest>(); });
    auto carry = [&](size_t n, std::string body) {
      if (flip_message == n) body[flip_bit / 8 % body.size()] ^= static_cast<char>(1 << flip_bit % 8);
      return body;
    };
    auto challenge = a.on_hello(carry(0, i.hello()));
    if (!challenge) return false;
    auto proof = i.on_challenge(carry(1, *challenge));
    if (!proof) return false;
    auto welcome = a.on_proof(carry(2, *proof));
    if (!welcome) return false;
    if (!i.on_welcome(carry(3, *welcome))) return false;
    return i.session().key == a.session().key && i.session().id == a.session().id;
  };
  CHECK(run({}, 0));
  for (size_t message = 0; message < 4; ++message) {
    for (size_t bit = 0; bit < 8 * 64; ++bit) REQUIRE_FALSE(run(message, bit));
  }
  Digest key = sha256("session key");
  auto find = [&](const Id128&) { return std::optional(key); };
  for (bool right : {true, false}) {
    InitiatorHandshake lane(random_id(), right ? std::string(as_view(key)) : "other", "x", LaneClaim{random_id(), 3});
    AcceptorHandshake a(random_id(), "token", find);
    auto welcome = a.on_proof(*lane.on_challenge(*a.on_hello(lane.hello())));
    CHECK(welcome.is_ok() == right);
    CHECK(a.claim()->index == 3);
  }
}

TEST_CASE("reject: round trip; a long message is cut to fit; nonsense is corrupt, never ok") {
  CHECK(decode_reject(encode_reject({Code::auth, "no"})).code() == Code::auth);
  CHECK(encode_reject({Code::auth, std::string(5000, 'x')}).size() <= kMaxBodyBeforeAuth);
  CHECK(decode_reject("").code() == Code::corrupt);
  CHECK(decode_reject(std::string(5, '\0')).code() == Code::corrupt);
}
