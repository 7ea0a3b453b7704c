// Run-time errors: each names the op, its spec, the dim, the sizes and the device, and says what helps.
#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "op_case.hpp"
#include "shardlib/comm/dry.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

const std::string on_one = " (device 0 (d=0,t=0) of mesh d=1,t=1)";

template <class T>
T zero_of(const DevicePtr& device, std::initializer_list<std::int64_t> sizes) {
  Global x;
  for (const Dim& dim : detail::parsed<T::spec>.dims) x.names.emplace_back(dim.name);
  x.shape = sizes;
  x.data.resize(count_of(x.shape));
  return T(place(device, dtype_v<typename T::value_type>, detail::parsed<T::spec>, x));
}
template <class T>
T leaf_of(const DevicePtr& device, std::initializer_list<std::int64_t> sizes) {
  return T(detail::as_leaf(*zero_of<T>(device, sizes).value()));
}

/// Runs the body on one device, once.
void on_one_device(const std::function<void(const DevicePtr&, const Mesh<"d t">&)>& body) {
  int runs = 0;
  on_mesh("d=1,t=1", [&](const DevicePtr& device) {
    body(device, Mesh<"d t">(device));
    ++runs;
  });
  REQUIRE((runs == 1 || world_rank() > 0));
}

TEST_CASE("an exception without a text is named by its type", "[errors]") {
  const auto of = [](const auto& thrown) { return detail::ending_of(std::make_exception_ptr(thrown)); };
  CHECK(of(std::runtime_error("why")).message == "why");
  CHECK(of(std::runtime_error("")).message ==
        "the program has thrown a std::runtime_error without a text: give it one");
  CHECK(of(42).message ==
        "the program has thrown a value of type int, which is not a std::exception: throw a shardlib::Error with a "
        "text");
  CHECK(of(std::bad_alloc()).message ==
        "the host has no memory left: choose smaller sizes, or fewer devices on this machine");
  CHECK(
      of(std::system_error(EAGAIN, std::generic_category())).message ==
      "the system allows no more threads, or has no memory for their stacks: raise the limits (ulimit -u, ulimit -v), "
      "or start fewer processes on this machine");
  CHECK(of(std::system_error(EIO, std::generic_category())).message == "Input/output error");
  CHECK(of(42).status == 1);
  // Of the copies that mpirun has started of a program without MPI, one speaks.
  CHECK((of(UsageError("")).message.empty() && of(UsageError("")).status == 2));
}

TEST_CASE("a collective that a device waits for in vain is named once", "[ops][errors]") {
  if (under_mpi()) return;
  const auto gathers = [](const DevicePtr& device) {
    const Mesh<"d"> mesh(device);
    if (device->rank() > 0) return;
    const auto whole = all_gather<"A/d -> A">(zeros<f32, "A/d">(mesh, {{"A", 4}}));
    static_cast<void>(whole.span());
  };
  ERROR_IS(
      "all_gather<`A/d -> A`>: device 1 (rank 1 of 2) has returned without taking part: every device of a group must "
      "make the same calls (device 0 (d=0) of mesh d=2)",
      launch(parse_mesh("d=2"), gathers));
}

std::string at(unsigned line) {
  return std::string(" at ") + __FILE__ + ":" + std::to_string(line);
}
/// Compares in the line where f stands, which its error has to name.
#define ERROR_NAMES_THIS_LINE(before, after, ...) \
  CHECK(error_of([&] { __VA_ARGS__; }) == std::string(before) + at(__LINE__) + (after))

