// Definitions of layout.hpp.
#pragma once

#include "shardlib/compute/layout.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "shardlib/compute/create.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/runtime/bindings.hpp"
#include "shardlib/runtime/names.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE Buffer same_bytes(const Value& in, const Value& /*out*/) {
  return in.data();
}
SHARDLIB_INLINE ValuePtr record_on(const OpInfo& op, const ValuePtr& x, const DevicePtr& device, const TensorSpec& spec,
                                   const GlobalSizes& global, std::span<EdgeSource> sources) {
  note_operand(*x);
  return evaluate(make_recorded(op, device, x->dtype, spec, global, sources),
                  OfOperand<decltype(&same_bytes)>{x, same_bytes});
}

SHARDLIB_INLINE GlobalSizes sizes_in_order(const ValuePtr& x, const TensorSpec& out) {
  GlobalSizes global;
  for (const Dim& dim : out.dims) global.push_back(x->global[x->spec->find(dim.name)]);
  return global;
}
SHARDLIB_INLINE Buffer permute(const Value& in, const Value& out) {
  int order[max_dims];
  for (int i = 0; i < out.spec->rank(); ++i) order[i] = in.spec->find(out.spec->dims[i].name);
  Buffer result = allocate(out);
  kernels::permute(out.device->exec(), size_of(out.dtype), in.data().data(), view(in.local),
                   std::span<const int>(order, static_cast<std::size_t>(out.spec->rank())), result.data());
  return result;
}

SHARDLIB_INLINE GlobalSizes merged_sizes(const OpInfo& op, const OpParts& parts, const TensorSpec& out,
                                         const ValuePtr& x) {
  Bindings names(op, x->device);
  names.bind(*x);
  DimSize size = 1;
  for (const Dim& dim : parts.in[0].dims) {
    const DimSize part = names[dim];
    if (part.is_padded() && !(dim == parts.in[0].dims[0]))
      fail_padded(op, *x->device, dim.name, part,
                  "only the first of the merged dims may be padded; choose a size that needs no padding");
    size = {size.size * part.size, size.padded * part.padded};
  }
  names.bind(parts.out.dims[0].name, size);
  return names.sizes(out);
}

SHARDLIB_INLINE GlobalSizes split_sizes(const OpInfo& op, const OpParts& parts, const TensorSpec& out,
                                        const ValuePtr& x, const Sizes& sizes) {
  Bindings names(op, x->device);
  names.bind(*x);
  for (const NamedSize& given : sizes) names.bind(given);
  const Dim& whole = parts.in[0].dims[0];
  // If the padding is a whole number of the first new dim's elements, that dim gets it, and it stays at the end.
  DimSize rest = names[whole];
  const Dim* open = nullptr;
  for (const Dim& dim : parts.out.dims) {
    bool given = dim.is_integer();
    for (const NamedSize& size : sizes) given = given || size.name == dim.name;
    if (!given && open != nullptr)
      names.fail("the sizes of `" + std::string(open->name) + "` and `" + std::string(dim.name) +
                 "` are both open: give one of them");
    if (!given) {
      open = &dim;
      continue;
    }
    const DimSize part = names[dim];
    if (part.size == 0 || rest.size % part.size != 0 || rest.padded % part.padded != 0)
      names.fail("dim `" + std::string(whole.name) + "` of size " + to_string(names[whole]) + " does not split by `" +
                 std::string(dim.name) + "` = " + to_string(part) + "; choose a size that divides it");
    rest = {rest.size / part.size, rest.padded / part.padded};
  }
  if (open != nullptr)
    names.bind(open->name, rest);
  else if (rest != DimSize(1))
    names.fail("the sizes of the parts multiply to less than `" + std::string(whole.name) +
               "` = " + to_string(names[whole]));
  for (const Dim& dim : parts.out.dims)
    if (names[dim].is_padded() && !(dim == parts.out.dims[0]))
      fail_padded(op, *x->device, dim.name, names[dim],
                  "only the first of the parts may be padded; give it the padding, or choose a size that needs none");
  return names.sizes(out);
}

