// Every kernel, for a CUDA device: scripts/test-cuda.sh compiles it, and nothing runs it. kernel_names.cpp compiles its names.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shardlib/compute/dropout.hpp"
#include "shardlib/compute/einsum_bias.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/norms.hpp"
#include "shardlib/device/cuda_launcher.hpp"
#include "shardlib/device/tree_kernel.hpp"
#include "shardlib/kernels/body/affine_norm.hpp"
#include "shardlib/kernels/body/attention.hpp"
#include "shardlib/kernels/body/check.hpp"
#include "shardlib/kernels/body/einsum.hpp"
#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/body/fused_attention.hpp"
#include "shardlib/kernels/body/fused_attention_backward.hpp"
#include "shardlib/kernels/body/held_rows.hpp"
#include "shardlib/kernels/body/index.hpp"
#include "shardlib/kernels/body/layout.hpp"
#include "shardlib/kernels/body/logits.hpp"
#include "shardlib/kernels/body/map_program.hpp"
#include "shardlib/kernels/body/optimizers.hpp"
#include "shardlib/kernels/body/ordering.hpp"
#include "shardlib/kernels/body/positions.hpp"
#include "shardlib/kernels/body/random.hpp"
#include "shardlib/kernels/body/reduce.hpp"
#include "shardlib/kernels/body/reduce_backward.hpp"
#include "shardlib/kernels/body/rows.hpp"
#include "shardlib/kernels/body/scans.hpp"
#include "shardlib/kernels/body/sort.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/ops/map/symbol.hpp"

