// Hyper-rectangles (boxes) of row-major arrays, and their contiguous runs in two arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardlib::io {

/// Sizes or places, one a dim.
using Index = std::vector<std::int64_t>;

namespace detail {

/// `joined({2, 0}, ".")` is "2.0"
inline std::string joined(std::span<const std::int64_t> values, std::string_view separator) {
  std::string text;
  for (const auto value : values) (text += text.empty() ? "" : separator) += std::to_string(value);
  return text;
}
/// A shape in a message: "[256, 2, 64]".
inline std::string show_shape(std::span<const std::int64_t> shape) {
  return "[" + joined(shape, ", ") + "]";
}

}  // namespace detail

/// The number of elements of a shape.
inline std::int64_t volume(std::span<const std::int64_t> shape) {
  std::int64_t n = 1;
  for (const auto size : shape) n *= size;
  return n;
}
/// The stride of each dim of a row-major array, in elements.
inline Index row_major_strides(std::span<const std::int64_t> shape) {
  Index strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}
/// Advances a place within `shape`, the last dim fastest; false after the last. `do { ... } while (next_place(place,
/// shape))`
inline bool next_place(Index& place, std::span<const std::int64_t> shape) {
  for (std::size_t i = place.size(); i-- > 0;) {
    if (++place[i] < shape[i]) return true;
    place[i] = 0;
  }
  return false;
}

/// Calls f(offset in a, offset in b, elements) for each run of a box that is contiguous in both arrays, where
/// `strides` are the arrays' and the offsets count from the box's first element. `for_each_run(box, strides,
/// strides_out, [&](auto a, auto b, auto n) { ... })`
template <class F>
void for_each_run(std::span<const std::int64_t> box, const Index& a_strides, const Index& b_strides, F&& f) {
  if (volume(box) == 0) return;
  std::size_t outer = box.size();
  std::int64_t run = 1;
  while (outer > 0 && (box[outer - 1] == 1 || (a_strides[outer - 1] == run && b_strides[outer - 1] == run)))
    run *= box[--outer];
  Index place(outer, 0);
  do {
    std::int64_t a = 0, b = 0;
    for (std::size_t i = 0; i < outer; ++i) {
      a += place[i] * a_strides[i];
      b += place[i] * b_strides[i];
    }
    f(a, b, run);
  } while (next_place(place, box.first(outer)));
}
/// Copies a box between two arrays, which have `item` bytes for an element. The pointers are to the box's first
/// element in each. `copy_box(box, 4, shard, row_major_strides(local), message, row_major_strides(box))`
inline void copy_box(std::span<const std::int64_t> box, std::size_t item, const std::byte* from,
                     const Index& from_strides, std::byte* to, const Index& to_strides) {
  for_each_run(box, from_strides, to_strides, [&](std::int64_t a, std::int64_t b, std::int64_t n) {
    std::memcpy(to + static_cast<std::size_t>(b) * item, from + static_cast<std::size_t>(a) * item,
                static_cast<std::size_t>(n) * item);
  });
}
/// Copies a box of a file into an array. `read(place, out)` fills `out` from a place in bytes, which counts from the
/// box's first element. Short runs are cut from one read of all that is between, which is faster than many.
/// `read_box(box, 4, row_major_strides(stored), read, out, row_major_strides(box))`
template <class Read>
void read_box(std::span<const std::int64_t> box, std::size_t item, const Index& from_strides, Read&& read,
              std::byte* to, const Index& to_strides) {
  const auto bytes = [item](std::int64_t elements) { return static_cast<std::size_t>(elements) * item; };
  std::int64_t span = 0, shortest = volume(box);
  for_each_run(box, from_strides, to_strides, [&](std::int64_t a, std::int64_t, std::int64_t n) {
    span = a + n;
    shortest = std::min(shortest, n);
  });
  if (shortest == span || bytes(shortest) >= 65536) {
    for_each_run(box, from_strides, to_strides, [&](std::int64_t a, std::int64_t b, std::int64_t n) {
      read(bytes(a), std::span(to + bytes(b), bytes(n)));
    });
    return;
  }
  std::vector<std::byte> all(bytes(span));
  read(std::size_t{0}, std::span(all));
  copy_box(box, item, all.data(), from_strides, to, to_strides);
}

}  // namespace shardlib::io