TEST_CASE("an error names the line of the call", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">& mesh) {
    const auto x = zero_of<Tensor<f32, "B/d L">>(device, {4, 6});
    const auto y = zero_of<Tensor<f32, "L">>(device, {5});
    const std::string sizes = ": dim `L` is 5, but 6 in another operand" + on_one;
    ERROR_NAMES_THIS_LINE("+ of `B/d L` and `L`", sizes, x + y);
    ERROR_NAMES_THIS_LINE("size", ": `B/d L` has no dim `M`", static_cast<void>(x.size("M")));
    ERROR_NAMES_THIS_LINE("padded_size", ": `B/d L` has no dim `M`", static_cast<void>(x.padded_size("M")));
    ERROR_NAMES_THIS_LINE("- of `B/d L` and `L`", sizes, x - y);
    ERROR_NAMES_THIS_LINE("* of `B/d L` and `L`", sizes, x * y);
    ERROR_NAMES_THIS_LINE("/ of `B/d L` and `L`", sizes, x / y);
    ERROR_NAMES_THIS_LINE("map of `B/d L` and `L`", sizes, map([](auto a, auto b) { return a * b; }, x, y));
    auto sum = x;
    const auto other = zero_of<Tensor<f32, "B/d L">>(device, {4, 5});
    ERROR_NAMES_THIS_LINE("+ of `B/d L` and `B/d L`", sizes, sum += other);

    const Tensor<f32, "L"> none;
    const std::string empty =
        ": a tensor `f32[L]` was never given a value, or was moved from; make one with an op, as `zeros` or `place`, "
        "before it is used";
    ERROR_NAMES_THIS_LINE("operator+", empty, none + none);
    ERROR_NAMES_THIS_LINE("operator-", empty, -none);
    ERROR_NAMES_THIS_LINE("operator+", empty, none + 1.0);
    ERROR_NAMES_THIS_LINE("operator-", empty, 1.0 - none);
    ERROR_NAMES_THIS_LINE("operator*", empty, 2.0 * none);
    ERROR_NAMES_THIS_LINE("operator/", empty, none / 2.0);
    ERROR_NAMES_THIS_LINE("map", empty, map([](auto a) { return a; }, none));
    ERROR_NAMES_THIS_LINE("exp", empty, exp(none));
    ERROR_NAMES_THIS_LINE("zeros<`L`>", ": the size of dim `L` is not known: give it, as in {{\"L\", 8}}" + on_one,
                          zeros<f32, "L">(mesh, {}));
  });
}

struct Block {
  Tensor<f32, "M"> scale, bias;
};
struct Blocks {
  Array<"layers", Block> layers;
};

TEST_CASE("an error of a tree names the leaf or the Array", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">&) {
    const auto scale = zero_of<Tensor<f32, "M">>(device, {3});
    Blocks one, two;
    one.layers = {Block{scale, scale}, Block{scale, {}}};
    const std::string empty = error_of([&] { map_tree([](const auto& x) { return x * 2.0; }, one); });
    CHECK_THAT(empty,
               Catch::Matchers::StartsWith("the leaf `layers/1/bias`: operator*") && Catch::Contains(at(__LINE__ - 2)));
    const auto read = [](std::string_view, const auto& x) { static_cast<void>(x.span()); };
    CHECK_THAT(error_of([&] { for_each_leaf(read, one); }), Catch::Matchers::StartsWith("the leaf `layers/1/bias`: "));
    two.layers = {Block{scale, scale}};
    CHECK(error_of([&] { map_tree([](const auto& a, const auto& b) { return a + b; }, one, two); }) ==
          "map_tree: trees of different structure: the Array `layers` has 2 entries in the first tree and 1 in "
          "another; build "
          "them from one configuration");
  });
}

TEST_CASE("a mesh of no device", "[ops][errors]") {
  CHECK_THAT(error_of([] { const Mesh<"d"> mesh(nullptr); }),
             Catch::Matchers::Equals("a mesh `d` needs a device; take the one that `launch` gives to its function"));
}

TEST_CASE("sizes own their names", "[ops][errors]") {
  on_one_device([](const DevicePtr&, const Mesh<"d t">& mesh) {
    const auto made = [] {
      const std::string name = "name_that_no_small_string_holds";
      return Sizes{{name, 3}};
    };
    const Sizes sizes = made();
    CHECK(zeros<f32, "name_that_no_small_string_holds">(mesh, sizes).size("name_that_no_small_string_holds") == 3);
  });
}

TEST_CASE("sizes that disagree", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">&) {
    const auto x = zero_of<Tensor<f32, "B/d L">>(device, {4, 6});
    ERROR_IS("einsum_unreduced<`B/d L, L M -> B/d M`>: dim `L` is 5, but 6 in another operand" + on_one,
             einsum_unreduced<"B/d L, L M -> B/d M">(x, zero_of<Tensor<f32, "L M">>(device, {5, 2})));
    ERROR_IS("+ of `B/d L` and `L`: dim `L` is 5, but 6 in another operand" + on_one,
             x + zero_of<Tensor<f32, "L">>(device, {5}));
    ERROR_IS("maximum of `L` and `B/d L`: dim `L` is 6, but 5 in another operand" + on_one,
             maximum(zero_of<Tensor<f32, "L">>(device, {5}), x));
    ERROR_IS("index_unreduced<`[V] L, B/d L -> B/d L`>: dim `L` is 7, but 6 in another operand" + on_one,
             index_unreduced<"[V] L, B/d L -> B/d L">(zero_of<Tensor<f32, "V L">>(device, {9, 6}),
                                                      zero_of<Tensor<i32, "B/d L">>(device, {4, 7})));
    ERROR_IS("concat<`L, L -> N`>: dim `B` is 4 in one operand, but 2 in another" + on_one,
             concat<"L, L -> N">(x, zero_of<Tensor<f32, "B/d L">>(device, {2, 6})));
    ERROR_IS("broadcast<`B/d L -> C B/d L`>: dim `L` is 5, but 6 in another operand" + on_one,
             broadcast<"B/d L -> C B/d L">(x, {{"C", 2}, {"L", 5}}));
  });
}

