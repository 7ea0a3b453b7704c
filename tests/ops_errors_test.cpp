// Run-time errors: each names the op, its spec, the dim, the sizes and the device, and says what helps.
#include "op_case.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

const std::string on_one = " (device 0 (d=0,t=0) of mesh d=1,t=1)";

template <class T>
T zero_of(const std::shared_ptr<Device>& device, std::initializer_list<std::int64_t> sizes) {
  Global x;
  for (const Dim& dim : detail::parsed<T::spec>.dims) x.names.emplace_back(dim.name);
  x.shape = sizes;
  x.data.resize(count_of(x.shape));
  return T(place(device, dtype_v<typename T::value_type>, detail::parsed<T::spec>, x));
}
template <class T>
T leaf_of(const std::shared_ptr<Device>& device, std::initializer_list<std::int64_t> sizes) {
  return T(detail::as_leaf(*zero_of<T>(device, sizes).value()));
}

/// Runs the body on one device, once.
void on_one_device(const std::function<void(const std::shared_ptr<Device>&, const Mesh<"d t">&)>& body) {
  int runs = 0;
  on_mesh("d=1,t=1", [&](const std::shared_ptr<Device>& device) {
    body(device, Mesh<"d t">(device));
    ++runs;
  });
  REQUIRE((runs == 1 || world_rank() > 0));
}

TEST_CASE("sizes that disagree", "[ops][errors]") {
  on_one_device([](const auto& device, const auto&) {
    const auto x = zero_of<Tensor<f32, "B/d L">>(device, {4, 6});
    expect_error<Error>(
        [&] {
          einsum_unreduced<"B/d L, L M -> B/d M">(x, zero_of<Tensor<f32, "L M">>(device, {5, 2}));
        },
        "einsum_unreduced<`B/d L, L M -> B/d M`>: dim `L` is 5, but 6 in another operand" + on_one);
    expect_error<Error>([&] { x + zero_of<Tensor<f32, "L">>(device, {5}); },
                        "+ of `B/d L` and `L`: dim `L` is 5, but 6 in another operand" + on_one);
    expect_error<Error>([&] { maximum(zero_of<Tensor<f32, "L">>(device, {5}), x); },
                        "maximum of `L` and `B/d L`: dim `L` is 6, but 5 in another operand" + on_one);
    expect_error<Error>(
        [&] {
          index_unreduced<"[V] L, B/d L -> B/d L">(zero_of<Tensor<f32, "V L">>(device, {9, 6}),
                                                   zero_of<Tensor<i32, "B/d L">>(device, {4, 7}));
        },
        "index_unreduced<`[V] L, B/d L -> B/d L`>: dim `L` is 7, but 6 in another operand" + on_one);
    expect_error<Error>(
        [&] {
          concat<"L">(x, zero_of<Tensor<f32, "B/d L">>(device, {2, 6}));
        },
        "concat<`L`>: dim `B` is 4 in the first operand, but 2 in the second" + on_one);
    expect_error<Error>(
        [&] {
          broadcast<"B/d L -> C B/d L">(x, {{"C", 2}, {"L", 5}});
        },
        "broadcast<`B/d L -> C B/d L`>: dim `L` is 5, but 6 in another operand" + on_one);
  });
}

