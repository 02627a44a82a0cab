// What the election says to etcd, and the options that name it. The election itself: tests/pool/test_membership.py.
#include "pool/election.h"

#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "common/fd.h"
#include "pool/election_text.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

TEST_CASE("base64 of every length, there and back") {
  CHECK(to_base64("") == "");
  CHECK(to_base64("M") == "TQ==");
  CHECK(to_base64("Ma") == "TWE=");
  CHECK(to_base64("Man") == "TWFu");
  std::string bytes;
  for (int i = 0; i < 300; ++i) {
    CHECK(from_base64(to_base64(bytes)) == bytes);
    bytes += static_cast<char>(i * 37);
  }
}

TEST_CASE("fields of etcd's answers") {
  const std::string answer =
      R"({"header":{"cluster_id":"12","revision":"34"},"kvs":[{"create_revision":"5","lease":"77","value":"QQ=="}],)"
      R"("succeeded" : true, "count":1})";
  CHECK(json_number(answer, "revision") == 34);
  CHECK(json_number(answer, "create_revision") == 5);
  CHECK(json_field(answer, "value") == "QQ==");
  CHECK(json_field(answer, "succeeded") == "true");
  CHECK(json_number(answer, "count") == 1);
  CHECK_FALSE(json_field(answer, "TTL"));
  CHECK_FALSE(json_number(answer, "value"));
  CHECK_FALSE(json_field(R"({"error":"value")", "value"));
  CHECK_FALSE(json_field(R"({"value":")", "value"));
  CHECK_FALSE(json_field("\"value\":", "value"));
  CHECK_FALSE(json_number(R"({"revision":"-1"})", "revision"));
}

TEST_CASE("where the election takes place") {
  for (const char* good : {"etcd://a", "etcd://a:2379", "etcd://a:1,b:2/prod", "etcd://[::1]:2379/", "etcd://[::1]"})
    CHECK_MESSAGE(open_election(good).is_ok(), good);
  for (const char* bad : {"etcd://", "etcd://a:0", "etcd://a:x", "etcd://a,,b", "etcd://:1"})
    CHECK_MESSAGE(open_election(bad).status().code() == Code::invalid_argument, bad);
  CHECK(open_election("zookeeper://a").status().code() == Code::unsupported);
}

TEST_CASE("an etcd that is not there: io, by the deadline") {
  auto election = open_election("etcd://127.0.0.1:1,127.0.0.1:2");
  REQUIRE(election.is_ok());
  CHECK((*election)->leader(Deadline::after_ms(5000)).status().code() == Code::io);
  CHECK((*election)->campaign({}, Deadline::after_ms(5000)).status().code() == Code::io);
}

TEST_CASE("a host that is silent leaves the others their time") {
  UniqueFd listening[2];
  std::string url = "etcd://";
  for (UniqueFd& fd : listening) {
    fd = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
    REQUIRE(::listen(fd.get(), 8) == 0);
    REQUIRE(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
    url += (url.ends_with('/') ? "" : ",") + ("127.0.0.1:" + std::to_string(ntohs(at.sin_port)));
  }
  std::thread answering([&] {  // the second, once: no key is there
    UniqueFd peer(::accept(listening[1].get(), nullptr, nullptr));
    char request[4096];
    const std::string answer = "HTTP/1.0 200 OK\r\n\r\n{}";
    if (peer.valid() && ::recv(peer.get(), request, sizeof request, 0) > 0)
      (void)::send(peer.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
  });
  auto election = open_election(url);
  REQUIRE(election.is_ok());
  auto leader = (*election)->leader(Deadline::after_ms(3000));
  ::shutdown(listening[1].get(), SHUT_RDWR);
  answering.join();
  REQUIRE_MESSAGE(leader.is_ok(), leader.status().to_string());
  CHECK_FALSE(leader->has_value());
}
