// Matrix product on the host: oneDNN for f32 and bf16 if the build has it, else Eigen.
#pragma once

#ifndef EIGEN_DONT_PARALLELIZE
#define EIGEN_DONT_PARALLELIZE  // the caller creates the threads
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
// a false warning from g++ 12's AVX-512 header, inlined into Eigen
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <Eigen/Core>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#if defined(SHARDLIB_WITH_DNNL)
#include <dnnl.h>
#endif

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/bf16_gemm.hpp"
#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/gpu_gemm.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

/// The number of multiplications from which a product runs on several threads.
inline constexpr std::int64_t large_gemm = 1 << 21;

namespace detail {

template <class T>
void eigen_gemm(bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k, const T* a,
                std::int64_t lda, const T* b, std::int64_t ldb, T* c, std::int64_t ldc, bool accumulate) {
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Input = Eigen::Map<const Matrix, 0, Eigen::OuterStride<>>;
  const Input left(a, trans_a ? k : m, trans_a ? m : k, Eigen::OuterStride<>(lda));
  const Input right(b, trans_b ? n : k, trans_b ? k : n, Eigen::OuterStride<>(ldb));
  Eigen::Map<Matrix, 0, Eigen::OuterStride<>> result(c, m, n, Eigen::OuterStride<>(ldc));
  if (!accumulate) result.setZero();
  if (trans_a && trans_b) {
    result.noalias() += left.transpose() * right.transpose();
  } else if (trans_a) {
    result.noalias() += left.transpose() * right;
  } else if (trans_b) {
    result.noalias() += left * right.transpose();
  } else {
    result.noalias() += left * right;
  }
}

/// A dim of a product in parts of whole tiles, as equal as possible. The remainder belongs to the last part, because
/// the library would round a single row or column differently.
struct GemmParts {
  static constexpr std::int64_t tile_rows = 8, tile_columns = 48;  ///< tile size of oneDNN's kernels
  std::int64_t size, tile, count = 1;

  [[nodiscard]] std::int64_t tiles() const { return std::max<std::int64_t>(1, size / tile); }
  [[nodiscard]] std::int64_t begin(std::int64_t i) const { return i == count ? size : tiles() * i / count * tile; }
  [[nodiscard]] std::int64_t length(std::int64_t i) const { return begin(i + 1) - begin(i); }
  [[nodiscard]] std::int64_t longest() const {
    std::int64_t most = 0;
    for (std::int64_t i = 0; i < count; ++i) most = std::max(most, length(i));
    return most;
  }
};

/// Divides the rows and the columns of C into parts, one per thread. First it minimizes the largest part, then the
/// data that the parts read.
struct GemmGrid {
  GemmParts rows, columns;

  GemmGrid(std::int64_t threads, std::int64_t m, std::int64_t n)
      : rows{m, GemmParts::tile_rows}, columns{n, GemmParts::tile_columns} {
    const auto largest = [](const GemmParts& dim, std::int64_t parts) { return (dim.tiles() + parts - 1) / parts; };
    std::pair<std::int64_t, std::int64_t> least;
    for (std::int64_t r = 1; r <= threads; ++r) {
      if (threads % r != 0) continue;
      const std::int64_t c = threads / r;
      const std::pair cost(largest(rows, r) * largest(columns, c), r * n + c * m);
      if (r > 1 && cost >= least) continue;
      least = cost;
      rows.count = r;
      columns.count = c;
    }
  }
};

/// C = op(A) op(B), plus C if `accumulate` is set. Matrices are row-major; op transposes if its flag is set. op(A) is
/// m x k. T is the type of A and B, C that of the result.
template <class T, class C = T>
struct Gemm {
  bool trans_a, trans_b;
  std::int64_t m, n, k;
  const T* a;
  std::int64_t lda;
  const T* b;
  std::int64_t ldb;
  C* c;
  std::int64_t ldc;
  bool accumulate;

