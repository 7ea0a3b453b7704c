// The main of every test program: a Catch2 session between initialising and finalising Kokkos and MPI.
#define CATCH_CONFIG_RUNNER
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "shardlib/launch.hpp"

int main(int argc, char** argv) {
  return shardlib::run_program(argc, argv, [&] { return Catch::Session().run(argc, argv); });
}
