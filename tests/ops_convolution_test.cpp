// conv_unreduced and windows: lengths, strides, zeros and gaps of every kind, on every mesh, forward and backward.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "op_case.hpp"
#include "shardlib/comm/dry.hpp"
#include "shardlib/kernels/convolution.hpp"
#include "shardlib/shardlib.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// Sums products over every index that the result lacks; along `from`, the operand's index is that of the window.
Reference convolved(const Names& from, const Names& window, const Names& to, const std::vector<Window>& windows) {
  return [=](const std::vector<Global>& x, Global& y) {
    Names names = y.names;
    Shape sizes = y.shape;
    const auto is_in = [](const Names& list, const std::string& name) {
      return std::find(list.begin(), list.end(), name) != list.end();
    };
    for (const auto& operand : x)
      for (std::size_t i = 0; i < operand.names.size(); ++i)
        if (!is_in(names, operand.names[i]) && !is_in(from, operand.names[i])) {
          names.push_back(operand.names[i]);
          sizes.push_back(operand.shape[i]);
        }
    Shape in = strides_along(x[0], names);
    const Shape weights = strides_along(x[1], names), out = strides_along(y, names), along = strides_along(x[0], from);
    const auto at = [&](const std::string& name) {
      return static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    };
    for (const auto& name : to) in[at(name)] = 0;
    std::fill(y.data.begin(), y.data.end(), 0.0);
    for_each_index(sizes, [&](const Shape& index) {
      std::size_t element = offset(in, index);
      for (std::size_t i = 0; i < from.size(); ++i) {
        const Window& w = windows[windows.size() == 1 ? 0 : i];
        const auto size = x[0].shape[static_cast<std::size_t>(std::find(x[0].names.begin(), x[0].names.end(), from[i]) -
                                                              x[0].names.begin())];
        const std::int64_t position = index[at(to[i])] * w.stride + index[at(window[i])] * w.dilation - w.before;
        if (position < 0 || position >= size) return;
        element += static_cast<std::size_t>(position * along[i]);
      }
      y.data[offset(out, index)] += x[0].data[element] * x[1].data[offset(weights, index)];
    });
  };
}

/// The names of a spec without axes: "L D".
Names names_in(const std::string& text) {
  Names names;
  for (const Dim& dim : parse_tensor(text).spec.dims) names.emplace_back(dim.name);
  return names;
}

#define CONV(dtype, lhs, rhs, out, from, window, to, ...)                           \
  make_case<Tensor<dtype, lhs>, Tensor<dtype, rhs>>(                                \
      "conv " #dtype " " lhs ", " rhs " -> " out ", " from ", " window " -> " to,   \
      [](const auto& x, const auto& w) {                                            \
        return conv_unreduced<lhs ", " rhs " -> " out, from ", " window " -> " to>( \
            x, w, std::initializer_list<Window>{__VA_ARGS__});                      \
      },                                                                            \
      convolved(names_in(from), names_in(window), names_in(to), std::initializer_list<Window>{__VA_ARGS__}))

/// The cases by oneDNN, which takes those of images where it can, and by products of windows.
void check_both_ways(const std::vector<Case>& cases) {
  for (const bool by_onednn : {true, false}) {
    const Temporarily wanted(tuning.image_conv, std::optional(by_onednn));
    check_cases(cases);
  }
}

constexpr Window plain, causal{.before = 3}, centered{.before = 2, .after = 2}, by_two{.stride = 2};

