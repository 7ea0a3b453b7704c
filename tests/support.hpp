// Helpers for the tests: bodies on a mesh, expectations that any thread may state, buffers from values.
#pragma once

#include "catch.hpp"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <source_location>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/device/impl/launch_parts.hpp"
#include "shardlib/device/launch.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/with_value.hpp"

namespace shardlib::test {

/// A failed expectation of a device body. Not a shardlib::Error, so that no test takes it for the error it expects.
struct Failure : std::logic_error {
  using std::logic_error::logic_error;
};

/// Catch's own macros are for one thread only; `launch` carries this exception to the test.
inline void expect(bool ok, std::string_view message = "expectation failed",
                   std::source_location where = std::source_location::current()) {
  if (!ok) {
    throw Failure(std::string(where.file_name()) + ":" + std::to_string(where.line()) + ": " + std::string(message));
  }
}

template <class T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_same_v<T, bf16>) {
    out << float(value);
  } else {
    out << value;
  }
  return out.str();
}

/// Equal in size and in every element; names the first that differs.
template <class T>
void expect_equal(const std::vector<T>& actual, const std::vector<T>& expected,
                  std::source_location where = std::source_location::current()) {
  expect(actual.size() == expected.size(), show(actual.size()) + " elements instead of " + show(expected.size()),
         where);
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (!(actual[i] == expected[i])) {
      expect(false, "element " + show(i) + " is " + show(actual[i]) + " instead of " + show(expected[i]), where);
    }
  }
}

/// The text without the lines of calls in the test's own file, " at FILE:LINE". Those elsewhere are wrong, and stay.
inline std::string without_sites(std::string text, std::source_location where) {
  const std::string at = " at " + std::string(where.file_name()) + ":";
  for (std::size_t i = text.find(at); i != std::string::npos; i = text.find(at, i)) {
    const std::size_t end = text.find_first_not_of("0123456789", i + at.size());
    text.erase(i, (end == std::string::npos ? text.size() : end) - i);
  }
  return text;
}

/// The message with which f fails, or "no error".
template <class E = Error, class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "no error";
}

/// f throws an E whose text is exactly `text`, but for the lines of the calls where `text` has none.
template <class E = Error, class F>
void expect_error(const F& f, std::string_view text, std::source_location where = std::source_location::current()) {
  std::string got = error_of<E>(f);
  if (text.find(" at " + std::string(where.file_name()) + ":") == std::string_view::npos)
    got = without_sites(got, where);
  expect(got == text, "the error is \"" + got + "\" instead of \"" + std::string(text) + "\"", where);
}

/// expect_error of one expression.
#define ERROR_IS(text, ...) ::shardlib::test::expect_error([&] { static_cast<void>(__VA_ARGS__); }, text)

/// Waits for the device of a result. Wrong ids, which the CPU finds in the op, are an error here on other devices.
template <class T>
void wait_for(const T& x) {
  x.value()->device->exec().synchronize();
}

/// The most memory that f takes at once, beyond what is there.
template <class F>
std::size_t peak(const DevicePtr& device, const F& f) {
  device->pool()->reset_peak();
  const std::size_t before = device->pool()->stats().live;
  f();
  return device->pool()->stats().peak - before;
}

