// Every kernel, for a CUDA device: scripts/test-cuda.sh compiles it, and nothing runs it.
#include <cstddef>
#include <cstdint>

#include "shardlib/autodiff/accumulator.hpp"
#include "shardlib/compute/dropout.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/norms.hpp"
#include "shardlib/device/cuda_launcher.hpp"
#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/body/index.hpp"
#include "shardlib/kernels/body/layout.hpp"
#include "shardlib/kernels/body/optimizers.hpp"
#include "shardlib/kernels/body/random.hpp"
#include "shardlib/kernels/body/reduce.hpp"
#include "shardlib/kernels/body/reduce_tree.hpp"
#include "shardlib/kernels/body/rows.hpp"
#include "shardlib/kernels/body/scans.hpp"
#include "shardlib/kernels/body/sort.hpp"

namespace shardlib::detail {

namespace body = kernels::body;

#define KERNEL(...)                                                                                  \
  template cudaError_t launch_on_cuda(cudaStream_t, std::int64_t, unsigned, std::byte*, std::size_t, \
                                      const __VA_ARGS__&);
#define ELEMENTWISE(...) KERNEL(body::Elementwise<body::ElementRow<__VA_ARGS__>>)
#define REDUCTION(Op, T)                                                   \
  KERNEL(body::ReduceRuns<kernels::detail::Op, accumulator_t<T>, T, T>)    \
  KERNEL(body::ReduceColumns<kernels::detail::Op, accumulator_t<T>, T, T>) \
  KERNEL(body::Identity<kernels::detail::Op, T>)
#define MOVES(U)               \
  KERNEL(body::CopyRows<U>)    \
  KERNEL(body::Transpose<U>)   \
  KERNEL(body::Gather<U, i32>) \
  KERNEL(body::Gather<U, u32>)
#define SCAN(...) KERNEL(body::ScanColumns<body::__VA_ARGS__>)
#define KERNELS(T)                                                            \
  KERNEL(body::Fill<T, body::Uniform>)                                        \
  KERNEL(body::Fill<T, body::Normal>)                                         \
  KERNEL(body::Fill<T, body::TruncatedNormal>)                                \
  KERNEL(body::Rows<T, 1, body::Softmax>)                                     \
  KERNEL(body::Rows<T, 2, body::SoftmaxBackward>)                             \
  KERNEL(body::Rows<T, 1, body::Norm<false>>)                                 \
  KERNEL(body::Rows<T, 1, body::Norm<true>>)                                  \
  KERNEL(body::Rows<T, 2, body::NormBackward<false>>)                         \
  KERNEL(body::Rows<T, 2, body::NormBackward<true>>)                          \
  KERNEL(body::SumExp<T>)                                                     \
  KERNEL(body::CrossEntropyBackward<T, i32>)                                  \
  KERNEL(body::CrossEntropyBackward<T, u32>)                                  \
  ELEMENTWISE(PointwiseElement<WrappingSum, T>, const T, const T, T)          \
  ELEMENTWISE(PointwiseElement<WrappingProduct, T>, const T, const T, T)      \
  ELEMENTWISE(PointwiseElement<Quotient, T>, const T, const T, T)             \
  ELEMENTWISE(LinearElement<Negate, T>, const T, T)                           \
  ELEMENTWISE(LinearElement<TimesNumber<float>, T>, const T, T)               \
  ELEMENTWISE(WhereElseNumberElement<T>, const bool_, const T, T)             \
  ELEMENTWISE(WhereElement, const bool_, const T, const T, T)                 \
  ELEMENTWISE(CastElement, const T, f32)                                      \
  ELEMENTWISE(CastElement, const T, bf16)                                     \
  ELEMENTWISE(CastElement, const T, i32)                                      \
  ELEMENTWISE(DropoutElement, const T, const float, T)                        \
  ELEMENTWISE(RotateElement, const T, const T, const f32, const f32, T, T)    \
  ELEMENTWISE(AddElement, const T, f32)                                       \
  KERNEL(body::Nontemporal<body::AdamWNumbers, f32, f32, f32, const T>)       \
  KERNEL(body::Nontemporal<body::AdamWNumbers, f32, f32, f32, const T, bf16>) \
  KERNEL(body::Nontemporal<body::SgdNumbers, f32, f32, const T>)              \
  KERNEL(body::Nontemporal<body::SgdNumbers, f32, f32, const T, bf16>)        \
  KERNEL(body::Nontemporal<body::LionNumbers, f32, f32, const T>)             \
  KERNEL(body::Nontemporal<body::LionNumbers, f32, f32, const T, bf16>)       \
  REDUCTION(SumOp, T)                                                         \
  REDUCTION(ProdOp, T)                                                        \
  REDUCTION(MaxOp, T)                                                         \
  REDUCTION(MinOp, T)                                                         \
  KERNEL(body::SquaresOfPiece<T>)                                             \
  KERNEL(body::Argmax<T>)                                                     \
  MOVES(kernels::Word<sizeof(T)>)                                             \
  KERNEL(body::AddRows<T>)                                                    \
  KERNEL(body::ReduceTree<T, Sum>)                                            \
  KERNEL(body::ReduceTree<T, Max>)                                            \
  SCAN(CumulativeSum<T>)                                                      \
  SCAN(CumulativeProduct<T>)                                                  \
  SCAN(CumulativeProductBackward<T>)                                          \
  SCAN(CumulativeMaximum<T>)                                                  \
  SCAN(CumulativeMaximumBackward<T>)                                          \
  SCAN(LinearScan<T>)                                                         \
  SCAN(LinearScanEnds<T>)                                                     \
  SCAN(LinearScanBackward<T>)                                                 \
  SCAN(LinearScanBackwardEnds<T>)
KERNELS(f32)
KERNELS(bf16)
MOVES(kernels::Word<1>)
MOVES(kernels::Word<8>)
KERNEL(body::ZeroRows)
KERNEL(body::ListAdditions<i32>)
KERNEL(body::ListAdditions<u32>)
KERNEL(body::SortRuns<body::Addition>)
KERNEL(body::MergeRuns<body::Addition>)
SCAN(CumulativeSum<i32>)
REDUCTION(SumOp, i32)
KERNEL(body::ReduceRuns<kernels::detail::SumOp, f32, f32, bf16>)
KERNEL(body::ReduceColumns<kernels::detail::SumOp, f32, f32, bf16>)
KERNEL(body::SumOfPieces<f32>)
#undef KERNELS
#undef SCAN
#undef MOVES
#undef REDUCTION
#undef ELEMENTWISE
#undef KERNEL

}  // namespace shardlib::detail
