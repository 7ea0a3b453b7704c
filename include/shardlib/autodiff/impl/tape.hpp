// Definitions of tape.hpp.
#pragma once

#include "shardlib/autodiff/tape.hpp"

#include <optional>
#include <string_view>

#include "shardlib/autodiff/overlap.hpp"
#include "shardlib/memory/faults.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/observe.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

// Drops the nodes of a chain one after the other. If each dropped the next one, a long chain would fill the stack.
SHARDLIB_INLINE Node::~Node() {
  std::vector<Handle<Node>> below;
  const auto take = [&](Node& node) {
    for (Edge& edge : std::exchange(node.edges, {}))
      if (edge.input) below.push_back(std::move(edge.input.node));
  };
  take(*this);
  while (!below.empty()) {
    const Handle<Node> node = std::move(below.back());
    below.pop_back();
    if (node.use_count() == 1) take(*node);
  }
}

SHARDLIB_INLINE Handle<Value> as_leaf(const Value& value) {
  auto leaf = Handle<Value>::make(value);
  leaf->slot = {Handle<Node>::make(), 0};
  leaf->slot.node->tape = program_state(value.device).tape;
  return leaf;
}

SHARDLIB_INLINE void require_this_tape(const OpInfo& op, const Slot& operand, const DevicePtr& device) {
  const ProgramState& s = program_state(device);
  if (!operand || operand.node->tape == s.tape || s.tape == 0 || s.pass != ProgramState::Pass::forward) return;
  throw Error(op.describe() + ": it takes " + operand.node->describe() +
              " from an earlier call of value_and_grad, or from another microbatch of a pipeline, so its gradient "
              "would be lost; compute it again, or take `stop_gradient` of it (" +
              device->describe() + ")");
}

SHARDLIB_INLINE void stop_below(const Slot& slot) {
  std::vector<Node*> todo{slot.node.get()};
  while (!todo.empty()) {
    Node* node = todo.back();
    todo.pop_back();
    if (node == nullptr || std::exchange(node->stopped, true)) continue;
    for (const Node::Edge& edge : node->edges) todo.push_back(edge.input.node.get());
  }
}

SHARDLIB_INLINE void stop_below(const ValuePtr& x) {
  stop_below(x->slot);
}
SHARDLIB_INLINE ValuePtr without_gradient(const ValuePtr& x) {
  return stopped(*x);
}

SHARDLIB_INLINE bool differentiated_twice(const ValuePtr& x) {
  return program_state(x->device).twice;
}

SHARDLIB_INLINE ValuePtr with_spec(const ValuePtr& value, const TensorSpec& spec) {
  if (value->spec == &spec) return value;
  auto copy = Handle<Value>::make(*value);
  copy->spec = &spec;
  return copy;
}

SHARDLIB_INLINE void require_sizes_of(const GlobalSizes& operand, const char* name, const Value& cotangent) {
  for (int i = 0; i < operand.size(); ++i) {
    const DimSize due = operand[i], is = cotangent.global[i];
    if (is == due) continue;
    throw Error(Calling::placed({name, {}, {}}).describe() + ": its VJP returns a cotangent with `" +
                std::string(cotangent.spec->dims[i].name) + "` of size " + to_string(is) + ", where the operand has " +
                to_string(due) + "; return one for all elements of the operand (" + cotangent.device->describe() + ")");
  }
}

SHARDLIB_INLINE ProgramState::Count& count(const Value& value) {
  auto& counts = program_state(value.device).counts;
  auto it = counts.find(value.made_by.name);
  if (it == counts.end()) it = counts.emplace(value.made_by.name, ProgramState::Count{}).first;
  ++it->second.calls;
  return it->second;
}

SHARDLIB_INLINE void add_flops(const Value& value, double flops) {
  ProgramState& s = program_state(value.device);
  s.counts.find(value.made_by.name)->second.flops += flops;
  s.work.flops += flops;
}

