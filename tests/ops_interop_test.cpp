// Tensors and the outside: other libraries' arrays over the same memory, host arrays, text, pictures.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "op_case.hpp"
#include "shardlib/interop/eigen.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

using Grid = Mesh<"d t">;

template <class D>
HostArray<D> counting(std::vector<std::int64_t> shape) {
  HostArray<D> host(std::move(shape));
  for (std::size_t i = 0; i < host.data.size(); ++i) host.data[i] = static_cast<D>(static_cast<f32>(i));
  return host;
}

TEST_CASE("span, Eigen and Kokkos see a tensor's own memory", "[ops][interop]") {
  on_mesh("d=2,t=1", [](const Grid& mesh) {
    const auto x = place<Tensor<f32, "B/d L M">>(mesh, counting<f32>({4, 3, 5}));
    const auto first = static_cast<float>(30 * mesh.axis_index("d"));
    expect(x.span().size() == 30 && x.span()[0] == first && x.span()[29] == first + 29, "span");
    expect(x.local_shape()[0] == 2 && x.global_shape()[0] == 4 && x.size("L") == 3, "sizes");
    const auto matrix = as_eigen(x);
    expect(matrix.data() == x.span().data() && matrix.rows() == 6 && matrix.cols() == 5, "Eigen's map");
    expect(matrix(4, 2) == first + 22, "Eigen's element");
    const auto scalar = full<f32, "">(mesh, {}, 2.0);
    const auto empty = zeros<f32, "A B">(mesh, {{"A", 0}, {"B", 3}});
    expect(as_eigen(scalar)(0, 0) == 2 && as_eigen(empty).size() == 0, "Eigen's map of a scalar, of no elements");
#if !defined(SHARDLIB_WITHOUT_KOKKOS)
    const auto view = as_kokkos(x);
    static_assert(decltype(view)::rank == 3);
    expect(view.data() == x.span().data() && view.extent(0) == 2 && view.extent(1) == 3 && view.extent(2) == 5,
           "Kokkos' view");
    expect(view(1, 2, 4) == first + 29, "Kokkos' element");
    expect(as_kokkos(scalar)() == 2 && as_kokkos(empty).size() == 0, "Kokkos' view of a scalar, of no elements");
#endif
  });
}

TEST_CASE("a tensor over memory of the caller's", "[ops][interop]") {
  on_mesh("d=2,t=1", [](const Grid& mesh) {
    auto memory = std::make_shared<std::vector<f32>>(6, 1.5F);
    const std::weak_ptr<std::vector<f32>> watch = memory;
    const f32* data = memory->data();
    {
      const auto x = from_memory<f32, "B/d M">(mesh, {{"B", 4}, {"M", 3}}, std::span<const f32>(*memory), memory);
      memory.reset();
      if (mesh.device()->pool() == mesh.device()->host_pool())
        expect(x.span().data() == data && !watch.expired(), "the memory itself, kept by its owner");
      else
        expect(x.span().data() != data && watch.expired(), "a copy in the device's memory");
      const auto y = rename<"M -> H">(x);
      expect(y.value()->data().data() == x.value()->data().data(), "rename copies nothing");
      const Global total = assemble(*sum(x).value(), parse_tensor("+d").spec);
      expect(total.data[0] == 18, "sum");
    }
    expect(watch.expired(), "the owner is let go with the last tensor");
    const std::vector<f32> named(6, 0.5F);
    const auto z = from_memory<f32, "B/d M">(mesh, {{"B", 4}, {"M", 3}}, {named.data(), named.data() + 6});
    expect(fetch(z).data == std::vector<f32>(12, 0.5F), "a span of two pointers");
    expect(Grid(std::cref(mesh)).size("d") == 2, "a copy of a mesh by a reference to it");
  });
}

