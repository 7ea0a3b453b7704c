// rename, rearrange, transpose, merge, split, stack_shards, concat, stack and broadcast, with their VJPs.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shape_specs.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

TEST_CASE("rename", "[ops]") {
  check_cases({
      ONE(f32, "L/t K", (rename<"L -> H">(x)), same()),
      ONE(f32, "L/t V/d +p", (rename<"L V -> H M">(x)), same()),
      ONE(f32, "2 L/t 2", (rename<"2 2 -> two more">(x)), same()),
      ONE(i32, "L/t K", (rename<"L -> C">(x)), same(), .draws = {Draw::integers}),
      ONE(bf16, "L +t", (rename<"L -> C">(x)), same()),
  });
}

TEST_CASE("rearrange", "[ops]") {
  check_cases({
      ONE(f32, "A B/t", (rearrange<"A B/t -> B/t A">(x)), products()),
      ONE(f32, "B/d L H/t K", (rearrange<"B/d L H/t K -> H/t B/d K L">(x)), products()),
      ONE(f32, "A/t/d C +p", (rearrange<"A/t/d C +p -> C A/t/d +p">(x)), products()),
      ONE(f32, "C 2 L/t", (rearrange<"C 2 L/t -> L/t C 2">(x)), products()),
      ONE(bf16, "A B/t", (rearrange<"A B/t -> B/t A">(x)), products()),
      ONE(bool_, "A/d C", (rearrange<"A/d C -> C A/d">(x)), products(), .draws = {Draw::truth}),
  });
}

TEST_CASE("merge and split", "[ops]") {
  check_cases({
      ONE(f32, "B/d H/t K", (merge<"H/t K -> A/t">(x)), same()),
      ONE(f32, "H/t K C/d +p", (merge<"H/t K -> A/t">(x)), same()),
      ONE(f32, "2 2 C/d", (merge<"2 2 -> K">(x)), same()),
      ONE(i32, "B/t/d 2", (merge<"B/t/d 2 -> A/t/d">(x)), same(), .draws = {Draw::integers}),
      ONE(f32, "B/d A/t", (split<"A/t -> H/t K">(x, {sized("H")})), same()),
      ONE(f32, "A/t C/d +p", (split<"A/t -> H/t K">(x, {{"K", 4}})), same()),
      ONE(f32, "B/t", (split<"B/t -> C/t 2">(x, {})), same()),
      ONE(bf16, "A/t", (split<"A/t -> H/t 2 2">(x, {})), same()),
  });
}

/// The stack of x's shards: each element of x lies in the shard of a device, whose places along the axes count the
/// first dim. Sizes depend on the mesh.
Global stack_of_shards(const DevicePtr& device, const Global& x, const TensorSpec& from, const TensorSpec& to) {
  const auto along = [&](std::string_view axis) -> std::int64_t { return axis_size(device->axes(), axis); };
  Global y{{std::string(to.dims[0].name)}, {1}, {}, {1}};
  Shape shards(x.shape.size(), 1);  // of each dim that is stacked
  for (const auto axis : to.dims[0].axes) y.padded[0] = y.shape[0] *= along(axis);
  for (std::size_t i = 0; i < x.shape.size(); ++i) {
    const Dim &whole = from.dims[static_cast<int>(i)], &part = to.dims[static_cast<int>(i) + 1];
    if (!(whole == part))
      for (const auto axis : whole.axes) shards[i] *= along(axis);
    y.names.emplace_back(part.name);
    y.shape.push_back(x.shape[i] / shards[i]);
    y.padded.push_back(x.padded[i] / shards[i]);
  }
  y.data.resize(x.data.size());
  const Shape strides = strides_along(y, y.names);
  auto element = x.data.begin();
  for_each_index(x.shape, [&](const Shape& index) {
    std::map<std::string_view, std::int64_t> place;  // of the device, along each axis
    Shape at{0};
    for (std::size_t i = 0; i < index.size(); ++i) {
      const std::int64_t size = x.shape[i] / shards[i];
      at.push_back(index[i] % size);
      const Axes& axes = from.dims[static_cast<int>(i)].axes;
      std::int64_t shard = index[i] / size;
      for (int k = shards[i] > 1 ? axes.size() : 0; k-- > 0; shard /= along(axes[k]))
        place[axes[k]] = shard % along(axes[k]);
    }
    for (const auto axis : to.dims[0].axes) at[0] = at[0] * along(axis) + place[axis];
    y.data[offset(strides, at)] = *element++;
  });
  return y;
}

