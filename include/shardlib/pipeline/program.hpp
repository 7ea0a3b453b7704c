// The program of a pipeline: its layers, and functions that are its stages. Types only: a program can be checked at
// compile time with nothing installed; execute.hpp runs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/ops/value_and_grad.hpp"
#include "shardlib/pipeline/impl/specs.hpp"
#include "shardlib/pipeline/schedule.hpp"
#include "shardlib/rules/pipeline.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::pipeline {

template <Spec P, Spec A>
class StagedMesh;

/// The part of the model that a program computes, stage `stage` of `num_stages`, and the microbatch. `is_first` and
/// `is_last` are true for the stages at the ends.
struct StagePlace {
  int stage = 0, num_stages = 1, microbatch = 0;
  [[nodiscard]] bool is_first() const { return stage == 0; }
  [[nodiscard]] bool is_last() const { return stage + 1 == num_stages; }
};

/// Maps layers to stages and ranks: every stage has consecutive layers.
class LayerMap {
 public:
  /// Cuts the layers as evenly as possible: where the stages do not divide them, the first stages have one more. Throws
  /// UsageError where there are fewer layers than stages. `LayerMap(schedule, 6)` of 4 stages has 2, 2, 1 and 1.
  SHARDLIB_INLINE LayerMap(const Schedule& schedule, std::int64_t layers);
  /// Stage s has counts[s] layers, at least one. Throws UsageError for another number of stages.
  /// `LayerMap(schedule, std::vector{1, 2, 2, 1})`
  SHARDLIB_INLINE LayerMap(const Schedule& schedule, const std::vector<int>& counts);
  /// The number of the stage's layers.
  [[nodiscard]] std::size_t layers_of_stage(int stage) const {
    return static_cast<std::size_t>(counts_.at(static_cast<std::size_t>(stage)));
  }
  /// The number of the model's layers before the stage.
  [[nodiscard]] SHARDLIB_INLINE std::size_t layers_before_stage(int stage) const;
  /// The model's numbers of the layers that a rank holds, in the order in which it holds them.
  [[nodiscard]] SHARDLIB_INLINE std::vector<int> of_rank(int rank) const;
  /// The index of the stage's first layer among the layers of its rank.
  [[nodiscard]] SHARDLIB_INLINE std::size_t first_of_stage(int stage) const;

 private:
  std::vector<std::vector<int>> stages_;  ///< of each rank
  std::vector<int> owners_, counts_;      // of each stage
};

/// The ranks of some stages, in ascending order: those that hold a weight which these stages use.
/// `ranks_of(schedule, {0, schedule.num_stages() - 1})` of an embedding that is tied
[[nodiscard]] SHARDLIB_INLINE std::vector<int> ranks_of(const Schedule& schedule, const std::vector<int>& stages);

/// Throws UsageError unless the schedule is for as many ranks as the stage axis has. `must_fit(schedule, "p",
/// mesh.ranks())`
SHARDLIB_INLINE void must_fit(const Schedule& schedule, std::string_view axis, int ranks);

/// An output of the last stage for one microbatch. The outputs are concatenated in order along `Dim`: a dim that the
/// tensor has, unsharded, or a new one, which comes first. `Concat<"N", Tensor<f32, "B/d L">>` becomes `Tensor<f32, "N
/// B/d L">`, where N is the number of microbatches.
template <DimName Dim, class T>
struct Concat {
  static_assert(is_tensor<T>, "Concat: it takes one Tensor; return a tuple of several Concats");
  T value;  ///< the tensor of one microbatch
  /// The type of all microbatches together.
  using result = Tensor<typename T::value_type, shardlib::detail::result_of<rules::concat_microbatches, Dim, T::spec>>;
};

/// An output of the last stage for one microbatch. Each element of the whole output is the maximum over the
/// microbatches, or NaN if one of them has a NaN there. It has no gradient. `Max<Tensor<f32, "B/d">>` stays
/// `Tensor<f32, "B/d">`.
template <class T>
struct Max {
  static_assert(is_tensor<T>, "Max: it takes one Tensor; return a tuple of several Maxes");
  T value;  ///< the tensor of one microbatch
  /// The type of all microbatches together.
  using result = Tensor<
      shardlib::detail::after_t<shardlib::detail::is_number<"Max", typename T::value_type>, typename T::value_type>,
      shardlib::detail::named_result_of<rules::map1, "Max", T::spec>>;
};