TEST_CASE("texts of specs, meshes and tensors", "[ops][interop]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    expect(fmt::format("{}", Spec{"B/d  L +t"}) == "B/d L +t", "Spec");
    expect(fmt::format("{:>6}|", parse_tensor("A/t").spec) == "   A/t|", "TensorSpec");
    expect(fmt::format("{}", mesh) == "d=2,t=2", "Mesh");
    const std::string on = " on " + mesh.device()->describe() + ": ";
    const auto x = place<Tensor<f32, "B/d L">>(mesh, counting<f32>({4, 3}));
    const bool second = mesh.axis_index("d") == 1;
    const auto is = [](const std::string& text, const std::string& expected) {
      expect(text == expected, "\"" + text + "\" instead of \"" + expected + "\"");
    };
    is(fmt::format("{}", x),
       "f32[B/d=4 L=3]" + on + "shard 2x3, min " + (second ? "6, max 11, mean 8.5" : "0, max 5, mean 2.5"));
    is(fmt::format("{}", to_partial<"B/d L -> B/d L +t">(x * 0.0)),
       "f32[B/d=4 L=3 +t]" + on + "shard 2x3, min 0, max 0, mean 0");
    is(fmt::format("{}", log(x - 100.0)), "f32[B/d=4 L=3]" + on + "shard 2x3, 6 not finite");
    is(fmt::format("{}", full<i32, "">(mesh, {}, 7)), "i32[]" + on + "shard of one, min 7, max 7, mean 7");
    is(fmt::format("{}", full<bf16, "2 A/t">(mesh, {{"A", 2}}, 1)),
       "bf16[2 A/t=2]" + on + "shard 2x1, min 1, max 1, mean 1");
    is(fmt::format("{}", zeros<u8, "A">(mesh, {{"A", 0}})), "u8[A=0]" + on + "shard 0, empty");
    is(fmt::format("{}", Tensor<f32, "A/t +d">()), "f32[A/t +d] (empty)");
    expect(fmt::format("{:d<22}", Tensor<f32, "A/t +d">()) == "f32[A/t +d] (empty)ddd", "a width filled with letters");
  });
}

TEST_CASE("pictures of shardings", "[ops][interop]") {
  on_mesh("d=2,t=2", [](const Grid& mesh) {
    const Sizes sizes{{"A", 4}, {"B", 4}, {"C", 4}};
    const auto shows = [](const auto& x, const std::string& expected) {
      const std::string picture = visualize_sharding(x);
      expect(picture == expected, "\n" + picture + "instead of\n" + expected);
    };
    shows(zeros<f32, "A/d B/t">(mesh, sizes),
          "f32[A/d B/t] on mesh d=2,t=2\n"
          "┌───┬───┐\n"
          "│ 0 │ 1 │\n"
          "├───┼───┤\n"
          "│ 2 │ 3 │\n"
          "└───┴───┘\n");
    shows(zeros<f32, "A B/t">(mesh, sizes),
          "f32[A B/t] on mesh d=2,t=2\n"
          "┌─────┬─────┐\n"
          "│ 0,2 │ 1,3 │\n"
          "└─────┴─────┘\n");
    shows(zeros<f32, "A/t/d">(mesh, sizes),
          "f32[A/t/d] on mesh d=2,t=2\n"
          "┌───┬───┬───┬───┐\n"
          "│ 0 │ 2 │ 1 │ 3 │\n"
          "└───┴───┴───┴───┘\n");
    shows(to_partial<"A/d B -> A/d B +t">(zeros<f32, "A/d B">(mesh, sizes)),
          "f32[A/d B +t] on mesh d=2,t=2\n"
          "┌─────┐\n"
          "│ 0+1 │\n"
          "├─────┤\n"
          "│ 2+3 │\n"
          "└─────┘\n");
    shows(full<i32, "">(mesh, {}, 1),
          "i32[] on mesh d=2,t=2\n"
          "┌─────────┐\n"
          "│ 0,1,2,3 │\n"
          "└─────────┘\n");
    shows(zeros<f32, "A/d B C/t">(mesh, sizes),
          "f32[A/d B C/t] on mesh d=2,t=2\n"
          "A shard 0:\n"
          "┌───┬───┐\n"
          "│ 0 │ 1 │\n"
          "└───┴───┘\n"
          "A shard 1:\n"
          "┌───┬───┐\n"
          "│ 2 │ 3 │\n"
          "└───┴───┘\n");
  });
}

