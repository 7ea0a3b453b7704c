// Handle<T>: a shared pointer for devices and for the parts of tensors. With std::shared_ptr, shapes.hpp would take a
// sixth longer to compile, because of <memory>, and with std::atomic a twelfth. Hence the compilers' atomic functions.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace shardlib::detail {

/// An object with a count of its handles. It is deleted with the last handle. A copy has its own count.
class Counted {
 protected:
  Counted() = default;
  Counted(const Counted&) noexcept {}
  Counted& operator=(const Counted&) noexcept { return *this; }
  virtual ~Counted() = default;

 private:
  template <class T>
  friend class Handle;
  // Copying and dropping a handle are function calls, because inline they would be most of an op's code. Only
  // `release` requires a non-null pointer: the caller checks, because the compiler knows that a moved-from handle is
  // empty.
  [[gnu::noinline]] static void retain(const Counted* x) noexcept {
    if (x != nullptr) __atomic_fetch_add(&x->handles_, 1, __ATOMIC_RELAXED);
  }
  [[gnu::noinline]] static void release(const Counted* x) noexcept {
    if (__atomic_fetch_sub(&x->handles_, 1, __ATOMIC_ACQ_REL) == 1) delete x;
  }
  mutable std::ptrdiff_t handles_ = 0;
};

/// Shares a T, which derives from Counted. T may be incomplete, except for `make`, `get`, `*` and `->`, and for
/// conversions from, and comparisons with, handles of a base class. Threads may share the T, but not one handle.
template <class T>
class Handle {
 public:
  Handle() = default;
  Handle(std::nullptr_t) noexcept {}  // NOLINT(google-explicit-constructor): as of std::shared_ptr
  Handle(const Handle& other) noexcept : counted_(other.counted_) { Counted::retain(counted_); }
  Handle(Handle&& other) noexcept : counted_(std::exchange(other.counted_, nullptr)) {}
  template <class U>
  requires(!std::is_same_v<T, U> && std::is_convertible_v<U*, T*>) Handle(Handle<U> other)
  noexcept  // NOLINT(google-explicit-constructor): as of std::shared_ptr
      : counted_(std::exchange(other.counted_, nullptr)) {}
  Handle& operator=(Handle other) noexcept {
    std::swap(counted_, other.counted_);
    return *this;
  }
  ~Handle() {
    if (counted_ != nullptr) Counted::release(counted_);
  }
  template <class... Args>
  [[nodiscard]] static Handle make(Args&&... args) {
    static_assert(std::is_convertible_v<T*, const Counted*>, "Handle: what it shares derives from Counted");
    Handle handle;
    handle.counted_ = new std::remove_const_t<T>(std::forward<Args>(args)...);
    Counted::retain(handle.counted_);
    return handle;
  }
  /// One more handle to an object that has some.
  [[nodiscard]] static Handle share(T* object) {
    Handle handle;
    handle.counted_ = object;
    Counted::retain(handle.counted_);
    return handle;
  }

  [[nodiscard]] T* get() const noexcept { return const_cast<T*>(static_cast<const T*>(counted_)); }
  T& operator*() const noexcept { return *get(); }
  T* operator->() const noexcept { return get(); }
  explicit operator bool() const noexcept { return counted_ != nullptr; }
  /// Once it returns 1, writes that other threads made before they dropped their handles are visible.
  [[nodiscard]] std::ptrdiff_t use_count() const noexcept {
    return counted_ == nullptr ? 0 : __atomic_load_n(&counted_->handles_, __ATOMIC_ACQUIRE);
  }
  template <class U>
  requires(std::is_convertible_v<U*, T*> || std::is_convertible_v<T*, U*>) bool operator==(
      const Handle<U>& other) const noexcept {
    return counted_ == other.counted_;
  }
  bool operator==(std::nullptr_t) const noexcept { return counted_ == nullptr; }

 private:
  template <class U>
  friend class Handle;
  const Counted* counted_ = nullptr;
};

}  // namespace shardlib::detail
