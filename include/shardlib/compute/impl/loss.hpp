// Definitions of loss.hpp: linear_cross_entropy.
#pragma once

#include "shardlib/compute/loss.hpp"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "shardlib/autodiff/accumulator.hpp"
#include "shardlib/kernels/body/check.hpp"
#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/body/logits.hpp"
#include "shardlib/kernels/body/rows.hpp"
#include "shardlib/kernels/check.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/kernels/gemm.hpp"
#include "shardlib/kernels/reduce.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/function.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/math.hpp"
#include "shardlib/types/tensor.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE Buffer Given::operator()(const Value& /*out*/) const {
  return value->data();
}

/// The sizes of the operands on this device.
struct LinearCrossEntropySizes : LinearCrossEntropy {
  [[nodiscard]] std::int64_t rows() const { return targets->count(); }
  /// The number of ids in this device's shard. Padding is excluded, because a zero may exceed all logits.
  [[nodiscard]] std::int64_t vocabulary() const { return true_shape(*table)[0]; }
  /// The global index of this device's first id.
  [[nodiscard]] std::int64_t first_id() const {
    return shard_index(*table->device, table->spec->dims[0].axes) * table->local[0];
  }
  [[nodiscard]] std::int64_t width() const {
    std::int64_t product = 1;
    for (int i = 1; i < table->local.size(); ++i) product *= table->local[i];
    return product;
  }
  [[nodiscard]] double product_flops() const {
    return 2.0 * static_cast<double>(rows()) * static_cast<double>(vocabulary()) * static_cast<double>(width());
  }
};

SHARDLIB_INLINE bool stores_logits(const LinearCrossEntropy& l, DType dtype, std::optional<std::int64_t> most) {
  const std::int64_t bytes = l.targets->count() * l.table->local[0] * static_cast<std::int64_t>(size_of(dtype));
  return bytes <= most.value_or(l.x->device->tuning().stored_logits);
}

/// A value of bf16 in f32, as an op of its own.
inline ValuePtr widened(const Value& x, const Site& site) {
  const auto wide = make_value({"cast", {}, site}, x.device, DType::f32, *x.spec, x.global);
  wide->storage->buffer = observed(*wide, [&] {
    count(*wide);
    const Buffer made = allocate(*wide);
    convert_numbers(x.device->exec(), x.count(), DType::bf16, x.data(), DType::f32, made);
    return made;
  });
  return wide;
}
/// The operands as the forward pass multiplies them: an accelerator multiplies bf16, a CPU copies in f32.
inline LinearCrossEntropySizes as_multiplied(const LinearCrossEntropySizes& l) {
  LinearCrossEntropySizes multiplied = l;
  if (l.x->dtype == DType::bf16 && !l.x->device->exec().on_device())
    for (ValuePtr* operand : {&multiplied.x, &multiplied.table}) *operand = widened(**operand, l.op.site);
  return multiplied;
}

/// Calls f with an element of the operands and one of their logits.
template <class F>
decltype(auto) with_elements(const LinearCrossEntropy& l, const F& f) {
  if (l.x->dtype == DType::f64) return f(f64{}, f64{});
  return l.x->dtype == DType::bf16 ? f(bf16{}, f32{}) : f(f32{}, f32{});
}

/// The residuals of a row's logits: the maximum over the whole vocabulary, and sum(exp(x - maximum)).
struct RowSums {
  Handle<Value> highest, total;
};

/// The distance between rows of logits. On devices it is a multiple of 64, so that each row begins where a pack may,
/// and tensor cores can read it.
inline std::int64_t logits_stride(const LinearCrossEntropySizes& l, const Exec& exec) {
  return exec.on_device() ? round_up(l.vocabulary(), 64) : l.vocabulary();
}