TEST_CASE("sizes that do not divide or are not there", "[ops][errors]") {
  on_one_device([](const auto& device, const auto& mesh) {
    expect_error<Error>(
        [&] {
          zeros<f32, "A B">(mesh, {{"A", 2}});
        },
        "full<`A B`>: the size of dim `B` is not known: give it, as in {{\"B\", 8}}" + on_one);
    expect_error<Error>(
        [&] {
          zeros<f32, "A">(mesh, {{"A", -2}});
        },
        "full<`A`>: dim `A` has the negative size -2" + on_one);
    const auto x = zero_of<Tensor<f32, "A/t">>(device, {12});
    expect_error<Error>([&] { split<"A/t -> H/t K">(x, {}); },
                        "split<`A/t -> H/t K`>: the sizes of `H` and `K` are both open: give one of them" + on_one);
    expect_error<Error>(
        [&] {
          split<"A/t -> H/t K">(x, {{"K", 5}});
        },
        "split<`A/t -> H/t K`>: dim `A` of size 12 does not split by `K` = 5" + on_one);
    expect_error<Error>(
        [&] {
          split<"A/t -> H/t K">(x, {{"K", 2}, {"H", 3}});
        },
        "split<`A/t -> H/t K`>: the sizes of the parts multiply to less than `A` = 12" + on_one);
    expect_error<Error>(
        [&] {
          rope<"L", "K">(zero_of<Tensor<f32, "L K">>(device, {2, 3}));
        },
        "rope<`K`>: dim `K` has the odd size 3; rotary embedding turns pairs" + on_one);
    expect_error<Error>([&] { static_cast<void>(x.size("B")); }, "size: `A/t` has no dim `B`");
    expect_error<Error>(
        [&] {
          place<Tensor<f32, "A 2">>(mesh, HostArray<f32>({4, 3}));
        },
        "place<`A 2`>: the integer dim `2` has size 3" + on_one);
    expect_error<Error>([&] { place<Tensor<f32, "A B">>(mesh, HostArray<f32>({4})); },
                        "place<`A B`>: the host array has 1 dims, the spec 2" + on_one);
    expect_error<Error>([&] { HostArray<f32>({2, 2}, {1, 2, 3}); }, "HostArray: 3 values for a shape of 4");
    const std::vector<f32> memory(7);
    expect_error<Error>(
        [&] {
          from_memory<f32, "B/d M">(mesh, {{"B", 4}, {"M", 2}}, std::span(memory));
        },
        "from_memory<`B/d M`>: the block of this device has 8 elements, the memory 7" + on_one);
  });
  // Every device says so, under its own name, before anything is sent.
  on_mesh("d=2,t=2", [](const std::shared_ptr<Device>& device) {
    const Mesh<"d t"> mesh(device);
    const std::string here = " (" + device->describe() + ")";
    expect_error<Error>(
        [&] {
          zeros<f32, "A/d B">(mesh, {{"A", 3}, {"B", 3}});
        },
        "full<`A/d B`>: dim `A/d` of size 3 does not divide evenly into 2 blocks; choose a multiple of 2" + here);
    expect_error<Error>(
        [&] { slice<"B -> B/t/d">(zero_of<Tensor<f32, "B">>(device, {6})); },
        "slice<`B -> B/t/d`>: dim `B/t/d` of size 6 does not divide evenly into 4 blocks; choose a multiple of 4" +
            here);
    expect_error<Error>(
        [&] {
          reduce_scatter<"B C +d -> B C/d">(zero_of<Tensor<f32, "B C +d">>(device, {6, 5}));
        },
        "reduce_scatter<`B C +d -> B C/d`>: dim `C/d` of size 5 does not divide evenly into 2 blocks; choose a "
        "multiple "
        "of 2" +
            here);
    expect_error<Error>(
        [&] {
          all_to_all<"B/d C -> B C/d">(zero_of<Tensor<f32, "B/d C">>(device, {6, 5}));
        },
        "all_to_all<`B/d C -> B C/d`>: dim `C/d` of size 5 does not divide evenly into 2 blocks; choose a multiple of "
        "2" +
            here);
    expect_error<Error>(
        [&] {
          split<"A/d -> H/d K">(zero_of<Tensor<f32, "A/d">>(device, {6}), {{"K", 2}});
        },
        "split<`A/d -> H/d K`>: dim `H/d` of size 3 does not divide evenly into 2 blocks; choose a multiple of 2" +
            here);
  });
}

TEST_CASE("axes that the mesh lacks", "[ops][errors]") {
  on_one_device([](const auto& device, const auto&) {
    const auto x = zero_of<Tensor<f32, "A">>(device, {12});
    expect_error<Error>([&] { slice<"A -> A/q">(x); },
                        "slice<`A -> A/q`>: `A/q`: unknown axis 'q': the mesh is d=1,t=1" + on_one);
    expect_error<Error>([&] { to_partial<"A -> A +q">(x); },
                        "to_partial<`A -> A +q`>: `A +q`: unknown axis 'q': the mesh is d=1,t=1" + on_one);
    expect_error<UsageError>([&] { Mesh<"t d">{device}; },
                             "the program is written for a mesh with the axes `t d`, in this order, but was given "
                             "`d=1,t=1`");
    expect_error<UsageError>([&] { Mesh<"d">{device}; },
                             "the program is written for a mesh with the axes `d`, in this order, but was given "
                             "`d=1,t=1`");
    const auto other = std::make_shared<Device>(parse_mesh("d=1"), 0);
    expect_error<Error>(
        [&] { x + zero_of<Tensor<f32, "A">>(other, {12}); },
        "+ of `A` and `A`: its operands lie on different meshes: device 0 (d=0) of mesh d=1 and device 0 "
        "(d=0,t=0) of mesh d=1,t=1" +
            on_one);
  });
}

TEST_CASE("scopes", "[ops][errors]") {
  on_one_device([](const auto& device, const auto& mesh) {
    const auto x = zero_of<Tensor<f32, "A B">>(device, {2, 3});
    const auto y = zero_of<Tensor<f32, "B A">>(device, {2, 3});
    static_cast<void>(x + x);  // without a scope names may change their sizes
    static_cast<void>(y + y);
    {
      const Scope outer(mesh);
      static_cast<void>(x + x);
      expect_error<Error>([&] { y + y; }, "+ of `B A`: dim `B` is 2, but 3 earlier in this scope" + on_one);
      expect(zeros<f32, "A">(mesh, {}).size("A") == 2, "a scope knows sizes");
      {
        const Scope inner(mesh);  // the innermost counts
        static_cast<void>(y + y);
        expect_error<Error>([&] { x + x; }, "+ of `A B`: dim `A` is 2, but 3 earlier in this scope" + on_one);
      }
      static_cast<void>(x + x);
      expect_error<Error>([&] { y + y; }, "+ of `B A`: dim `B` is 2, but 3 earlier in this scope" + on_one);
      expect_error<Error>([&] { rename<"A -> B">(zero_of<Tensor<f32, "A">>(device, {5})); },
                          "rename<`A -> B`>: dim `B` is 5, but 3 earlier in this scope" + on_one);
      expect_error<Error>(
          [&] {
            merge<"A C -> B">(zero_of<Tensor<f32, "A C">>(device, {2, 2}));
          },
          "merge<`A C -> B`>: dim `B` is 4, but 3 earlier in this scope" + on_one);
      expect_error<Error>([&] { place<Tensor<f32, "A">>(mesh, HostArray<f32>({5})); },
                          "place<`A`>: dim `A` is 5, but 2 earlier in this scope" + on_one);
    }
    static_cast<void>(y + y);
    expect_error<Error>([&] { zeros<f32, "A">(mesh, {}); },
                        "full<`A`>: the size of dim `A` is not known: give it, as in {{\"A\", 8}}" + on_one);
  });
}