  /// The product of part i of the rows of C and part j of its columns.
  [[nodiscard]] Gemm part(const GemmParts& rows, std::int64_t i, const GemmParts& columns, std::int64_t j) const {
    const std::int64_t row = rows.begin(i), column = columns.begin(j);
    Gemm g = *this;
    g.m = rows.length(i);
    g.n = columns.length(j);
    g.a += trans_a ? row : row * lda;
    g.b += trans_b ? column * ldb : column;
    g.c += row * ldc + column;
    return g;
  }
  /// Runs in panels of columns, to save memory. The library copies a panel before it multiplies: 384 rows at a time
  /// and up to 9984 columns. Each thread's heap would keep these 15 MB. A panel of the length below takes 2 MB and no
  /// more time. A result in bf16 runs in panels of rows too, because the library holds a panel's f32 sums.
  void run() const {
    constexpr std::int64_t longest_panel = 1536;
    constexpr std::int64_t highest_panel = std::is_same_v<C, bf16> ? 384 : std::int64_t{1} << 62;
    const GemmParts rows{m, GemmParts::tile_rows, 1 + (m - 1) / highest_panel},
        columns{n, GemmParts::tile_columns, (n + longest_panel - 1) / longest_panel};
    for (std::int64_t i = 0; i < rows.count * columns.count; ++i)
      part(rows, i % rows.count, columns, i / rows.count).run_panel();
  }

 private:
  /// Whether the library reads B in place, with rows that share a few sets of the caches. With AVX2 it packs no B if
  /// the result has few rows or columns: the condition is in oneDNN 2.6 and 3 (gemm_driver.cpp,
  /// nocopy_checker_avx2). With AVX-512 it has another one, which packs such a B.
  [[nodiscard]] bool reads_rows_that_collide() const {
#if defined(__x86_64__)
    constexpr std::int64_t set_period = 2048 / sizeof(T), fewest_rows = 64, most_depth = 8192;
    return !trans_b && ldb % set_period == 0 && m >= fewest_rows && k <= most_depth &&
           1.0 / static_cast<double>(m) + 1.0 / static_cast<double>(n) >= 0.0038 && !__builtin_cpu_supports("avx512f");
#else
    return false;
#endif
  }
  /// Multiplies panels of B that are copied with rows at another distance: the same bits in half the time (m = 256,
  /// n = k = 1024). A copy has about 2 MiB.
  void run_copied() const {
    constexpr std::int64_t elements = (std::int64_t{1} << 21) / sizeof(T);
    GemmParts columns{n, GemmParts::tile_columns};
    columns.count = std::min(1 + (n - 1) * k / elements, columns.tiles());
    std::int64_t stride = columns.longest();
    stride += stride % 256 == 0 ? 16 : 0;
    const auto copy = std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(k * stride));
    for (std::int64_t i = 0; i < columns.count; ++i) {
      Gemm g = part({m, GemmParts::tile_rows}, 0, columns, i);
      for (std::int64_t row = 0; row < k; ++row) std::copy_n(g.b + row * ldb, g.n, copy.get() + row * stride);
      g.b = copy.get();
      g.ldb = stride;
      g.run_panel();
    }
  }
  void run_panel() const {
    if constexpr (std::is_same_v<T, bf16>) {
      Bf16Gemm{trans_a, trans_b, m, n, k, lda, ldb, ldc, accumulate, std::is_same_v<C, bf16>}.run(a, b, c);
      return;
    } else
#if defined(SHARDLIB_WITH_DNNL)
        if constexpr (std::is_same_v<T, float>) {
      if (reads_rows_that_collide()) return run_copied();
      const auto status = dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, 1.0F, a, lda, b, ldb,
                                     accumulate ? 1.0F : 0.0F, c, ldc);
      if (status != dnnl_success) {
        const auto text = [](std::int64_t v) { return std::to_string(v); };
        throw Error("gemm: dnnl_sgemm failed with status " + text(status) + " on m=" + text(m) + " n=" + text(n) +
                    " k=" + text(k) + " lda=" + text(lda) + " ldb=" + text(ldb) + " ldc=" + text(ldc) +
                    "; check the leading dims, or build without SHARDLIB_WITH_DNNL");
      }
    } else
#endif
    {
      eigen_gemm(trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc, accumulate);
    }
  }
};

}  // namespace detail