SHARDLIB_INLINE std::vector<ValuePtr> fused_cotangents(
    const OpInfo& op, std::span<const ValuePtr> operands, std::span<const bool> wanted,
    std::span<const TensorSpec* const> due,
    const std::function<void(const Value& first, std::span<const ValuePtr> cotangents)>& fill) {
  std::vector<ValuePtr> cotangents(operands.size());
  Handle<Value> first;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (!wanted[i]) continue;
    const Value& like = *operands[i];
    auto made = make_value(op, like.device, like.dtype, *due[i], like.global);
    made->storage->buffer = allocate(*made);
    if (!first) first = made;
    cotangents[i] = std::move(made);
  }
  observed(*first, [&] {
    count(*first);
    fill(*first, cotangents);
    for (const ValuePtr& made : cotangents)
      if (made) zero_padding(*made, made->storage->buffer);
    return first->storage->buffer;
  });
  for (const ValuePtr& made : cotangents)
    if (made && made != first && program_state(first->device).note_reads)
      observed(*made, [&] {
        note_read(*first);
        return made->storage->buffer;
      });
  return cotangents;
}

SHARDLIB_INLINE void attach(const Handle<Value>& out, std::vector<Node::Edge>&& edges,
                            std::function<std::vector<ValuePtr>(const std::vector<ValuePtr>&)> fused_vjp, bool twice) {
  bool any = false;
  for (const auto& edge : edges) any = any || edge.input;
  ProgramState& s = program_state(out->device);
  if (!any || s.mode == ProgramState::Mode::start) return;
  if (s.mode == ProgramState::Mode::checkpoint) {
    const auto outside = std::find_if(edges.begin(), edges.end(), [](const auto& e) { return bool(e.input); });
    throw Error(out->made_by.describe() + " of result `" + std::string(to_string(*out->spec).view()) +
                "`: inside explicit_activation_checkpointing it uses a tensor from outside, " +
                outside->input.node->describe() + "; pass that as an argument, or its gradient would be lost (" +
                out->device->describe() + ")");
  }
  for (const auto& edge : edges) require_this_tape(out->made_by, edge.input, out->device);
  auto node = Handle<Node>::make();
  node->op = out->made_by;
  node->part = s.part;
  node->sequence = ++s.sequence;
  node->tape = s.tape;
  node->edges = std::move(edges);
  node->fused_vjp = std::move(fused_vjp);
  node->twice = twice;
  out->slot = {std::move(node), 0};
}

/// The reads of an op inside a VJP that is differentiated: of its operands that have derivatives, and of any for a
/// result that has none, such as a condition.
class ReadsOf {
 public:
  explicit ReadsOf(const Value& out) {
    ProgramState& s = program_state(out.device);
    if (s.transposing == nullptr) return;
    Transposing& reads = reads_.emplace(Transposing{s.transposing->op});
    if (out.slot)
      for (const Node::Edge& edge : out.slot.node->edges) reads.differentiable.push_back(edge.input);
    here_.emplace(s.transposing, is_floating(out.dtype) ? &reads : nullptr);
  }

 private:
  std::optional<Transposing> reads_;
  std::optional<WithValue<Transposing*>> here_;
};

/// An error's reason with the op's name, its line and the device.
inline std::string with_op(const Value& out, std::string_view reason) {
  // A collective's communicator has added the name already.
  const std::string named = std::string(out.made_by.name) + ": ";
  if (reason.starts_with(named)) reason.remove_prefix(named.size());
  return out.made_by.describe() + ": " + std::string(reason) + " (" + out.device->describe() + ")";
}

/// Calls f, a part of the op that computes `out`, and reports it to the observer if `report`. Adds the op's name and
/// the device to its errors, also to those that its kernels find later.
inline Buffer run_part(const Value& out, bool report, const std::function<Buffer()>& f) {
  const ReadsOf reads(out);
  Region* const memory = out.device->pool()->device_memory();
  Faults* const faults = memory == nullptr ? nullptr : memory->faults();
  const std::size_t before = faults == nullptr ? 0 : faults->count();
  const auto name_checks = [&] {
    if (faults != nullptr) faults->name(before, [&](const std::string& reason) { return with_op(out, reason); });
  };
  try {
    Buffer result = report ? observed(out, f) : f();
    name_checks();
    return result;
  } catch (const Error& error) {
    name_checks();
    // In a replay, the operands' ops run inside this one and have already added their names.
    if (typeid(error) != typeid(Error) || std::string_view(error.what()).ends_with(" (" + out.device->describe() + ")"))
      throw;
    throw Error(with_op(out, error.what()));
  }
}