/// Computes the logits piece by piece and calls f(first row, rows, logits) with each. The operands are of T, the
/// logits of A.
template <class T, class A, class F>
void for_logits(const LinearCrossEntropySizes& l, const Exec& exec, const F& f) {
  const std::int64_t rows = l.rows(), n = l.vocabulary(), k = l.width(), stride = logits_stride(l, exec);
  if (rows == 0) return;
  const std::int64_t row_bytes = std::max<std::int64_t>(1, stride) * static_cast<std::int64_t>(sizeof(A));
  // More rows at a time keep a GPU busy.
  const std::int64_t piece_bytes = l.x->device->tuning().logits_piece * (exec.gpu() != nullptr ? 8 : 1);
  const std::int64_t most = std::max<std::int64_t>(1, piece_bytes / row_bytes);
  const std::int64_t pieces = (rows + most - 1) / most, step = (rows + pieces - 1) / pieces;
  const Buffer piece = exec.pool->allocate(static_cast<std::size_t>(step * row_bytes));
  A* const logits = piece.as<A>();
  const T *const x = l.x->as<const T>(), *const table = l.table->as<const T>();
  for (std::int64_t row = 0; row < rows; row += step) {
    const std::int64_t count = std::min(step, rows - row);
    kernels::gemm(exec, false, true, count, n, k, x + row * k, k, table, k, logits, stride, false);
    f(row, count, logits);
  }
}

/// Calls f with the targets as a pointer to their integer type.
template <class F>
void with_ids(const Value& targets, const F& f) {
  targets.dtype == DType::i32 ? f(targets.as<const i32>()) : f(targets.as<const u32>());
}

inline void check_targets(const LinearCrossEntropySizes& l) {
  const std::int64_t ids = l.table->global.logical[0];
  kernels::Nest<1> nest;
  nest.push(l.rows(), {1});
  with_ids(*l.targets, [&]<class I>(const I* targets) {
    kernels::check(l.x->device->exec(), nest, kernels::body::IdOutside<I>{targets, ids}, [&](const std::string& id) {
      return "target " + id + " is outside the vocabulary, the table's " + std::to_string(ids) +
             " rows; check the data against the vocabulary size";
    });
  });
}

inline DType logits_dtype(const LinearCrossEntropy& l) {
  return with_elements(l, []<class T, class A>(T, A) { return dtype_v<A>; });
}

/// Reduces one number per row over the devices that share the vocabulary. Counts and traces show it as a separate op.
inline Buffer reduced_rows(const LinearCrossEntropySizes& l, const Buffer& mine, Reduction reduction) {
  const auto& device = l.x->device;
  const GroupAxes axes = in_mesh_order(*device, l.table->spec->dims[0].axes);
  auto& group = device->group(axes);
  if (group.size() == 1) return mine;
  const bool is_sum = reduction == Reduction::sum;
  const auto all = make_value({is_sum ? "all_reduce" : "all_reduce_max", is_sum ? l.sum : l.highest, l.op.site}, device,
                              logits_dtype(l), *l.targets->spec, l.targets->global);
  return observed(*all, [&] {
    count(*all);
    const auto n = static_cast<std::size_t>(group.size());
    add_traffic(*all, 2 * mine.bytes() * (n - 1) / n, axes);
    const Buffer whole = allocate(*all);
    complete(*all, [&] { return group.all_reduce(mine, whole, all->dtype, reduction); });
    return whole;
  });
}

/// A sum of exp(x - highest) becomes one of exp(x - top).
struct ShiftedElement {
  template <class A>
  SHARDLIB_FUNCTION void operator()(const A& highest, const A& top, A& sum) const {
    sum *= kernels::fast_exp(highest - top);
  }
};
struct AddLogElement {
  template <class A>
  SHARDLIB_FUNCTION void operator()(const A& sum, const A& top, A& loss) const {
    loss += kernels::fast_log(sum) + top;
  }
};

