// fmt formatters for specs, meshes and tensors. visualize_sharding shows which device holds which shard.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/kernels/layout.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/types/leaves.hpp"

namespace shardlib {

namespace detail {

/// This device's elements, without padding.
template <dtype D, Spec S>
std::vector<D> true_values(const Tensor<D, S>& x) {
  const Shape shape = true_shape(*x.value());
  std::vector<D> values(static_cast<std::size_t>(product(shape)));
  kernels::copy_strided(x.device()->host_exec(), sizeof(D), view(shape), x.span().data(),
                        kernels::row_major(view(x.value()->local)), values.data(), kernels::row_major(view(shape)));
  return values;
}

}  // namespace detail

/// Describes a tensor in one line: "f32[B/d=8 L=16 +t] on device 3 (d=1,t=1) of mesh d=4,t=2: shard 2x16, min -1.2,
/// max 3.4, mean 0.1". A padded dim is "V/t=50257 (padded to 50304)". The shape of the shard includes the padding;
/// min, max and mean do not. `describe(x)`
template <dtype D, Spec S>
std::string describe(const Tensor<D, S>& x) {
  const TensorSpec& spec = detail::parsed<S>;
  const bool empty = detail::UntypedAccess::value(x) == nullptr;
  std::string text = fmt::format("{}[", name(dtype_v<D>));
  for (int i = 0; i < spec.rank(); ++i) {
    if (i > 0) text += ' ';
    text += to_string(spec.dims[i]).view();
    if (!empty && !spec.dims[i].is_integer()) text += "=" + detail::to_string(x.value()->global[i]);
  }
  for (auto axis : spec.partial) text += fmt::format("{}+{}", text.back() == '[' ? "" : " ", axis);
  text += ']';
  if (empty) return text + " (empty)";
  text += fmt::format(" on {}: shard {}", x.device()->describe(),
                      spec.rank() == 0 ? std::string("of one") : fmt::format("{}", fmt::join(x.local_shape(), "x")));
  const auto values = detail::true_values(x);
  if (values.empty()) return text + ", empty";
  double low = std::numeric_limits<double>::infinity(), high = -low, sum = 0;
  std::size_t bad = 0;
  for (const D& v : values) {
    const auto number = static_cast<double>(static_cast<detail::scalar_of<D>>(v));
    if (!std::isfinite(number)) {
      ++bad;
      continue;
    }
    low = std::min(low, number);
    high = std::max(high, number);
    sum += number;
  }
  if (values.size() > bad)
    text +=
        fmt::format(", min {:.4g}, max {:.4g}, mean {:.4g}", low, high, sum / static_cast<double>(values.size() - bad));
  if (bad > 0) text += fmt::format(", {} not finite", bad);
  return text;
}

namespace detail {

/// The devices that hold each shard along the dims, in row-major order of the shards.
inline std::vector<std::string> holders(const Device& device, const TensorSpec& spec,
                                        const std::vector<std::int64_t>& parts) {
  std::int64_t cells = 1;
  for (auto n : parts) cells *= n;
  std::vector<std::string> labels(static_cast<std::size_t>(cells));
  for (int index = 0; index < device.size(); ++index) {
    Device other(device.axes(), index);
    for (const Dim& dim : spec.dims)
      for (const auto axis : dim.axes)
        if (device.size(axis) == 1) other.know_absent(axis);  // if the mesh has it, its index is 0 as well
    std::int64_t cell = 0;
    for (int i = 0; i < spec.rank(); ++i)
      cell = cell * parts[static_cast<std::size_t>(i)] + shard_index(other, spec.dims[i].axes);
    auto& label = labels[static_cast<std::size_t>(cell)];
    // A + joins summands, a comma joins replicas.
    if (!label.empty()) label += spec.partial.empty() ? "," : "+";
    label += std::to_string(index);
  }
  return labels;
}

}  // namespace detail

/// Draws, as text, which device holds which shard. Rows and columns are the shards of the last two sharded dims;
/// further sharded dims give several pictures. "0,4" are replicas, "0+4" hold summands. `visualize_sharding(x)`
template <dtype D, Spec S>
std::string visualize_sharding(const Tensor<D, S>& x) {
  const TensorSpec& spec = detail::parsed<S>;
  const Device& device = *x.device();
  std::vector<std::int64_t> parts;
  for (const Dim& dim : spec.dims) parts.push_back(detail::shard_count(device, dim.axes));
  const auto labels = detail::holders(device, spec, parts);
  const std::size_t rank = parts.size();
  const std::int64_t columns = rank > 0 ? parts[rank - 1] : 1;
  const std::int64_t rows = rank > 1 ? parts[rank - 2] : 1;
  std::size_t width = 3;
  for (const auto& label : labels) width = std::max(width, label.size() + 2);

  const auto rule = [&](const char* left, const char* middle, const char* right) {
    std::string line = left;
    for (std::int64_t c = 0; c < columns; ++c) {
      for (std::size_t i = 0; i < width; ++i) line += "─";
      line += c + 1 < columns ? middle : right;
    }
    return line + "\n";
  };
  std::string text = fmt::format("{}[{}] on mesh {}", name(dtype_v<D>), std::string_view(S), to_string(device.axes()));
  for (int i = 0; i < spec.rank(); ++i)
    if (const DimSize size = x.value()->global[i]; size.is_padded())
      text += fmt::format(", {}={}", spec.dims[i].name, detail::to_string(size));
  text += "\n";
  const auto pictures = static_cast<std::int64_t>(labels.size()) / (rows * columns);
  for (std::int64_t p = 0; p < pictures; ++p) {
    if (pictures > 1) {
      std::string where;
      std::int64_t rest = p;
      for (std::size_t i = rank - 2; i-- > 0; rest /= parts[i])
        where = fmt::format("{} shard {}{}{}", spec.dims[static_cast<int>(i)].name, rest % parts[i],
                            where.empty() ? "" : ", ", where);
      text += where + ":\n";
    }
    text += rule("┌", "┬", "┐");
    for (std::int64_t r = 0; r < rows; ++r) {
      text += "│";
      for (std::int64_t c = 0; c < columns; ++c)
        text += fmt::format("{:^{}}│", labels[static_cast<std::size_t>((p * rows + r) * columns + c)], width);
      text += "\n" + (r + 1 < rows ? rule("├", "┼", "┤") : rule("└", "┴", "┘"));
    }
  }
  return text;
}

}  // namespace shardlib

