// The last steps of a product on a GPU, before it is written to memory.
#pragma once

#include <cstdint>

namespace shardlib::kernels {

/// The steps that follow a product. Arrays have the product's dtype.
struct Epilogue {
  const void* bias = nullptr;  ///< of the result's last dims, `bias_size` elements: added
  std::int64_t bias_size = 0;
  void* gelu = nullptr;            ///< receives the gelu of the result, and has its shape
  const void* slope_at = nullptr;  ///< the result is multiplied by the derivative of gelu here; it has its shape
};

}  // namespace shardlib::kernels
