#include "rpc/session.h"

#include "rpc/responder_state.h"

namespace torch_mooncake::rpc {

void Identity::encode(ByteWriter& out) const {
  out.put(engine).put(std::string_view(host_id)).put(std::string_view(name)).put(std::string_view(role));
  out.put(pid).put(nonce_address).put(nonce);
  out.put(static_cast<uint32_t>(addresses.size()));
  for (auto& address : addresses) out.put(std::string_view(address));
}

Identity Identity::decode(ByteReader& in) {
  Identity id;
  id.engine = in.get_id();
  id.host_id = in.get_string();
  id.name = in.get_string();
  id.role = in.get_string();
  id.pid = in.get<uint32_t>();
  id.nonce_address = in.get<uint64_t>();
  id.nonce = in.get_id();
  uint32_t n = in.get_count(4);
  for (uint32_t i = 0; i < n && in.ok(); ++i) id.addresses.push_back(in.get_string());
  return id;
}

Responder::Responder(std::shared_ptr<State> state) : state_(std::move(state)) {}
Responder::Responder(Responder&&) noexcept = default;

Responder& Responder::operator=(Responder&& other) noexcept {
  if (this != &other) {
    Responder dropped(std::move(state_));  // answers, if nobody did
    state_ = std::move(other.state_);
  }
  return *this;
}

Responder::~Responder() {
  if (state_) fail({Code::internal, "the handler gave no answer"});
}

void Responder::ok(std::string body, std::vector<UniqueFd> fds) {
  auto state = std::move(state_);
  if (state) state->ok(std::move(body), std::move(fds));
}

void Responder::fail(const Status& status) {
  auto state = std::move(state_);
  if (state) state->fail(status);
}

}  // namespace torch_mooncake::rpc