TEST_CASE("conv_unreduced along one length", "[ops]") {
  check_both_ways({
      // depthwise: the result keeps the channels of both
      CONV(f32, "C/d L", "C/d K", "C/d L", "L", "K", "L", causal),
      CONV(f32, "C/d L H/t", "K H/t", "C/d L H/t", "L", "K", "L", causal),
      // channels summed, sharded or not; new channels sharded
      CONV(f32, "C/d D H", "two H more", "C/d K more", "D", "two", "K", plain),
      CONV(f32, "C/d D H/t", "two H/t more", "C/d K more +t", "D", "two", "K", plain),
      CONV(f32, "D H", "K H C/t", "two C/t", "D", "K", "two", plain),
      CONV(f64, "L two C/d", "H/t D two", "C/d H/t L", "L", "D", "L", centered),
      // groups; weights of each row; a pending sum; a length alone
      CONV(f32, "L H/t two", "H/t K two more", "L H/t more", "L", "K", "L", causal),
      CONV(f32, "C/d L H", "C/d K H", "C/d L", "L", "K", "L", causal),
      CONV(f32, "H D +t", "two H", "K H +t", "D", "two", "K", plain),
      CONV(f32, "D H", "two H more +d", "K more +d", "D", "two", "K", plain),
      CONV(f64, "D", "more", "two", "D", "more", "two", by_two),
      // strides, and zeros on one or both sides
      CONV(f32, "C/d D H", "two H more", "C/d K more", "D", "two", "K", {.stride = 2, .before = 3}),
      CONV(f32, "C/d D H/t", "more H/t", "C/d two H/t", "D", "more", "two", {.stride = 4, .after = 1}),
      CONV(f32, "K C/t", "two C/t", "D C/t", "K", "two", "D", {.before = 1, .after = 1}),
      // elements of a window with gaps between them
      CONV(f32, "C/d L", "C/d two", "C/d L", "L", "two", "L", {.before = 3, .dilation = 3}),
      CONV(f32, "C/d D H/t", "K H/t more", "C/d two more +t", "D", "K", "two",
           {.stride = 2, .before = 3, .after = 2, .dilation = 2}),
      // windows of which some see zeros only
      CONV(f32, "C/d D H", "two H more", "C/d N more", "D", "two", "N", {.before = 12, .after = 11}),
      CONV(f32, "two C", "more C", "D C", "two", "more", "D", {.before = 3, .after = 1}),
  });
}

TEST_CASE("conv_unreduced along two lengths", "[ops]") {
  check_both_ways({
      CONV(f32, "C/d L D", "K more H", "C/d L two H", "L D", "K more", "L two", causal, by_two),
      CONV(f32, "D H/t L", "H/t K more", "L two +t", "L D", "K more", "L two", causal, by_two),
      // an image, with weights in another order
      CONV(f32, "L D C/t", "H C/t two K", "more D H +t", "L D", "two K", "more D", {.stride = 3}, causal),
      CONV(f64, "L K C/t", "D two C/t", "L K C/t", "L K", "D two", "L K", centered, {.before = 1}),
  });
}

/// The elements under each window, as further dims.
Reference taken(const Names& from, const Names& window, const Names& to, const std::vector<Window>& windows) {
  return [=](const std::vector<Global>& x, Global& y) {
    Shape in = strides_along(x[0], y.names);
    const Shape along = strides_along(x[0], from), out = strides_along(y, y.names);
    const auto at = [](const Names& names, const std::string& name) {
      return static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    };
    for (const auto& name : to) in[at(y.names, name)] = 0;
    for_each_index(y.shape, [&](const Shape& index) {
      std::size_t element = offset(in, index);
      bool inside = true;
      for (std::size_t i = 0; i < from.size(); ++i) {
        const Window& w = windows[windows.size() == 1 ? 0 : i];
        const std::int64_t position =
            index[at(y.names, to[i])] * w.stride + index[at(y.names, window[i])] * w.dilation - w.before;
        inside = inside && position >= 0 && position < x[0].shape[at(x[0].names, from[i])];
        element += inside ? static_cast<std::size_t>(position * along[i]) : 0;
      }
      y.data[offset(out, index)] = inside ? x[0].data[element] : 0;
    });
  };
}

#define WINDOWS(dtype, spec, from, window, to, ...)                                                       \
  make_case<Tensor<dtype, spec>>(                                                                         \
      "windows " #dtype " " spec ", " from ", " window " -> " to,                                         \
      [](const auto& x) {                                                                                 \
        Sizes sizes;                                                                                      \
        for (const auto& name : names_in(window)) sizes.push_back({name, size_of_dim(name).size});        \
        return windows<from ", " window " -> " to>(x, sizes, std::initializer_list<Window>{__VA_ARGS__}); \
      },                                                                                                  \
      taken(names_in(from), names_in(window), names_in(to), std::initializer_list<Window>{__VA_ARGS__}))

