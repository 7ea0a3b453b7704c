// A mesh with a stage axis: the view that a pipeline rank has of its own stage, and the messages between stages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/device/device.hpp"
#include "shardlib/pipeline/impl/specs.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/tensor.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/tree.hpp"

namespace shardlib::pipeline {

namespace detail {

using core::ValuePtr;

/// A tensor's values under another spec, and on another device of the same program: nothing is copied.
[[nodiscard]] SHARDLIB_INLINE ValuePtr relabeled(const core::Value& x, const TensorSpec& spec, const DevicePtr& device);

/// Lets messages with `peers`, ranks along the stage axis in ascending order, go from device to device (where they
/// can), if these have exchanged messages for the same purpose before, which its fingerprint tells. The first time they
/// go through host memory. Meanwhile the device has loaded its kernels and made its groups: on a GPU this can wait for
/// all that runs there, also for a message that another device has not begun. Both ranks of a message call it.
SHARDLIB_INLINE void set_direct(const DevicePtr& device, std::string_view axis, std::uint64_t purpose,
                                const std::vector<int>& peers);

/// One message of a group along the stage axis, counted and traced like a collective. Never waits for the receiver.
SHARDLIB_INLINE void send(const core::Value& x, std::string_view axis, int to);

/// Messages on their way: of values that have shapes, but no data yet.
class Incoming {
 public:
  SHARDLIB_INLINE Incoming(const std::vector<ValuePtr>& shapes, std::string_view axis, int from);
  /// The values, once all have come.
  SHARDLIB_INLINE std::vector<ValuePtr> wait();

 private:
  std::vector<ValuePtr> values_;
  std::vector<Request> requests_;
};

/// See StagedMesh::sum_over. `spec` is x's without the sum, and `what` begins the message for wrong owners.
[[nodiscard]] SHARDLIB_INLINE ValuePtr sum_over(const std::vector<int>& owners, int rank, const core::Value& x,
                                                const TensorSpec& spec, const DevicePtr& stage, std::string_view axis,
                                                const std::string& what);

/// The device of a stage's mesh. From then on, `global_norm` knows this mesh as a part of a pipeline.
[[nodiscard]] SHARDLIB_INLINE DevicePtr stage_device(const DevicePtr& whole, std::string_view axis);

/// The values of a tree's leaves, and a tree without Arrays from its leaves' values.
template <class T>
std::vector<ValuePtr> values_of(const T& tree) {
  std::vector<ValuePtr> values;
  const auto take = [&](const core::Path&, const auto& leaf) { values.push_back(leaf.value()); };
  core::visit(take, {}, tree);
  return values;
}
template <class T>
T tree_of(const std::vector<ValuePtr>& values) {
  T tree;
  std::size_t i = 0;
  const auto give = [&](const core::Path&, auto& leaf) { leaf = std::remove_cvref_t<decltype(leaf)>(values.at(i++)); };
  core::visit(give, {}, tree);
  return tree;
}

/// Values without data for the leaves of T, under their own specs or (`dual`) those of their cotangents.
template <class T, Spec A>
std::vector<ValuePtr> shapes_of(const Mesh<A>& mesh, const Sizes& sizes, bool dual) {
  std::vector<ValuePtr> shapes;
  T tree;
  const auto add = [&]<class D, Spec S>(const core::Path&, Tensor<D, S>&) {
    static_assert(floating<D>, "stages hand floating-point tensors over; integers belong into the microbatch");
    const core::OpInfo op{"receive", S, {}};
    core::Bindings names(op, mesh.device());
    for (const NamedSize& given : sizes)
      if (core::parsed<S>.has(given.name)) names.bind(given);
    const TensorSpec& spec = dual ? core::parsed<core::dual_spec<S, A>()> : core::parsed<S>;
    shapes.push_back(core::make_value(op, mesh.device(), dtype_v<D>, spec, names.sizes(core::parsed<S>)));
  };
  core::visit(add, {}, tree);
  return shapes;
}

template <class M, dtype D, Spec S>
auto sum_over(const M& mesh, const std::vector<int>& owners, const Tensor<D, S>& x, const std::string& what) {
  static constexpr Spec sum = without_partial<S, M::axis>;
  return Tensor<D, sum>(
      sum_over(owners, mesh.rank(), *x.value(), core::parsed<sum>, mesh.stage().device(), M::axis, what));
}

}  // namespace detail

/// One device's view of a mesh `A` whose axis `P` numbers pipeline ranks: `StagedMesh<"p", "p d t"> mesh(device)`. All
/// tensors of a stage live on `mesh.stage()`, a `Mesh<"d t">` of the devices that share the rank. Without a stage axis,
/// `StagedMesh<"", "d t">`, the whole mesh is one rank: a schedule for one rank makes plain gradient accumulation.
/// `axis` is "p" and `stage_axes` is "d t". `Stage` is the type of a stage's mesh, `whole` is the mesh of all ranks,
/// and `stage` the mesh of this rank. `rank` is its number among `ranks`.
template <Spec P, Spec A>
class StagedMesh {
  static constexpr bool has_axis = !std::string_view(P).empty();
  static_assert(!has_axis || rules::mesh_axes(A).contains(P), "the stage axis is an axis of the mesh");