TEST_CASE("sizes that do not divide or are not there", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">& mesh) {
    ERROR_IS("zeros<`A B`>: the size of dim `B` is not known: give it, as in {{\"B\", 8}}" + on_one,
             zeros<f32, "A B">(mesh, {{"A", 2}}));
    ERROR_IS("zeros<`A`>: dim `A` has the negative size -2" + on_one, zeros<f32, "A">(mesh, {{"A", -2}}));
    const auto x = zero_of<Tensor<f32, "A/t">>(device, {12});
    ERROR_IS("split<`A/t -> H/t K`>: the sizes of `H` and `K` are both open: give one of them" + on_one,
             split<"A/t -> H/t K">(x, {}));
    ERROR_IS(
        "split<`A/t -> H/t K`>: dim `A` of size 12 does not split by `K` = 5; choose a size that divides it" + on_one,
        split<"A/t -> H/t K">(x, {{"K", 5}}));
    ERROR_IS("split<`A/t -> H/t K`>: the sizes of the parts multiply to less than `A` = 12" + on_one,
             split<"A/t -> H/t K">(x, {{"K", 2}, {"H", 3}}));
    ERROR_IS("rope<`K`>: dim `K` has the odd size 3; rotary embedding rotates pairs" + on_one,
             rope<"L", "K">(zero_of<Tensor<f32, "L K">>(device, {2, 3})));
    ERROR_IS("size: `A/t` has no dim `B`", x.size("B"));
    ERROR_IS("place<`A 2`>: the integer dim `2` has size 3" + on_one,
             place<Tensor<f32, "A 2">>(mesh, HostArray<f32>({4, 3})));
    ERROR_IS("place<`A B`>: the host array has 1 dims, the spec 2" + on_one,
             place<Tensor<f32, "A B">>(mesh, HostArray<f32>({4})));
    ERROR_IS("HostArray: 3 values for a shape of 4 elements; give as many, or the shape alone for zeros",
             HostArray<f32>({2, 2}, {1, 2, 3}));
    ERROR_IS("HostArray: 0 values for a shape of 4 elements; give as many, or the shape alone for zeros",
             HostArray<f32>({2, 2}, std::vector<f32>()));
    const std::vector<f32> memory(7);
    ERROR_IS("from_memory<`B/d M`>: the shard of this device has 8 elements, the memory 7" + on_one,
             from_memory<f32, "B/d M">(mesh, {{"B", 4}, {"M", 2}}, std::span(memory)));
  });
  // Every device says so, under its own name, before anything is sent.
  on_mesh("d=2,t=2", [](const DevicePtr& device) {
    const Mesh<"d t"> mesh(device);
    const std::string here = " (" + device->describe() + ")";
    ERROR_IS(
        "zeros<`A/d B`>: dim `A/d` of size 3 does not divide evenly into 2 shards; choose a multiple of 2, or pad it: "
        "{\"A\", 3, 4}" +
            here,
        zeros<f32, "A/d B">(mesh, {{"A", 3}, {"B", 3}}));
    ERROR_IS(
        "shard<`B -> B/t/d`>: dim `B/t/d` of size 6 does not divide evenly into 4 shards; choose a multiple of 4, or "
        "pad it: {\"B\", 6, 8}" +
            here,
        shard<"B -> B/t/d">(zero_of<Tensor<f32, "B">>(device, {6})));
    ERROR_IS(
        "reduce_scatter<`B C +d -> B C/d`>: dim `C/d` of size 5 does not divide evenly into 2 shards; choose a "
        "multiple of 2, or pad it: {\"C\", 5, 6}" +
            here,
        reduce_scatter<"B C +d -> B C/d">(zero_of<Tensor<f32, "B C +d">>(device, {6, 5})));
    ERROR_IS(
        "all_to_all<`B/d C -> B C/d`>: dim `C/d` of size 5 does not divide evenly into 2 shards; choose a multiple of "
        "2, or pad it: {\"C\", 5, 6}" +
            here,
        all_to_all<"B/d C -> B C/d">(zero_of<Tensor<f32, "B/d C">>(device, {6, 5})));
    ERROR_IS(
        "split<`A/d -> H/d K`>: dim `H/d` of size 3 does not divide evenly into 2 shards; choose a multiple of 2, or "
        "pad it: {\"H\", 3, 4}" +
            here,
        split<"A/d -> H/d K">(zero_of<Tensor<f32, "A/d">>(device, {6}), {{"K", 2}}));
  });
}

