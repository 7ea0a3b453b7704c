// Typing rules of the backward pass: dual specs, the loss, gradients, fully sharded weights.
#pragma once

#include "shardlib/rules/dtypes.hpp"
#include "shardlib/spec/dtype.hpp"

#include <cstddef>
#include <string_view>

namespace shardlib::rules {

/// The spec of x's cotangent: on each of the axes, replicated and partial swap, and sharded stays.
constexpr TensorSpec dual(const TensorSpec& x, const Axes& axes) {
  TensorSpec spec = x;
  for (auto axis : axes) {
    const Placement s = spec.placement(axis);
    if (s.kind == Placement::partial)
      spec.partial.erase(spec.partial.find(axis));
    else if (s.kind == Placement::replicated && !spec.partial.full())
      spec.add_partial(axis);
  }
  return spec;
}

/// Parses the axes of "d t".
constexpr Axes mesh_axes(const TensorSpec& mesh) {
  Axes axes;
  for (const Dim& dim : mesh.dims)
    if (!axes.full()) axes.push_back(dim.name);
  return axes;
}

constexpr Verdict mesh(std::string_view axes) {
  if (axes == "??")
    return {{}, "a Mesh has the names of its axes in its type; write `const Mesh<\"d t\"> mesh(device)`"};
  const auto parsed = parse_tensor(axes);
  for (std::size_t from = 0; from < axes.size();) {  // the parser reads an axis as a dim, so its error would say dim
    const auto space = detail::find(axes, " ", from);
    const auto end = space == detail::npos ? axes.size() : space;
    const auto axis = axes.substr(from, end - from);
    for (std::size_t at = end; !axis.empty() && at + axis.size() < axes.size(); ++at)
      if (axes[at] == ' ' && axes.substr(at + 1, axis.size()) == axis &&
          (at + 1 + axis.size() == axes.size() || axes[at + 1 + axis.size()] == ' '))
        return {{}, "mesh " + quoted(axes) + ": axis " + quoted(axis) + " appears twice"};
    from = end + 1;
  }
  if (!parsed.error.empty()) return {{}, "mesh " + quoted(axes) + ": " + parsed.error};
  if (!are_names(parsed.spec))
    return {{}, "mesh " + quoted(axes) + ": write the names of the axes, separated by spaces; sizes come at run time"};
  if (parsed.spec.has(unnamed_axes))
    return {{}, "mesh " + quoted(axes) + ": `unnamed` stands for axes without a name; give the axis another name"};
  if (parsed.spec.rank() > max_axes)
    return {{}, "mesh " + quoted(axes) + ": a mesh has at most " + number(max_axes) + " axes"};
  return {parsed.spec, {}};
}

/// Every axis of the spec is an axis of the mesh.
constexpr Verdict on_mesh(const TensorSpec& mesh, const TensorSpec& x) {
  const auto axes = mesh_axes(mesh);
  Small<std::string_view, 3 * max_axes> used;
  collect_axes(x, used);
  for (auto axis : used)
    if (!axes.contains(axis))
      return {x, quoted(x) + " uses axis " + quoted(axis) + ", which the mesh " + quoted(mesh) +
                     " does not have; correct the spec, or add the axis to the Mesh"};
  return {x, {}};
}

/// Ops that create arrays (constants, iota, random numbers): every axis is on the mesh, and nothing is partial.
constexpr Verdict create(std::string_view op, const TensorSpec& mesh, const TensorSpec& x) {
  if (!x.partial.empty())
    return {x, Text(op) + ": " + quoted(x) +
                   " is partial, and what each summand should be is not said; make it without `+" + x.partial[0] +
                   "` and take `to_partial` (no traffic)"};
  if (op == "causal_mask" && x.rank() != 2)
    return {x, Text(op) + ": " + quoted(x) + " must have two dims, rows and columns: `Qlen Klen`"};
  Verdict verdict = on_mesh(mesh, x);
  if (!verdict.ok()) verdict.why = Text(op) + ": " + verdict.why;
  return verdict;
}

constexpr Verdict positions_along(std::string_view name, const TensorSpec& mesh, const TensorSpec& x) {
  if (x.rank() != 1) return {x, Text(name) + "<" + quoted(x) + ">: write exactly one dim"};
  return create(name, mesh, x);
}
constexpr Verdict iota(const TensorSpec& mesh, const TensorSpec& x) {
  return positions_along("iota", mesh, x);
}
constexpr Verdict sequence_positions(const TensorSpec& mesh, const TensorSpec& x) {
  return positions_along("sequence_positions", mesh, x);
}

/// value_and_grad: the loss is a scalar that is partial over every axis of the mesh.
constexpr Verdict loss(const TensorSpec& mesh, DType dtype, const TensorSpec& x) {
  const Text title = "value_and_grad: the loss " + quoted(x);
  TensorSpec wanted;
  for (auto axis : mesh_axes(mesh)) wanted.add_partial(axis);
  if (!is_floating(dtype)) return {{}, title + " is " + name(dtype) + ", not floating, so it has no derivative"};
  if (x.rank() != 0)
    return {{}, title + " has dims; `sum` it to a scalar whose sum over the devices is pending, " + quoted(wanted)};
  Verdict verdict = on_mesh(mesh, x);  // first: a misspelled axis is missing on the mesh, and not only replicated
  if (!verdict.ok()) {
    verdict.why = "value_and_grad: the loss " + verdict.why;
    return verdict;
  }
  for (auto axis : mesh_axes(mesh))
    if (x.placement(axis).kind != Placement::partial)
      return {{},
              title + " is replicated over " + axis + ": each device of " + axis +
                  " would count it again, so the gradients would be too large by the size of the axis; leave the sum "
                  "pending, " +
                  quoted(wanted) + ", and reduce it outside the differentiated function, or, if nothing is summed " +
                  "over " + axis + ", take " + suggestion("to_partial", x, wanted) + " of it (no traffic)"};
  return verdict;
}

/// value_and_grad: the function returns its loss. This one returns nothing, a plain number, or another type.
constexpr Verdict returned_loss(bool nothing, bool plain_number) {
  return {{},
          Text("value_and_grad: the function returns ") +
              (nothing        ? "nothing"
               : plain_number ? "a plain number, which has no derivative"
                              : "no Tensor") +
              "; return the loss, a Tensor, or std::pair(loss, what it returns besides)"};
}

/// value_and_grad: a weight is a floating-point tensor on the mesh and is not partial.
constexpr Verdict weight(const TensorSpec& mesh, DType dtype, const TensorSpec& x) {
  const Text title = "value_and_grad: the weight " + quoted(Text(name(dtype)) + "[" + x + "]");
  if (!is_floating(dtype)) return {{}, title + " is not floating, so it has no gradient; pass it as an argument"};
  if (!x.partial.empty())
    return {{},
            title + " is partial over " + x.partial[0] + "; " +
                (dtype == DType::bf16 ? sums_in_f32(reduce_first(x)) : reduce_first(x))};
  Verdict verdict = on_mesh(mesh, x);
  if (!verdict.ok()) verdict.why = "value_and_grad: the weight " + verdict.why;
  return verdict;
}

/// The reason why a function does not accept its arguments. It has `parameters` parameters (-1: unknown). Parameter
/// number `at` (-1: none) has a declared type that does not accept its argument. The last three texts end the sentences
/// on what it does not take, on their number, and on that parameter.
constexpr Verdict misfit(const Text& title, int parameters, int at, bool not_const, std::string_view declared,
                         const Text& arguments, const Text& count, const Text& type) {
  if (parameters < 0) return {{}, title + "the function does not take " + arguments};
  if (at < 0)
    return {{},
            title + "the function has " + number(parameters) +
                (parameters == 1 ? " parameter, but " : " parameters, but ") + count};
  const Text parameter = title + "parameter " + number(at + 1) + " of the function";
  if (not_const)
    return {{},
            parameter + ", " + quoted(declared) + ", is not const; write " + quoted("const " + Text(declared) + "&")};
  return {{}, parameter + type};
}

/// value_and_grad: the reason why the function does not accept the weights and `args` more arguments.
constexpr Verdict callable(int args, int parameters, int at, bool not_const, std::string_view declared,
                           std::string_view given) {
  const Text form("; write value_and_grad(mesh, f, weights, arguments...) for f(weights, arguments...)"),
      arguments = "the weights and " + number(args) + (args == 1 ? " more argument" : " more arguments"),
      braces(args == 0 ? " (arguments in braces are not counted, as they have no type: write `Batch{x, y}`)" : "");
  return misfit("value_and_grad: ", parameters, at, not_const, declared,
                arguments + " in this order, each by value or as a const reference" + form,
                "is given " + arguments + braces + form,
                ", " + (at == 0 ? Text("the weights") : "argument " + number(at)) + ", is " + quoted(declared) +
                    ", but is given " + quoted(given) + form);
}

/// map: the function takes one number for each operand.
constexpr Verdict map_function(bool takes_numbers, bool takes_plain_numbers) {
  if (takes_numbers) return {};
  return {{},
          takes_plain_numbers ? "map: the function takes plain numbers, which have no derivative; write `auto` for the "
                                "types of its parameters"
                              : "map: the function does not take one number for each operand, in their order"};
}

/// map: the function returns a number.
constexpr Verdict map_return(bool nothing) {
  if (!nothing) return {};
  return {{}, "map: the function returns nothing; return the number for the result"};
}

/// A Jet that the function of a map converts to a plain number.
constexpr Verdict plain_number(bool is_plain) {
  if (!is_plain) return {};
  return {{},
          "map: a number of the function becomes a plain one here, which has no derivative; call exp, log, pow, "
          "maximum and the like without std::, write `x > 0` in place of `if (x)`, and cast no number"};
}

/// A function that runs again in the backward pass.
constexpr Verdict owned_function(std::string_view op, bool is_plain, bool is_trivial) {
  if (is_plain) return {};
  const Text why =
      Text(op) + (is_trivial ? ": the function captures by reference, or holds a pointer or a union"
                             : ": the function holds more than numbers (a tensor, a container, a std::function)");
  const Text when = is_trivial
                        ? ", and it runs again in the backward pass, when what it refers to may be gone; "
                        : ", of which it cannot be told that they outlast the backward pass, where it runs again; ";
  return {{},
          why + when +
              (op != "map" && op != "prefetch"
                   ? "pass tensors and configurations as arguments, and capture numbers by value: `[k]`"
                   : "capture nothing, or numbers by value: `[k]`")};
}

/// An argument of such a function.
constexpr Verdict owned_argument(std::string_view op, bool is_owned, std::string_view type) {
  if (is_owned) return {};
  return {{},
          Text(op) + ": the argument of type " + quoted(type) +
              " holds a pointer, a reference or a union, and the function runs again in the backward pass, when what "
              "it refers to may be gone; pass a type that owns what it needs"};
}

/// The reasons why a type is not a tree of tensors.
enum class NoTree { no_struct, not_public, bases, tuple, list, empty, constant, c_array, fields };
constexpr Verdict tree(std::string_view op, bool is_tree, std::string_view type, NoTree why) {
  if (is_tree) return {};
  return {
      {},
      Text(op) + ": " + quoted(type) + " is not a tree of tensors: " +
          (why == NoTree::no_struct    ? "it is not a struct"
           : why == NoTree::not_public ? "it has private members, a constructor or a virtual function"
           : why == NoTree::bases      ? "it has a base class"
           : why == NoTree::tuple      ? "its parts have no names; take a plain struct, or an argument for each"
           : why == NoTree::list ? "a list of trees needs a name; take an Array, which is a std::vector with a name, "
                                   "`Array<\"layers\", Layer>`"
           : why == NoTree::empty
               ? "it has no fields; where a model may have nothing, as in place of an alternative, take a std::optional"
           : why == NoTree::constant
               ? "it is const, or a field is const or a reference, so nothing can be assigned to it; "
                 "write the type without const and `&`"
           : why == NoTree::c_array
               ? "a field is a C array; take an Array, `Array<\"layers\", Layer>`, or a std::array "
                 "where it holds no tensors"
               : "it has more than 23 fields, or a reference") +
          "; a tree is a tensor, an Array, std::optional or std::variant of trees, or a plain struct of 1 to 23 trees "
          "(nest structs for more), all public"};
}

/// A field of a struct of tensors that is not a tensor and holds none.
constexpr Verdict no_tree_field(std::string_view field) {
  return {{},
          "the field " + quoted(field) +
              " of a struct of tensors is not a tensor, Array or struct of them; keep it elsewhere, as in an argument "
              "of its own"};
}

/// The kind of a node of a tree: a tensor, an Array, a std::optional, a std::variant of `alternatives` types, a struct,
/// which the number of its fields stands for, or none of these.
struct TreeNode {
  static constexpr int other = 0, tensor = -1, array = -2, optional = -3, variant = -4;
  int kind = other, alternatives = 0;
  friend constexpr bool operator==(const TreeNode&, const TreeNode&) = default;
};
/// Two trees that are paired leaf by leaf, and have another structure.
constexpr Verdict tree_structure(std::string_view a, TreeNode is_a, std::string_view b, TreeNode is_b) {
  const auto described = [](std::string_view type, TreeNode is) {
    return quoted(type) + (is.kind == TreeNode::tensor     ? Text(", a tensor,")
                           : is.kind == TreeNode::array    ? Text(", an Array,")
                           : is.kind == TreeNode::optional ? Text(", a std::optional,")
                           : is.kind == TreeNode::variant ? ", a std::variant of " + number(is.alternatives) + " types,"
                           : is.kind == TreeNode::other
                               ? Text(", no tree,")
                               : ", a struct of " + number(is.kind) + (is.kind == 1 ? " field," : " fields,"));
  };
  return {{},
          "trees are paired leaf by leaf, but where one has " + described(a, is_a) + " another has " +
              described(b, is_b) + " so a leaf would have no partner; give trees of one structure"};
}

/// Two structs of tensors whose fields have another order.
constexpr Verdict field_places(std::string_view a, std::string_view b, std::string_view field) {
  return {{},
          "the fields of " + quoted(a) + " and " + quoted(b) + " are paired by their places, but " + quoted(field) +
              " has another place in each; declare the fields in one order"};
}

/// An optimizer's update: the gradient has the weight's spec, and the moments have the weight's type.
constexpr Verdict update(std::string_view optimizer, DType weight_dtype, const TensorSpec& weight, bool moments_fit,
                         DType gradient_dtype, const TensorSpec& gradient) {
  const Text p = quoted(Text(name(weight_dtype)) + "[" + weight + "]");
  const Text g = quoted(Text(name(gradient_dtype)) + "[" + gradient + "]");
  const Text title = Text(optimizer) + ": ";
  if (weight_dtype != DType::f32)
    return {{},
            title + "the weight " + p + " is not f32; keep the weights in f32, and give " + optimizer +
                " copies in another dtype"};
  if (!moments_fit) return {{}, title + "a moment of the weight " + p + " has another type; make it with `zeros_like`"};
  if (gradient_dtype != DType::f32 && gradient_dtype != DType::bf16)
    return {{}, title + "the gradient " + g + " of the weight " + p + " is neither f32 nor bf16; `cast` it"};
  const TensorSpec &is = gradient, &due = weight;
  if (is == due) return {};
  const Text why = title + "the gradient " + g + " of the weight " + p + " ";
  if (is.dims == due.dims && due.partial.empty())
    return {
        {},
        why + "is partial over " + is.partial[0] +
            "; take the sums with `reduce_gradients(mesh, grads)`, once, after those over microbatches (communicates)"};
  return {{}, why + "has another spec: " + difference(is, due)};
}

/// A sum or an average in f32 to which an op adds values of the same spec.
constexpr Verdict add_in_place(std::string_view op, DType sum_dtype, const TensorSpec& sum, DType dtype,
                               const TensorSpec& added) {
  const Text s = quoted(Text(name(sum_dtype)) + "[" + sum + "]"), a = quoted(Text(name(dtype)) + "[" + added + "]");
  const Text title = Text(op) + ": ";
  if (sum_dtype != DType::f32) return {{}, title + "the leaf " + s + " is not f32; keep sums and averages in f32"};
  if (dtype != DType::f32 && dtype != DType::bf16)
    return {{}, title + "the leaf " + a + ", which is added to " + s + ", is neither f32 nor bf16; `cast` it"};
  if (added == sum) return {};
  return {{}, title + "the leaf " + a + ", which is added to " + s + ", has another spec: " + difference(added, sum)};
}

/// reduce_gradients: the mesh has the axes over which a sum is pending.
constexpr Verdict reduced_leaf(const TensorSpec& mesh, DType dtype, const TensorSpec& x) {
  const auto axes = mesh_axes(mesh);
  for (auto axis : x.partial)
    if (!axes.contains(axis))
      return {{},
              "reduce_gradients: the gradient " + quoted(Text(name(dtype)) + "[" + x + "]") + " is partial over " +
                  axis + ", which the mesh " + quoted(mesh) +
                  " does not have; name the mesh of value_and_grad, of a pipeline with the owners of leaves, "
                  "`reduce_gradients(mesh, grads, owners)`"};
  return {};
}

/// global_norm: each element of a leaf must count once, and on a device of the mesh.
constexpr Verdict norm_leaf(const TensorSpec& mesh, DType dtype, const TensorSpec& x) {
  const Text leaf = "global_norm: the leaf " + quoted(Text(name(dtype)) + "[" + x + "]");
  if (dtype != DType::f32 && dtype != DType::bf16) return {{}, leaf + " is neither f32 nor bf16; `cast` it"};
  if (!x.partial.empty())
    return {{},
            leaf + " is partial over " + x.partial[0] +
                ", and the norm of a sum is not that of its parts; take the sums first, of gradients with "
                "`reduce_gradients(mesh, grads)` (communicates)"};
  Verdict verdict = on_mesh(mesh, x);
  if (!verdict.ok()) verdict.why = "global_norm: the leaf " + verdict.why;
  return verdict;
}

/// fetch(x): takes the pending sums.
constexpr Verdict fetch(const TensorSpec& x) {
  if (!x.partial.contains(unnamed_axes)) return {x, {}};
  return {{}, "fetch: the sums that are pending in " + quoted(x) + " cannot be taken: " + naming_axes()};
}

/// item(x): a scalar that is the same on every device.
constexpr Verdict item(const TensorSpec& x) {
  if (x.rank() != 0)
    return {{}, "item: " + quoted(x) + " is not a scalar; reduce it, or read the local shard with span()"};
  if (!x.partial.empty())
    return {{},
            "item: " + quoted(x) + " is partial over " + x.partial[0] +
                ": devices would read different numbers and could diverge; " + reduce_first(x)};
  return {x, {}};
}

/// fully_sharded: every axis of the mesh shards some dim.
constexpr Verdict fully_sharded(const TensorSpec& mesh, const TensorSpec& x) {
  for (auto axis : mesh_axes(mesh))
    if (x.placement(axis).kind != Placement::sharded)
      return {{},
              "fully_sharded: " + quoted(x) + " is not sharded over " + axis + ", so every device of " + axis +
                  " keeps a copy; shard one of its dims, e.g. `dim/" + axis + "`"};
  Verdict verdict = on_mesh(mesh, x);
  if (!verdict.ok()) verdict.why = "fully_sharded: " + verdict.why;
  return verdict;
}

/// The result of a VJP must have the operand's dual type.
constexpr Verdict cotangent(std::string_view op, const TensorSpec& is, const TensorSpec& wanted) {
  if (is == wanted) return {is, {}};
  return {{},
          Text(op) + ": its VJP returns a cotangent " + quoted(is) + " where " + quoted(wanted) +
              " is due: " + difference(is, wanted) +
              "; the cotangent of an operand has its dims, and is partial where the operand is replicated, and the "
              "reverse"};
}
constexpr Verdict cotangent_dtype(std::string_view op, DType is, DType wanted) {
  if (is == wanted) return {};
  return {{},
          Text(op) + ": its VJP returns a cotangent of " + name(is) + " where " + name(wanted) +
              " is due; take `cast<" + name(wanted) + ">` of it"};
}

}  // namespace shardlib::rules
