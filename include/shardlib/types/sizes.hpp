// The sizes of an array's dims, without and with padding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "shardlib/spec/spec.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::detail {

using Shape = Small<std::int64_t, max_dims>;

/// The global sizes of an array, without and with padding. Shards divide the padded sizes.
struct GlobalSizes {
  Shape logical;
  Shape padded;

  void push_back(DimSize dim) {
    logical.push_back(dim.size);
    padded.push_back(dim.padded);
  }
  void set(int i, DimSize dim) {
    logical[i] = dim.size;
    padded[i] = dim.padded;
  }
  DimSize operator[](int i) const { return {logical[i], padded[i]}; }
  [[nodiscard]] int size() const { return logical.size(); }
  [[nodiscard]] bool is_padded() const { return !(logical == padded); }
};

/// "50257 (padded to 50304)"
inline std::string to_string(DimSize dim) {
  return std::to_string(dim.size) + (dim.is_padded() ? " (padded to " + std::to_string(dim.padded) + ")" : "");
}

inline std::span<const std::int64_t> view(const Shape& e) {
  return {e.begin(), static_cast<std::size_t>(e.size())};
}
inline std::int64_t product(const Shape& e) {
  std::int64_t n = 1;
  for (const auto size : e) n *= size;
  return n;
}

}  // namespace shardlib::detail