TEST_CASE("a mean of no elements", "[ops][errors]") {
  on_one_device([](const auto& device, const auto& /*mesh*/) {
    const auto rows = zero_of<Tensor<f32, "B/d C">>(device, {0, 3});
    ERROR_IS(
        "mean<`B/d C -> C +d`>: the dim `B` has 0 elements, and a mean divides by their number; give it at least one "
        "element, for example one row for each microbatch" +
            on_one,
        mean<"B/d C -> C +d">(rows));
    ERROR_IS(
        "mean<`B C -> C`>: the dim `B` has 0 elements, and a mean divides by their number; give it at least one "
        "element, for example one row for each microbatch" +
            on_one,
        var<"B C -> C">(zero_of<Tensor<f32, "B C">>(device, {0, 3})));
    expect(mean<"B/d C -> B/d">(rows).size("B") == 0, "means of three elements each, which are none");
  });
}

TEST_CASE("axes that the mesh lacks", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">&) {
    const auto x = zero_of<Tensor<f32, "A">>(device, {12});
    ERROR_IS("shard<`A -> A/q`>: `A/q`: unknown axis 'q': the mesh is d=1,t=1" + on_one, shard<"A -> A/q">(x));
    ERROR_IS("to_partial<`A -> A +q`>: `A +q`: unknown axis 'q': the mesh is d=1,t=1" + on_one,
             to_partial<"A -> A +q">(x));
    expect_error<UsageError>(
        [&] { Mesh<"t d">{device}; },
        "the program is written for a mesh with the axes `t d`, in this order, but was given `d=1,t=1`; give `launch` "
        "the axes of the program");
    expect_error<UsageError>(
        [&] { Mesh<"d">{device}; },
        "the program is written for a mesh with the axes `d`, in this order, but was given `d=1,t=1`; give `launch` "
        "the axes of the program");
    const auto other = DevicePtr::make(parse_mesh("d=1"), 0);
    const Mesh<"r d"> wider{DevicePtr::make(parse_mesh("d=1"), 0)};
    expect(wider.size("r") == 1 && wider.axis_index("r") == 0 && wider.device()->group({"r", "d"}).size() == 1,
           "an axis of the type that the device has not has size 1");
    const std::string drawn = visualize_sharding(zeros<f32, "B/r/d">(wider, {{"B", 12}}));
    expect(drawn.find("f32[B/r/d] on mesh d=1\n") == 0 && drawn.find("│ 0 │") != std::string::npos, drawn);
    expect(wider.device()->describe() == "device 0 (d=0) of mesh d=1", wider.device()->describe());
    ERROR_IS(
        "+ of `A` and `A`: its operands are on different meshes: device 0 (d=0) of mesh d=1 and device 0 (d=0,t=0) of "
        "mesh d=1,t=1; make all tensors on one" +
            on_one,
        x + zero_of<Tensor<f32, "A">>(other, {12}));
  });
}

