// Definitions of map.hpp: type-erased maps.
#pragma once

#include "shardlib/compute/map.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "shardlib/compute/on_host.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/runtime/program_state.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/handle.hpp"
#if defined(SHARDLIB_TYPED_KERNELS)
#include "shardlib/kernels/body/map_program.hpp"
#endif

namespace shardlib::detail {

SHARDLIB_INLINE Shape broadcast_strides(const Value& x, const TensorSpec& result) {
  Shape strides;
  for (int i = 0; i < result.rank(); ++i) {
    // Operands with integer dims never broadcast. Their dims match by position.
    const int at = x.spec->dims == result.dims ? i : x.spec->find(result.dims[i].name);
    std::int64_t stride = at < 0 ? 0 : 1;
    for (int k = at + 1; at >= 0 && k < x.local.size(); ++k) stride *= x.local[k];
    strides.push_back(stride);
  }
  return strides;
}

/// The operands whose cotangents a loop makes: `count` of them, from `first` on.
struct MapWanted {
  std::size_t first = 0, count = 0;
};

/// The arrays that one loop of a map reads and writes.
class MapArrays {
 public:
  explicit MapArrays(const Value& shape)
      : shape_(shape), whole_(strides_of(kernels::row_major(view(shape.local)).span())) {}
  /// Adds an operand, broadcast to the loop's shape.
  void read(const Value& x) {
    add(x.data().data(), x.dtype, false, strides_of(view(broadcast_strides(x, *shape_.spec))));
  }
  /// Adds an array of the loop's shape.
  void read_whole(const Value& x) { add(x.data().data(), x.dtype, false, whole_); }
  void write(std::byte* data, DType dtype) { add(data, dtype, true, whole_); }
  /// Runs the loop of `function` that makes its result, or the cotangents of `wanted` operands.
  void run(const MapFunction& function, const MapFunction::Loop& loop, [[maybe_unused]] MapWanted wanted = {}) {
    for (std::size_t i = 0; i < count_; ++i) arrays_[i].strides = &strides_[i];
    const Exec exec = shape_.device->exec();
    const std::span arrays(arrays_.data(), count_);
#if defined(SHARDLIB_TYPED_KERNELS)
    if (kernels::takes_typed_kernels(exec)) return launch(exec, function, loop, wanted);
#endif
    kernels::detail::apply_erased(exec, view(shape_.local), arrays, loop.run, function.f, function.f_bytes);
  }