 public:
  static constexpr Spec axis = P;
  static constexpr Spec stage_axes = detail::axes_without(A, P);
  using Stage = Mesh<stage_axes>;

  explicit StagedMesh(const DevicePtr& device)
      : whole_(device),
        present_(device->is_absent(std::string_view(P)) ? std::string_view() : std::string_view(P)),
        stage_(has_axis ? detail::stage_device(device, P) : device) {}

  [[nodiscard]] const Mesh<A>& whole() const { return whole_; }
  [[nodiscard]] const Stage& stage() const { return stage_; }
  /// The stage axis; empty where the device's mesh lacks it, and one rank has all stages.
  [[nodiscard]] std::string_view present_axis() const { return present_; }
  [[nodiscard]] int rank() const { return has_axis ? whole_.axis_index(P) : 0; }
  [[nodiscard]] int ranks() const { return has_axis ? whole_.size(P) : 1; }

  /// Sends a tensor or tree of this stage to the same place of rank `to`. Does not wait for the receiver.
  template <class T>
  void send(const T& x, int to) const {
    for (const auto& value : detail::values_of(x)) detail::send(*value, P, to);
  }
  /// Receives the tensor that rank `from` sends. Messages of two ranks arrive in order. `sizes` has the sizes of all
  /// names.
  template <class T>
  [[nodiscard]] T receive(const Sizes& sizes, int from) const {
    return detail::tree_of<T>(detail::Incoming(detail::shapes_of<T>(stage_, sizes, false), P, from).wait());
  }

  /// Turns a stage's part of a sum over all stages into a tensor of the whole mesh.
  /// A stage's `"+d +t"` becomes `"+d +p +t"`.
  template <dtype D, Spec S>
  [[nodiscard]] auto part_of_sum(const Tensor<D, S>& x) const -> Tensor<D, detail::with_partial<S, P>> {
    static constexpr Spec sum = detail::with_partial<S, P>;
    return Tensor<D, sum>(detail::relabeled(*x.value(), detail::core::parsed<sum>, whole_.device()));
  }

  /// The sum of what `owners` (ranks, ascending, this one among them) hold of x, on each of them, with the same bits:
  /// the gradient of a weight that several stages use, `"M/d +p"` becomes `"M/d"`. The others do not take part: a rank
  /// that is not an owner gets an Error. `reduce_gradients` does it for a tree.
  template <dtype D, Spec S>
  [[nodiscard]] auto sum_over(const std::vector<int>& owners, const Tensor<D, S>& x) const
      -> Tensor<D, detail::without_partial<S, P>> {
    return detail::sum_over(*this, owners, x, "sum_over: the tensor");
  }

 private:
  Mesh<A> whole_;
  std::string_view present_;
  Stage stage_;
};

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/impl/staged_mesh.hpp"
#endif