struct Inner {
  Tensor<f32, "M/t/d H"> a;
  Tensor<f32, "H"> b;
};
struct Outer {
  Inner inner;
  Array<"layers", Inner> layers;
  Tensor<f32, "M/d"> c;
};

TEST_CASE("place and fetch", "[ops][interop]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=1,t=3", "d=2,t=2", "d=2,t=3"}, [](const Grid& mesh) {
    const auto same = [](const auto& a, const auto& b) {
      expect(a.shape == b.shape && a.data == b.data, "fetched " + show(a.data.size()) + " elements differ");
    };
    const auto host = counting<f32>({12, 6});
    const auto x = place<Tensor<f32, "A/t/d C">>(mesh, host);
    Global whole = assemble(*x.value(), parse_tensor("A/t/d C").spec);
    expect(std::equal(host.data.begin(), host.data.end(), whole.data.begin()), "each device has its shard");
    same(fetch(x), host);
    same(fetch(place<Tensor<f32, "A/d C/t">>(mesh, host)), host);
    same(fetch(place<Tensor<bf16, "C A/t">>(mesh, counting<bf16>({6, 12}))), counting<bf16>({6, 12}));
    same(fetch(place<Tensor<u8, "A/d 2">>(mesh, counting<u8>({12, 2}))), counting<u8>({12, 2}));
    same(fetch(place<Tensor<i32, "">>(mesh, counting<i32>({}))), counting<i32>({}));
    // Pending sums are taken.
    same(fetch(to_partial<"A/t C -> A/t C +d">(place<Tensor<f32, "A/t C">>(mesh, host))), host);
    same(fetch(sum<"A/t/d C -> C +d +t">(x)), fetch(sum<"A C -> C">(place<Tensor<f32, "A C">>(mesh, host))));

    Outer structure;
    structure.layers.resize(2);
    std::vector<HostArray<f32>> leaves;
    for (int i = 0; i < 3; ++i) {
      leaves.push_back(counting<f32>({12, 6}));
      leaves.push_back(counting<f32>({6}));
      leaves.back().data[0] = static_cast<float>(i);
    }
    leaves.push_back(counting<f32>({6}));
    const auto tree = place(mesh, leaves, structure);
    expect(tree.layers[1].b.span()[0] == 2, "the leaves are in order");
    const auto back = fetch(tree);
    expect(back.size() == 7, "all leaves");
    for (std::size_t i = 0; i < back.size(); ++i) same(back[i], leaves[i]);
    leaves.pop_back();
    expect_error([&] { place(mesh, leaves, structure); }, "place: 6 host arrays for a struct of 7 tensors");
  });
}

template <class D>
void check_host_arrays(const Grid& mesh, D one, D other) {
  HostArray<D> host({4, 6});
  for (std::size_t i = 0; i < host.data.size(); ++i) host.data[i] = i % 3 == 0 ? one : other;
  const auto same = [&](const HostArray<D>& back) {
    expect(back.shape == host.shape, "shape");
    expect_equal(back.data, host.data);
  };
  using Shards = Tensor<D, "A/d B/t">;
  same(fetch(place<Shards>(mesh, host)));
  same(spmd(mesh, [](const Shards& x) { return x; })(host));
  same(spmd(mesh, [](Shards x) noexcept { return x; })(host));
}

