// The tiles of row_tile.hpp on a GPU: a warp has 16 rows, and multiplies them on its tensor cores. Elements are in
// registers, where the instruction mma.m16n8k16 has them: a lane has those of two rows, shared with three other lanes.
#pragma once

#include <cstdint>

#include "shardlib/device/team.hpp"
#include "shardlib/kernels/body/row_tile.hpp"
#include "shardlib/spec/dtype.hpp"

#if defined(__CUDACC__)

namespace shardlib::kernels::body {

/// A team of four warps.
template <class Team>
concept WarpTeam = Team::part_lanes == 32 && Team::parts == 4;

namespace cuda {

/// Four matrices of 8 x 8 elements. Lane i names the row i % 8 of the matrix i / 8, and receives two elements of each:
/// those of row i / 4, or, transposed, of column i / 4.
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}
__device__ __forceinline__ void load_transposed(std::uint32_t (&to)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}
/// Adds the product of 16 x 16 and 16 x 8 elements.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// Two numbers as bf16, the first of them in the lower half.
__device__ __forceinline__ std::uint32_t pack(float first, float second) {
  std::uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
/// Copies 16 bytes to shared memory, or sets them to zero.
__device__ __forceinline__ void start_piece(std::uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ int lane() {
  return shardlib::detail::cuda_lane() % 32;
}
__device__ __forceinline__ int first_row() {
  return shardlib::detail::cuda_lane() / 32 * 16;
}

}  // namespace cuda

template <WarpTeam Team>
struct TileRows<Team> {
  static constexpr int count = 64, slots = 2;

  [[nodiscard]] __device__ __forceinline__ static int row(int slot) {
    return cuda::first_row() + cuda::lane() / 4 + 8 * slot;
  }
  template <class F>
  __device__ __forceinline__ static void for_each(const Team& /*team*/, const F& f) {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) f(slot, row(slot));
  }
  template <class F>
  __device__ __forceinline__ static void for_each_once(const Team& team, const F& f) {
    if (cuda::lane() % 4 == 0) for_each(team, f);
  }
  __device__ __forceinline__ static void maximum(float (&x)[slots]) {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      x[slot] = fmaxf(x[slot], __shfl_xor_sync(0xffffffffU, x[slot], 1));
      x[slot] = fmaxf(x[slot], __shfl_xor_sync(0xffffffffU, x[slot], 2));
    }
  }
  __device__ __forceinline__ static void sum(float (&x)[slots]) {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      x[slot] += __shfl_xor_sync(0xffffffffU, x[slot], 1);
      x[slot] += __shfl_xor_sync(0xffffffffU, x[slot], 2);
    }
  }
};

template <WarpTeam Team, int Columns>
class RowOperand<Team, Columns> {
 public:
  __device__ __forceinline__ void load(const Team& /*team*/, TeamMatrix<Columns> from) {
    const int lane = cuda::lane();
    const std::uint32_t row =
        cuda::shared_address(from.first) +
        static_cast<std::uint32_t>((cuda::first_row() + lane % 16) * Columns) * std::uint32_t{sizeof(bf16)};
#pragma unroll
    for (int k = 0; k < Columns / 16; ++k)
      cuda::load_matrices(x_[k], row + static_cast<std::uint32_t>(((2 * k + lane / 16) ^ (lane & 7)) * 16));
  }

 private:
  template <class, int>
  friend class RowTile;
  std::uint32_t x_[Columns / 16][4];
};

template <WarpTeam Team, int Columns>
class RowTile<Team, Columns> {
 public:
  using Rows = TileRows<Team>;