TEST_CASE("windows along lengths", "[ops]") {
  check_cases({
      WINDOWS(f32, "C/d D H/t", "D", "two", "K", plain),
      WINDOWS(f32, "C/d L", "L", "K", "L", causal),
      WINDOWS(f64, "D C/t", "D", "two", "K", {.stride = 2, .before = 3}),
      WINDOWS(f32, "H D +t", "D", "two", "K", {.before = 1, .after = 1, .dilation = 3}),
      WINDOWS(bf16, "D C/t", "D", "more", "two", by_two),
      WINDOWS(i32, "D C/d", "D", "more", "two", by_two),
      WINDOWS(f32, "L C/d D", "L D", "K more", "L two", causal, by_two),
  });
}

TEST_CASE("windows and a reduction are a pooling", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    const std::vector<f32> numbers{3, 1, 4, 1, 5};
    const auto x = from_memory<f32, "L C">(mesh, {{"L", 5}, {"C", 1}}, std::span(numbers), nullptr);
    const auto most = [](const Tensor<f32, "L C">& in) {
      const auto seen = windows<"L, K -> N">(in, {{"K", 3}}, {.stride = 2});
      return to_partial<" -> +d +t">(sum<"N C -> ">(max<"N K C -> N C">(seen) * 10.0));
    };
    const auto [y, g] = value_and_grad(mesh, most, x);
    CHECK(item(all_reduce<"+d +t -> ">(y)) == 90);  // of 3 1 4 and 4 1 5
    CHECK(std::vector<f32>(g.span().begin(), g.span().end()) == std::vector<f32>{0, 0, 10, 0, 10});
    const auto twice = [](const Tensor<f32, "L C">& in) {
      return to_partial<" -> +d +t">(sum<"N K C -> ">(windows<"L, K -> N">(in, {{"K", 3}}, {.stride = 2})));
    };
    const auto counts = value_and_grad(mesh, twice, x).second;
    CHECK(std::vector<f32>(counts.span().begin(), counts.span().end()) == std::vector<f32>{1, 1, 2, 1, 1});
  });
}

TEST_CASE("conv_unreduced of bf16 rounds its sums once", "[ops]") {
  std::vector<Case> cases{
      CONV(bf16, "C/t L", "C/t K", "C/t L", "L", "K", "L", causal),
      CONV(bf16, "H L", "D K", "H L", "H L", "D K", "H L", centered, {.before = 1, .after = 2}),
  };
  check_cases(cases, {"d=1,t=1"});
  // Elsewhere each device rounds its summand of what is partial.
  for (Case& c : cases) c.options.tolerance = 0.03;
  check_cases(cases);
}

struct Operands {
  Tensor<f32, "B H W C"> x;
  Tensor<f32, "P Q C F"> w;
};
Operands gradients(const Mesh<"d t">& mesh, const Operands& at, Window window) {
  const auto f = [&](const Operands& of) {
    const auto y = conv_unreduced<"B H W C, P Q C F -> B Y X F", "H W, P Q -> Y X">(of.x, of.w, window);
    return to_partial<" -> +d +t">(sum(y * y));
  };
  const auto grads = value_and_grad(mesh, f, at).second;
  return {all_reduce<"B H W C">(grads.get<&Operands::x>()), all_reduce<"P Q C F">(grads.get<&Operands::w>())};
}
Operands random_operands(const Mesh<"d t">& mesh, const Sizes& sizes) {
  return {random_normal<f32, "B H W C">(mesh, sizes, {0, 1}), random_normal<f32, "P Q C F">(mesh, sizes, {0, 2})};
}

TEST_CASE("conv_unreduced takes a large batch in pieces", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    // The elements under all windows are 34 MB, or 9 MB with a stride of 2.
    const Operands all =
        random_operands(mesh, {{"B", 40}, {"H", 32}, {"W", 32}, {"C", 16}, {"P", 4}, {"Q", 4}, {"F", 3}});
    for (const Window& window : {plain, by_two}) {
      const auto got = gradients(mesh, all, window);
      Tensor<f32, "P Q C F"> sum = zeros_like(all.w);
      for (std::int64_t image = 0; image < 40; ++image) {
        const auto of_image = [&](const auto& x) { return rename<"N -> B">(narrow<"B -> N">(x, image, 1)); };
        const auto expected = gradients(mesh, {of_image(all.x), all.w}, window);
        CHECK(global_norm(mesh, of_image(got.x) - expected.x) < 1e-5 * global_norm(mesh, expected.x));
        sum = sum + expected.w;
      }
      CHECK(global_norm(mesh, got.w - sum) < 1e-5 * global_norm(mesh, sum));
    }
    if (!mesh.device()->exec().on_device()) CHECK(peak(mesh.device(), [&] { gradients(mesh, all, plain); }) < 20 << 20);
  });
}

