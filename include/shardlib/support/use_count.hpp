// How many handles share an object: the only handle may write to it.
#pragma once

#include <atomic>
#include <memory>

namespace shardlib::detail {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool under_thread_sanitizer = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
inline constexpr bool under_thread_sanitizer = true;
#else
inline constexpr bool under_thread_sanitizer = false;
#endif
#else
inline constexpr bool under_thread_sanitizer = false;
#endif

/// The number of handles; what other threads did with theirs before they dropped them is seen from here on.
template <class T>
long use_count(const std::shared_ptr<T>& x) {
  const long count = x.use_count();  // a relaxed read
  if constexpr (under_thread_sanitizer) {
    [[maybe_unused]] const std::shared_ptr<T> one_more = x;  // the sanitizer knows no fences, but atomic additions
  } else {
    std::atomic_thread_fence(std::memory_order_acquire);
  }
  return count;
}

}  // namespace shardlib::detail