TEST_CASE("scopes", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">& mesh) {
    const auto x = zero_of<Tensor<f32, "A B">>(device, {2, 3});
    const auto y = zero_of<Tensor<f32, "B A">>(device, {2, 3});
    static_cast<void>(x + x);  // without a scope names may change their sizes
    static_cast<void>(y + y);
    const std::string rule =
        ", and a name has one size within this Scope; `rename` one of the two, or open a `Scope` around the part that "
        "means another size" +
        on_one;
    {
      const Scope outer(mesh);
      static_cast<void>(x + x);
      ERROR_IS("+ of `B A`: dim `B` is 2, but 3 in + of `A B`" + rule, y + y);
      expect(zeros<f32, "A">(mesh, {}).size("A") == 2, "a scope knows sizes");
      {
        const Scope inner(mesh);  // the innermost counts
        static_cast<void>(y + y);
        ERROR_IS("+ of `A B`: dim `A` is 2, but 3 in + of `B A`" + rule, x + x);
      }
      static_cast<void>(x + x);
      ERROR_IS("+ of `B A`: dim `B` is 2, but 3 in + of `A B`" + rule, y + y);
      ERROR_IS("rename<`A -> B`>: dim `B` is 5, but 3 in + of `A B`" + rule,
               rename<"A -> B">(zero_of<Tensor<f32, "A">>(device, {5})));
      ERROR_IS("merge<`A C -> B`>: dim `B` is 4, but 3 in + of `A B`" + rule,
               merge<"A C -> B">(zero_of<Tensor<f32, "A C">>(device, {2, 2})));
      ERROR_IS("place<`A`>: dim `A` is 5, but 2 in + of `A B`" + rule,
               place<Tensor<f32, "A">>(mesh, HostArray<f32>({5})));
    }
    static_cast<void>(y + y);
    ERROR_IS("zeros<`A`>: the size of dim `A` is not known: give it, as in {{\"A\", 8}}" + on_one,
             zeros<f32, "A">(mesh, {}));
  });
}

TEST_CASE("indices outside the table", "[ops][errors]") {
  on_mesh("d=1,t=2", [](const DevicePtr& device) {
    const auto table = zero_of<Tensor<f32, "V/t M">>(device, {8, 2});
    static const TensorSpec ids = parse_tensor("B").spec;
    const auto look_up = [&](double id) {
      const Tensor<i32, "B"> indices(place(device, DType::i32, ids, {{"B"}, {3}, {1, id, 7}}));
      wait_for(index_unreduced<"[V/t] M, B -> B M +t">(table, indices));
    };
    const std::string here = " (" + device->describe() + ")";
    for (const int id : {8, -1})
      ERROR_IS("index_unreduced<`[V/t] M, B -> B M +t`>: gather: index " + std::to_string(id) +
                   " is outside dim `V` of size 8; check the data against that size" + here,
               look_up(id));
    look_up(0);
    const Tensor<i32, "B"> i(place(device, DType::i32, ids, {{"B"}, {3}, {1, 7, 2}}));
    ERROR_IS(
        "index_unreduced<`[V/t] [M], B, B -> B +t`>: index tensor 2: index 7 is outside dim `M` of size 2; "
        "check the data against that size" +
            here,
        wait_for(index_unreduced<"[V/t] [M], B, B -> B +t">(table, i, i)));
  });
}

TEST_CASE("a table with too many rows along several dims", "[ops][errors]") {
  const auto device = DevicePtr::make(parse_mesh("d=2"), 0, std::make_shared<DryWorld>());
  const Mesh<"d"> mesh(device);
  const auto ids = zeros<i32, "B">(mesh, {{"B", 3}});
  const auto fails = [&](const char* op, const auto& f) {
    expect_error(f, "index_unreduced<`" + std::string(op) +
                        "`>: the looked-up dims of the shard of the table span 2^32 steps or more; put them first and "
                        "next to each other in the table's spec, or shard it further (" +
                        device->describe() + ")");
  };
  const auto look_up = [&](std::int64_t w) {
    const auto table = zeros<f32, "V W C">(mesh, {{"V", 65536}, {"W", w}, {"C", 4}});
    static_cast<void>(index_unreduced<"[V] [W] C, B, B -> B C">(table, ids, ids));
  };
  look_up(65535);
  fails("[V] [W] C, B, B -> B C", [&] { look_up(65536); });
  const Sizes sizes{{"V", 65536}, {"W", 32768}, {"C", 4}};
  static_cast<void>(index_unreduced<"[V] [W] C, B, B -> B C">(zeros<f32, "V W C">(mesh, sizes), ids, ids));
  fails("[V] C [W], B, B -> B C", [&] {
    static_cast<void>(index_unreduced<"[V] C [W], B, B -> B C">(zeros<f32, "V C W">(mesh, sizes), ids, ids));
  });
  const auto parts = zeros<f32, "V/d C W">(mesh, {{"V", 65536}, {"W", 32768}, {"C", 3}});
  static_cast<void>(index_unreduced<"[V/d] C [W], B, B -> B C +d">(parts, ids, ids));
}

TEST_CASE("maxima over devices have no derivative", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">&) {
    const auto x = leaf_of<Tensor<f32, "A V/t">>(device, {2, 4});
    ERROR_IS(
        "all_reduce_max<`A V/t -> A`>: a maximum over devices has no derivative; take stop_gradient of the operand "
        "first" +
            on_one,
        all_reduce_max<"A V/t -> A">(x));
    static_cast<void>(all_reduce_max<"A V/t -> A">(stop_gradient(x)));
  });
}

