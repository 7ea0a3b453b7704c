// The main of every test program: a Catch2 session between initializing and finalizing Kokkos and MPI.
#define CATCH_CONFIG_RUNNER
#include "catch.hpp"

#include "shardlib/device/launch.hpp"

int main(int argc, char** argv) {
  return shardlib::run_program(argc, argv, [&] { return Catch::Session().run(argc, argv); });
}