SHARDLIB_INLINE Buffer run(const Kernel& kernel, const Value& out) {
  make_progress(program_state(out.device));
  count(out);
  return run_part(out, true, [&] {
    Buffer result = kernel(out);
    // A buffer with other owners is an operand's, passed on unchanged, or a collective's. Its padding is zero already.
    if (out.global.is_padded() && result.unique()) zero_padding(out, result);
    return result;
  });
}

/// The value as the function that computes it has it: without a slot, and without its storage, because that must not
/// own itself. A replayed value has no storage at all, by which observers recognize it.
inline Handle<Value> shape_of(const Value& out) {
  auto shape = detached(out);
  const bool again = program_state(out.device).mode == ProgramState::Mode::replay;
  shape->storage = again ? nullptr : Handle<Storage>::make();
  return shape;
}

SHARDLIB_INLINE void run_async(const ValuePtr& out, const std::function<PendingOp()>& start, NumbersIn numbers) {
  ProgramState& s = program_state(out->device);
  make_progress(s);
  count(*out);
  if (s.mode == ProgramState::Mode::checkpoint) note_op(s, *out, numbers);
  const WithValue work(s.work, {});
  Kernel finish;
  const bool dry = out->device->is_dry();
  static_cast<void>(run_part(*out, dry, [&] {
    PendingOp begun = start();
    finish = std::move(begun.finish);
    return std::move(begun.result);
  }));
  out->storage->compute = [finish = std::move(finish), shape = shape_of(*out), work = std::exchange(s.work, {}), dry] {
    return run_part(*shape, !dry, [&] {
      if (!dry) program_state(shape->device).work = work;
      return finish(*shape);
    });
  };
}

/// Defers the value until something reads it.
inline void defer(const ValuePtr& out, Kernel kernel) {
  out->storage->compute = [kernel = std::move(kernel), shape = shape_of(*out)] { return run(kernel, *shape); };
}

SHARDLIB_INLINE bool keeps(const Value& out) {
  const ProgramState& s = program_state(out.device);
  return s.kept && std::ranges::find(s.kept->ops, std::string_view(out.made_by.name)) != s.kept->ops.end();
}

SHARDLIB_INLINE ValuePtr evaluate(const Handle<Value>& out, Kernel kernel, std::span<const ValuePtr> extra,
                                  NumbersIn numbers) {
  ProgramState& s = program_state(out->device);
  const bool replay = s.mode == ProgramState::Mode::replay, kept = keeps(*out);
  out->checkpoint = s.checkpoint;
  if (replay || s.mode == ProgramState::Mode::checkpoint) note_op(s, *out, numbers);
  const auto results = [&](const auto& f) {
    f(*out);
    for (const ValuePtr& one : extra) f(*one);
  };
  if (replay && kept) {
    results([&](const Value& known) { known.storage->buffer = next_saved(s, known).storage->buffer; });
  } else if (replay || s.mode == ProgramState::Mode::start) {
    defer(out, std::move(kernel));
  } else {
    out->storage->buffer = run(kernel, *out);
    if (kept) results([&](const Value& made) { s.saved.push_back(detached(made)); });
  }
  return out;
}