/// stack_shards<O> of X, and unstack_shards<Back> of the result, forward and backward. Dims that are not stacked are
/// one element shorter than padded, if `pad`.
template <class X, OpSpec O, OpSpec Back>
void check_stack_of_shards(const DevicePtr& device, bool pad) {
  using Y = decltype(stack_shards<O>(std::declval<X>()));
  static_assert(std::is_same_v<decltype(unstack_shards<Back>(std::declval<Y>())), X>);
  static const TensorSpec from = parse_tensor(X::spec).spec, to = parse_tensor(Y::spec).spec;
  if (!names_axes_of(*device, from)) return;
  const DType dtype = dtype_v<typename X::value_type>;
  const auto draw_x = [&](Draw kind, std::uint64_t seed) {
    Global x = shell(from);
    for (int i = 0; i < from.rank(); ++i)
      if (pad && !from.dims[i].is_integer() && from.dims[i] == to.dims[i + 1]) --x.shape[static_cast<std::size_t>(i)];
    x.data.resize(count_of(x.shape));
    for (std::size_t i = 0; i < x.data.size(); ++i) x.data[i] = draw(kind, seed, i);
    return x;
  };
  const bool floating = is_floating(dtype);
  const Global x = draw_x(floating ? Draw::odd : Draw::integers, 1);
  const Global y = stack_of_shards(device, x, from, to);
  const auto placed = place(device, dtype, from, x, 1);
  const X operand(floating ? detail::as_leaf(*placed) : placed);
  const Y stacked = stack_shards<O>(operand);
  expect_close(assemble(*stacked.value(), to), y, dtype, 0, "stack_shards");
  expect(stacked.value()->data().data() == placed->data().data(), "without a copy");
  const auto placed_stack = place(device, dtype, to, y, 1);
  const Y of_back(floating ? detail::as_leaf(*placed_stack) : placed_stack);
  const X back = unstack_shards<Back>(of_back);
  expect_close(assemble(*back.value(), from), x, dtype, 0, "unstack_shards");
  if (!floating) return;
  // Cotangents go the other way.
  const Global ct = draw_x(Draw::odd, 77), ct_of_stack = stack_of_shards(device, ct, from, to);
  const std::string dual_x = dual_on(*device, from), dual_y = dual_on(*device, to);
  const TensorSpec due = parse_tensor(dual_x).spec, due_of_stack = parse_tensor(dual_y).spec;
  const auto x_bar = place(device, dtype, due, ct, 7), y_bar = place(device, dtype, due_of_stack, ct_of_stack, 7);
  const auto found = detail::Backward({{stacked.value()->slot, y_bar}}, {operand.value()->slot}).run();
  expect_close(assemble(*found[0], due), ct, dtype, 0, "cotangent of stack_shards");
  const auto found_back = detail::Backward({{back.value()->slot, x_bar}}, {of_back.value()->slot}).run();
  expect_close(assemble(*found_back[0], due_of_stack), ct_of_stack, dtype, 0, "cotangent of unstack_shards");
  const Dot there = pair_up(*stacked.value(), *y_bar), here = pair_up(*operand.value(), *found[0]);
  expect(std::abs(there.sum - here.sum) <= 1e-6 * there.magnitude, "adjoint law");
}

TEST_CASE("stack_shards and unstack_shards", "[ops]") {
  for (const std::string& mesh : op_meshes())
    for (const bool pad : {false, true})
      on_mesh(mesh, [&](const DevicePtr& device) {
        poison(*device);
        check_stack_of_shards<Tensor<f32, "B/d L/t M">, "B/d L/t M -> P/t/d U W M", "P/t/d U W M -> B/d L/t M">(device,
                                                                                                                pad);
        check_stack_of_shards<Tensor<f32, "L/t B/d M">, "P/d/t U W M", "L/t B/d M">(device, pad);
        check_stack_of_shards<Tensor<f32, "B/t/d M">, "B/t/d M -> P/d/t U M", "P/d/t U M -> B/t/d M">(device, pad);
        check_stack_of_shards<Tensor<f32, "K M/t L/d">, "P/d K M/t W", "K M/t L/d">(device, pad);
        check_stack_of_shards<Tensor<f32, "2 B/d L +t">, "P/d 2 U L +t", "2 B/d L +t">(device, pad);
        check_stack_of_shards<Tensor<f32, "A/p B/d L/t">, "P/t/p/d N U W", "A/p B/d L/t">(device, pad);
        check_stack_of_shards<Tensor<bf16, "B/d L/t">, "P/d/t U W", "B/d L/t">(device, pad);
        check_stack_of_shards<Tensor<i32, "B/d L/t K">, "P/t/d U W K", "B/d L/t K">(device, pad);
      });
}