TEST_CASE("indices outside the table", "[ops][errors]") {
  on_mesh("d=1,t=2", [](const std::shared_ptr<Device>& device) {
    const auto table = zero_of<Tensor<f32, "V/t M">>(device, {8, 2});
    static const TensorSpec ids = parse_tensor("B").spec;
    const auto look_up = [&](double id) {
      const Tensor<i32, "B"> indices(place(device, DType::i32, ids, {{"B"}, {3}, {1, id, 7}}));
      static_cast<void>(index_unreduced<"[V/t] M, B -> B M +t">(table, indices));
    };
    const std::string here = " (" + device->describe() + ")";
    for (const int id : {8, -1})
      expect_error<Error>([&] { look_up(id); },
                          "index_unreduced<`[V/t] M, B -> B M +t`>: gather: id " + std::to_string(id) +
                              " is outside the table's extent 8; check the data against the vocabulary size" + here);
    look_up(0);
  });
  SUCCEED();
}

TEST_CASE("maxima have no derivative", "[ops][errors]") {
  on_one_device([](const auto& device, const auto&) {
    const auto x = leaf_of<Tensor<f32, "A V/t">>(device, {2, 4});
    expect_error<Error>([&] { all_reduce_max<"A V/t -> A">(x); },
                        "all_reduce_max<`A V/t -> A`>: a maximum over devices has no derivative; take stop_gradient of "
                        "the operand first" +
                            on_one);
    static_cast<void>(all_reduce_max<"A V/t -> A">(stop_gradient(x)));
    const auto y = leaf_of<Tensor<f32, "A V">>(device, {2, 4});
    expect_error<Error>(
        [&] { max<"A V -> A">(y); },
        "max<`A V -> A`>: a maximum has no derivative here; take stop_gradient of the operand first" + on_one);
  });
}

TEST_CASE("a tensor from outside in a checkpointed function", "[ops][errors]") {
  on_one_device([](const auto& device, const auto& mesh) {
    const auto x = zero_of<Tensor<f32, "A/d">>(device, {4});
    const std::string remedy = "; pass that as an argument, or its gradient would be lost" + on_one;
    constexpr int line = __LINE__ + 2;
    const auto of_result = [&](const Tensor<f32, "A/d">& w) -> Tensor<f32, "+d +t"> {
      const auto outside = exp(w);
      const auto f = explicit_activation_checkpointing([&](const Tensor<f32, "A/d">& v) { return v * outside; });
      return to_partial<"+d -> +d +t">(sum(f(x)));
    };
    expect_error<Error>(
        [&] { value_and_grad(mesh, of_result, x); },
        "* of result `A/d`: inside explicit_activation_checkpointing it uses a tensor from outside, the "
        "result of exp at " +
            std::string(__FILE__) + ":" + std::to_string(line) + remedy);
    const auto of_weight = [&](const Tensor<f32, "A/d">& w) -> Tensor<f32, "+d +t"> {
      const auto f = explicit_activation_checkpointing([&](const Tensor<f32, "A/d">& v) { return v * w; });
      return to_partial<"+d -> +d +t">(sum(f(x)));
    };
    expect_error<Error>([&] { value_and_grad(mesh, of_weight, x); },
                        "* of result `A/d`: inside explicit_activation_checkpointing it uses a tensor from outside, a "
                        "weight" +
                            remedy);
  });
}

TEST_CASE("elements that cannot be reduced", "[ops][errors]") {
  on_one_device([](const auto& device, const auto&) {
    expect_error<Error>([&] { sum<"A -> ">(zero_of<Tensor<u8, "A">>(device, {4})); },
                        "sum<`A -> `>: sum: no reduction of u8; cast to i32 first" + on_one);
  });
  on_mesh("d=1,t=2", [](const std::shared_ptr<Device>& device) {
    expect_error<Error>(
        [&] { all_reduce<"A +t -> A">(zero_of<Tensor<u8, "A +t">>(device, {4})); },
        "all_reduce<`A +t -> A`>: all_reduce of u8: only f32, bf16, f64, i32 and u32 can be reduced: convert "
        "first (" +
            device->describe() + ")");
  });
}

}  // namespace