SHARDLIB_INLINE Handle<Value> make_recorded(const OpInfo& op, const DevicePtr& device, DType dtype,
                                            const TensorSpec& spec, const GlobalSizes& global,
                                            std::span<EdgeSource> sources) {
  auto out = make_value(op, device, dtype, spec, global);
  bind_names(op, *out);
  std::vector<Node::Edge> edges;
  const bool twice = program_state(device).twice;
  for (EdgeSource& source : sources) {
    auto& edge = edges.emplace_back();
    if (!(*source.x)->slot) continue;  // the tape does not track this operand, so it needs no residuals
    edge = {(*source.x)->slot, {{}, (*source.x)->global}, std::move(source.vjp), source.of_result};
    for (const ValuePtr* saved : source.saved)
      if (saved != nullptr) edge.saved.values.push_back(twice ? *saved : ValuePtr(detached(**saved)));
    if (source.of_result) edge.saved.values.push_back(detached(*out));  // with its slot, the node would own itself
  }
  attach(out, std::move(edges), nullptr, twice);
  return out;
}

SHARDLIB_INLINE EdgeSource VjpRef::source() const {
  return {x, saved, make != nullptr && (*x)->slot ? make(f) : nullptr, of_result};
}

SHARDLIB_INLINE ValuePtr record_erased(const OpInfo& op, const DevicePtr& device, DType dtype, const TensorSpec& spec,
                                       const GlobalSizes& global, std::span<const VjpRef> vjps, const void* kernel,
                                       Kernel (*copy)(const void* kernel), NumbersIn numbers) {
  std::vector<EdgeSource> sources;
  sources.reserve(vjps.size());
  for (const VjpRef& vjp : vjps) {
    note_operand(**vjp.x);
    for (const ValuePtr* saved : vjp.saved)
      if (saved != nullptr) note_operand(**saved);
    sources.push_back(vjp.source());
  }
  return evaluate(make_recorded(op, device, dtype, spec, global, sources), copy(kernel), {}, numbers);
}

SHARDLIB_INLINE const TensorSpec& lasting_dual(const TensorSpec& spec,
                                               std::initializer_list<const TensorSpec*> others) {
  Axes axes;
  rules::collect_axes(spec, axes);
  for (const TensorSpec* other : others) rules::collect_axes(*other, axes);
  return lasting(rules::dual(spec, axes));
}

SHARDLIB_INLINE ValuePtr record_linear_erased(const OpInfo& op, const ValuePtr& x, const TensorSpec& spec,
                                              const GlobalSizes& global, UnaryKernel forward, UnaryKernel transpose) {
  note_operand(*x);
  EdgeSource source{&x};
  if (x->slot)
    source.vjp = [op, forward, transpose, due = &lasting_dual(*x->spec, {&spec})](const ValuePtr& ct,
                                                                                  const Residuals& saved) {
      return record_linear_erased(op, ct, *due, saved.sizes, transpose, forward);
    };
  return evaluate(make_recorded(op, x->device, x->dtype, spec, global, {&source, 1}),
                  OfOperand<UnaryKernel>{x, std::move(forward)});
}

SHARDLIB_INLINE ValuePtr defer_product(const Handle<Value>& out, Kernel&& kernel,
                                       std::function<Buffer(const Value& out, const Value& x)>&& with_slope) {
  defer(out, kernel);
  out->storage->with_gelu_slope = [kernel = std::move(kernel), with_slope = std::move(with_slope),
                                   shape = shape_of(*out)](Storage& product, const Value& x) {
    bool multiplied = false;
    product.compute = nullptr;
    product.buffer = run(
        [&](const Value& result) {
          if (Buffer both = with_slope(result, x)) {
            multiplied = true;
            return both;
          }
          return kernel(result);
        },
        *shape);
    return multiplied;
  };
  return out;
}

SHARDLIB_INLINE ValuePtr record_addend_erased(const OpInfo& op, const DevicePtr& device, DType dtype,
                                              const TensorSpec& spec, const GlobalSizes& global, Kernel&& kernel,
                                              AddKernel&& add) {
  const auto out = make_value(op, device, dtype, spec, global);
  defer(out, std::move(kernel));
  out->storage->add_to = [add = std::move(add), shape = shape_of(*out)](std::byte* sum) {
    count(*shape);
    add(*shape, sum);
  };
  return out;
}

}  // namespace shardlib::detail
