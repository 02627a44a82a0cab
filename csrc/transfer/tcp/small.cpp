#include "transfer/tcp/small.h"

#include <cstring>

#include "transfer/engine_impl.h"
#include "transfer/tcp/endpoint.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {

const char* carrier(PeerImpl& peer) { return peer.session()->over_unix() ? "unix" : "tcp"; }

std::string_view view(const std::byte* data, uint64_t nbytes) {
  return {reinterpret_cast<const char*>(data), static_cast<size_t>(nbytes)};
}

// The pieces of a request, all within their regions; their bytes together, which are few.
Result<uint64_t> check_all(PeerImpl& peer, std::span<const Piece> pieces, Direction direction) {
  uint64_t nbytes = 0;
  for (auto& piece : pieces) {
    TM_TRY(peer.grants().check(piece, direction));
    nbytes += piece.nbytes;
    if (nbytes > SmallPart::kMaxBytes) return {Code::invalid_argument, "a small op that is not small"};
  }
  return nbytes;
}

}  // namespace

void SmallPart::run() {
  op_->add(shared_from_this());
  op_->direction() == Direction::write ? write() : read();
}

void SmallPart::write() {
  std::string body = ByteWriter().put(std::string_view(op_->take_notify())).take();
  body.reserve(body.size() + 4 + plan_.pieces.size() * sizeof(Piece) + plan_.nbytes);
  append_pieces(body, plan_.pieces);
  {
    std::lock_guard lock(mutex_);
    if (over_) return op_->quiescent(*this);  // the memory is the caller's again
    for (size_t i = 0; i < plan_.pieces.size(); ++i) body += view(plan_.local[i], plan_.pieces[i].nbytes);
  }
  op_->peer().engine().metrics().bytes(carrier(op_->peer()), plan_.nbytes, 0);
  op_->peer().session()->call(
      kSmallWrite, std::move(body), Deadline::never(),
      [self = shared_from_this()](Result<rpc::Message> answer) {
        auto& op = *self->op_;
        if (answer) op.add_bytes_done(self->plan_.nbytes);
        // Whatever the answer says, nothing lands after it; without one nobody knows.
        if (answer || op.peer().alive()) op.quiescent(*self);
        self->end(answer.status());
      },
      {}, true);
}

void SmallPart::read() {
  std::string body;
  append_pieces(body, plan_.pieces);
  op_->peer().session()->call(
      kSmallRead, std::move(body), Deadline::never(),
      [self = shared_from_this()](Result<rpc::Message> answer) {
        if (!answer) return self->end(answer.status());
        self->arrived(answer->body);
      },
      {}, true);
}

void SmallPart::arrived(std::string_view payload) {
  if (payload.size() != plan_.nbytes)
    return end({Code::corrupt, op_->peer().name() + " answered a read with " + std::to_string(payload.size()) +
                                   " bytes, not " + std::to_string(plan_.nbytes)});
  {
    std::lock_guard lock(mutex_);
    if (over_) return;
    over_ = true;
    for (size_t i = 0; i < plan_.pieces.size(); ++i) {
      std::memcpy(plan_.local[i], payload.data(), plan_.pieces[i].nbytes);
      payload.remove_prefix(plan_.pieces[i].nbytes);
    }
  }
  op_->add_bytes_done(plan_.nbytes);
  op_->peer().engine().metrics().bytes(carrier(op_->peer()), 0, plan_.nbytes);
  op_->part_done(shared_from_this(), {});
}

void SmallPart::end(const Status& outcome) {
  {
    std::lock_guard lock(mutex_);
    if (over_) return;
    over_ = true;
  }
  op_->part_done(shared_from_this(), outcome);
}

void SmallPart::help(Deadline deadline, int64_t spin_until_ns) {
  (void)op_->peer().session()->receive_until([this] { return op_->ended(); }, deadline, spin_until_ns);
}

// ---- The other side

void SmallPart::on_write(PeerImpl& peer, rpc::Message request, rpc::Responder responder) {
  ByteReader in(request.body);
  auto notify = in.get_string();
  auto pieces = get_pieces(in);
  auto nbytes = check_all(peer, pieces, Direction::write);
  if (!nbytes) return responder.fail(nbytes.status());
  if (!in.ok() || in.rest().size() != *nbytes) return responder.fail({Code::corrupt, "malformed small write"});
  const char* from = in.rest().data();
  for (auto& piece : pieces) {
    auto window = peer.grants().window(piece, Direction::write);
    if (!window) return responder.fail(window.status());
    std::memcpy(window->data, from, piece.nbytes);
    peer.grants().release(*window);
    from += piece.nbytes;
  }
  peer.engine().metrics().bytes(carrier(peer), 0, *nbytes);
  if (!notify.empty()) peer.engine().notes()->push({peer.identity().engine, peer.identity().name, std::move(notify)});
  responder.ok();
}

void SmallPart::on_read(PeerImpl& peer, rpc::Message request, rpc::Responder responder) {
  ByteReader in(request.body);
  auto pieces = get_pieces(in);
  if (!in.done()) return responder.fail({Code::corrupt, "malformed small read"});
  auto nbytes = check_all(peer, pieces, Direction::read);
  if (!nbytes) return responder.fail(nbytes.status());
  std::string payload;
  payload.reserve(*nbytes);
  for (auto& piece : pieces) {
    auto window = peer.grants().window(piece, Direction::read);
    if (!window) return responder.fail(window.status());
    payload.append(view(window->data, piece.nbytes));
    peer.grants().release(*window);
  }
  peer.engine().metrics().bytes(carrier(peer), *nbytes, 0);
  responder.ok(std::move(payload));
}

}  // namespace torch_mooncake::transfer