/// Sets an environment variable, and back.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) {
    const char* const before = std::getenv(name);
    was_set_ = before != nullptr;
    if (was_set_) before_ = before;
    setenv(name, value, 1);
  }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  ~Setting() { was_set_ ? setenv(name_, before_.c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  bool was_set_;
  std::string before_;
};

/// A test sets this to fail or die while a checkpoint is saved.
inline std::function<void(std::string_view phase, int device)> checkpoint_phase;

/// The options with which `on_mesh` launches. A test lowers a field with Temporarily.
inline Tuning tuning = {.checkpoint_phase = [](std::string_view phase, int device) {
  if (checkpoint_phase) checkpoint_phase(phase, device);
}};

/// What SHARDLIB_TEST_DEVICE=nccl adds to the simulated device: a stand-in for NCCL, from comm_nccl_test.cpp.
struct NcclForTests {
  const detail::nccl::Functions* functions = nullptr;
  void (*check)() = nullptr;  ///< throws if the calls were not those that NCCL allows
};
inline NcclForTests nccl_for_tests;

inline std::string_view test_device() {
  const char* const name = std::getenv("SHARDLIB_TEST_DEVICE");
  return name == nullptr ? "" : name;
}
/// What runs the kernels of `on_mesh` where the test does not say it: SHARDLIB_TEST_DEVICE=simulated, nccl or gpu, or
/// else the CPU.
inline DeviceKind device_kind() {
  const std::string_view name = test_device();
  if (name.empty()) return DeviceKind::cpu;
  if (name == "simulated" || name == "nccl") return DeviceKind::simulated;
  if (name == "gpu") return DeviceKind::gpu;
  throw std::invalid_argument("SHARDLIB_TEST_DEVICE is '" + std::string(name) + "'; there are simulated, nccl and gpu");
}

/// Whether a case takes long: under a sanitizer, and on the simulated device, where lanes take turns.
inline bool is_slow() {
#if defined(SHARDLIB_ADDRESS_SANITIZER) || defined(SHARDLIB_THREAD_SANITIZER)
  return true;
#else
  return device_kind() == DeviceKind::simulated;
#endif
}

/// The cases, of which only the first `most` are taken where one takes long.
template <class T, std::size_t N>
std::span<const T> few(const T (&cases)[N], std::size_t most) {
  return std::span(cases).first(is_slow() ? most : N);
}

/// Gives a variable another value for as long as this lives.
template <class T>
using Temporarily = detail::WithValue<T>;

/// Runs `body` once per device of the mesh. Under mpirun with too few ranks it does nothing and returns false, as for
/// more than 4 devices where SHARDLIB_TEST_DEVICE=simulated; ranks beyond the mesh are idle. When only some ranks fail
/// the whole job ends, as the others may wait for them.
inline bool on_mesh(const std::string& mesh, const DeviceBody& body, LaunchOptions options = {.kind = device_kind()}) {
  const std::vector<AxisSize> axes = parse_mesh(mesh);
  SUCCEED();  // an assertion for Catch, which sees none of what the devices expect
  if (under_mpi() && device_count(axes) > world_size()) return false;
  if (device_kind() == DeviceKind::simulated && device_count(axes) > 4) return false;
  std::exception_ptr error;
  detail::Ending ending;
  ending.idle = world_rank() >= device_count(axes);
  options.allow_idle_ranks = true;
  options.tuning = tuning;
  const bool by_nccl = test_device() == "nccl" && options.kind == DeviceKind::simulated && !tuning.nccl;
  if (by_nccl && !nccl_for_tests.functions)
    throw std::invalid_argument("SHARDLIB_TEST_DEVICE is nccl, but comm_nccl_test.cpp is not in this build");
  if (by_nccl) {
    options.tuning.nccl = nccl_for_tests.functions;
    options.tuning.nccl_apart = true;
    options.tuning.simulated_seed = 1;  // kernels run early, too, before what waits in NCCL's stream
  }
  try {
    launch(axes, body, options);
    if (by_nccl) nccl_for_tests.check();
  } catch (...) {
    error = std::current_exception();
    ending = detail::ending_of(error);
  }
  const std::string message = detail::agreed_message(ending);
  if (error) std::rethrow_exception(error);
  // An idle rank must leave the test case too, or it would be out of step in the next one.
  if (ending.idle && !message.empty()) throw Failure(message);
  return true;
}

/// A device, as the parameter of a body that takes its Mesh.
struct AnyMesh {
  const DevicePtr& device;
  template <class M>
  operator M() const {
    return M(device);
  }
};
/// The same for a body that takes a Mesh: on_mesh("d=2", [](const Mesh<"d">& mesh) { ... })
template <class Body>
requires(!std::is_invocable_v<const Body&, const DevicePtr&>) bool on_mesh(const std::string& mesh, const Body& body,
                                                                           LaunchOptions options = {
                                                                               .kind = device_kind()}) {
  return on_mesh(mesh, DeviceBody([&](const DevicePtr& device) { body(AnyMesh{device}); }), std::move(options));
}

/// on_mesh for each mesh, which a failure names.
template <class Body>
void on_meshes(const std::vector<std::string>& meshes, const Body& body,
               const LaunchOptions& options = {.kind = device_kind()}) {
  for (const std::string& mesh : meshes) {
    INFO(mesh);
    on_mesh(mesh, body, options);
  }
}

template <class T>
Buffer make_buffer(const Device& device, const std::vector<T>& values) {
  Buffer buffer = device.host_pool()->allocate(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(buffer.data(), values.data(), buffer.bytes());
  return buffer;
}

template <class T>
Buffer make_buffer(const Device& device, std::size_t count) {
  return make_buffer(device, std::vector<T>(count));
}

/// Element i of a rank's numbers, of both signs and many magnitudes, so that every order of summation gives other bits.
template <class T = float>
T rough(int rank, std::size_t i) {
  const auto h = static_cast<std::uint32_t>((static_cast<std::size_t>(rank) * 7919 + i) * 2654435761U + 12345U);
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(h);
  else
    return static_cast<T>(std::ldexp(static_cast<float>(h >> 8) / 16777216.0F - 0.5F, static_cast<int>((h >> 3) % 12)));
}
template <class T = float>
std::vector<T> rough_values(int rank, std::size_t count) {
  std::vector<T> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(rough<T>(rank, i));
  return values;
}

template <class T>
std::vector<T> values_of(const Buffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  copy(Buffer(values.data(), buffer.bytes(), nullptr), buffer);
  return values;
}

}  // namespace shardlib::test
