// Convolutions where oneDNN takes none and where it takes those that are faster: milliseconds of CPU time on one
// thread, medians of calls in turn. Prints the table of history.md.
//   convolutions --rounds 5     fewer calls
#include <fmt/format.h>

#include <shardlib/run/options.hpp>
#include <shardlib/shardlib.hpp>

#include <cstdint>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "times.hpp"

using namespace shardlib;

namespace {

using X = Tensor<f32, "B H W C">;
using W = Tensor<f32, "P Q C F">;
using Y = Tensor<f32, "B Y X F">;
constexpr OpSpec lengths = "H W, P Q -> Y X";

struct Row {
  std::int64_t batch, length, channels, filters, window, stride;
};

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// The three passes of a row on one device.
std::vector<std::function<void()>> passes(const Tuning& tuning, const Row& row) {
  const Mesh<"d"> mesh(DevicePtr::make(std::vector<AxisSize>{{"d", 1}}, 0, nullptr, 1, tuning));
  const std::int64_t n = row.length, zeros = row.stride == row.window ? 0 : (row.window - 1) / 2;
  const Window window{.stride = row.stride, .before = zeros, .after = zeros};
  const auto x = random_normal<f32, X::spec>(mesh, {{"B", row.batch}, {"H", n}, {"W", n}, {"C", row.channels}}, {0, 1});
  const auto w = random_normal<f32, W::spec>(
      mesh, {{"P", row.window}, {"Q", row.window}, {"C", row.channels}, {"F", row.filters}}, {0, 2});
  const auto forward = [=] { return conv_unreduced<"B H W C, P Q C F -> B Y X F", lengths>(x, w, window); };
  const Y y = forward();
  static constexpr OpParts parts = parse_op(lengths);
  const auto loops = detail::window_sizes(detail::OpInfo{"conv_unreduced", Y::spec, {}}, parts, detail::parsed<Y::spec>,
                                          x.value(), w.value(), {}, {window})
                         .loops;
  return {[=] { forward(); }, [=] { detail::ConvOperandVjp<lengths, X>{loops}(y, w, x.value()->global); },
          [=] { detail::ConvWeightsVjp<lengths, W>{loops}(y, x, w.value()->global); }};
}

void print_row(const Row& row, std::int64_t rounds) {
  const auto with = passes({}, row), without = passes({.image_conv = false}, row);
  std::string text = fmt::format("| {0}x{0}{1}, {2} to {3} of {4}, B = {5} |", row.window,
                                 row.stride == 1 ? "" : fmt::format(", stride {}", row.stride), row.channels,
                                 row.filters, row.length, row.batch);
  for (std::size_t i = 0; i < with.size(); ++i) {
    const auto times = interleaved(static_cast<int>(rounds), {without[i], with[i]}, cpu_seconds);
    text += fmt::format(" {:.1f} .. {:.1f} |", 1e3 * times[0].median, 1e3 * times[1].median);
  }
  fmt::print("{}\n", text);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    std::int64_t rounds = 15;
    run::Options options("convolutions", "Times convolutions with and without those of oneDNN, on one thread.");
    options.add("--rounds", rounds, "calls of each", run::size());
    if (!options.parse(argc, argv)) return 0;
    fmt::print(
        "| windows, channels and length | forward | gradient of the operand | gradient of the weights |\n"
        "|---|---|---|---|\n");
    for (const Row& row : {Row{4, 224, 3, 768, 16, 16}, Row{4, 56, 64, 64, 3, 1}, Row{4, 14, 256, 256, 3, 1},
                           Row{4, 56, 128, 128, 3, 2}, Row{4, 7, 512, 512, 3, 1}, Row{4, 56, 256, 64, 1, 1},
                           Row{4, 56, 64, 256, 1, 1}, Row{4, 224, 3, 64, 7, 2}, Row{32, 32, 16, 16, 3, 1}})
      print_row(row, rounds);
    return 0;
  });
}
