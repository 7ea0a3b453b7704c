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

/// The name of an exception's type, "std::runtime_error". The type is null for an exception of another language.
inline std::string type_name(const std::type_info* type) {
  if (type == nullptr) return "foreign exception";
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(type->name(), nullptr, nullptr, nullptr),
                                                         &std::free);
  return name ? name.get() : type->name();
}

/// The text of an exception, or a sentence with its type if it has no text. Only a UsageError keeps an empty text: the
/// copies of a program that must print nothing throw it.
inline std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const UsageError& e) {
    return e.what();
  } catch (const std::bad_alloc&) {
    return "the host has no memory left: choose smaller sizes, or fewer devices on this machine";
  } catch (const std::system_error& e) {
    // std::thread throws this error, whose text says nothing about threads.
    if (e.code() != std::errc::resource_unavailable_try_again) return e.what();
    return "the system allows no more threads, or has no memory for their stacks: raise the limits (ulimit -u, "
           "ulimit -v), or start fewer processes on this machine";
  } catch (const std::exception& e) {
    const std::string text = e.what();
    return text.empty() ? "the program has thrown a " + type_name(&typeid(e)) + " without a text: give it one" : text;
  } catch (...) {
    return "the program has thrown a value of type " + type_name(abi::__cxa_current_exception_type()) +
           ", which is not a std::exception: throw a shardlib::Error with a text";
  }
}

}  // namespace shardlib::detail