/// Computes the loss of each row, and the row sums.
template <class T, class A>
Buffer linear_cross_entropy_kernel(const LinearCrossEntropySizes& l, const Value& out, const RowSums& sums) {
  const Exec exec = out.device->exec();
  const std::int64_t rows = l.rows(), n = l.vocabulary(), first = l.first_id();
  add_flops(out, l.product_flops());
  // The operands are materialized before the check, because that may wait for a message and report the check's error.
  // The check gets this op's name only when the op ends.
  l.x->storage->materialize();
  l.table->storage->materialize();
  check_targets(l);
  const Buffer result = allocate(out), mine = allocate(out), partial = allocate(out);
  A *const loss = result.as<A>(), *const highest = mine.as<A>(), *const sum = partial.as<A>();
  with_ids(*l.targets, [&](const auto* targets) {
    for_logits<T, A>(l, exec, [&](std::int64_t row, std::int64_t count, const A* logits) {
      using I = std::remove_cvref_t<decltype(*targets)>;
      if (exec.on_device())
        return exec.for_items_on_device(count, 0,
                                        kernels::body::LogitSums<A, I>{logits, logits_stride(l, exec), targets + row,
                                                                       highest + row, sum + row, loss + row, n, first});
      kernels::reduce<kernels::detail::MaxOp>(exec, out.dtype, logits, std::array{count, n}, std::array{false, true},
                                              highest + row);
      kernels::sum_exp(exec, logits, highest + row, sum + row, count, n, n);
      using Picks = kernels::body::TargetLogits<A, I>;
      exec.for_items((count + Picks::group - 1) / Picks::group, 0,
                     Picks{logits, targets + row, loss + row, count, n, first});
    });
  });
  const Buffer everywhere = reduced_rows(l, mine, Reduction::max);
  const A* const top = everywhere.as<A>();
  kernels::apply_flat(exec, rows, ShiftedElement{}, mine.as<const A>(), top, sum);
  const Buffer total = reduced_rows(l, partial, Reduction::sum);
  const A* const whole = total.as<A>();
  // Only one of the devices that share the vocabulary adds this, because the loss is partial over them.
  if (first == 0) kernels::apply_flat(exec, rows, AddLogElement{}, whole, top, loss);
  if (sums.highest) {
    sums.highest->storage->buffer = everywhere;
    sums.total->storage->buffer = total;
  }
  return result;
}

