// Wrong programs: ops outside the library whose kernels and VJPs are not what `custom::record` takes. The program above the
// cases is the right one.
// needs: runtime
#include "shardlib/shardlib.hpp"

using namespace shardlib;

using X = Tensor<f32, "B/d L">;
constexpr auto twice_kernel = [](custom::Shard<f32> y, custom::Shard<const f32> x) {
  for (std::int64_t i = 0; i < y.size(); ++i) y.data[i] = 2 * x.data[i];
};
template <class Kernel, class... V>
X op(const X& x, const Kernel& kernel, const V&... vjps) {
  return custom::record<"twice", X>({{}, Site::current()}, kernel, custom::operands(x), vjps...);
}

// An op owns what it captures by value: numbers, and objects that are not only bytes.
X right(const X& x, float k, const std::shared_ptr<float>& table) {
  const auto kernel = [k, table](custom::Shard<f32> y, custom::Shard<const f32> z) {
    for (std::int64_t i = 0; i < y.size(); ++i) y.data[i] = k * *table * z.data[i];
  };
  return op(x, kernel, custom::vjp(x, custom::save(x), [k](const auto& ct, const auto& z) { return ct * k * z; })) +
         op(x, twice_kernel, custom::vjp_of_result(x, custom::save(), [](const auto& ct, const auto&) { return ct; }));
}

// With a mesh, the type of the cotangent names its axes, and the function may reduce it.
using Grid = Mesh<"d t">;
X clipped(const Grid& mesh, const X& x) {
  return op(x, twice_kernel, custom::vjp(mesh, x, [](const auto& ct) {
              return to_partial<over<"t">>(clamp(all_reduce<"B/d L +t -> B/d L">(ct), -1.0, 1.0));
            }));
}

// The cotangent is a summand of this device over the axes that no type names: here t.
// expect: clamp: the operand `B/d L \+unnamed` is partial over unnamed, and clamp is not linear, so it has to see the sum
// expect: `\+unnamed` stands for the axes of the mesh that no type of the op names, and `custom::vjp\(mesh, x, f\)` names them
X clipped_summand(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, [](const auto& ct) { return clamp(ct, -1.0, 1.0); }));
}

// expect: clamp: the operand `B/d L \+t` is partial over t, and clamp is not linear, so it has to see the sum
X clipped_summand_on_mesh(const Grid& mesh, const X& x) {
  return op(x, twice_kernel, custom::vjp(mesh, x, [](const auto& ct) { return clamp(ct, -1.0, 1.0); }));
}

// expect: a tensor `f32\[B/d L \+unnamed\]` does not fit the declared type `f32\[B/d L\]`: a sum over unnamed is still
// expect: pending in it, and `\+unnamed` stands for the axes of the mesh that no type of the op names, and `custom::vjp
X without_sum(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, [](const X& ct) { return ct; }));
}

// expect: all_reduce<`B/d L \+unnamed -> B/d L`>: this op acts over axes that have names: `\+unnamed` stands for
X reduced_over_unnamed(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, [](const auto& ct) { return all_reduce<"B/d L">(ct); }));
}

// expect: \+ of `B/d L \+unnamed` and `B/d L`: .* is replicated over unnamed, so the pending sum would count the latter once
X affine(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, custom::save(x), [](const auto& ct, const auto& y) { return ct + y; }));
}

// expect: twice: its kernel captures by reference, or holds a pointer or a union, and it runs after the call, when what it refers to
// expect: pass tensors to `custom::operands`
X kernel_by_reference(const X& x, const float& k) {
  const auto kernel = [&k](custom::Shard<f32> y, custom::Shard<const f32> z) { y.data[0] = k * z.data[0]; };
  return op(x, kernel, custom::vjp(x, [](const auto& ct) { return ct; }));
}

// expect: twice: its VJP captures by reference, or holds a pointer or a union
// expect: pass tensors to `custom::save`
X vjp_by_reference(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, [&x](const auto& ct) { return ct * x; }));
}

// expect: custom::vjp: the function does not take the cotangent `B/d L \+unnamed` and 0 saved tensors, as f\(ct, saved...\);
// expect: name what it needs besides the cotangent in `custom::save`
X nothing_saved(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, [](const auto& ct, const auto& z) { return ct * z; }));
}

// expect: custom::vjp: the function does not take the cotangent `B/d L \+unnamed` and 1 saved tensor, as f\(ct, saved...\)
X one_too_many(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, custom::save(x), [](const auto& ct) { return ct; }));
}

// expect: twice: its VJP returns a cotangent `B/d \+unnamed` where `B/d L \+unnamed` is due
// expect: the cotangent of an operand has its dims, and is partial where the operand is replicated
X wrong_dims(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, [](const auto& ct) { return sum<"B/d L +unnamed -> B/d +unnamed">(ct); }));
}

// expect: twice: its VJP returns a cotangent of f64 where f32 is due; take `cast<f32>` of it
X wrong_dtype(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, [](const auto& ct) { return cast<f64>(ct); }));
}

// expect: custom::vjp: the function returns no tensor; return the cotangent of the operand
X no_cotangent(const X& x) {
  return op(x, twice_kernel, custom::vjp(x, [](const auto&) {}));
}

// expect: custom::record: the kernel takes the shard of the result and those of all operands, as
// expect: kernel\(custom::Shard<f32> y, custom::Shard<const f32> x\)
X kernel_without_operand(const X& x) {
  return op(x, [](custom::Shard<f32> y) { y.data[0] = 0; });
}

// expect: custom::record: it does not take these arguments; write `custom::record<..?name..?, Out>\({spec, site}, kernel, custom::operands
X operands_without_their_list(const X& x) {
  return custom::record<"twice", X>({{}, Site::current()}, twice_kernel, x,
                                    custom::vjp(x, [](const auto& ct) { return ct * 2.0; }));
}

// expect: custom::record: it does not take these arguments; write `custom::record<..?name..?, Out>\({spec, site}, kernel, custom::operands
X no_operands(const X& x) {
  const Sizes sizes{{"L", x.size("L")}};
  return custom::record<"twice", X>({{}, Site::current()}, sizes, twice_kernel);
}
