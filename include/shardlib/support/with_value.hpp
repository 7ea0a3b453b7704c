// A value that a variable has for as long as an object lives.
#pragma once

#include <type_traits>
#include <utility>

namespace shardlib::detail {

/// Gives a variable another value, and its own one back on every exit from the C++ block.
template <class T>
class WithValue {
 public:
  WithValue(T& variable, std::type_identity_t<T> value)
      : variable_(variable), before_(std::exchange(variable, std::move(value))) {}
  WithValue(const WithValue&) = delete;
  WithValue& operator=(const WithValue&) = delete;
  ~WithValue() { variable_ = std::move(before_); }

 private:
  T& variable_;
  T before_;
};

}  // namespace shardlib::detail