 private:
  static kernels::detail::Strides strides_of(std::span<const std::int64_t> s) {
    return kernels::detail::padded(s);
  }
  void add(const std::byte* data, DType dtype, bool output, const kernels::detail::Strides& strides) {
    arrays_[count_] = {const_cast<std::byte*>(data), size_of(dtype), output, nullptr};
#if defined(SHARDLIB_TYPED_KERNELS)
    dtypes_[count_] = dtype;
#endif
    strides_[count_++] = strides;
  }
#if defined(SHARDLIB_TYPED_KERNELS)
  void launch(const Exec& exec, const MapFunction& function, const MapFunction::Loop& loop, MapWanted wanted) {
    const auto loops = kernels::detail::elementwise_loops(exec, view(shape_.local), std::span(arrays_.data(), count_));
    std::array<std::byte*, kernels::detail::max_operands> data{};
    for (std::size_t i = 0; i < count_; ++i) data[i] = arrays_[i].data;
    if (loop.launch != nullptr) return loop.launch(function.f, exec, loops, data.data());
    bool wide = false;
    for (std::size_t i = 0; i < count_; ++i) wide = wide || dtypes_[i] == DType::f64;
    const auto run = [&]<class T>(T /*number*/) {
      // More elements at once for fewer derivatives, as a lane's memory holds both.
      if (wanted.count == 0)
        run_program<T, 0, 4>(exec, loops, function, data, wanted);
      else if (wanted.count == 1)
        run_program<T, 1, 2>(exec, loops, function, data, wanted);
      else if (wanted.count == 2)
        run_program<T, 2, 2>(exec, loops, function, data, wanted);
      else
        run_program<T, most_mapped, 1>(exec, loops, function, data, wanted);
    };
    wide ? run(f64{}) : run(f32{});
  }
  template <class T, std::size_t N, int E>
  void run_program(const Exec& exec, const kernels::body::ElementwiseLoops& loops, const MapFunction& function,
                   const std::array<std::byte*, kernels::detail::max_operands>& data, MapWanted wanted) {
    using Row = kernels::body::ProgramRow<T, N, E>;
    Row row{function.program, data, dtypes_, function.operands, {-1, -1, -1, -1}};
    for (std::size_t k = 0; k < wanted.count; ++k) row.seeds[wanted.first + k] = static_cast<std::int8_t>(k);
    kernels::run_typed(exec, loops.items(), kernels::body::Elementwise<Row>{loops, row});
  }
  std::array<DType, kernels::detail::max_operands> dtypes_{};
#endif
  static constexpr std::size_t most = 2 * most_mapped + 1;
  static_assert(most <= kernels::detail::max_operands);
  const Value& shape_;
  kernels::detail::Strides whole_;
  std::array<kernels::detail::ErasedOperand, most> arrays_;
  std::array<kernels::detail::Strides, most> strides_;
  std::size_t count_ = 0;
};

using MapOperands = std::vector<ValuePtr>;

SHARDLIB_INLINE void keep_result(MadeWithOperand& made, Buffer result, const Value& operand) {
  ProgramState& s = program_state(operand.device);
  if (s.note_reads) s.work.reads.push_back({result.data(), {}, operand.spec, result.bytes(), true, true});
  made.result = std::move(result);
}

SHARDLIB_INLINE Buffer map_forward(const MapFunction& function, const MapOperands& x, const Value& out) {
  if (function.made_with_operand) {
    MadeWithOperand& made = *function.made_with_operand;
    made.wanted = true;  // if the operand is deferred, its kernel runs now
    static_cast<void>(x[0]->data());
    if (made.result) {
      program_state(out.device).work.made_before = true;
      return std::exchange(made.result, {});
    }
  }
  Buffer result = allocate(out);
  MapArrays arrays(out);
  for (const ValuePtr& operand : x) arrays.read(*operand);
  arrays.write(result.data(), out.dtype);
  arrays.run(function, function.forward);
  return result;
}

/// Whether only this handle has the value, so that its VJP may write over it.
inline bool is_last_use(const ValuePtr& ct) {
  ct->storage->materialize();
  return ct.use_count() == 1 && !ct->slot && ct->storage.use_count() == 1 && ct->storage->buffer.unique();
}

/// A cotangent of the shape of `ct`, in memory of its own, or if `over` in that of `ct`, where the dtype is the same.
inline Handle<Value> cotangent_like(const Value& ct, DType dtype, bool over) {
  auto value = detached(ct);
  value->made_by = Calling::placed({"map_backward", {}, {}});
  value->dtype = dtype;
  value->storage = Handle<Storage>::make(over && dtype == ct.dtype ? ct.data() : allocate(*value));
  return value;
}

SHARDLIB_INLINE ValuePtr map_vjp(const MapFunction& function, std::size_t i, const Value& ct, const MapOperands& x,
                                 bool over) {
  auto grad = cotangent_like(ct, x[i]->dtype, over);
  const Buffer& shard = grad->storage->buffer;
  observed(*grad, [&] {
    program_state(ct.device).work.in_place = shard.data() == ct.data().data();
    MapArrays arrays(ct);
    arrays.read_whole(ct);
    for (const ValuePtr& operand : x) arrays.read(*operand);
    arrays.write(shard.data(), grad->dtype);
    arrays.run(function, function.vjp[i], {i, 1});
    zero_padding(*grad, shard);
    return shard;
  });
  return grad;
}

SHARDLIB_INLINE MapOperands map_vjp_all(const MapFunction& function, const Value& ct, const MapOperands& x, bool over) {
  MapOperands grads;  // the last is written last, when the loop has read the element of `ct`
  for (const ValuePtr& operand : x)
    grads.push_back(cotangent_like(ct, operand->dtype, over && grads.size() + 1 == x.size()));
  observed(*grads[0], [&] {
    MapArrays arrays(ct);
    arrays.read_whole(ct);
    for (const ValuePtr& operand : x) arrays.read(*operand);
    for (const ValuePtr& grad : grads) arrays.write(grad->storage->buffer.data(), grad->dtype);
    arrays.run(function, function.vjp_all, {0, x.size()});
    for (const ValuePtr& grad : grads) zero_padding(*grad, grad->storage->buffer);
    return grads[0]->storage->buffer;
  });
  for (std::size_t k = 1; k < grads.size() && program_state(ct.device).note_reads; ++k)
    observed(*grads[k], [&] {
      note_read(*grads[0]);
      return grads[k]->storage->buffer;
    });
  return grads;
}

/// The backward pass of a map needs these values besides the operands.
struct MapDerivatives {
  Handle<const MapFunction> function;
  const TensorSpec* spec;     ///< of the result
  const TensorSpec* ct_spec;  ///< of its cotangent
  std::array<UnbroadcastFn, most_mapped> sums;
};

/// The product of the factors and of the derivative by the operands `by`, in the result's shape.
inline Buffer map_products(const MapFunction& function, const Differentiations& by, const MapOperands& factors,
                           const MapOperands& x, const Value& out) {
  std::vector<HostNumbers> numbers, arrays;
  std::vector<Shape> strides;
  for (const ValuePtr& factor : factors) numbers.emplace_back(*factor);
  for (const ValuePtr& operand : x) {
    arrays.emplace_back(*operand);
    strides.push_back(broadcast_strides(*operand, *out.spec));
  }
  return filled_on_host(out, [&](const HostNumbers& result) {
    out.device->host_exec().for_each(out.count(), [&](std::int64_t n) {
      std::array<const std::byte*, most_mapped> elements{};
      for (std::size_t k = 0; k < x.size(); ++k) {
        std::int64_t at = 0, rest = n;
        for (int d = out.local.size(); d-- > 0; rest /= out.local[d]) at += rest % out.local[d] * strides[k][d];
        elements[k] = arrays[k].data() + static_cast<std::size_t>(at) * size_of(x[k]->dtype);
      }
      double product = function.derivative(function.f, by, elements.data());
      for (const HostNumbers& factor : numbers) product *= factor[n];
      result.set(n, product);
    });
  });
}

/// The derivative of a map by the operands `by`, one after another, times the cotangents `factors`, one for each
/// derivative: the cotangent of the result, then that of the derivative before. In the result's shape, and on the tape
/// if that tracks a factor or an operand.
inline ValuePtr map_derivative(const MapDerivatives& map, const Differentiations& by, const MapOperands& factors,
                               const MapOperands& x, DType dtype, bool over = false) {
  const Value& ct = *factors.front();
  const auto tracked = [](const ValuePtr& value) { return bool(value->slot); };
  const auto i = static_cast<std::size_t>(by[0]);
  const bool first = by.size() == 1 && ct.dtype == map.function->result && dtype == x[i]->dtype;
  if (first && !tracked(factors[0]) && std::ranges::none_of(x, tracked)) return map_vjp(*map.function, i, ct, x, over);
  // Over an axis that the operands lack, either a cotangent is partial, or the value that it is the cotangent of.
  const bool has_ct =
      std::ranges::find(factors, map.ct_spec, [](const ValuePtr& f) { return f->spec; }) != factors.end();
  const TensorSpec *const spec = has_ct ? map.ct_spec : map.spec, *const dual = has_ct ? map.spec : map.ct_spec;
  auto out = make_value(Calling(by.size() == 1 ? "map_backward" : "map_derivative", {}, {}), ct.device, dtype, *spec,
                        ct.global);
  const bool twice = program_state(ct.device).twice;
  Residuals saved;
  for (const MapOperands& values : {x, factors})
    for (const ValuePtr& value : values) saved.values.push_back(twice ? value : ValuePtr(detached(*value)));
  const auto operands_of = [n = x.size()](const Residuals& r) {
    return MapOperands(r.values.begin(), r.values.begin() + static_cast<std::ptrdiff_t>(n));
  };
  const auto factors_of = [n = x.size()](const Residuals& r) {
    return MapOperands(r.values.begin() + static_cast<std::ptrdiff_t>(n), r.values.end());
  };
  std::vector<Node::Edge> edges;
  for (std::size_t k = 0; k < factors.size(); ++k)  // it is linear in each factor
    if (tracked(factors[k]))
      edges.push_back({factors[k]->slot, saved, [=](const ValuePtr& g, const Residuals& residuals) {
                         MapOperands others = factors_of(residuals);
                         const DType wanted = others[k]->dtype;
                         others[k] = with_spec(g, *dual);
                         return map_derivative(map, by, others, operands_of(residuals), wanted);
                       }});
  for (std::size_t j = 0; j < x.size(); ++j)
    if (tracked(x[j]) && map.function->vjp[j].run != nullptr)
      edges.push_back({x[j]->slot, saved, [=](const ValuePtr& g, const Residuals& residuals) {
                         if (by.full())
                           throw Error("map_derivative: functions of numbers have derivatives up to order " +
                                       std::to_string(by.size()) +
                                       "; take the central difference of two of them for one more (" +
                                       g->device->describe() + ")");
                         Differentiations next = by;
                         next.push_back(static_cast<int>(j));
                         MapOperands all = factors_of(residuals);
                         all.push_back(with_spec(g, *dual));
                         const MapOperands at = operands_of(residuals);
                         return map.sums[j](map_derivative(map, next, all, at, at[j]->dtype));
                       }});
  attach(out, std::move(edges), nullptr, twice);
  evaluate(out, [=, function = map.function](const Value& shape) {
    return first ? map_vjp(*function, i, *factors[0], x, false)->storage->buffer
                 : map_products(*function, by, factors, x, shape);
  });
  return out;
}

/// Whether the cotangent of a gelu, a product that is computed only now, has been multiplied by gelu's derivative at
/// the operand in the same kernel.
inline bool has_slope_of_product(const MapDerivatives& map, const ValuePtr& ct, const Residuals& residuals) {
  if (map.function->made_with_operand == nullptr || ct.use_count() > 1 || ct->slot || ct->storage.use_count() > 1)
    return false;
  const auto with_slope = std::exchange(ct->storage->with_gelu_slope, nullptr);
  return with_slope && with_slope(*ct->storage, *residuals.values[0]);
}

#if defined(SHARDLIB_TYPED_KERNELS)
/// Calls a lambda with symbols, whose instructions a kernel then runs.
inline void trace_map(const OpInfo& op, const MapFunction& function, const MapOperands& x) {
  std::array<DType, most_mapped> dtypes{};
  for (std::size_t i = 0; i < x.size(); ++i) dtypes[i] = x[i]->dtype;
  try {
    function.program = function.trace(function.f, dtypes);
  } catch (const Error& error) {
    throw Error(op.describe() + ": " + error.what() + " (" + x[0]->device->describe() + ")");
  }
}
#endif

SHARDLIB_INLINE ValuePtr record_map(const OpInfo& op, const TensorSpec& spec, const TensorSpec& ct_spec,
                                    const Handle<const MapFunction>& function,
                                    const std::array<ValuePtr, most_mapped>& operands,
                                    const std::array<UnbroadcastFn, most_mapped>& sums) {
  MapOperands x(operands.begin(), operands.begin() + static_cast<std::ptrdiff_t>(function->operands));
  Bindings names(op, x[0]->device);
  for (const ValuePtr& operand : x) names.bind(*operand);
  auto out = make_value(op, x[0]->device, function->result, spec, names.sizes(spec));
#if defined(SHARDLIB_TYPED_KERNELS)
  if (function->trace != nullptr && kernels::takes_typed_kernels(out->device->exec())) trace_map(op, *function, x);
#endif
  if (is_floating(function->result)) {
    std::vector<Node::Edge> edges(x.size());
    MapOperands saved;
    const bool twice = program_state(out->device).twice;
    for (const ValuePtr& operand : x) saved.push_back(twice ? operand : ValuePtr(detached(*operand)));
    bool all = !twice && function->vjp_all.run != nullptr;
    const MapDerivatives map{function, &spec, &ct_spec, sums};
    for (std::size_t i = 0; i < x.size(); ++i) {
      all = all && x[i]->slot;
      if (function->vjp[i].run == nullptr) continue;
      edges[i].input = x[i]->slot;
      if (!x[i]->slot) continue;
      edges[i].saved.values = saved;
      edges[i].vjp = [map, i](const ValuePtr& ct, const Residuals& residuals) {
        if (has_slope_of_product(map, ct, residuals)) return map.sums[i](with_spec(ct, *map.ct_spec));
        Differentiations by;
        by.push_back(static_cast<int>(i));
        const bool over = is_last_use(ct);
        return map.sums[i](
            map_derivative(map, by, {with_spec(ct, *map.ct_spec)}, residuals.values, residuals.values[i]->dtype, over));
      };
    }
    std::function<MapOperands(const MapOperands&)> fused_vjp;
    if (all)
      fused_vjp = [function, saved, &ct_spec, sums](const MapOperands& cts) {
        const bool over = is_last_use(cts[0]);
        auto grads = map_vjp_all(*function, *with_spec(cts[0], ct_spec), saved, over);
        for (std::size_t i = 0; i < grads.size(); ++i) grads[i] = sums[i](grads[i]);
        return grads;
      };
    attach(out, std::move(edges), std::move(fused_vjp), twice);
    if (out->slot) out->slot.node->takes_product = function->made_with_operand != nullptr;
  }
  evaluate(
      out, [function, x = std::move(x)](const Value& shape) { return map_forward(*function, x, shape); }, {},
      function->numbers);
  return out;
}

}  // namespace shardlib::detail