namespace {
thread_local const Tensor<f32, "A/d">* outside =
    nullptr;  // captures are a compile error; this is not seen before it runs
}

TEST_CASE("a tensor from outside in a checkpointed function", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">& mesh) {
    const auto x = zero_of<Tensor<f32, "A/d">>(device, {4});
    const std::string remedy = "; pass that as an argument, or its gradient would be lost" + on_one;
    constexpr int line = __LINE__ + 2;
    const auto of_result = [&](const Tensor<f32, "A/d">& w) -> Tensor<f32, "+d +t"> {
      const auto other = exp(w);
      outside = &other;
      const auto f = explicit_activation_checkpointing([](const Tensor<f32, "A/d">& v) { return v * *outside; });
      return to_partial<"+d -> +d +t">(sum(f(x)));
    };
    ERROR_IS("operator*" + at(line + 2) +
                 " of result `A/d`: inside explicit_activation_checkpointing it uses a tensor from outside, the result "
                 "of exp" +
                 at(line) + remedy,
             value_and_grad(mesh, of_result, x));
    const auto of_weight = [&](const Tensor<f32, "A/d">& w) -> Tensor<f32, "+d +t"> {
      outside = &w;
      const auto f = explicit_activation_checkpointing([](const Tensor<f32, "A/d">& v) { return v * *outside; });
      return to_partial<"+d -> +d +t">(sum(f(x)));
    };
    ERROR_IS(
        "operator* of result `A/d`: inside explicit_activation_checkpointing it uses a tensor from outside, a "
        "weight" +
            remedy,
        value_and_grad(mesh, of_weight, x));
  });
}

TEST_CASE("two meshes of the same axes", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">&) {
    const auto twin = DevicePtr::make(parse_mesh("d=1,t=1"), 0);
    ERROR_IS(
        "+ of `A` and `A`: its operands are on two meshes of the same axes, each with devices of its own; make all "
        "tensors on one, in one `launch`" +
            on_one,
        zero_of<Tensor<f32, "A">>(device, {2}) + zero_of<Tensor<f32, "A">>(twin, {2}));
  });
}

TEST_CASE("tensors of two devices of a launch", "[ops][errors]") {
  if (under_mpi()) return;
  std::array<Tensor<f32, "A/d">, 2> shared;
  launch({{"d", 2}}, [&](const DevicePtr& device) {
    const Mesh<"d"> mesh(device);
    const int own = mesh.rank();
    shared[static_cast<std::size_t>(own)] = ones<f32, "A/d">(mesh, {{"A", 4}});
    static_cast<void>(fetch(shared[static_cast<std::size_t>(own)]));  // both are there
    if (own == 1) return;
    ERROR_IS(
        "+ of `A/d` and `A/d`: its operands are of two devices, device 1 (d=1) of mesh d=2 and device 0 (d=0) of mesh "
        "d=2; let each device make its own tensors, and move shards with a collective (device 0 (d=0) of mesh d=2)",
        shared[0] + shared[1]);
  });
}

TEST_CASE("a tensor kept past its launch", "[ops][errors]") {
  if (under_mpi()) return;
  for (const int devices : {1, 2}) {
    std::optional<Tensor<f32, "A/d">> kept, moments;
    std::optional<Mesh<"d">> mesh;
    launch({{"d", devices}}, [&](const DevicePtr& device) {
      if (device->rank() > 0) return;
      mesh.emplace(device);
      kept.emplace(ones<f32, "A/d">(*mesh, {{"A", 2}}));
      moments.emplace(zeros_like(*kept));
      static_cast<void>(kept->span());
    });
    const std::string ended =
        ": its operands, or its mesh, are of a `launch` that has returned; compute in the function that `launch` runs, "
        "and keep what `fetch` or `item` returns (device 0 (d=0) of mesh d=" +
        std::to_string(devices) + ")";
    ERROR_NAMES_THIS_LINE("exp", ended, exp(*kept));
    ERROR_NAMES_THIS_LINE("all_gather<`A/d -> A`>", ended, all_gather<"A/d -> A">(*kept));
    ERROR_NAMES_THIS_LINE("zeros<`A`>", ended, zeros<f32, "A">(*mesh, {{"A", 2}}));
    ERROR_NAMES_THIS_LINE("fetch", ended, static_cast<void>(fetch(*kept)));
    auto w = *kept, mu = *moments, nu = *moments;
    expect_error([&] { AdamW().update(w, mu, nu, *kept, 0.1, 1.0, 0, [](std::string_view) { return false; }); },
                 "adamw" + ended);
    CHECK(kept->span()[0] == 1);  // what was computed can be read
  }
}