  template <class F>
  __device__ __forceinline__ void for_each(const Team& /*team*/, const F& f) {
    const int first = cuda::lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < Columns / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int slot = 0; slot < Rows::slots; ++slot) f(slot, Rows::row(slot), 8 * j + first + e, x_[j][2 * slot + e]);
  }
  template <class F>
  __device__ __forceinline__ void for_each_with(const Team& /*team*/, const RowTile& other, const F& f) {
    const int first = cuda::lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < Columns / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int slot = 0; slot < Rows::slots; ++slot)
          f(slot, Rows::row(slot), 8 * j + first + e, x_[j][2 * slot + e], other.x_[j][2 * slot + e]);
  }
  template <class F>
  __device__ __forceinline__ void for_pairs(const Team& /*team*/, const F& f) {
    const int first = cuda::lane() % 4 * 2;
#pragma unroll
    for (int slot = 0; slot < Rows::slots; ++slot)
#pragma unroll
      for (int j = 0; j < Columns / 8; ++j)
        f(slot, Rows::row(slot), 8 * j + first, x_[j][2 * slot], x_[j][2 * slot + 1]);
  }
  __device__ __forceinline__ void clear(const Team& /*team*/) {
#pragma unroll
    for (auto& part : x_)
#pragma unroll
      for (float& x : part) x = 0;
  }
  template <int K>
  __device__ __forceinline__ void set_product_transposed(const Team& team, const RowOperand<Team, K>& a,
                                                         TeamMatrix<K> b) {
    constexpr std::uint32_t row_bytes = K * sizeof(bf16);
    const int lane = cuda::lane(), row = lane / 16 * 8 + lane % 8, group = lane / 8 % 2;
    const std::uint32_t from = cuda::shared_address(b.first) + static_cast<std::uint32_t>(row) * row_bytes;
    clear(team);
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
      const std::uint32_t at = from + static_cast<std::uint32_t>(((2 * k + group) ^ (row & 7)) * 16);
#pragma unroll
      for (int j = 0; j < Columns / 16; ++j) {
        std::uint32_t f[4];
        cuda::load_matrices(f, at + static_cast<std::uint32_t>(j) * 16 * row_bytes);
        cuda::multiply_add(x_[2 * j], a.x_[k], f[0], f[1]);
        cuda::multiply_add(x_[2 * j + 1], a.x_[k], f[2], f[3]);
      }
    }
  }
  template <int K>
  __device__ __forceinline__ void add_product(const Team& /*team*/, const RowTile<Team, K>& a, TeamMatrix<Columns> b) {
    constexpr std::uint32_t row_bytes = Columns * sizeof(bf16);
    const int lane = cuda::lane(), row = lane % 16, group = lane / 16;
    const std::uint32_t from = cuda::shared_address(b.first) + static_cast<std::uint32_t>(row) * row_bytes;
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
      const auto& low = a.x_[2 * k];
      const auto& high = a.x_[2 * k + 1];
      const std::uint32_t factors[4] = {cuda::pack(low[0], low[1]), cuda::pack(low[2], low[3]),
                                        cuda::pack(high[0], high[1]), cuda::pack(high[2], high[3])};
#pragma unroll
      for (int j = 0; j < Columns / 16; ++j) {
        std::uint32_t f[4];
        cuda::load_transposed(f, from + static_cast<std::uint32_t>(k) * 16 * row_bytes +
                                     static_cast<std::uint32_t>(((2 * j + group) ^ (row & 7)) * 16));
        cuda::multiply_add(x_[2 * j], factors, f[0], f[1]);
        cuda::multiply_add(x_[2 * j + 1], factors, f[2], f[3]);
      }
    }
  }

 private:
  template <class, int>
  friend class RowTile;
  float x_[Columns / 8][4];
};

template <int Rows, int Columns, WarpTeam Team>
__device__ __forceinline__ void start_copy(const Team& /*team*/, const OperandRows& from, TeamMatrix<Columns> to) {
  using M = TeamMatrix<Columns>;
  constexpr int lanes = 32 * Team::parts, pieces = Rows * M::groups, apart = lanes / M::groups;  // rows of a lane
  static_assert(pieces % lanes == 0 && apart % 8 == 0);
  const int g = shardlib::detail::cuda_lane() % M::groups, row = shardlib::detail::cuda_lane() / M::groups;
  const bool column = g * M::group < from.width;
  const std::uint32_t at = cuda::shared_address(to.first + M::offset(row, g));
  const bf16* source = from.first + row * from.stride + g * M::group;
#pragma unroll
  for (int i = 0; i < pieces / lanes; ++i) {
    const bool there = column && row + i * apart < from.rows;
    cuda::start_piece(at + static_cast<std::uint32_t>(i * apart * Columns) * std::uint32_t{sizeof(bf16)},
                      there ? source + i * apart * from.stride : from.first, there);
  }
}
template <class T, WarpTeam Team>
__device__ __forceinline__ void start_copy(const Team& /*team*/, int count, const T* from, T* to) {
  constexpr int elements = 16 / sizeof(T);
  for (int i = shardlib::detail::cuda_lane() * elements; i < count; i += 32 * Team::parts * elements)
    cuda::start_piece(cuda::shared_address(to + i), from + i, true);
}
template <WarpTeam Team>
__device__ __forceinline__ void finish_copies(const Team& /*team*/) {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace shardlib::kernels::body

#endif