TEST_CASE("stack_shards: padding, and stacks that are none", "[ops]") {
  on_mesh("d=2,t=1", [](const Mesh<"d t">& mesh) {
    const std::string on = " (" + mesh.device()->describe() + ")";
    const auto padded = zeros<f32, "B/d L">(mesh, {{"B", 5, 6}, {"L", 2}});
    expect_error([&] { stack_shards<"B/d L -> P/d U L">(padded); },
                 "stack_shards<`B/d L -> P/d U L`>: dim `B` is 5 (padded to 6), and shards would have several sizes; "
                 "choose a size that needs no padding" +
                     on);
    const auto rows = zeros<f32, "P/d U">(mesh, {{"P", 4}, {"U", 3}});
    expect_error([&] { unstack_shards<"P/d U -> B/d">(rows); },
                 "unstack_shards<`P/d U -> B/d`>: dim `P/d` is 4, but must have one element for each of the 2 devices "
                 "along its axes; `split` it first, and keep the rest as a dim of the shards" +
                     on);
    const auto parts = zeros<f32, "P/d W">(mesh, {{"P", 2}, {"W", 3, 4}});
    expect_error([&] { unstack_shards<"P/d W -> B/d">(parts); },
                 "unstack_shards<`P/d W -> B/d`>: dim `W` is 3 (padded to 4), and its padding would be between "
                 "elements; choose a size that needs none" +
                     on);
  });
}

/// One operand after the other along `dim`.
Reference one_after_the_other(const std::string& dim) {
  return [dim](const std::vector<Global>& x, Global& y) {
    const auto d = static_cast<std::size_t>(std::find(y.names.begin(), y.names.end(), dim) - y.names.begin());
    const Shape to = strides_along(y, y.names);
    std::int64_t begin = 0;
    for (const Global& part : x) {
      const Shape from = strides_along(part, part.names);
      for_each_index(part.shape, [&](Shape i) {
        const double v = part.data[offset(from, i)];
        i[d] += begin;
        y.data[offset(to, i)] = v;
      });
      begin += part.shape[d];
    }
  };
}

TEST_CASE("concat", "[ops]") {
  // Both operands have the dim's size of the table of sizes, the result twice that.
#define CONCAT(dtype, spec, out)                                                                         \
  make_case<Tensor<dtype, spec>, Tensor<dtype, spec>>(                                                   \
      "concat " #dtype " " spec, [](const auto& a, const auto& b) { return concat<"C, C -> B">(a, b); }, \
      one_after_the_other("B"), {.law = Law::joint, .padding = false})
  check_cases({
      CONCAT(f32, "C", "B"),
      CONCAT(f32, "A/d C H/t", "A/d B H/t"),
      CONCAT(f32, "C A/t/d +p", "B A/t/d +p"),
      CONCAT(bf16, "A/t C", "A/t B"),
      CONCAT(i32, "A/t C", "A/t B"),
  });
#undef CONCAT
  // Parts of different sizes.
  on_meshes({"d=1,t=1", "d=2,t=1"}, [](const DevicePtr& device) {
    static const TensorSpec first = parse_tensor("C/d P").spec, second = parse_tensor("C/d L").spec,
                            both = parse_tensor("C/d N").spec;
    const Global a{{"C", "P"}, {6, 6}, random_global(second, Draw::odd, 1).data};
    Global b{{"C", "L"}, {6, 2}, {}};
    for (int i = 0; i < 12; ++i) b.data.push_back(i);
    const Tensor<f32, "C/d P"> x(detail::as_leaf(*place(device, DType::f32, first, a)));
    const Tensor<f32, "C/d L"> y(detail::as_leaf(*place(device, DType::f32, second, b)));
    const auto z = concat<"P, L -> N">(x, y);
    static_assert(decltype(z)::spec == Spec("C/d N"));
    Global whole{{"C", "N"}, {6, 8}, std::vector<double>(48)};
    one_after_the_other("N")({Global{{"C", "N"}, a.shape, a.data}, Global{{"C", "N"}, b.shape, b.data}}, whole);
    expect_close(assemble(*z.value(), both), whole, DType::f32, 0, "concat");
    const auto found = detail::Backward({{z.value()->slot, place(device, DType::f32, both, whole)}},
                                        {x.value()->slot, y.value()->slot})
                           .run();
    expect_close(assemble(*found[0], first), a, DType::f32, 0, "cotangent of the first");
    expect_close(assemble(*found[1], second), b, DType::f32, 0, "cotangent of the second");
  });
}

