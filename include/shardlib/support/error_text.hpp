// The text that a program prints for an exception that ends it.
#pragma once

#include <cxxabi.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <typeinfo>

#include "shardlib/support/error.hpp"

namespace shardlib::detail {

/// "std::runtime_error" of an exception's type, which is null for one of another language.
inline std::string type_name(const std::type_info* type) {
  if (type == nullptr) return "foreign exception";
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(type->name(), nullptr, nullptr, nullptr),
                                                         &std::free);
  return name ? name.get() : type->name();
}

/// The text of an exception, and for one that has none its type. That of a UsageError stays empty: the copy of a
/// program that is to be silent throws it.
inline std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const UsageError& e) {
    return e.what();
  } catch (const std::bad_alloc&) {
    return "the host has no memory left: choose smaller sizes, or fewer devices on this machine";
  } catch (const std::system_error& e) {
    // What std::thread throws: its text is the system's alone.
    if (e.code() != std::errc::resource_unavailable_try_again) return e.what();
    return "the system allows no more threads, or has no memory for their stacks: raise the limits (ulimit -u, "
           "ulimit -v), or start fewer processes on this machine";
  } catch (const std::exception& e) {
    const std::string text = e.what();
    return text.empty() ? "the program has thrown a " + type_name(&typeid(e)) + " without a text: give it one" : text;
  } catch (...) {
    return "the program has thrown a value of type " + type_name(abi::__cxa_current_exception_type()) +
           ", which is no std::exception: throw a shardlib::Error with a text";
  }
}

}  // namespace shardlib::detail
