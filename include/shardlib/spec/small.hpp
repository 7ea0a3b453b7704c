// A vector of fixed capacity, for constant expressions.
#pragma once

#include <cstddef>

namespace shardlib::detail {

/// A vector of fixed capacity for constant expressions. It has the functions of std::vector that the rules need:
/// `items` and `count`, `size`, `full`, `empty`, `push_back`, `begin`, `end`, `contains` and `erase`, which takes a
/// position.
template <class T, int Capacity>
struct Small {
  T items[static_cast<std::size_t>(Capacity)]{};
  int count = 0;

  constexpr bool full() const { return count == Capacity; }
  constexpr void push_back(const T& item) { items[count++] = item; }
  constexpr int size() const { return count; }
  constexpr bool empty() const { return count == 0; }
  constexpr T& operator[](int i) { return items[i]; }
  constexpr const T& operator[](int i) const { return items[i]; }
  constexpr const T* begin() const { return items; }
  constexpr const T* end() const { return items + count; }
  constexpr T* begin() { return items; }
  constexpr T* end() { return items + count; }
  /// Position of the item, or -1.
  constexpr int find(const T& item) const {
    for (int i = 0; i < count; ++i)
      if (items[i] == item) return i;
    return -1;
  }
  constexpr bool contains(const T& item) const { return find(item) >= 0; }
  constexpr void erase(int at) {
    for (int i = at; i + 1 < count; ++i) items[i] = items[i + 1];
    items[--count] = T{};
  }
  friend constexpr bool operator==(const Small& a, const Small& b) {
    if (a.count != b.count) return false;
    for (int i = 0; i < a.count; ++i)
      if (!(a.items[i] == b.items[i])) return false;
    return true;
  }
};

/// An empty vector. A constant expression copies it in one step, but constructs it element by element.
template <class T>
inline constexpr T none{};

}  // namespace shardlib::detail