TEST_CASE("division of integers by zero", "[ops][errors]") {
  on_one_device([](const DevicePtr& device, const Mesh<"d t">& mesh) {
    const auto x = full<i32, "A">(mesh, {{"A", 3, 4}}, 7);
    ERROR_IS(
        "operator/: the divisor `A` has a zero in this shard, by which integers cannot be divided; replace it, e.g. "
        "with "
        "`where`" +
            on_one,
        wait_for(x / zeros<i32, "A">(mesh, {{"A", 3, 4}})));
    ERROR_IS("/ of `A`: integers cannot be divided by zero" + on_one, x / 0);
    // The padding of a divisor is zero, and the least integer has no opposite: neither may trap.
    expect_equal(fetch(x / full<i32, "A">(mesh, {{"A", 3, 4}}, 2)).data, std::vector<i32>{3, 3, 3});
    const auto least = full<i32, "A">(mesh, {{"A", 2}}, -2147483648.0);
    expect_equal(fetch(least / full<i32, "A">(mesh, {{"A", 2}}, -1)).data, fetch(least).data);
    expect_equal(fetch(least / -1).data, fetch(least).data);
    const Tensor<u8, "A"> bytes = full<u8, "A">(mesh, {{"A", 2}}, 200);
    expect_equal(fetch(bytes / full<u8, "A">(mesh, {{"A", 2}}, 3)).data, std::vector<u8>{66, 66});
    expect(std::isinf(fetch(full<f32, "A">(mesh, {{"A", 2}}, 1.0) / zeros<f32, "A">(mesh, {{"A", 2}})).data[0]),
           "floating numbers have an infinity");
    static_cast<void>(device);
  });
}

TEST_CASE("numbers that a dtype does not hold", "[ops][errors]") {
  on_one_device([](const DevicePtr&, const Mesh<"d t">& mesh) {
    const std::string i32_remedy =
        ", and is not rounded silently; write a whole number from -2147483648 to 2147483647, or `cast<f32>` the tensor "
        "first" +
        on_one;
    const auto x = full<i32, "A">(mesh, {{"A", 2}}, 6);
    ERROR_IS("* of `A`: the number 0.5 is not an i32" + i32_remedy, x * 0.5);
    ERROR_IS("/ of `A`: the number 3e+09 is not an i32" + i32_remedy, x / 3000000000);
    ERROR_IS("+ of `A`: the number 0.25 is not an i32" + i32_remedy, x + 0.25);
    ERROR_IS("- of `A`: the number 1e+12 is not an i32" + i32_remedy, x - 1e12);
    ERROR_IS("- of `A`: the number 1e+12 is not an i32" + i32_remedy, 1e12 - x);
    ERROR_IS("greater of `A`: the number 0.5 is not an i32" + i32_remedy, greater(x, 0.5));
    ERROR_IS("where of `A`: the number 0.5 is not an i32" + i32_remedy, where(greater(x, 0), x, 0.5));
    ERROR_IS("full<`A`>: the number 1e+12 is not an i32" + i32_remedy, full<i32, "A">(mesh, {{"A", 2}}, 1e12));
    ERROR_IS(
        "full<`A`>: the number 300 is not a u8, and is not rounded silently; write a whole number from 0 to 255, or "
        "`cast<f32>` the tensor first" +
            on_one,
        full<u8, "A">(mesh, {{"A", 2}}, 300));
    ERROR_IS("full<`A`>: the number nan is not an i32" + i32_remedy, full<i32, "A">(mesh, {{"A", 2}}, std::nan("")));
    const auto unsigned_x = full<u32, "A">(mesh, {{"A", 2}}, 4294967295.0);
    expect_equal(fetch(unsigned_x - 4294967294.0).data, std::vector<u32>{1, 1});
    expect_equal(fetch(2 * x + 1).data, std::vector<i32>{13, 13});
    ERROR_IS("iota<`A`>: the size 2147483649 is more than i32 counts" + on_one,
             iota<"A">(mesh, (std::int64_t{1} << 31) + 1));
  });
}

