// Catch2's implementation, which takes longer to compile than most tests: once for all test programs.
#define CATCH_CONFIG_RUNNER
#include "catch.hpp"

int run_tests(int argc, char** argv) {
  return Catch::Session().run(argc, argv);
}