TEST_CASE("host arrays of every dtype go in and out", "[ops][interop]") {
  on_meshes({"d=1,t=1", "d=2,t=1", "d=2,t=2"}, [](const Grid& mesh) {
    check_host_arrays<f32>(mesh, 1.5F, -2);
    check_host_arrays<f64>(mesh, 1.5, -2);
    check_host_arrays<bf16>(mesh, bf16(1.5F), bf16(-2));
    check_host_arrays<i32>(mesh, 7, -2);
    check_host_arrays<u32>(mesh, 7, 4294967295);
    check_host_arrays<u8>(mesh, 7, 255);
    check_host_arrays<bool_>(mesh, true, false);
  });
}

TEST_CASE("sizes may be listed at run time", "[ops][interop]") {
  on_mesh("d=1,t=1", [](const DevicePtr& device) {
    Sizes sizes;
    for (const char* name : {"A", "B"}) sizes.push_back({name, 3, 4});
    const auto x = zeros<f32, "A B/t">(Grid(device), sizes);
    expect(x.size("B") == 3 && x.padded_size("A") == 4, "sizes");
  });
}

// What spmd refuses, with a sentence: functions without written-out types of parameters.
// (nvcc takes no lambda in a decltype.)
[[maybe_unused]] constexpr auto of_any = [](const auto& x) { return x; };
[[maybe_unused]] constexpr auto of_tensor = [](const Tensor<f32, "A">& x) { return x; };
static_assert(!detail::has_signature<std::remove_const_t<decltype(of_any)>>);
static_assert(detail::has_signature<std::remove_const_t<decltype(of_tensor)>>);

TEST_CASE("spmd places by the types of the parameters and puts the result together", "[ops][interop]") {
  const auto product =
      [](const Tensor<f32, "A/d K/t">& x, const Tensor<f32, "K/t C">& y, double factor) -> Tensor<f32, "A/d C +t"> {
    return einsum_unreduced<"A/d K/t, K/t C -> A/d C +t">(x, y) * factor;
  };
  on_meshes({"d=1,t=1", "d=2,t=2", "d=2,t=3"}, [&](const Grid& mesh) {
    const auto x = counting<f32>({4, 6}), y = counting<f32>({6, 2});
    // Host arrays and tensors may be mixed.
    const auto z = spmd(mesh, product)(x, place<Tensor<f32, "K/t C">>(mesh, y), 2.0);
    expect(z.shape == Shape{4, 2}, "shape");
    for (std::size_t i = 0; i < 4; ++i)
      for (std::size_t j = 0; j < 2; ++j) {
        float expected = 0;
        for (std::size_t k = 0; k < 6; ++k) expected += x.data[i * 6 + k] * y.data[k * 2 + j];
        expect(z.data[i * 2 + j] == 2 * expected, "element");
      }
    // An argument of another type than the parameter's, to which it converts.
    expect(spmd(mesh, product)(x, y, 2).data == z.data, "an int for a double");
    const auto named = [](const Tensor<f32, "A/d K/t">& a, const std::string& name) {
      return a * static_cast<double>(name.size());
    };
    expect(spmd(mesh, named)(x, "a name of more letters than a small string has").data[1] == 46 * x.data[1], "a text");
  });
}

TEST_CASE("a program has the same bits twice, and where only the data's placement differs", "[ops][interop]") {
  // Everything local: no sum crosses devices, so a mesh may not change a bit.
  std::vector<float> first;
  std::mutex mutex;
  on_meshes({"d=1,t=1", "d=1,t=1", "d=2,t=1", "d=3,t=1", "d=2,t=2"}, [&](const Grid& mesh) {
    const auto x = random_normal<f32, "B/d M">(mesh, {{"B", 12}, {"M", 16}}, {1, 1});
    const auto w = random_normal<f32, "M">(mesh, {{"M", 16}}, {1, 2});
    const auto y = fetch(softmax<"M">(gelu(rms_norm<"M">(x) * w)));
    const std::lock_guard lock(mutex);
    if (first.empty()) first = y.data;
    expect(std::memcmp(first.data(), y.data.data(), first.size() * sizeof(float)) == 0, "bits differ");
  });
  REQUIRE((first.size() == 192 || world_rank() > 0));
}

}  // namespace