TEST_CASE("oneDNN takes conv_unreduced where it is faster, with the same bits on any number of threads", "[ops]") {
#if defined(SHARDLIB_WITH_DNNL) && defined(__x86_64__)
  using kernels::ConvPass;
  const Exec exec;
  const auto takes = [&](ConvPass pass, std::int64_t images, std::int64_t length, std::int64_t channels,
                         std::int64_t window, std::optional<bool> wanted = {}) {
    const auto along = [&](std::int64_t distance) {
      return kernels::ImageLength{length, window, length, 1, 1, window / 2, distance};
    };
    const std::int64_t pixel = channels * channels;
    const kernels::ImageConv conv{images, channels, channels, channels, 1, 2, {along(window * pixel), along(pixel)}};
    return kernels::has_image_conv(exec, pass, conv, wanted);
  };
  for (const ConvPass pass : {ConvPass::result, ConvPass::images, ConvPass::weights}) {
    CHECK(takes(pass, 4, 56, 64, 3));
    CHECK_FALSE(takes(pass, 4, 56, 64, 3, false));
    CHECK(takes(pass, 4, 56, 64, 1));
    CHECK_FALSE(takes(pass, 64, 7, 512, 3));  // many channels
    CHECK_FALSE(takes(pass, 4, 7, 128, 3));   // few windows
    CHECK_FALSE(takes(pass, 1, 56, 64, 3));   // one image
    CHECK(takes(pass, 1, 56, 64, 3, true));
  }
#endif
  if (under_mpi() || device_kind() != DeviceKind::cpu) return;
  const auto bits_of = [](int threads, std::optional<bool> by_onednn) {
    const Temporarily wanted(tuning.image_conv, by_onednn);
    std::vector<f32> all;
    on_mesh("d=1,t=1",
            [&](const Mesh<"d t">& mesh) {
              const Operands operands =
                  random_operands(mesh, {{"B", 8}, {"H", 16}, {"W", 16}, {"C", 3}, {"P", 3}, {"Q", 3}, {"F", 5}});
              const Operands found = gradients(mesh, operands, {.before = 1, .after = 1});
              all.assign(found.x.span().begin(), found.x.span().end());
              all.insert(all.end(), found.w.span().begin(), found.w.span().end());
            },
            {.threads = threads});
    return all;
  };
  const std::vector<f32> one = bits_of(1, {}), expected = bits_of(1, false);
  CHECK(bits_of(3, {}) == one);
  for (std::size_t i = 0; i < one.size(); ++i) REQUIRE(one[i] == Approx(expected[i]).margin(1e-3));
#if defined(SHARDLIB_WITH_DNNL) && defined(__x86_64__)
  CHECK(one != expected);  // other kernels round differently
#endif
}

TEST_CASE("a dry run takes the memory of conv_unreduced by oneDNN", "[ops]") {
  const Temporarily wanted(tuning.image_conv, std::optional(true));
  const auto peak_on = [](const Mesh<"d t">& mesh) {
    const Operands operands =
        random_operands(mesh, {{"B", 8}, {"H", 20}, {"W", 16}, {"C", 3}, {"P", 3}, {"Q", 3}, {"F", 40}});
    return peak(mesh.device(), [&] { gradients(mesh, operands, {.stride = 2}); });
  };
  const auto dry = DevicePtr::make(parse_mesh("d=1,t=1"), 0, std::make_shared<DryWorld>(Peers::threads), 1, tuning);
  const std::size_t planned = peak_on(Mesh<"d t">(dry));
  on_mesh("d=1,t=1", [&](const Mesh<"d t">& mesh) { CHECK(peak_on(mesh) == planned); }, {.threads = 1});
}

TEST_CASE("a gradient of conv_unreduced takes no memory for what windows skip", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    const Operands patches =
        random_operands(mesh, {{"B", 2}, {"H", 64}, {"W", 64}, {"C", 3}, {"P", 16}, {"Q", 16}, {"F", 64}});
    CHECK(peak(mesh.device(), [&] { gradients(mesh, patches, {.stride = 16}); }) < 4 << 20);
  });
}

