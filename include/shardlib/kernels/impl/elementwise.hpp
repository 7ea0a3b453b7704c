// Definitions of elementwise.hpp.
#pragma once

#include "shardlib/kernels/elementwise.hpp"

#include <cstring>

#include "shardlib/support/function.hpp"

namespace shardlib::kernels::detail {

SHARDLIB_INLINE Strides padded(std::span<const std::int64_t> strides) {
  Strides all{};
  std::copy(strides.begin(), strides.end(), all.begin());
  return all;
}

/// Copies n elements between a strided row and a dense tile.
template <class U>
void copy_tile(std::byte* row, std::int64_t stride, std::byte* tile, std::int64_t n, bool to_tile) {
  U* a = reinterpret_cast<U*>(row);
  U* b = reinterpret_cast<U*>(tile);
  if (!to_tile) {
    for (std::int64_t i = 0; i < n; ++i) a[i * stride] = b[i];
  } else if (stride == 0) {
    std::fill_n(b, n, *a);
  } else {
    for (std::int64_t i = 0; i < n; ++i) b[i] = a[i * stride];
  }
}
inline void copy_tile(const ErasedOperand& o, std::byte* row, std::byte* tile, std::int64_t n, bool to_tile) {
  if (o.element == 4)
    copy_tile<Word<4>>(row, o.stride, tile, n, to_tile);
  else if (o.element == 2)
    copy_tile<Word<2>>(row, o.stride, tile, n, to_tile);
  else if (o.element == 8)
    copy_tile<Word<8>>(row, o.stride, tile, n, to_tile);
  else
    copy_tile<Word<1>>(row, o.stride, tile, n, to_tile);
}

SHARDLIB_INLINE body::ElementwiseLoops elementwise_loops(const Exec& exec, std::span<const std::int64_t> shape,
                                                         std::span<ErasedOperand> operands) {
  // A GPU has many blocks, of a few elements for each lane, so that it is busy to the end.
  const std::int64_t grain = exec.gpu() != nullptr ? 2048 : 8192;
  body::ElementwiseLoops loops;
  loops.grain = grain;
  if (product(shape) == 0) return loops;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::array<std::int64_t, max_operands> strides{};
    for (std::size_t k = 0; k < operands.size(); ++k) strides[k] = (*operands[k].strides)[d];
    loops.nest.push(shape[d], strides);
  }
  loops.inner = loops.nest.pop();
  for (std::size_t k = 0; k < operands.size(); ++k) operands[k].stride = loops.inner.strides[k];
  loops.rows = loops.nest.count();
  loops.pieces = (loops.inner.extent + grain - 1) / grain;
  loops.group = std::max<std::int64_t>(1, grain / loops.inner.extent);
  return loops;
}

/// A row that hands contiguous elements to a loop behind a pointer, so that all functions share it.
struct ErasedRow {
  std::array<ErasedOperand, max_operands> operands;
  std::size_t count;
  bool dense;  ///< every operand is contiguous
  UnitLoop loop;
  const void* f;  ///< null: its bytes are in `held`
  alignas(std::max_align_t) std::array<std::byte, 64> held;

  SHARDLIB_HOST_ONLY template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, const std::array<std::int64_t, max_operands>& offsets,
                                    const std::array<std::int64_t, max_operands>& /*strides*/, std::int64_t start,
                                    std::int64_t n) const {
    const auto place = [&](std::size_t k, std::int64_t i) {
      return operands[k].data +
             (offsets[k] + (start + i) * operands[k].stride) * static_cast<std::int64_t>(operands[k].element);
    };
    std::byte* data[max_operands];
    const void* const function = f != nullptr ? f : held.data();
    if constexpr (Team::single) {
      constexpr std::int64_t tile_size = 256;
      alignas(64) std::byte tiles[max_operands][tile_size * 8];
      const std::int64_t step = dense ? n : tile_size;
      for (std::int64_t begin = 0; begin < n; begin += step) {
        const std::int64_t length = std::min(step, n - begin);
        for (std::size_t k = 0; k < count; ++k) {
          data[k] = operands[k].stride == 1 ? place(k, begin) : tiles[k];
          // A broadcast element fills its tile once for the whole row.
          if (operands[k].stride != 1 && (operands[k].stride != 0 || begin == 0))
            copy_tile(operands[k], place(k, begin), tiles[k], length, true);
        }
        loop(function, length, data);
        for (std::size_t k = 0; k < count; ++k)
          if (operands[k].output && operands[k].stride != 1)
            copy_tile(operands[k], place(k, begin), tiles[k], length, false);
      }
    } else {
      team.lanes(n, [&](std::int64_t i) {
        for (std::size_t k = 0; k < count; ++k) data[k] = place(k, i);
#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)  // apply_erased throws on a GPU
        loop(function, 1, data);
#endif
      });
    }
  }
};

SHARDLIB_INLINE void apply_erased(const Exec& exec, std::span<const std::int64_t> shape,
                                  std::span<ErasedOperand> operands, UnitLoop loop, const void* f,
                                  std::size_t f_bytes) {
  if (exec.gpu() != nullptr) shardlib::detail::refuse_host_loop();  // a GPU cannot call the loop
  const auto loops = elementwise_loops(exec, shape, operands);
  ErasedRow row{{}, operands.size(), true, loop, f, {}};
  std::copy(operands.begin(), operands.end(), row.operands.begin());
  for (const ErasedOperand& o : operands) row.dense = row.dense && o.stride == 1;
  const bool held = exec.on_device() && f_bytes > 0 && f_bytes <= row.held.size();
  if (held) {
    std::memcpy(row.held.data(), f, f_bytes);
    row.f = nullptr;
  }
  exec.for_items(loops.items(), 0, body::Elementwise<ErasedRow>{loops, row});
  if (!held) exec.synchronize();
}

}  // namespace shardlib::kernels::detail
