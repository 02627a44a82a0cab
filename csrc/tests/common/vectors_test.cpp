// SHA-256, HMAC and CRC-32C against published vectors, and the two CRC implementations against each other.
#include <doctest/doctest.h>

#include <string>

#include "common/crc32c.h"
#include "common/random.h"
#include "common/sha256.h"

using namespace torch_mooncake;

static std::string hex(const Digest& d) { return to_hex(as_view(d)); }

TEST_CASE("sha256: FIPS 180-4 examples") {
  CHECK(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(sha256(std::string(1'000'000, 'a'))) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("sha256: any split of the input gives the same digest") {
  std::string text(300, '\0');
  random_bytes(text.data(), text.size());
  auto whole = sha256(text);
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    Sha256 h;
    h.update(std::string_view(text).substr(0, cut)).update(std::string_view(text).substr(cut));
    REQUIRE(h.finish() == whole);
  }
}

TEST_CASE("hmac-sha256: RFC 4231 cases 1, 2, 3, 6, 7") {
  CHECK(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(hex(hmac_sha256(std::string(131, '\xaa'),
                        "This is a test using a larger than block-size key and a larger than block-size data. The "
                        "key needs to be hashed before being used by the HMAC algorithm.")) ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST_CASE("equal_constant_time") {
  auto a = sha256("a"), b = a;
  CHECK(equal_constant_time(a, b));
  for (size_t i = 0; i < b.size(); ++i) {
    b = a;
    b[i] ^= 1;
    CHECK_FALSE(equal_constant_time(a, b));
  }
}

TEST_CASE("crc32c: RFC 3720 B.4 vectors, both implementations") {
  std::string ascending;
  for (int i = 0; i < 32; ++i) ascending += static_cast<char>(i);
  std::string descending(ascending.rbegin(), ascending.rend());
  auto check = [](auto crc) {
    CHECK(crc("123456789", 9, 0) == 0xe3069283);
    CHECK(crc(std::string(32, '\0').data(), 32, 0) == 0x8a9136aa);
    CHECK(crc(std::string(32, '\xff').data(), 32, 0) == 0x62a8ab43);
    CHECK(crc("", 0, 0) == 0);
  };
  check(crc32c_tables);
  check(crc32c);
  CHECK(crc32c(ascending.data(), 32) == 0x46dd794e);
  CHECK(crc32c(descending.data(), 32) == 0x113fdb5c);
}

TEST_CASE("crc32c: hardware equals tables at every size, start and split") {
  std::string data(100'000, '\0');
  random_bytes(data.data(), data.size());
  for (size_t n : {0u, 1u, 7u, 8u, 9u, 4095u, 4096u, 12287u, 12288u, 12289u, 12296u, 24576u, 99'000u}) {
    for (size_t start : {0u, 1u, 3u, 8u}) {
      auto want = crc32c_tables(data.data() + start, n, 0);
      REQUIRE(crc32c(data.data() + start, n) == want);
      size_t cut = n / 3;
      REQUIRE(crc32c(data.data() + start + cut, n - cut, crc32c(data.data() + start, cut)) == want);
    }
  }
}
