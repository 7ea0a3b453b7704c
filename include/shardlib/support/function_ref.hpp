// A reference to a callable object, for parameters: `FunctionRef<int(double)>`.
#pragma once

#include <type_traits>
#include <utility>

namespace shardlib::detail {

template <class Signature>
class FunctionRef;
/// Must not outlive the object that it refers to.
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(const F& f)  // NOLINT(google-explicit-constructor): stands for the function
      : object_(&f), call_([](const void* object, Args... args) -> R {
          return (*static_cast<const F*>(object))(std::forward<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  const void* object_;
  R (*call_)(const void*, Args...);
};

}  // namespace shardlib::detail
