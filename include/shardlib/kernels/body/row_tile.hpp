// Matrix products of a team: tiles of 64 rows, of which each lane holds a part in its own variables, and matrices of
// bf16 in team memory. This is what teams without tensor cores do; row_tile_cuda.hpp has the GPU's.
#pragma once

#include <cstdint>

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/math.hpp"

namespace shardlib::kernels::body {

/// A matrix in team memory. Each row has its groups of 8 elements in another order, so that lanes that read the same
/// group of neighboring rows read different banks.
template <int Columns>
struct TeamMatrix {
  static_assert(Columns % 64 == 0);
  static constexpr int group = 8, groups = Columns / group;
  bf16* first;

  /// The rows from r on, a multiple of 8.
  [[nodiscard]] constexpr TeamMatrix from(int r) const { return {first + r * Columns}; }
  [[nodiscard]] static constexpr int offset(int row, int g) { return row * Columns + (g ^ (row & 7)) * group; }
};

/// Rows in the device's memory, which begin at 16 bytes. A matrix's elements beyond `rows` and `width` are zero.
struct OperandRows {
  const bf16* first;
  std::int64_t stride;
  int rows;
  int width;  ///< a multiple of 8
};

/// 2^x, to about the rounding of an f32: 0 for -inf.
SHARDLIB_FUNCTION inline float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return fast_exp(x * 0.693147181F);
#endif
}

/// The division of a tile's 64 rows among the lanes of a team. A lane has a variable, called a slot, for each row of
/// which it holds elements.
template <class Team>
struct TileRows {
  static constexpr int count = 64, slots = count;

  /// Calls f(slot, row) on each lane for each of its rows.
  template <class F>
  SHARDLIB_FUNCTION static void for_each(const Team& team, const F& f) {
    team.lanes(count, [&](std::int64_t r) { f(static_cast<int>(r), static_cast<int>(r)); });
  }
  /// The same on one lane for each row.
  template <class F>
  SHARDLIB_FUNCTION static void for_each_once(const Team& team, const F& f) {
    for_each(team, f);
  }
  /// A lane's numbers of its rows become the maxima of those of all lanes that hold elements of the row.
  SHARDLIB_FUNCTION static void maximum(float (&)[slots]) {}
  /// The same for sums.
  SHARDLIB_FUNCTION static void sum(float (&)[slots]) {}
};

/// The left operand of products: 64 rows of bf16.
template <class Team, int Columns>
class RowOperand {
 public:
  /// Lanes read the matrix. After the next barrier it is not needed.
  SHARDLIB_FUNCTION void load(const Team& team, TeamMatrix<Columns> from) {
    using M = TeamMatrix<Columns>;
    team.lanes(TileRows<Team>::count, [&](std::int64_t r) {
      for (int g = 0; g < M::groups; ++g)
        for (int e = 0; e < M::group; ++e)
          x_[r][g * M::group + e] = static_cast<float>(from.first[M::offset(static_cast<int>(r), g) + e]);
    });
  }

 private:
  template <class, int>
  friend class RowTile;
  float x_[TileRows<Team>::count][Columns];
};

/// 64 rows of f32.
template <class Team, int Columns>
class RowTile {
 public:
  using Rows = TileRows<Team>;

  /// Calls f(slot, row, column, element) for all elements. Each lane has some.
  template <class F>
  SHARDLIB_FUNCTION void for_each(const Team& team, const F& f) {
    team.lanes(Rows::count, [&](std::int64_t r) {
      for (int c = 0; c < Columns; ++c) f(static_cast<int>(r), static_cast<int>(r), c, x_[r][c]);
    });
  }
  /// The same with the elements of another tile: f(slot, row, column, element, other element).
  template <class F>
  SHARDLIB_FUNCTION void for_each_with(const Team& team, const RowTile& other, const F& f) {
    team.lanes(Rows::count, [&](std::int64_t r) {
      for (int c = 0; c < Columns; ++c) f(static_cast<int>(r), static_cast<int>(r), c, x_[r][c], other.x_[r][c]);
    });
  }
  /// Calls f(slot, row, column, element, next element) for all even columns.
  template <class F>
  SHARDLIB_FUNCTION void for_pairs(const Team& team, const F& f) {
    team.lanes(Rows::count, [&](std::int64_t r) {
      for (int c = 0; c < Columns; c += 2) f(static_cast<int>(r), static_cast<int>(r), c, x_[r][c], x_[r][c + 1]);
    });
  }
  SHARDLIB_FUNCTION void clear(const Team& team) {
    for_each(team, [](int /*slot*/, int /*row*/, int /*column*/, float& x) { x = 0; });
  }
  /// Becomes a b'.
  template <int K>
  SHARDLIB_FUNCTION void set_product_transposed(const Team& team, const RowOperand<Team, K>& a, TeamMatrix<K> b) {
    using M = TeamMatrix<K>;
    team.lanes(Rows::count, [&](std::int64_t r) {
      for (int c = 0; c < Columns; ++c) {
        float sums[M::group] = {};
        for (int g = 0; g < M::groups; ++g)
          for (int e = 0; e < M::group; ++e)
            sums[e] += a.x_[r][g * M::group + e] * static_cast<float>(b.first[M::offset(c, g) + e]);
        x_[r][c] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
      }
    });
  }
  /// Adds a b, with a rounded to bf16.
  template <int K>
  SHARDLIB_FUNCTION void add_product(const Team& team, const RowTile<Team, K>& a, TeamMatrix<Columns> b) {
    using M = TeamMatrix<Columns>;
    team.lanes(Rows::count, [&](std::int64_t r) {
      for (int k = 0; k < K; ++k) {
        const auto factor = static_cast<float>(static_cast<bf16>(a.x_[r][k]));
        for (int g = 0; g < M::groups; ++g)
          for (int e = 0; e < M::group; ++e)
            x_[r][g * M::group + e] += factor * static_cast<float>(b.first[M::offset(k, g) + e]);
      }
    });
  }

 private:
  template <class, int>
  friend class RowTile;
  float x_[Rows::count][Columns];
};

/// Starts copies of `Rows` rows to a matrix, and of 16-byte pieces. They are there after finish_copies and a barrier.
template <int Rows, int Columns, class Team>
SHARDLIB_FUNCTION void start_copy(const Team& team, const OperandRows& from, TeamMatrix<Columns> to) {
  using M = TeamMatrix<Columns>;
  team.lanes(Rows * M::groups, [&](std::int64_t i) {
    const int r = static_cast<int>(i) / M::groups, g = static_cast<int>(i) % M::groups;
    const bool there = r < from.rows && g * M::group < from.width;
    for (int e = 0; e < M::group; ++e)
      to.first[M::offset(r, g) + e] = there ? from.first[r * from.stride + g * M::group + e] : bf16();
  });
}
template <class T, class Team>
SHARDLIB_FUNCTION void start_copy(const Team& team, int count, const T* from, T* to) {
  team.lanes(count, [=](std::int64_t i) { to[i] = from[i]; });
}
template <class Team>
SHARDLIB_FUNCTION void finish_copies(const Team& /*team*/) {}

}  // namespace shardlib::kernels::body

#if defined(__CUDACC__)
#include "shardlib/kernels/body/row_tile_cuda.hpp"
#endif
