// Run-time errors. Every message names the op or file, the place, the reason and the remedy.
#pragma once

#include <stdexcept>
#include <string>

namespace shardlib {

/// An error that stops the program: conflicting sizes, a failed collective, a damaged file. Exit status 1.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// An op on an empty tensor.
struct EmptyTensor : Error {
  using Error::Error;
};

/// An invalid request: a wrong option, a missing file, a batch that the mesh does not divide. Exit status 2.
struct UsageError : Error {
  using Error::Error;
};

/// A failure of storage: a full disk, a failing device. A later try may succeed.
struct StorageError : Error {
  using Error::Error;
};

/// Thrown on a device that waits for a failed device. The failed device's own error is the one that is reported.
struct Aborted : Error {
  Aborted() : Error("another device failed") {}
};

/// f(), whose errors then begin with the option that they are about, and keep their kind. `naming_option("--load", [&]
/// { return read(path); })`
template <class F>
auto naming_option(const std::string& option, const F& f) {
  const auto named = [&](const Error& error) { return option + ": " + error.what(); };
  try {
    return f();
  } catch (const UsageError& error) {
    throw UsageError(named(error));
  } catch (const StorageError& error) {
    throw StorageError(named(error));
  } catch (const Aborted&) {
    throw;
  } catch (const Error& error) {
    throw Error(named(error));
  }
}

}  // namespace shardlib
