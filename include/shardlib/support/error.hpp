// Run-time errors. Every message names the op or file, the place, the reason and the remedy.
#pragma once

#include <stdexcept>
#include <string>

namespace shardlib {

/// A program that cannot go on: conflicting sizes, a failed collective, a damaged file. Exit status 1.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// An op on a tensor that holds nothing.
struct EmptyTensor : Error {
  using Error::Error;
};

/// A request that makes no sense: a wrong option, a missing file, a batch that the mesh does not divide. Exit status 2.
struct UsageError : Error {
  using Error::Error;
};

/// Thrown on a device that waits for another one that has failed; the failed one's own error is what gets reported.
struct Aborted : Error {
  Aborted() : Error("another device failed") {}
};

}  // namespace shardlib