namespace detail {

template <class T>
inline constexpr bool is_concat = false;
template <DimName Dim, class T>
inline constexpr bool is_concat<Concat<Dim, T>> = true;
template <class T>
inline constexpr bool is_output = is_concat<T>;
template <class T>
inline constexpr bool is_output<Max<T>> = true;

/// The type of one of the last stage's outputs after concatenation.
struct OutputShape {
  const TensorSpec* spec = nullptr;  ///< of all microbatches together
  int dim = 0;                       ///< which of its dims they are concatenated along
};
template <DimName Dim, class T>
constexpr OutputShape output_shape(std::type_identity<Concat<Dim, T>>) {
  const TensorSpec& spec = core::parsed<Concat<Dim, T>::result::spec>;
  return {&spec, spec.find(Dim)};
}

/// The labels of all Arrays of T agree with the stage axis.
template <Spec P, class T>
constexpr bool labels_fit() {
  if constexpr (is_array<T>) {
    return core::checked<rules::stage_label, core::Literal{std::string_view(P)},
                         core::Literal{std::string_view(T::dim)}>::ok &&
           labels_fit<P, typename T::value_type>();
  } else if constexpr (is_tensor<T> || !core::is_tree<T>()) {
    return true;
  } else {
    return []<class... Part>(std::type_identity<std::tuple<Part...>>) {
      return (labels_fit<P, Part>() && ...);
    }(std::type_identity<core::parts_below_t<T>>{});
  }
}

/// Whether T has a leaf outside of the Arrays over the stage axis: a weight that several ranks may hold.
template <Spec P, class T>
constexpr bool has_shared() {
  if constexpr (std::string_view(P).empty() || !core::is_tree<T>()) {
    return false;
  } else if constexpr (is_tensor<T>) {
    return true;
  } else if constexpr (is_array<T>) {
    return !rules::is_spread(P, core::array_name<T>()) && has_shared<P, typename T::value_type>();
  } else {
    return []<class... Part>(std::type_identity<std::tuple<Part...>>) {
      return (has_shared<P, Part>() || ...);
    }(std::type_identity<core::parts_below_t<T>>{});
  }
}
/// The mesh of gradients of which several ranks may have a part, such as `M/d +p`: the whole one.
template <Spec P, Spec A>
struct Parts {
  static constexpr Spec axes = A;
};

// The types of a program's functions. One that is not there, or cannot be called, makes one error of ours; its unknown
// type then fits everywhere.
using Unknown = Tensor<f32, "?">;
template <class T>
inline constexpr bool is_there = false;

#define SHARDLIB_STAGE_FUNCTION(name, function, sentence)                                            \
  template <class Program, class W, class... X>                                                      \
  struct name {                                                                                      \
    static_assert(is_there<Program>, sentence);                                                      \
    using type = Unknown;                                                                            \
  };                                                                                                 \
  template <class Program, class W, class... X>                                                      \
  requires requires(const Program& p, const W& w, const StagePlace& at, const X&... x) {             \
    p.function(w, x..., at);                                                                         \
  }                                                                                                  \
  struct name<Program, W, X...> {                                                                    \
    using type = std::decay_t<decltype(std::declval<const Program&>().function(                      \
        std::declval<const W&>(), std::declval<const X&>()..., std::declval<const StagePlace&>()))>; \
  };
SHARDLIB_STAGE_FUNCTION(enter_of, enter,
                        "pipeline: the program has no `enter(weights, place) -> X` that is const and takes these "
                        "weights; it makes what the first stage begins with")
SHARDLIB_STAGE_FUNCTION(stage_of, stage,
                        "pipeline: the program has no `stage(weights, X, place) -> X` that is const and takes these "
                        "weights and what `enter` returns; it runs the layers of a stage")
SHARDLIB_STAGE_FUNCTION(loss_of, loss,
                        "pipeline: the program has no `loss(weights, X, place) -> Loss` that is const and takes these "
                        "weights and what `stage` returns; the last stage ends with it")
SHARDLIB_STAGE_FUNCTION(
    outputs_of, outputs,
    "pipeline: the program has no `outputs(weights, X, place) -> Concat` (or Max) that is const and "
    "takes these weights and what `stage` returns; the last stage ends with it")
#undef SHARDLIB_STAGE_FUNCTION

/// The result of the last stage: a loss, or a loss and outputs.
template <class R>
struct ending {
  static_assert(!is_output<R>,
                "pipeline: `loss` returns a Concat or a Max in place of the loss, but these have no gradient; return "
                "the loss, a sum over the microbatches, or a tuple that begins with it");
  using loss = R;
  using outputs = std::tuple<>;
};
template <class Loss, class... O>
struct ending<std::tuple<Loss, O...>> {
  static_assert((is_output<O> && ...),
                "pipeline: `loss` returns its loss, or a tuple of the loss and outputs, each a "
                "`pipeline::Concat<\"dim\", Tensor>` or a `pipeline::Max<Tensor>`");
  using loss = typename ending<Loss>::loss;
  using outputs = std::tuple<typename O::result...>;
};
/// The result of the last stage without a loss.
template <class R>
struct output_types {
  static_assert(std::is_same_v<R, Unknown>,
                "pipeline: `outputs` returns a `pipeline::Concat<\"dim\", Tensor>` or a `pipeline::Max<Tensor>`, or a "
                "tuple of them");
  using type = std::tuple<>;
};
template <class R>
requires is_output<R>
struct output_types<R> {
  using type = std::tuple<typename R::result>;
};
template <class... O>
struct output_types<std::tuple<O...>> {
  static_assert((is_output<O> && ...),
                "pipeline: `outputs` returns a `pipeline::Concat<\"dim\", Tensor>` or a `pipeline::Max<Tensor>`, or a "
                "tuple of them");
  using type = std::tuple<typename O::result...>;
};

/// The stages alone: what they hand over.
template <Spec P, class Program, class W>
struct stages_of {
  using activation = typename enter_of<Program, W>::type;
  using made = typename stage_of<Program, W, activation>::type;
  static_assert(core::is_tree<activation>() && !core::is_open<activation>(),
                "pipeline: a stage hands over a tensor, or a plain struct of tensors; an Array, a std::optional "
                "and a std::variant have no fixed length");
  static constexpr bool ok = [] {
    if constexpr (is_tensor<activation> && is_tensor<made>)
      return core::checked<rules::stage_result, dtype_v<typename activation::value_type>, activation::spec,
                           dtype_v<typename made::value_type>, made::spec>::ok;
    else
      static_assert(std::is_same_v<activation, made>,
                    "pipeline: `stage` returns another type than it takes; the next stage takes what this one returns, "
                    "so write `stage(weights, X, place) -> X` with the X of `enter`");
    return true;
  }() && labels_fit<P, W>();
};

/// A program with a loss.
template <Spec P, Spec A, class Program, class W>
struct program_types {
  using stages = stages_of<P, Program, W>;
  static_assert(stages::ok);
  using activation = typename stages::activation;
  using ends = ending<typename loss_of<Program, W, activation>::type>;
  using loss = typename ends::loss;
  using outputs = typename ends::outputs;
  static_assert(sizeof(typename core::value_and_gradient<Mesh<axes_without(A, P)>, W, loss>::type) > 0);  // its errors
  using gradients = gradient_t<StagedMesh<P, A>, W>;
  static constexpr bool ok = true;
};

/// A program without one.
template <Spec P, class Program, class W>
struct output_program {
  using stages = stages_of<P, Program, W>;
  static_assert(stages::ok);
  using activation = typename stages::activation;
  using outputs = typename output_types<typename outputs_of<Program, W, activation>::type>::type;
};

template <class M, class Program, class W>
struct valid;
template <Spec P, Spec A, class Program, class W>
struct valid<StagedMesh<P, A>, Program, W> : program_types<P, A, Program, W> {};

}  // namespace detail
}  // namespace shardlib::pipeline

namespace shardlib::detail {

/// The leaves of Arrays over the stage axis have one rank, and their gradients the types of a stage's mesh. The others'
/// are partial over the stage axis, too.
template <Spec P, Spec A, class W>
struct gradient_mesh<pipeline::StagedMesh<P, A>, W> {
  using type = std::conditional_t<pipeline::detail::has_shared<P, W>(), pipeline::detail::Parts<P, A>,
                                  Mesh<pipeline::detail::axes_without(A, P)>>;
};
template <Spec P, Spec A, class W>
struct gradient_mesh<pipeline::detail::Parts<P, A>, W> : gradient_mesh<pipeline::StagedMesh<P, A>, W> {};

}  // namespace shardlib::detail

namespace shardlib::pipeline {

/// A program, its weights and the mesh go together; if not, the compiler says why:
/// `static_assert(pipeline::valid_program<pipeline::StagedMesh<"p", "p d t">, Program, Weights>);`
template <class M, class Program, class W>
inline constexpr bool valid_program = detail::valid<M, Program, W>::ok;

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/impl/program.hpp"
#endif