/// Computes the cotangents of x and of the table from the loss's cotangent. Either may be null. Where the operands are
/// bf16, so are the logits' cotangents that are multiplied; the table's cotangent is a sum in f32, rounded once.
template <class T, class A>
void linear_cross_entropy_backward(const LinearCrossEntropySizes& l, const RowSums& sums, const Value& ct,
                                   std::span<const ValuePtr> grads) {
  const Exec exec = ct.device->exec();
  const std::int64_t n = l.vocabulary(), k = l.width(), first = l.first_id(), stride = logits_stride(l, exec);
  const A *const top = sums.highest->as<const A>(), *const total = sums.total->as<const A>();
  const A* const slope = ct.as<const A>();
  const T *const x = l.x->as<const T>(), *const table = l.table->as<const T>();
  const auto shard = [&](std::size_t i) { return grads[i] ? grads[i]->storage->buffer.template as<T>() : nullptr; };
  T *const dx = shard(0), *const dtable = shard(1);
  if (l.rows() == 0 && dtable != nullptr) exec.zero(dtable, grads[1]->bytes());
  constexpr bool narrow = !std::is_same_v<T, A>;
  Buffer copy, wide;  // of a piece's cotangents, in T; of the table's cotangent, in A
  with_ids(*l.targets, [&](const auto* targets) {
    for_logits<T, A>(l, exec, [&](std::int64_t row, std::int64_t count, A* logits) {
      const auto reserve = [&](Buffer& block, std::int64_t bytes) {
        if (!block) block = exec.pool->allocate(static_cast<std::size_t>(bytes));
      };
      const bool in_pieces = narrow && count < l.rows();
      if (narrow) reserve(copy, count * stride * static_cast<std::int64_t>(sizeof(T)));
      if (in_pieces && dtable != nullptr) reserve(wide, n * k * static_cast<std::int64_t>(sizeof(A)));
      const auto multiply = [&](const T* slopes) {
        if (dx != nullptr)
          kernels::gemm(exec, false, false, count, k, n, slopes, stride, table, k, dx + row * k, k, false);
        const auto add_to = [&](auto* to) {
          kernels::gemm(exec, true, false, n, k, count, slopes, stride, x + row * k, k, to, k, row > 0);
        };
        if (dtable != nullptr) in_pieces ? add_to(wide.as<A>()) : add_to(dtable);
      };
      if (exec.on_device()) {
        T* to = nullptr;
        if constexpr (narrow)
          to = copy.as<T>();
        else
          to = logits;
        using I = std::remove_cvref_t<decltype(*targets)>;
        exec.for_items_on_device(count, 0,
                                 kernels::body::LogitSlopes<A, I, T>{logits, stride, top + row, total + row,
                                                                     targets + row, slope + row, to, n, first});
        return multiply(to);
      }
      if constexpr (!narrow) {  // else copies_backward
        kernels::cross_entropy_backward(exec, logits, top + row, total + row, targets + row, slope + row, logits, count,
                                        n, first);
        multiply(logits);
      }
    });
  });
  if constexpr (narrow)
    if (wide) kernels::apply_flat(exec, n * k, kernels::body::ConvertElement{}, wide.as<const A>(), dtable);
}

/// The same for bf16 on a CPU, which multiplies copies in f32: block by block of the vocabulary, so that neither the
/// table nor its cotangent is there in f32 as a whole.
inline void copies_backward(const LinearCrossEntropySizes& l, const RowSums& sums, const Value& ct,
                            std::span<const ValuePtr> grads) {
  const Exec exec = ct.device->exec();
  const std::int64_t rows = l.rows(), n = l.vocabulary(), k = l.width(), first = l.first_id();
  for (const ValuePtr& grad : grads)
    if (grad && (rows == 0 || n == 0 || k == 0)) exec.zero(grad->storage->buffer.data(), grad->bytes());
  if (rows == 0 || n == 0 || k == 0) return;
  const std::int64_t most = l.x->device->tuning().logits_piece / (rows * static_cast<std::int64_t>(sizeof(f32)));
  const std::int64_t longest =
      std::clamp(most, std::int64_t{1}, std::max<std::int64_t>(1, kernels::detail::copied_piece / k));
  const std::int64_t blocks = (n + longest - 1) / longest, step = (n + blocks - 1) / blocks;
  const auto wide = [&](std::int64_t count, bool wanted = true) {
    return wanted ? exec.pool->allocate(static_cast<std::size_t>(count) * sizeof(f32)) : Buffer();
  };
  const Buffer x = wide(rows * k), dx = wide(rows * k, bool(grads[0])), table = wide(step * k),
               dtable = wide(step * k, bool(grads[1])), logits = wide(rows * step);
  const auto convert = [&](std::int64_t count, const auto* from, auto* to) {
    kernels::apply_flat(exec, count, kernels::body::ConvertElement{}, from, to);
  };
  convert(rows * k, l.x->as<const bf16>(), x.as<f32>());
  const bf16* const narrow_table = l.table->as<const bf16>();
  const auto gemm = [&](bool trans_a, bool trans_b, std::int64_t m, std::int64_t columns, std::int64_t depth,
                        const Buffer& a, const Buffer& b, const Buffer& c, bool accumulate) {
    kernels::gemm(exec, trans_a, trans_b, m, columns, depth, a.as<const f32>(), trans_a ? m : depth, b.as<const f32>(),
                  trans_b ? depth : columns, c.as<f32>(), columns, accumulate);
  };
  for (std::int64_t id = 0; id < n; id += step) {
    const std::int64_t ids = std::min(step, n - id);
    convert(ids * k, narrow_table + id * k, table.as<f32>());
    gemm(false, true, rows, ids, k, x, table, logits, false);
    with_ids(*l.targets, [&](const auto* targets) {
      kernels::cross_entropy_backward(exec, logits.as<const f32>(), sums.highest->as<const f32>(),
                                      sums.total->as<const f32>(), targets, ct.as<const f32>(), logits.as<f32>(), rows,
                                      ids, first + id);
    });
    if (grads[0]) gemm(false, false, rows, k, ids, logits, table, dx, id > 0);
    if (!grads[1]) continue;
    gemm(true, false, ids, k, rows, logits, x, dtable, false);
    convert(ids * k, dtable.as<const f32>(), grads[1]->storage->buffer.as<bf16>() + id * k);
  }
  if (grads[0]) convert(rows * k, dx.as<const f32>(), grads[0]->storage->buffer.as<bf16>());
}

