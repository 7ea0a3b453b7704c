// Handle<T>: a shared pointer. It takes a std::shared_ptr's place in the headers of types alone, to whose compile time
// <memory> adds a third.
#pragma once

#include <atomic>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace shardlib::detail {

/// What counts the handles to it, and goes with the last. A copy has its own count.
class Counted {
 public:
  Counted() = default;
  Counted(const Counted&) noexcept {}
  Counted& operator=(const Counted&) noexcept { return *this; }
  virtual ~Counted() = default;

 private:
  template <class T>
  friend class Handle;
  // Copying and dropping a handle are calls: done in place, they would be most of every op's code.
  [[gnu::noinline]] static void retain(const Counted* x) noexcept {
    if (x != nullptr) x->handles_.fetch_add(1, std::memory_order_relaxed);
  }
  [[gnu::noinline]] static void release(const Counted* x) noexcept {
    if (x->handles_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete x;
  }
  mutable std::atomic<std::ptrdiff_t> handles_ = 0;
};

/// Shares a T, which derives from Counted; only `make`, `get`, `*` and `->` need T whole. Threads may share the T, not
/// one handle.
template <class T>
class Handle {
 public:
  Handle() = default;
  Handle(std::nullptr_t) {}  // NOLINT(google-explicit-constructor): as of std::shared_ptr
  Handle(const Handle& other) noexcept : counted_(other.counted_) { Counted::retain(counted_); }
  Handle(Handle&& other) noexcept : counted_(std::exchange(other.counted_, nullptr)) {}
  template <class U>
    requires(!std::is_same_v<T, U> && std::is_convertible_v<U*, T*>)
  Handle(Handle<U> other) noexcept  // NOLINT(google-explicit-constructor): as of std::shared_ptr
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
    Handle handle;
    handle.counted_ = new std::remove_const_t<T>(std::forward<Args>(args)...);
    Counted::retain(handle.counted_);
    return handle;
  }

  [[nodiscard]] T* get() const { return const_cast<T*>(static_cast<const T*>(counted_)); }
  T& operator*() const { return *get(); }
  T* operator->() const { return get(); }
  explicit operator bool() const { return counted_ != nullptr; }
  [[nodiscard]] std::ptrdiff_t use_count() const {
    return counted_ == nullptr ? 0 : counted_->handles_.load(std::memory_order_relaxed);
  }
  template <class U>
  bool operator==(const Handle<U>& other) const {
    return counted_ == other.counted_;
  }
  bool operator==(std::nullptr_t) const { return counted_ == nullptr; }

 private:
  template <class U>
  friend class Handle;
  const Counted* counted_ = nullptr;
};

}  // namespace shardlib::detail
