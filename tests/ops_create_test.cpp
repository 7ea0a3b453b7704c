// Arrays from nothing: constants, indices, masks, random numbers that are the same on every mesh; item.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "op_case.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// The whole array, checked to be the same wherever it is replicated.
template <class D, Spec S>
Global whole(const Tensor<D, S>& x) {
  return assemble(*x.value(), detail::parsed<S>);
}
void expect_whole(const Global& x, const Shape& shape, const std::function<double(const Shape&)>& f) {
  expect(x.shape == shape, "shape");
  const Shape strides = strides_along(x, x.names);
  for_each_index(shape, [&](const Shape& i) {
    expect(x.data[offset(strides, i)] == f(i), "element is " + show(x.data[offset(strides, i)]));
  });
}

TEST_CASE("constants, indices and masks", "[ops]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=3", "d=2,t=2", "d=2,t=3"}, [](const Mesh<"d t">& mesh) {
    const auto is = [](double v) { return [v](const Shape&) { return v; }; };
    expect_whole(whole(full<f32, "A/t/d C">(mesh, {{"A", 12}, {"C", 5}}, 1.5)), {12, 5}, is(1.5));
    expect_whole(whole(full<bf16, "A/d">(mesh, {{"A", 12}}, 0.3)), {12}, is(rounded(DType::bf16, 0.3F)));
    expect_whole(whole(full<u8, "A">(mesh, {{"A", 4}}, 200)), {4}, is(200));
    expect_whole(whole(zeros<i32, "A/d">(mesh, {{"A", 6}})), {6}, is(0));
    expect_whole(whole(ones<f64, "">(mesh, {})), {}, is(1));
    // Sizes of names that the array lacks do not matter: one list serves a whole model.
    expect_whole(whole(full<bool_, "A/t 2">(mesh, {{"B", 7}, {"A", 6}}, 1)), {6, 2}, is(1));
    expect_whole(whole(iota<"L/t/d">(mesh, 24)), {24}, [](const Shape& i) { return static_cast<double>(i[0]); });
    expect_whole(whole(iota<"L">(mesh, 5)), {5}, [](const Shape& i) { return static_cast<double>(i[0]); });
    for (const std::int64_t rows : {6, 12})
      expect_whole(whole(causal_mask<"Q/d K/t">(mesh, rows, 6)), {rows, 6},
                   [](const Shape& i) { return i[0] >= i[1] ? 1.0 : 0.0; });
    expect(item(full<f32, "">(mesh, {}, 2.5)) == 2.5F, "item");
    expect(item(full<i32, "">(mesh, {}, 7), 40) == 7, "item, with what a dry run would get");
    // A plain number for every dtype.
    expect(item(full<bf16, "">(mesh, {}, 2.5), 1) == bf16(2.5F), "item of bf16");
    expect(item(full<bool_, "">(mesh, {}, 0), true) == false, "item of bool_");
  });
}

TEST_CASE("a causal mask with fewer rows than columns is an error", "[ops]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    const Mesh<"d t"> mesh(device);
    ERROR_IS(
        "causal_mask<`L K/t`>: row i sees the columns up to i, so with the sizes 1 and 6, column 5 is seen by no row; "
        "with a cache of `past` keys write `greater_equal(iota<\"L\">(mesh, rows) + past, iota<\"K\">(mesh, "
        "columns))` (device 0 (d=0,t=0) of mesh d=1,t=1)",
        causal_mask<"L K/t">(mesh, 1, 6));
    // What the sentence recommends, for the newest of six tokens.
    expect_whole(whole(greater_equal(iota<"L">(mesh, 1) + 5, iota<"K">(mesh, 6))), {1, 6},
                 [](const Shape&) { return 1.0; });
    causal_mask<"L K">(mesh, {6, 8}, {6, 12});  // without padding as many
  });
  SUCCEED();
}

TEST_CASE("random numbers are the same on every mesh", "[ops]") {
  std::map<std::string, Global> first;
  std::mutex mutex;
  on_meshes({"d=1,t=1", "d=2,t=1", "d=3,t=1", "d=2,t=2", "d=2,t=3"}, [&](const Mesh<"d t">& mesh) {
    const Sizes sizes{{"A", 24}, {"C", 5}};
    const auto check = [&](const std::string& name, const auto& x) {
      const Global g = whole(x);
      const std::lock_guard lock(mutex);
      const auto [it, fresh] = first.try_emplace(name, g);
      expect(it->second.shape == g.shape && it->second.data == g.data, name + " differs between meshes");
    };
    const RandomKey key{7, 3};
    check("normal", random_normal<f32, "A/t/d C">(mesh, sizes, key));
    check("normal", random_normal<f32, "A C">(mesh, sizes, key));
    check("normal", random_normal<f32, "A/d C">(mesh, sizes, key));
    check("normal of bf16", random_normal<bf16, "C A/t">(mesh, sizes, key));
    check("normal of f64", random_normal<f64, "C A/t">(mesh, sizes, key));
    check("truncated", random_truncated_normal<f32, "A/d/t">(mesh, sizes, key));
    check("truncated", random_truncated_normal<f32, "A">(mesh, sizes, key));
    check("uniform", random_uniform<f32, "C A/d">(mesh, sizes, key));
    check("uniform, other stream", random_uniform<f32, "C A/d">(mesh, sizes, {7, 4}));
    check("uniform, other seed", random_uniform<f32, "C A/d">(mesh, sizes, {8, 3}));
  });
  REQUIRE(first.size() == 7);
  REQUIRE(first["uniform"].data != first["uniform, other stream"].data);
  REQUIRE(first["uniform"].data != first["uniform, other seed"].data);
  for (const double v : first["uniform"].data) REQUIRE((v >= 0 && v < 1));
  double highest = 0;
  for (const double v : first["truncated"].data) highest = std::max(highest, std::abs(v));
  REQUIRE((highest <= 2 && highest > 1));
}

}  // namespace