template <class T, class C>
void gemm(const Exec& exec, bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k, const T* a,
          std::int64_t lda, const T* b, std::int64_t ldb, C* c, std::int64_t ldc, bool accumulate);

namespace detail {

/// Converts a matrix of rows that are `from_ld` and `to_ld` elements apart.
template <class From, class To>
void convert_matrix(const Exec& exec, std::int64_t rows, std::int64_t columns, const From* from, std::int64_t from_ld,
                    To* to, std::int64_t to_ld) {
  const std::array shape{rows, columns}, from_strides{from_ld, std::int64_t{1}}, to_strides{to_ld, std::int64_t{1}};
  apply(exec, shape, body::ConvertElement{}, Operand<const From>(from, from_strides), Operand<To>(to, to_strides));
}

/// The most elements of a piece that gemm_of_copies converts.
inline constexpr std::int64_t copied_piece = std::int64_t{1} << 21;

/// A product of bf16 on a CPU without instructions for it: of copies in f32, piece by piece. A piece has about
/// `most` elements. One loop is over the depth, so a large product has its sums in another order than one of few parts.
template <class C>
void gemm_of_copies(const Exec& exec, const Gemm<bf16, C>& g, std::int64_t most = copied_piece) {
  constexpr bool narrow = !std::is_same_v<C, f32>;
  GemmParts m{g.m, GemmParts::tile_rows}, n{g.n, GemmParts::tile_columns}, k{g.k, GemmParts::tile_columns};
  const auto shorten = [most](GemmParts& x, GemmParts& y) {
    GemmParts& longer = x.longest() >= y.longest() ? x : y;
    if (x.longest() * y.longest() <= most || longer.longest() < 2 * longer.tile) return false;
    ++longer.count;
    return true;
  };
  while (shorten(m, k) || shorten(k, n) || (narrow && shorten(m, n))) {
  }
  const auto block = [&](std::int64_t x, std::int64_t y) {
    return exec.pool->allocate(static_cast<std::size_t>(x * y) * sizeof(f32));
  };
  const Buffer a = block(m.longest(), k.longest()), b = block(k.longest(), n.longest());
  const Buffer sums = narrow ? block(m.longest(), n.longest()) : Buffer();
  // Copies rows i and columns j of an operand that is stored transposed or not. Returns the distance of the copy's
  // rows.
  const auto copy = [&](bool transposed, GemmParts rows, std::int64_t i, GemmParts columns, std::int64_t j,
                        const bf16* from, std::int64_t ld, f32* to) {
    if (transposed) {
      std::swap(rows, columns);
      std::swap(i, j);
    }
    const std::int64_t width = columns.length(j);
    convert_matrix(exec, rows.length(i), width, from + rows.begin(i) * ld + columns.begin(j), ld, to, width);
    return width;
  };
  std::int64_t lda = 0, ldb = 0;
  for (std::int64_t row = 0; row < m.count; ++row)
    for (std::int64_t column = 0; column < n.count; ++column) {
      C* const c = g.c + m.begin(row) * g.ldc + n.begin(column);
      for (std::int64_t i = 0; i < k.count; ++i) {
        // With one part of the depth, the copy of the product before is that of this one.
        if (k.count > 1 || column == 0) lda = copy(g.trans_a, m, row, k, i, g.a, g.lda, a.as<f32>());
        if (k.count > 1 || n.count > 1 || row == 0) ldb = copy(g.trans_b, k, i, n, column, g.b, g.ldb, b.as<f32>());
        const auto multiply = [&](f32* to, std::int64_t ldc, bool accumulate) {
          gemm(exec, g.trans_a, g.trans_b, m.length(row), n.length(column), k.length(i), a.as<const f32>(), lda,
               b.as<const f32>(), ldb, to, ldc, accumulate || i > 0);
        };
        if constexpr (narrow)
          multiply(sums.as<f32>(), n.length(column), false);
        else
          multiply(c, g.ldc, g.accumulate);
      }
      if constexpr (narrow)
        convert_matrix(exec, m.length(row), n.length(column), sums.as<const f32>(), n.length(column), c, g.ldc);
    }
}

}  // namespace detail