SHARDLIB_INLINE GlobalSizes stacked_sizes(const OpInfo& op, const ValuePtr& x, const TensorSpec& out) {
  GlobalSizes global;
  global.push_back(shard_count(*x->device, out.dims[0].axes));
  for (int i = 0; i < x->spec->rank(); ++i) {
    const Dim& dim = x->spec->dims[i];
    const bool stacked = !(dim == out.dims[i + 1]);
    if (stacked && x->global[i].is_padded())
      fail_padded(op, *x->device, dim.name, x->global[i],
                  "shards would have several sizes; choose a size that needs no padding");
    global.push_back(stacked ? DimSize(x->local[i]) : x->global[i]);
  }
  return global;
}
SHARDLIB_INLINE GlobalSizes unstacked_sizes(const OpInfo& op, const ValuePtr& x, const TensorSpec& out) {
  const Dim& first = x->spec->dims[0];
  if (const std::int64_t devices = shard_count(*x->device, first.axes); x->global[0] != DimSize(devices))
    throw Error(op.describe() + ": dim `" + std::string(to_string(first).view()) + "` is " + to_string(x->global[0]) +
                ", but must have one element for each of the " + std::to_string(devices) +
                " devices along its axes; `split` it first, and keep the rest as a dim of the shards (" +
                x->device->describe() + ")");
  GlobalSizes global;
  for (int i = 0; i < out.rank(); ++i) {
    const DimSize size = x->global[i + 1];
    const bool stacked = !(out.dims[i] == x->spec->dims[i + 1]);
    if (stacked && size.is_padded())
      fail_padded(op, *x->device, x->spec->dims[i + 1].name, size,
                  "its padding would be between elements; choose a size that needs none");
    global.push_back(stacked ? DimSize(size.size * shard_count(*x->device, out.dims[i].axes)) : size);
  }
  return global;
}

/// Checks that two operands have the same sizes, except along dim `at` of each.
inline void check_same_sizes(const OpInfo& op, const Value& a, const Value& b, int at) {
  if (b.device != a.device) {
    Bindings operands(op, a.device);
    operands.bind(a);
    operands.bind(b);  // throws
  }
  for (int i = 0; i < a.global.size(); ++i)
    if (i != at && b.global[i] != a.global[i])
      throw Error(op.describe() + ": dim `" + std::string(a.spec->dims[i].name) + "` is " + to_string(a.global[i]) +
                  " in one operand, but " + to_string(b.global[i]) + " in another (" + a.device->describe() + ")");
}

SHARDLIB_INLINE Joined joined_sizes(const OpInfo& op, const ValuePtr& a, const ValuePtr& b, int at) {
  Joined joined{a->global[at], b->global[at], a->global};
  if (joined.first.is_padded())
    fail_padded(op, *a->device, a->spec->dims[at].name, joined.first,
                "the padding of the first operand would be before the second; choose a size that needs none");
  check_same_sizes(op, *a, *b, at);
  joined.global.set(at, {joined.first.size + joined.second.size, joined.first.padded + joined.second.padded});
  return joined;
}
SHARDLIB_INLINE Buffer Concat::operator()(const Value& out) const {
  Buffer result = allocate(out);
  const auto strides = kernels::row_major(view(out.local));
  std::size_t offset = 0;
  for (const ValuePtr& part : {a, b}) {
    kernels::copy_strided(out.device->exec(), size_of(out.dtype), view(part->local), part->data().data(),
                          kernels::row_major(view(part->local)), result.data() + offset, strides);
    offset += static_cast<std::size_t>(part->local[at] * strides[at]) * size_of(out.dtype);
  }
  return result;
}
SHARDLIB_INLINE GlobalSizes with_size(const ValuePtr& x, int at, DimSize size) {
  GlobalSizes global = x->global;
  global.set(at, size);
  return global;
}
SHARDLIB_INLINE Buffer CopyRange::operator()(const Value& in, const Value& out) const {
  Buffer result = allocate(out);
  if (size != out.local[at]) fill_constant(result, out, fill);
  const auto in_strides = kernels::row_major(view(in.local)), out_strides = kernels::row_major(view(out.local));
  const auto skip = [&](std::int64_t elements) { return static_cast<std::size_t>(elements) * size_of(out.dtype); };
  Shape range = in.local;
  range[at] = size;
  kernels::copy_strided(out.device->exec(), size_of(out.dtype), view(range),
                        in.data().data() + skip(from * in_strides[at]), in_strides,
                        result.data() + skip(to * out_strides[at]), out_strides);
  return result;
}
SHARDLIB_INLINE GlobalSizes resized(const OpInfo& op, const TensorSpec& out, const ValuePtr& x, int at,
                                    std::int64_t size) {
  Bindings names(op, x->device);
  names.bind(*x);
  names.bind(out.dims[at].name, size);
  return names.sizes(out);
}
SHARDLIB_INLINE DimSize size_around(const OpInfo& op, const ValuePtr& x, int at, std::int64_t begin,
                                    std::int64_t size) {
  const DimSize own = x->global[at];
  if (begin < 0 || size < 0 || begin > own.size || size > own.size - begin)
    Bindings(op, x->device)
        .fail("the range of " + std::to_string(size) + " indices from " + std::to_string(begin) +
              " on is not inside dim `" + std::string(x->spec->dims[at].name) + "` of size " +
              std::to_string(own.size));
  return own;
}
SHARDLIB_INLINE DimSize size_inside(const OpInfo& op, const ValuePtr& x, int at, std::int64_t before,
                                    std::int64_t after, double value) {
  if (before < 0 || after < 0)
    Bindings(op, x->device)
        .fail("it would add " + std::to_string(before) + " elements before and " + std::to_string(after) +
              " after; take `narrow` to drop elements");
  const DimSize own = x->global[at];
  const std::int64_t room = std::numeric_limits<std::int64_t>::max() - own.size;
  if (before > room || after > room - before)
    Bindings(op, x->device)
        .fail("it would add " + std::to_string(before) + " elements before and " + std::to_string(after) +
              " after dim `" + std::string(x->spec->dims[at].name) + "` of size " + std::to_string(own.size) +
              ", which are more than can be counted; choose smaller numbers");
  check_number(op, *x->spec, *x->device, x->dtype, value);
  return own;
}

