// The number of handles that share an object, for code that writes to the object if it holds the only handle.
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

/// The number of handles. Writes that other threads made before they dropped their handles are visible after this
/// call.
template <class T>
long use_count(const std::shared_ptr<T>& x) {
  const long count = x.use_count();  // a relaxed read
  if constexpr (under_thread_sanitizer) {
    // ThreadSanitizer does not support fences, but sees this atomic increment
    [[maybe_unused]] const std::shared_ptr<T> one_more = x;
  } else {
    std::atomic_thread_fence(std::memory_order_acquire);
  }
  return count;
}

}  // namespace shardlib::detail