TEST_CASE("more elements than can be counted", "[ops][errors]") {
  on_one_device([](const DevicePtr&, const Mesh<"d t">& mesh) {
    constexpr std::int64_t large = std::int64_t{1} << 31;
    ERROR_IS(
        "zeros<`A/d B/t`>: the sizes `A` = 2147483648, `B` = 2147483648 of `A/d B/t` multiply to more bytes than can "
        "be counted; choose smaller ones" +
            on_one,
        zeros<f32, "A/d B/t">(mesh, {{"A", large}, {"B", large}}));
    const auto x = zeros<f32, "A">(mesh, {{"A", 1}});
    ERROR_IS(
        "broadcast<`A -> B C A`>: the sizes `B` = 2147483648, `C` = 2147483648, `A` = 1 of `B C A` multiply to more "
        "bytes than can be counted; choose smaller ones" +
            on_one,
        broadcast<"A -> B C A">(x, {{"B", large}, {"C", large}}));
    ERROR_IS("HostArray: the sizes of the shape multiply to more bytes than can be counted",
             HostArray<f32>({large, large}));
    ERROR_IS("HostArray: the shape has the negative size -1", HostArray<f32>({-1, 2}));
  });
}

struct Pair {
  Tensor<f32, "A/d B/t"> given;
  Tensor<f32, "B/t C/d"> forgotten;
};

TEST_CASE("tensors that hold nothing", "[ops][errors]") {
  on_one_device([](const DevicePtr&, const Mesh<"d t">& mesh) {
    const std::string remedy =
        " was never given a value, or was moved from; make one with an op, as `zeros` or `place`, before it is used";
    const Tensor<f32, "A"> x;
    const std::string message = "a tensor `f32[A]`" + remedy;
    ERROR_IS("operator+: " + message, x + x);
    ERROR_IS("exp: " + message, exp(x));
    ERROR_IS("operator*: " + message, x * 2.0);
    ERROR_IS("sum<`A -> `>: " + message, sum(x));
    ERROR_IS("operator+: " + message, zeros<f32, "A">(mesh, {{"A", 2}}) + x);
    ERROR_IS("shard<`A -> A/t`>: " + message, shard<"A -> A/t">(x));
    ERROR_IS("einsum_unreduced<`A, A -> `>: " + message, einsum_unreduced<"A, A -> ">(x, x));
    ERROR_IS("fetch: " + message, fetch(x));
    ERROR_IS(
        "value_and_grad: a tensor `f32[+d +t]`" + remedy,
        value_and_grad(
            mesh, [](const Tensor<f32, "A">&) { return Tensor<f32, "+d +t">(); }, zeros<f32, "A">(mesh, {{"A", 2}})));
    ERROR_IS(message, x.size("A"));
    ERROR_IS(message, x.padded_size("A"));
    ERROR_IS(message, x.span());
    ERROR_IS(message, x.local_shape());
    ERROR_IS(message, x.global_shape());
    ERROR_IS(message, x.device());
    const auto loss = [](const Pair& p) { return sum(p.given); };
    const Pair half{zeros<f32, "A/d B/t">(mesh, {{"A", 2}, {"B", 2}}), {}};
    ERROR_IS("value_and_grad: the weight `forgotten`, a tensor `f32[B/t C/d]`" + remedy,
             value_and_grad(mesh, loss, half));
    ERROR_IS("value_and_grad: the weight `given`, a tensor `f32[A/d B/t]`" + remedy,
             value_and_grad(mesh, loss, Pair{}));
    ERROR_IS("value_and_grad: the weight, a tensor `f32[A/d B/t]`" + remedy,
             value_and_grad(
                 mesh, [](const auto& w) { return sum(w); }, Tensor<f32, "A/d B/t">()));
    ERROR_IS("a mesh `d t` was never given its device; make it of the one that `launch` gives to its function",
             zeros<f32, "A">(Mesh<"d t">{}, {{"A", 2}}));
  });
}

TEST_CASE("targets outside the vocabulary", "[ops][errors]") {
  on_one_device([](const DevicePtr&, const Mesh<"d t">& mesh) {
    const auto logits = zeros<f32, "B V/t">(mesh, {{"B", 2}, {"V", 4}});
    const auto targets = full<i32, "B">(mesh, {{"B", 2}}, 4);
    ERROR_IS(
        "cross_entropy<`B [V/t], B -> B +t`>: gather: index 4 is outside dim `V` of size 4; check the "
        "data against that size" +
            on_one,
        wait_for(cross_entropy(logits, targets)));
  });
}

}  // namespace