template <>
struct fmt::formatter<shardlib::Spec> : fmt::formatter<std::string_view> {
  auto format(const shardlib::Spec& spec, fmt::format_context& context) const {
    return fmt::formatter<std::string_view>::format(std::string_view(spec), context);
  }
};
template <>
struct fmt::formatter<shardlib::TensorSpec> : fmt::formatter<std::string_view> {
  auto format(const shardlib::TensorSpec& spec, fmt::format_context& context) const {
    return fmt::formatter<std::string_view>::format(shardlib::to_string(spec).view(), context);
  }
};
template <shardlib::Spec A>
struct fmt::formatter<shardlib::Mesh<A>> : fmt::formatter<std::string_view> {
  auto format(const shardlib::Mesh<A>& mesh, fmt::format_context& context) const {
    return fmt::formatter<std::string_view>::format(shardlib::to_string(mesh.device()->axes()), context);
  }
};
template <shardlib::dtype D, shardlib::Spec S>
struct fmt::formatter<shardlib::Tensor<D, S>> : fmt::formatter<std::string_view> {
  // Not constexpr: the compiler shows its name for `{:.3f}`.
  static void a_tensor_is_printed_as_a_text_so_write_item_of_a_scalar_for_its_number() {
    throw fmt::format_error("a tensor is printed as a text; write item(x) for the number of a scalar");
  }
  template <class Context>
  constexpr auto parse(Context& context) {
    char type = 's';  // the last character of a format; others may be what fills the width
    for (auto at = context.begin(); at != context.end() && *at != '}'; ++at) type = *at;
    if (type == 'f' || type == 'g' || type == 'e' || type == 'd')
      a_tensor_is_printed_as_a_text_so_write_item_of_a_scalar_for_its_number();
    return fmt::formatter<std::string_view>::parse(context);
  }
  auto format(const shardlib::Tensor<D, S>& x, fmt::format_context& context) const {
    return fmt::formatter<std::string_view>::format(shardlib::describe(x), context);
  }
};