TEST_CASE("conv_unreduced takes a padded window", "[ops]") {
  const Padding padding;
  const Window all{.before = size_of_dim("H").size - 1};
  check_cases_as_sized({make_case<Tensor<f32, "two L C/t">, Tensor<f32, "H C/t">>(
                           "conv of a padded window",
                           [all](const auto& x, const auto& w) {
                             return conv_unreduced<"two L C/t, H C/t -> two L C/t", "L, H -> L">(x, w, all);
                           },
                           convolved({"L"}, {"H"}, {"L"}, {all}))},
                       op_meshes());
}

TEST_CASE("conv_unreduced says which sizes do not fit", "[ops]") {
  on_mesh("d=1,t=1", [](const Mesh<"d t">& mesh) {
    const auto x = ones<f32, "L C">(mesh, {{"L", 6}, {"C", 2}});
    const auto w = ones<f32, "K C">(mesh, {{"K", 4}, {"C", 2}}), wide = ones<f32, "K C">(mesh, {{"K", 8}, {"C", 2}});
    REQUIRE_THROWS_WITH(
        (conv_unreduced<"L C, K C -> L C", "L, K -> L">(x, w)),
        Catch::Contains("windows have 3 positions along `L`, which has size 6; give the length of the "
                        "result a name of its own, or 3 zeros, as in {.before = 3} (causal) or {.before = 1, "
                        ".after = 2} (centered)"));
    REQUIRE_THROWS_WITH((conv_unreduced<"L C, K C -> N C", "L, K -> N">(x, wide, {.after = 1})),
                        Catch::Contains("a window of 8 elements, `K`, has no place along `L` of size 6 with 1 zeros"));
    REQUIRE_THROWS_WITH((conv_unreduced<"L C, K C -> N C", "L, K -> N">(x, w, {.stride = 0})),
                        Catch::Contains("windows move by 0, with 0 zeros before and 0 after; give a stride of 1"));
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    REQUIRE_THROWS_WITH((conv_unreduced<"L C, K C -> N C", "L, K -> N">(x, w, {.before = most, .after = most})),
                        Catch::Contains("along `L` of size 6 there would be 9223372036854775807 zeros before and "));
    REQUIRE_THROWS_WITH((conv_unreduced<"L C, K C -> N C", "L, K -> N">(x, w, {{.stride = 1}, {.stride = 2}})),
                        Catch::Contains("2 windows are given for 1 lengths; give one for all, or one for each"));
    REQUIRE_THROWS_WITH((conv_unreduced<"L C, K C -> N C", "L, K -> N">(x, w, {.dilation = 0})),
                        Catch::Contains("along `L` the elements of a window are 0 apart; give a dilation of 1"));
    REQUIRE_THROWS_WITH((conv_unreduced<"L C, K C -> N C", "L, K -> N">(x, w, {.dilation = 2})),
                        Catch::Contains("a window of 4 elements, `K`, which are 2 apart, has no place along `L` of "
                                        "size 6 with 0 zeros"));
    REQUIRE_THROWS_WITH(
        (conv_unreduced<"L C, K C -> L C", "L, K -> L">(x, w, {.after = 4, .dilation = 3})),
        Catch::Contains("windows have 1 positions along `L`, which has size 6; give the length of the "
                        "result a name of its own, or 9 zeros, as in {.before = 9} (causal) or {.before = 4, "
                        ".after = 5} (centered)"));
    REQUIRE_THROWS_WITH((windows<"L, K -> N">(x, {})),
                        Catch::Contains("the size of dim `K` is not known: give it, as in {{\"K\", 8}}"));
    REQUIRE_THROWS_WITH((windows<"L, K -> N">(x, {{"K", 7}})),
                        Catch::Contains("a window of 7 elements, `K`, has no place along `L` of size 6 with 0 zeros"));
    const auto small = ones<f32, "K C">(mesh, {{"K", 4}, {"C", 3}});
    REQUIRE_THROWS_WITH((conv_unreduced<"L C, K C -> N C", "L, K -> N">(x, small)),
                        Catch::Contains("dim `C` is 3, but 2 in another operand"));
    REQUIRE((conv_unreduced<"L C, K C -> N C", "L, K -> N">(x, w, {.stride = 2}).size("N")) == 2);
  });
}

}  // namespace
