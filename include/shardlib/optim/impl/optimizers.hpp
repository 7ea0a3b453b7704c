// Definitions of optimizers.hpp.
#pragma once

#include "shardlib/optim/optimizers.hpp"

#include <algorithm>
#include <bit>

#include "shardlib/compute/create.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/optim/impl/settings.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE void check_step(std::string_view optimizer, double learning_rate, double scale, std::int64_t step,
                                std::initializer_list<double> decays,
                                std::initializer_list<std::pair<std::string_view, double>> settings) {
  const auto fail = [&](const std::string& what) { throw UsageError(std::string(optimizer) + ": " + what); };
  if (!std::isfinite(learning_rate))
    fail("the learning rate is " + show_number(learning_rate) + "; give a finite number");
  if (learning_rate < 0)
    fail("the learning rate is " + show_number(learning_rate) +
         ", and an update with it would increase the loss; give a number of at least 0, and to maximize, "
         "differentiate the negative value");
  if (!std::isfinite(scale))
    fail("the scale of the gradients is " + show_number(scale) +
         "; give a finite number, and skip a step whose gradients are not finite");
  if (scale == 0)
    fail(
        "the scale of the gradients is 0, so the step would ignore them; a quotient of integers such as 1 / n is 0: "
        "write `1.0 / n`, and skip a step whose gradients are not to count");
  if (step < 0) fail("step " + std::to_string(step) + " is negative; steps count from 0");
  for (const double decay : decays)
    if (!(decay >= 0 && decay < 1))
      fail("a moment's decay is " + show_number(decay) + "; give a number of at least 0 and less than 1");
  for (const auto& [name, value] : settings) require_setting(optimizer, name, value);
}

/// Notes a step that changes the leaves. All devices of a mesh make it alike for the leaves of that mesh; those of a
/// submesh may do other work than those outside of it.
inline void note_step(const std::vector<LeafUpdate>& leaves, GivenInput step) {
  std::vector<std::pair<Device*, std::size_t>> counts;  // of the leaves of each mesh
  for (const LeafUpdate& leaf : leaves) {
    Device* const device = (*leaf.weight)->device.get();
    const auto found = std::ranges::find(counts, device, &std::pair<Device*, std::size_t>::first);
    (found != counts.end() ? *found : counts.emplace_back(device, 0)).second += 1;
  }
  for (const auto& [device, count] : counts) {
    step.size = count;
    device->note_given(step, device->alike_axes({}));
  }
}
SHARDLIB_INLINE void begin_update(const char* optimizer, const std::vector<LeafUpdate>& leaves, double learning_rate,
                                  double weight_decay, double scale, const StepNumber& step) {
  for (const LeafUpdate& leaf : leaves)
    if (const double decay = learning_rate * leaf.factors.rate * weight_decay * leaf.factors.decay; decay > 1)
      throw UsageError(std::string(optimizer) + ": the learning rate times weight_decay of the leaf `" + leaf.name +
                       "` is " + show_number(decay) +
                       ", so the step would change the sign of its weights; lower one of them, to a product of at "
                       "most 1");
  note_step(leaves, {.kind = GivenInput::update,
                     .op = {optimizer, {}, step.site},
                     .first = std::bit_cast<std::uint64_t>(learning_rate),
                     .second = static_cast<std::uint64_t>(step.number),
                     .setting = static_cast<float>(scale)});
}
SHARDLIB_INLINE void note_average(const std::vector<LeafUpdate>& leaves, const LocatedNumber& kept) {
  note_step(leaves, {.kind = GivenInput::average,
                     .op = {"update_average", {}, kept.site},
                     .first = std::bit_cast<std::uint64_t>(kept.operand)});
}

enum class Contents { kept, overwritten };

/// A value whose shard may be written: x itself if it has no other owner, else a new value, with the same contents if
/// `contents` asks for them.
inline Handle<Value> writable(ValuePtr& x, Contents contents) {
  static_cast<void>(x->data());
  auto value = detached(*x);
  const bool alone = x.use_count() == 1 && x->storage.use_count() == 2 && x->storage->buffer.unique();
  if (!alone) {
    value->storage = Handle<Storage>::make(allocate(*value));
    if (contents == Contents::kept)
      x->device->exec().copy(value->storage->buffer.data(), x->storage->buffer.data(), x->bytes());
  }
  x = nullptr;
  return value;
}

SHARDLIB_INLINE ValuePtr zeros_as(const Value& x, const UntypedLeaf<ValuePtr>& leaf, int first) {
  const TensorSpec& spec = *leaf.spec;
  Sizes sizes;
  for (int i = 0; i < spec.rank(); ++i)
    if (const DimSize size = x.global[first + i]; !spec.dims[i].is_integer())
      sizes.push_back({std::string(spec.dims[i].name), size.size, size.padded});
  return create_constant({"zeros", leaf.text, {}}, x.device, leaf.dtype, spec, sizes, 0);
}

SHARDLIB_INLINE void cast_leaves(const UntypedLeaves<const ValuePtr>& from, const UntypedLeaves<ValuePtr>& to) {
  for (std::size_t i = 0; i < from.leaves.size(); ++i) {
    const ValuePtr& x = from.leaves[i].value();
    const DType dtype = to.leaves[i].dtype;
    *to.leaves[i].pointer = x->dtype == dtype ? x : cast_floating({"cast", {}, {}}, x, dtype);
  }
}