/// C = op(A) op(B), plus C if `accumulate` is set. Matrices are row-major; op transposes if its flag is set. op(A) is
/// m x k. A and B are f32, f64, or bf16: then sums are f32, and C is f32, or bf16 without `accumulate`. Where not
/// has_bf16_gemm(), it multiplies copies of bf16 in f32, piece by piece. A dry run takes their memory.
template <class T, class C>
void gemm(const Exec& exec, bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k, const T* a,
          std::int64_t lda, const T* b, std::int64_t ldb, C* c, std::int64_t ldc, bool accumulate) {
  static_assert(std::is_same_v<T, bf16> ? std::is_same_v<C, float> || std::is_same_v<C, bf16>
                                        : std::is_same_v<T, C> && std::is_floating_point_v<T>);
  if (m == 0 || n == 0) return;
  if (k == 0) {  // also on a device, whose library need not take it
    for (std::int64_t i = 0; i < m && !accumulate; ++i) exec.zero(c + i * ldc, static_cast<std::size_t>(n) * sizeof(C));
    return;
  }
#if defined(SHARDLIB_LAUNCHER_CUDA)
  if (exec.gpu() != nullptr)
    return detail::gpu_gemm(*exec.gpu(), trans_a, trans_b, m, n, k, a, lda, 0, b, ldb, 0, c, ldc, 0, 1, accumulate);
#endif
  const detail::Gemm<T, C> whole{trans_a, trans_b, m, n, k, a, lda, b, ldb, c, ldc, accumulate};
  if constexpr (std::is_same_v<T, bf16>)
    if (!has_bf16_gemm()) return detail::gemm_of_copies(exec, whole);
  if (exec.on_device()) return exec.launch([whole] { whole.run(); });
  exec.run([&] {
    const std::int64_t threads = m * n * k < large_gemm ? 1 : exec.available_threads();
    if (threads == 1) return whole.run();
    // Each thread runs its own product. The library's threads would get parts that differ in size by a sixth, and would
    // wait for each other while they pack.
    const detail::GemmGrid grid(threads, m, n);
    exec.for_each(threads, [&](std::int64_t i) {
      const auto part = whole.part(grid.rows, i / grid.columns.count, grid.columns, i % grid.columns.count);
      if (part.m > 0 && part.n > 0) part.run();
    });
  });
}

/// gemm for each i in [0, count): of the matrices at a + i stride_a and b + i stride_b, into c + i stride_c. A stride
/// of an operand may be 0; results do not overlap. T is f32 or f64, and C is T; or T is bf16, on every CPU, and C is
/// f32, or bf16 without `accumulate`.
template <class T, class C>
void gemm_batch(const Exec& exec, bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k,
                const T* a, std::int64_t lda, std::int64_t stride_a, const T* b, std::int64_t ldb,
                std::int64_t stride_b, C* c, std::int64_t ldc, std::int64_t stride_c, std::int64_t count,
                bool accumulate) {
#if defined(SHARDLIB_LAUNCHER_CUDA)
  if (exec.gpu() != nullptr && m > 0 && n > 0 && k > 0)
    return detail::gpu_gemm(*exec.gpu(), trans_a, trans_b, m, n, k, a, lda, stride_a, b, ldb, stride_b, c, ldc,
                            stride_c, count, accumulate);
#endif
  for (std::int64_t i = 0; i < count; ++i)
    gemm<T, C>(exec, trans_a, trans_b, m, n, k, a + i * stride_a, lda, b + i * stride_b, ldb, c + i * stride_c, ldc,
               accumulate);
}

}  // namespace shardlib::kernels