TEST_CASE("transpose", "[ops]") {
  check_cases({
      ONE(f32, "A B/t", transpose(x), products()),
      ONE(f32, "A/d C H/t", transpose(x), products()),
      ONE(f32, "A/d C H/t", (transpose<"A", "H">(x)), products()),
      ONE(bf16, "A/t B +d", (transpose<"B", "A">(x)), products()),
      ONE(i32, "A B C", transpose(x), products(), .draws = {Draw::integers}),
  });
}

TEST_CASE("stack and unstack", "[ops]") {
  std::vector<Case> cases;
  each<two_dims.size()>([&](auto i) {
    static constexpr Spec spec{two_dims[i]};
    using X = Tensor<turn_of_all<i>, spec>;
    const Draw draw = is_floating(dtype_v<typename X::value_type>) ? Draw::odd : Draw::integers;
    cases.push_back(make_case<X, X>(
        "stack of " + std::string(two_dims[i]), [](const auto& a, const auto& b) { return stack<"two">(a, b); },
        Reference(
            [](const std::vector<Global>& x, Global& y) {
              y.data = x[0].data;
              y.data.insert(y.data.end(), x[1].data.begin(), x[1].data.end());
            },
            [](const std::vector<Global>&, const Global& ct, std::vector<Global>& dx) {
              const auto middle = ct.data.begin() + static_cast<std::ptrdiff_t>(dx[0].data.size());
              dx[0].data.assign(ct.data.begin(), middle);
              dx[1].data.assign(middle, ct.data.end());
            }),
        {.law = Law::joint, .draws = {draw, draw}}));
    if constexpr (rules::unstack("unstack", "operand", "A", spec).ok())
      cases.push_back(
          make_case<X>("unstack of " + std::string(two_dims[i]), [](const auto& x) { return unstack<"A">(x)[2]; },
                       Reference(
                           [](const std::vector<Global>& x, Global& y) {
                             std::copy_n(x[0].data.begin() + 2 * std::ssize(y.data), y.data.size(), y.data.begin());
                           },
                           [](const std::vector<Global>&, const Global& ct, std::vector<Global>& dx) {
                             std::copy(ct.data.begin(), ct.data.end(), dx[0].data.begin() + 2 * std::ssize(ct.data));
                           }),
                       {.draws = {draw}}));
  });
  CHECK(cases.size() == 18 + (3 * 3 + 1));
  check_placements(cases, cases.size());
  on_mesh("d=2,t=2", [](const Mesh<"d t">& mesh) {
    using Part = Tensor<f32, "C/d L +t">;
    const auto one = to_partial<"C/d L -> C/d L +t">(full<f32, "C/d L">(mesh, {{"C", 6}, {"L", 2}}, 1.0));
    const auto three = stack<"S">(std::vector{one, one * 2.0, one * 3.0});
    static_assert(decltype(three)::spec == Spec("S C/d L +t"));
    expect_equal(fetch(sum<"S C L -> S">(all_gather<"S C L">(all_reduce<"S C/d L">(three)))).data,
                 std::vector<f32>{12, 24, 36});
    expect_error([&] { stack<"S">(std::vector<Part>{}); },
                 "stack<`S`>: there is nothing to stack; give one tensor at least");
  });
}

TEST_CASE("broadcast", "[ops]") {
  check_cases({
      ONE(f32, "M", (broadcast<"M -> B/d M">(x, {sized("B")})), products()),
      ONE(f32, "M/t", (broadcast<"M/t -> M/t C L">(x, {sized("C"), sized("L")})), products()),
      ONE(f32, "", (broadcast<" -> A/t/d">(x, {sized("A")})), products()),
      ONE(f32, "C +t", (broadcast<"C +t -> B/d C +t">(x, {sized("B")})), products()),
      ONE(bf16, "C/d", (broadcast<"C/d -> 2 C/d">(x, {})), products()),
      ONE(i32, "C", (broadcast<"C -> C B/t">(x, {sized("B")})), products(), .draws = {Draw::integers}),
  });
}

}  // namespace