SHARDLIB_INLINE GlobalSizes sizes_of_part(const ValuePtr& x) {
  GlobalSizes global;
  for (int i = 1; i < x->global.size(); ++i) global.push_back(x->global[i]);
  return global;
}
SHARDLIB_INLINE Buffer TakePart::operator()(const Value& in, const Value& out) const {
  Buffer result = allocate(out);
  const auto skip = static_cast<std::size_t>(at) * out.bytes();
  out.device->exec().copy(result.data(), in.data().data() + skip, out.bytes());
  return result;
}
SHARDLIB_INLINE Buffer PutPart::operator()(const Value& in, const Value& out) const {
  Buffer result = allocate(out);
  out.device->exec().zero(result.data(), out.bytes());
  out.device->exec().copy(result.data() + static_cast<std::size_t>(at) * in.bytes(), in.data().data(), in.bytes());
  return result;
}
/// Copies the parts one after the other. A part without a value is zero.
struct StackParts {
  std::vector<ValuePtr> parts;
  Buffer operator()(const Value& out) const {
    Buffer result = allocate(out);
    const Exec exec = out.device->exec();
    const std::size_t bytes = out.bytes() / static_cast<std::size_t>(out.local[0]);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      std::byte* const to = result.data() + i * bytes;
      parts[i] ? exec.copy(to, parts[i]->data().data(), bytes) : exec.zero(to, bytes);
    }
    return result;
  }
};
SHARDLIB_INLINE ValuePtr record_stack_erased(const OpInfo& op, const std::vector<ValuePtr>& parts, DimSize size,
                                             const TensorSpec& spec, std::vector<EdgeSource>& sources) {
  if (parts.empty()) throw Error(op.describe() + ": there is nothing to stack; give one tensor at least");
  const Value& like = *parts[0];
  GlobalSizes global;
  global.push_back(size);
  for (int i = 0; i < like.global.size(); ++i) global.push_back(like.global[i]);
  for (const ValuePtr& part : parts) {
    check_same_sizes(op, like, *part, -1);
    note_operand(*part);
  }
  return evaluate(make_recorded(op, like.device, like.dtype, spec, global, sources), StackParts{parts});
}
SHARDLIB_INLINE DimSize unstack_to(std::vector<ValuePtr>& parts, const OpInfo& op, const ValuePtr& x,
                                   const TensorSpec& part, const TensorSpec& due) {
  const auto stack_cotangents = [op, device = x->device, dtype = x->dtype, global = x->global,
                                 &due](const std::vector<ValuePtr>& cotangents) {
    std::vector<EdgeSource> sources;
    for (std::size_t i = 0; i < cotangents.size(); ++i)
      if (cotangents[i] && cotangents[i]->slot)
        sources.push_back({&cotangents[i],
                           {},
                           [i, spec = &lasting_dual(*cotangents[i]->spec, {})](const ValuePtr& ct, const Residuals&) {
                             const auto at = static_cast<std::int64_t>(i);
                             return record_linear_erased(Calling("take_part", {}, {}), ct, *spec, sizes_of_part(ct),
                                                         TakePart{at}, PutPart{at});
                           }});
    return std::vector{evaluate(make_recorded({"stack", op.spec, op.site}, device, dtype, due, global, sources),
                                StackParts{cotangents})};
  };
  note_operand(*x);
  Slot slot;
  for (std::int64_t i = 0; i < x->global[0].size; ++i) {
    const auto one = make_value(op, x->device, x->dtype, part, sizes_of_part(x));
    if (i == 0) {
      bind_names(op, *one);
      std::vector<Node::Edge> edges;
      edges.push_back({x->slot, {{}, x->global}, nullptr});
      attach(one, std::move(edges), stack_cotangents, program_state(x->device).twice);
      slot = one->slot;
      if (slot) slot.node->outputs = static_cast<int>(x->global[0].size);
    }
    slot.output = static_cast<int>(i);
    one->slot = slot;
    evaluate(one, [x, i](const Value& out) {
      const std::size_t bytes = out.bytes(), begin = static_cast<std::size_t>(i) * bytes;
      // Kernels may expect memory that is aligned as that of a block.
      if (bytes % 64 == 0) return x->data().slice(begin, bytes);
      Buffer result = allocate(out);
      out.device->exec().copy(result.data(), x->data().data() + begin, bytes);
      return result;
    });
    parts.push_back(one);
  }
  return x->global[0];
}

}  // namespace shardlib::detail