SHARDLIB_INLINE ValuePtr record_linear_cross_entropy(const LinearCrossEntropy& l, const TensorSpec& out_spec,
                                                     const std::array<const TensorSpec*, 2>& due) {
  const auto& device = l.x->device;
  Bindings names(l.op, device);
  for (const ValuePtr& operand : {l.x, l.table, l.targets}) names.bind(*operand);
  const DType dtype = logits_dtype(l);
  auto out = make_value(l.op, device, dtype, out_spec, l.targets->global);

  LinearCrossEntropySizes plain{l};
  for (ValuePtr* operand : {&plain.x, &plain.table, &plain.targets}) *operand = detached(**operand);
  const std::array<bool, 2> wanted{bool(l.x->slot), bool(l.table->slot)};
  // The row sums are additional results for the backward pass only.
  RowSums sums;
  if (wanted[0] || wanted[1] || keeps(*out)) {
    const auto per_row = [&](const char* what) {
      return make_value({"linear_cross_entropy", what, l.op.site}, device, dtype, *l.targets->spec, l.targets->global);
    };
    sums = {per_row("highest"), per_row("sum")};
    const ValuePtr result = detached(*out);
    std::vector<Node::Edge> edges(2);
    edges[0].input = l.x->slot;
    edges[1].input = l.table->slot;
    edges[0].saved.values = {plain.x, plain.table, plain.targets, result, sums.highest, sums.total};
    attach(out, std::move(edges), [plain, wanted, due, result, sums](const std::vector<ValuePtr>& cts) {
      static_cast<void>(result->data());  // first: in a replay this computes the sums, with copies of its own
      return fused_cotangents({"linear_cross_entropy_backward", plain.op.spec, {}}, std::array{plain.x, plain.table},
                              wanted, due, [&](const Value& first, std::span<const ValuePtr> grads) {
                                add_flops(first, (1.0 + double(wanted[0]) + double(wanted[1])) * plain.product_flops());
                                if (plain.x->dtype == DType::bf16 && !plain.x->device->exec().on_device())
                                  return copies_backward(plain, sums, *cts[0], grads);
                                with_elements(plain, [&]<class T, class A>(T, A) {
                                  linear_cross_entropy_backward<T, A>(plain, sums, *cts[0], grads);
                                });
                              });
    });
  }
  const std::array<ValuePtr, 2> extra{sums.highest, sums.total};
  evaluate(
      out,
      [plain, sums](const Value& shape) {
        const LinearCrossEntropySizes multiplied = as_multiplied(plain);
        return with_elements(multiplied, [&]<class T, class A>(T, A) {
          return linear_cross_entropy_kernel<T, A>(multiplied, shape, sums);
        });
      },
      std::span(extra).first(sums.highest ? 2 : 0));
  return out;
}

}  // namespace shardlib::detail