SHARDLIB_INLINE std::vector<LeafUpdate> list_updates(std::string_view function, const LeafFactorsOf& factors,
                                                     std::size_t moments, const UntypedLeaves<ValuePtr>& weights,
                                                     const UntypedLeaves<const ValuePtr>& grads,
                                                     std::span<const UntypedLeaves<ValuePtr>> rest) {
  grads.require_structure_of(weights, function);
  for (const auto& tree : rest) tree.require_structure_of(weights, function);
  std::vector<LeafUpdate> updates;
  for (std::size_t i = 0; i < weights.leaves.size(); ++i) {
    const auto& weight = weights.leaves[i];
    LeafUpdate leaf{weight.name, factors(weight.name), nullptr, {}, nullptr, nullptr, weight.spec};
    require_setting(function, "the factor of the rate", leaf.factors.rate, leaf.name);
    require_setting(function, "the factor of the decay", leaf.factors.decay, leaf.name);
    if (leaf.factors.rate == 0) continue;
    leaf.weight = &weight.value();
    leaf.grad = &grads.leaves[i].value();
    for (std::size_t k = 0; k < rest.size(); ++k)
      (k < moments ? leaf.moments[k] : leaf.copy) = &rest[k].leaves[i].value();
    const std::array<const ValuePtr*, 4> written{leaf.weight, leaf.moments[0], leaf.moments[1], leaf.copy};
    for (auto at = written.begin(); at != written.end(); ++at)
      if (*at != nullptr && std::find(at + 1, written.end(), *at) != written.end())
        throw UsageError(std::string(function) + ": the leaf `" + leaf.name +
                         "` is in two of the trees that it writes (weights, moments, copies): pass a tree of its own "
                         "for each");
    for (std::size_t k = 0; k < moments; ++k)
      if ((*leaf.moments[k])->storage == (*leaf.weight)->storage)
        throw UsageError(std::string(function) + ": the moments of `" + leaf.name +
                         "` share the weight's memory; make them with `init` or `zeros_like`");
    updates.push_back(std::move(leaf));
  }
  return updates;
}

/// Updates a leaf in one pass by one(weight, moments..., gradient, copy), as update_in_place says.
template <class One>
void update_by(const char* name, const One& one, const LeafUpdate& leaf) {
  constexpr std::size_t N = One::moments;
  const ValuePtr grad = *leaf.grad;  // an owner of its own: the gradient may be the weight too
  const OpInfo op{name, {}, {}};
  require_running(op, *grad->device);
  Bindings sizes(op, grad->device);
  const auto check = [&](const ValuePtr& x) {
    sizes.bind(*x);
    require_no_gradient(op, x, "an update in place has no derivative");
  };
  check(*leaf.weight);
  for (std::size_t i = 0; i != N; ++i) check(*leaf.moments[i]);  // nvcc warns of `i < N` where N is 0
  check(grad);
  // The tree has its new values before the kernel runs, so that no leaf is empty after an error.
  const bool shares = leaf.copy != nullptr && (*leaf.copy)->dtype != DType::bf16;
  if (leaf.copy != nullptr) check(*leaf.copy);
  if (shares) *leaf.copy = nullptr;  // it is the weight, which must have no other owner
  Handle<Value> p, c;
  try {
    *leaf.weight = p = writable(*leaf.weight, Contents::kept);
  } catch (...) {
    if (shares) *leaf.copy = *leaf.weight;
    throw;
  }
  if (shares) *leaf.copy = p;
  std::array<Handle<Value>, N> m;
  for (std::size_t i = 0; i != N; ++i) *leaf.moments[i] = m[i] = writable(*leaf.moments[i], Contents::kept);
  if (leaf.copy != nullptr && !shares) {  // the last, as its contents are lost
    *leaf.copy = c = writable(*leaf.copy, Contents::overwritten);
    c->made_by = op;
  }
  p->made_by = op;
  static_cast<void>(observed(*p, [&] {
    program_state(p->device).work.in_place = true;
    const auto all = [&](auto... rest) {
      [&]<std::size_t... I>(std::index_sequence<I...>) {
        if constexpr (std::is_invocable_v<const One&, f32&, decltype((static_cast<void>(I), std::declval<f32&>()))...,
                                          decltype(*rest)...>)
          kernels::apply_nontemporal(p->device->exec(), p->count(), one, p->template as<f32>(),
                                     m[I]->template as<f32>()..., rest...);
        else
          throw Error(std::string(op.name) + " writes no copy");
      }
      (std::make_index_sequence<N>{});
    };
    const bool from_bf16 = grad->dtype == DType::bf16;
    if (from_bf16 && c) all(grad->as<const bf16>(), c->template as<bf16>());
    if (from_bf16 && !c) all(grad->as<const bf16>());
    if (!from_bf16 && c) all(grad->as<const f32>(), c->template as<bf16>());
    if (!from_bf16 && !c) all(grad->as<const f32>());
    if (c) note_overwritten(*c);
    return p->storage->buffer;
  }));
}

SHARDLIB_INLINE void update_in_place(const char* op, const UpdateNumbers& numbers, const LeafUpdate& leaf) {
  std::visit([&](const auto& one) { update_by(op, one, leaf); }, numbers);
}

}  // namespace shardlib::detail
