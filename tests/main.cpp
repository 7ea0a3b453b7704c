// The main of every test program: a Catch2 session between initializing and finalizing Kokkos and MPI.
#include "shardlib/device/launch.hpp"

int run_tests(int argc, char** argv);  // of catch_session.cpp

int main(int argc, char** argv) {
  return shardlib::run_program(argc, argv, [&] { return run_tests(argc, argv); });
}