namespace shardlib::detail {

namespace body = kernels::body;

// A function object of a user, and a lambda, which nvcc must tell apart by their names as g++ does. HIP's kernels hold both.
struct Gate {
  template <class T>
  SHARDLIB_FUNCTION T operator()(const T& x, const T& y) const {
    return where(x > y, swish(x) * y, pow(x, 2) - tanh(y));
  }
};
inline constexpr auto lambda = [](auto x) { return x > 0 ? exp(x) : x; };
static_assert(is_closure<std::remove_const_t<decltype(lambda)>> &&
              is_closure<OnNumbers<std::remove_const_t<decltype(lambda)>>> && !is_closure<OnNumbers<Gate>>);
template <class F, class... D>
using Map = MapLoops<F, D...>;

#define KERNEL(...)                                                                                  \
  template cudaError_t launch_on_cuda(cudaStream_t, std::int64_t, unsigned, std::byte*, std::size_t, \
                                      const __VA_ARGS__&);
#define ELEMENTWISE(...) KERNEL(body::Elementwise<body::ElementRow<__VA_ARGS__>>)
#define REDUCTION(Op, T)                                                   \
  KERNEL(body::ReduceRuns<kernels::detail::Op, accumulator_t<T>, T, T>)    \
  KERNEL(body::ReduceColumns<kernels::detail::Op, accumulator_t<T>, T, T>)
#define MOVES(U)               \
  KERNEL(body::CopyRows<U>)    \
  KERNEL(body::Transpose<U>)   \
  KERNEL(body::Gather<U, i32>) \
  KERNEL(body::Gather<U, u32>)
#define SCAN(...) KERNEL(body::ScanColumns<body::__VA_ARGS__>)
#define MAP1(F, T)                               \
  ELEMENTWISE(Map<F, T, T>::Forward, const T, T) \
  ELEMENTWISE(Map<F, T, T>::VjpOne<0, T>, const T, const T, T)
#define MAP2(F, T)                                                         \
  ELEMENTWISE(Map<F, T, T, T>::Forward, const T, const T, T)               \
  ELEMENTWISE(Map<F, T, T, T>::VjpOne<1, T>, const T, const T, const T, T) \
  ELEMENTWISE(Map<F, T, T, T>::VjpAll, const T, const T, const T, T, T)
#define HELD(T, Groups)                                               \
  KERNEL(body::HeldRows<T, 1, body::HeldSoftmax, Groups>)             \
  KERNEL(body::HeldRows<T, 2, body::HeldSoftmaxBackward, Groups>)     \
  KERNEL(body::HeldRows<T, 1, body::HeldNorm<false>, Groups>)         \
  KERNEL(body::HeldRows<T, 1, body::HeldNorm<true>, Groups>)          \
  KERNEL(body::HeldRows<T, 2, body::HeldNormBackward<false>, Groups>) \
  KERNEL(body::HeldRows<T, 2, body::HeldNormBackward<true>, Groups>)
#define AFFINE(Centered, T, W, R)                                                      \
  KERNEL(body::HeldRows<T, 1, body::HeldAffineNorm<Centered, W>, 16, R>)               \
  KERNEL(body::HeldRows<T, 1, body::HeldAffineNorm<Centered, W>, 32, R>)               \
  KERNEL(body::RowKernel<T, 1, body::AffineNorm<Centered, W>, R>)                      \
  KERNEL(body::HeldAffineNormBackward<Centered, T, W, R, 16>)                          \
  KERNEL(body::HeldAffineNormBackward<Centered, T, W, R, 32>)                          \
  KERNEL(body::AffineNormBackward<Centered, T, W, R>)
#define KERNELS(T)                                                         \
  KERNEL(body::Fill<T, body::Uniform>)                                     \
  KERNEL(body::Fill<T, body::Normal>)                                      \
  KERNEL(body::Fill<T, body::TruncatedNormal>)                             \
  KERNEL(body::RowKernel<T, 1, body::Softmax>)                                  \
  KERNEL(body::RowKernel<T, 2, body::SoftmaxBackward>)                          \
  KERNEL(body::RowKernel<T, 1, body::Norm<false>>)                              \
  KERNEL(body::RowKernel<T, 1, body::Norm<true>>)                               \
  KERNEL(body::RowKernel<T, 2, body::NormBackward<false>>)                      \
  KERNEL(body::RowKernel<T, 2, body::NormBackward<true>>)                       \
  HELD(T, 16)                                                              \
  HELD(T, 32)                                                              \
  KERNEL(body::SumExp<T>)                                                  \
  KERNEL(body::LoadHeads<T>)                                               \
  KERNEL(body::StoreHeads<T, T>)                                           \
  KERNEL(body::HeadDots<T>)                                                \
  KERNEL(body::AttentionProbabilities<T>)                                  \
  KERNEL(body::AttentionScoresBackward<T>)                                 \
  KERNEL(body::FusedAttentionForward<64, T>)                               \
  KERNEL(body::FusedAttentionForward<128, T>)                              \
  KERNEL(body::FusedAttentionQueries<64, T>)                               \
  KERNEL(body::FusedAttentionQueries<128, T>)                              \
  KERNEL(body::FusedAttentionKeys<64, T, true, true>)                      \
  KERNEL(body::FusedAttentionKeys<128, T, true, false>)                    \
  KERNEL(body::FusedAttentionKeys<128, T, false, true>)                    \
  KERNEL(body::CrossEntropyBackward<T, i32>)                               \
  KERNEL(body::CrossEntropyBackward<T, u32>)                               \
  ELEMENTWISE(PointwiseElement<WrappingSum, T>, const T, const T, T)       \
  ELEMENTWISE(PointwiseElement<WrappingProduct, T>, const T, const T, T)   \
  ELEMENTWISE(PointwiseElement<Quotient, T>, const T, const T, T)          \
  ELEMENTWISE(BiasGeluElement<T>, const T, const T, T, T)                  \
  ELEMENTWISE(LinearElement<Negate, T>, const T, T)                        \
  ELEMENTWISE(LinearElement<TimesNumber<float>, T>, const T, T)            \
  ELEMENTWISE(WhereElseNumberElement<T>, const bool_, const T, T)          \
  ELEMENTWISE(WhereElement, const bool_, const T, const T, T)              \
  ELEMENTWISE(CastElement, const T, f32)                                   \
  ELEMENTWISE(CastElement, const T, bf16)                                  \
  ELEMENTWISE(CastElement, const T, i32)                                   \
  ELEMENTWISE(DropoutElement<float>, const T, const float, T)              \
  ELEMENTWISE(RotateElement, const T, const T, const f32, const f32, T, T) \
  MAP1(exp_function, T)                                                    \
  MAP1(gelu_function, T)                                                   \
  MAP2(maximum_function, T)                                                \
  MAP2(OnNumbers<Gate>, T)                                                 \
  ELEMENTWISE(body::ConstantElement<T>, T)                                 \
  ELEMENTWISE(body::AddElement, const T, f32)                              \
  ELEMENTWISE(body::AdamWNumbers, f32, f32, f32, const T)                  \
  ELEMENTWISE(body::AdamWNumbers, f32, f32, f32, const T, bf16)            \
  ELEMENTWISE(body::SgdNumbers, f32, f32, const T)                         \
  ELEMENTWISE(body::SgdNumbers, f32, f32, const T, bf16)                   \
  ELEMENTWISE(body::LionNumbers, f32, f32, const T)                        \
  ELEMENTWISE(body::LionNumbers, f32, f32, const T, bf16)                  \
  ELEMENTWISE(body::AddGradient, f32, const T)                             \
  ELEMENTWISE(body::AdafactorSquare, f32, const T)                         \
  ELEMENTWISE(body::AdafactorChange, f32, const T, const f32)              \
  ELEMENTWISE(body::AdafactorChange, f32, const T, const f32, const f32, const f32) \
  ELEMENTWISE(body::ScaledElement, f32, const T, const f32)                \
  ELEMENTWISE(body::MuonMomentum, f32, f32, const T)                       \
  ELEMENTWISE(body::EmaNumbers, f32, const T)                              \
  REDUCTION(SumOp, T)                                                      \
  REDUCTION(ProdOp, T)                                                     \
  REDUCTION(MaxOp, T)                                                      \
  REDUCTION(MinOp, T)                                                      \
  KERNEL(body::SquaresOfPiece<T>)                                          \
  KERNEL(body::SquaresOfGroups<T>)                                         \
  KERNEL(body::Argmax<T>)                                                  \
  KERNEL(body::ExtremumBackward<T>)                                        \
  KERNEL(body::ProdBackward<T>)                                            \
  KERNEL(body::ListElements<T>)                                            \
  MOVES(kernels::Word<sizeof(T)>)                                          \
  KERNEL(body::AddRows<T>)                                                 \
  KERNEL(ReduceTree<T, Sum>)                                               \
  KERNEL(ReduceTree<T, Max>)                                               \
  SCAN(Cumulative<kernels::detail::SumOp, T>)                              \
  SCAN(Cumulative<kernels::detail::ProdOp, T>)                             \
  SCAN(Cumulative<kernels::detail::MaxOp, T>)                              \
  SCAN(CumulativeProductBackward<T>)                                       \
  SCAN(CumulativeMaximumBackward<T>)                                       \
  SCAN(LinearScan<T>)                                                      \
  SCAN(LinearScanEnds<T>)                                                  \
  SCAN(LinearScanBackward<T>)                                              \
  SCAN(LinearScanBackwardEnds<T>)
KERNELS(f32)
KERNELS(bf16)
AFFINE(false, f32, f32, f32)
AFFINE(true, f32, f32, bf16)
AFFINE(false, bf16, f32, f32)
AFFINE(true, bf16, bf16, bf16)
KERNEL(body::SumGroups<f32, f32>)
KERNEL(body::SumGroups<f32, bf16>)
ELEMENTWISE(body::AdafactorFactor, f32, const f32, const f32)
ELEMENTWISE(body::StepAlong, f32, const f32)
ELEMENTWISE(body::StepAlong, f32, const f32, bf16)
KERNEL(body::Elementwise<body::ProgramRow<f32, 0, 4>>)
KERNEL(body::Elementwise<body::ProgramRow<f32, 1, 2>>)
KERNEL(body::Elementwise<body::ProgramRow<f32, 2, 2>>)
KERNEL(body::Elementwise<body::ProgramRow<f32, 4, 1>>)
KERNEL(body::Elementwise<body::ProgramRow<f64, 0, 4>>)
KERNEL(body::Elementwise<body::ProgramRow<f64, 4, 1>>)
MOVES(kernels::Word<1>)
MOVES(kernels::Word<8>)
KERNEL(body::ListHeads)
KERNEL(body::StoreHeads<f32, bf16>)
KERNEL(body::ListAttentionTerms)
KERNEL(body::ZeroRows)
KERNEL(body::FindFault<body::IdOutside<i32>>)
KERNEL(body::FindFault<body::IdOutside<u32>>)
KERNEL(body::FindFault<body::ZeroInteger<std::uint8_t>>)
KERNEL(body::FindFault<body::ZeroInteger<std::uint32_t>>)
KERNEL(body::JoinIds<i32>)
KERNEL(body::JoinIds<u32>)
KERNEL(body::ListAdditions<i32>)
KERNEL(body::ListAdditions<u32>)
KERNEL(body::SortRuns<body::Addition>)
KERNEL(body::MergeRuns<body::Addition>)
KERNEL(body::SortRuns<body::Ordered>)
KERNEL(body::MergeRuns<body::Ordered>)
KERNEL(body::ListElements<i32>)
KERNEL(body::ListElements<bool_>)
KERNEL(body::TakeIndices)
KERNEL(body::TargetLogits<f32, i32>)
KERNEL(body::TargetLogits<f32, u32>)
KERNEL(body::TargetLogits<f64, i32>)
KERNEL(body::RotaryTable<f32, RopeAngles>)
KERNEL(body::RotaryTable<f64, RopeAngles>)
KERNEL(body::Iota)
KERNEL(body::CausalMask)
KERNEL(body::ExtremumBackward<f64>)
KERNEL(body::ProdBackward<f64>)
KERNEL(body::ListElements<f64>)
SCAN(Cumulative<kernels::detail::SumOp, i32>)
REDUCTION(SumOp, i32)
KERNEL(body::ReduceRuns<kernels::detail::SumOp, f32, f32, bf16>)
KERNEL(body::ReduceColumns<kernels::detail::SumOp, f32, f32, bf16>)
KERNEL(body::SumOfGroups<f32>)
KERNEL(body::LogitSums<f32, i32>)
KERNEL(body::LogitSums<f32, u32>)
KERNEL(body::LogitSums<f64, i32>)
KERNEL(body::LogitSlopes<f32, i32, f32>)
KERNEL(body::LogitSlopes<f32, u32, bf16>)
KERNEL(body::LogitSlopes<f64, i32, f64>)
KERNEL(body::SumProducts<f32>)
KERNEL(body::SumProducts<f64>)
KERNEL(body::SumProducts<i32>)
KERNEL(body::SumProductsTogether<f32>)
KERNEL(body::SumProductsTogether<f64>)
KERNEL(body::SumProductsTogether<i32>)
#if defined(SHARDLIB_LAUNCHER_HIP)
MAP1(OnNumbers<std::remove_const_t<decltype(lambda)>>, f32)
#endif
#undef KERNELS
#undef HELD
#undef MAP2
#undef MAP1
#undef SCAN
#undef MOVES
#undef REDUCTION
#undef ELEMENTWISE
#undef KERNEL

}  // namespace shardlib::detail
