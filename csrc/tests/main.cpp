// doctest's main, which also fails when a filter of test cases (-tc=A,B) names what is not there: doctest alone is
// content with a run of nothing.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <fnmatch.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace {

std::vector<std::string> names;  // of the cases that ran

struct Listener final : doctest::IReporter {
  explicit Listener(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& data) override { names.emplace_back(data.m_name); }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};
REGISTER_LISTENER("cases that ran", 1, Listener);

// The patterns of the arguments "-tc=…" and "--test-case=…".
std::vector<std::string> patterns(int argc, char** argv) {
  std::vector<std::string> out;
  for (int i = 1; i < argc; ++i)
    for (const char* name : {"-tc=", "--test-case="})
      if (std::strncmp(argv[i], name, std::strlen(name)) == 0)
        for (const char* at = argv[i] + std::strlen(name); *at; at += *at == ',') {
          size_t length = std::strcspn(at, ",");
          out.emplace_back(at, length);
          at += length;
        }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  int status = context.run();
  if (context.shouldExit()) return status;  // it was asked for a list, or for help
  for (auto& pattern : patterns(argc, argv)) {
    bool ran = false;
    for (auto& name : names) ran |= fnmatch(pattern.c_str(), name.c_str(), FNM_CASEFOLD | FNM_NOESCAPE) == 0;
    if (ran) continue;
    std::fprintf(stderr, "no test case is called '%s'\n", pattern.c_str());
    status = 1;
  }
  if (argc == 1 || !names.empty()) return status;  // without filters: a program may have none (its headers are missing)
  std::fprintf(stderr, "no test case ran\n");
  return 1;
}
