// What the tests of the ops compare with: whole arrays in f64 over named dims, their placement on a mesh and back, and
// the checks that hold for every op (value, each cotangent, adjoint law).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/autodiff/backward.hpp"
#include "support.hpp"

namespace shardlib::test {

using Names = std::vector<std::string>;
using Shape = std::vector<std::int64_t>;

/// A whole array, row-major, without padding; `padded` are the sizes that tensors of it have with their padding (none:
/// the same).
struct Global {
  Names names;
  Shape shape;
  std::vector<double> data;
  Shape padded{};
};

/// The sum in the order that the communicators promise: sum(lo, hi) = sum(lo, mid) + sum(mid, hi), in f32.
inline float tree_sum(const std::vector<float>& v) {
  if (v.size() == 1) return v[0];
  std::size_t mid = 1;
  while (mid * 2 < v.size()) mid *= 2;
  const auto at = v.begin() + static_cast<std::ptrdiff_t>(mid);
  return tree_sum({v.begin(), at}) + tree_sum({at, v.end()});
}

inline std::size_t count_of(const Shape& shape) {
  std::size_t n = 1;
  for (const auto size : shape) n *= static_cast<std::size_t>(size);
  return n;
}

/// Calls f for every index below the shape.
template <class F>
void for_each_index(const Shape& shape, const F& f) {
  if (count_of(shape) == 0) return;
  Shape index(shape.size(), 0);
  for (;;) {
    f(index);
    std::size_t i = shape.size();
    while (i > 0 && ++index[i - 1] == shape[i - 1]) index[--i] = 0;
    if (i == 0) return;
  }
}

/// x's stride along each of the names; 0 where it lacks one. Equal lists match by position (integer dims may repeat).
inline Shape strides_along(const Global& x, const Names& names) {
  Shape own(x.shape.size(), 1);
  for (std::size_t i = own.size(); i-- > 1;) own[i - 1] = own[i] * x.shape[i];
  if (x.names == names) return own;
  Shape strides;
  for (const auto& name : names) {
    const auto it = std::find(x.names.begin(), x.names.end(), name);
    strides.push_back(it == x.names.end() ? 0 : own[static_cast<std::size_t>(it - x.names.begin())]);
  }
  return strides;
}
inline std::size_t offset(const Shape& strides, const Shape& index) {
  std::int64_t at = 0;
  for (std::size_t i = 0; i < index.size(); ++i) at += strides[i] * index[i];
  return static_cast<std::size_t>(at);
}

/// The elements that both shapes have, in an array of the shape `to`; the others are 0.
inline std::vector<double> resized(const std::vector<double>& data, const Shape& from, const Shape& to) {
  const Names names(from.size());
  const Shape in = strides_along({names, from, {}}, names), out = strides_along({names, to, {}}, names);
  std::vector<double> result(count_of(to));
  Shape common = from;
  for (std::size_t i = 0; i < from.size(); ++i) common[i] = std::min(from[i], to[i]);
  for_each_index(common, [&](const Shape& index) { result[offset(out, index)] = data[offset(in, index)]; });
  return result;
}

// ---- reference ops -------------------------------------------------------------------------------------------------

/// What an op does to whole arrays. Where the sums behind its cotangents are plain as well, `pullback` takes them at
/// once; elsewhere they are differences, of which each costs the reference twice.
class Reference {
 public:
  /// Fills y, whose dims are set, from the operands.
  using Value = std::function<void(const std::vector<Global>& x, Global& y)>;
  /// Adds the cotangents of the operands of an op whose result has the cotangent ct to dx, arrays of zeros.
  using Pullback = std::function<void(const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx)>;

  template <class F, class = std::enable_if_t<std::is_invocable_v<const F&, const std::vector<Global>&, Global&>>>
  Reference(F value, Pullback pullback = {}) : value_(std::move(value)), pullback_(std::move(pullback)) {}

  void operator()(const std::vector<Global>& x, Global& y) const { value_(x, y); }
  [[nodiscard]] const Pullback& pullback() const { return pullback_; }

 private:
  Value value_;
  Pullback pullback_;
};

/// The same elements in the same order: what a collective does to the whole array.
inline Reference same() {
  return {[](const std::vector<Global>& x, Global& y) { y.data = x[0].data; },
          [](const std::vector<Global>&, const Global& ct, std::vector<Global>& dx) { dx[0].data = ct.data; }};
}

/// Calls f with the place of each product's factors in the operands, and of its sum in y.
template <class F>
void for_each_product(const std::vector<Global>& x, const Global& y, const F& f) {
  Names names = y.names;
  Shape sizes = y.shape;
  std::vector<Shape> strides;
  for (const auto& operand : x)
    for (std::size_t i = 0; i < operand.names.size(); ++i)
      if (std::find(names.begin(), names.end(), operand.names[i]) == names.end()) {
        names.push_back(operand.names[i]);
        sizes.push_back(operand.shape[i]);
      }
  for (const auto& operand : x) strides.push_back(strides_along(operand, names));
  const Shape to = strides_along(y, names);
  std::vector<std::size_t> from(x.size());
  for_each_index(sizes, [&](const Shape& index) {
    for (std::size_t k = 0; k < x.size(); ++k) from[k] = offset(strides[k], index);
    f(from, offset(to, index));
  });
}

/// Sums products over every index that the result lacks.
inline Reference products() {
  using Places = std::vector<std::size_t>;
  return {[](const std::vector<Global>& x, Global& y) {
            std::fill(y.data.begin(), y.data.end(), 0.0);
            for_each_product(x, y, [&](const Places& from, std::size_t to) {
              double product = 1;
              for (std::size_t k = 0; k < x.size(); ++k) product *= x[k].data[from[k]];
              y.data[to] += product;
            });
          },
          [](const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx) {
            for_each_product(x, ct, [&](const Places& from, std::size_t to) {
              for (std::size_t k = 0; k < x.size(); ++k) {
                double others = ct.data[to];
                for (std::size_t j = 0; j < x.size(); ++j)
                  if (j != k) others *= x[j].data[from[j]];
                dx[k].data[from[k]] += others;
              }
            });
          }};
}

/// f of the operands' elements, broadcast by name.
inline Reference elementwise(const std::function<double(const std::vector<double>&)>& f) {
  return [f](const std::vector<Global>& x, Global& y) {
    std::vector<Shape> strides;
    for (const auto& operand : x) strides.push_back(strides_along(operand, y.names));
    const Shape to = strides_along(y, y.names);
    std::vector<double> in(x.size());
    for_each_index(y.shape, [&](const Shape& index) {
      for (std::size_t k = 0; k < x.size(); ++k) in[k] = x[k].data[offset(strides[k], index)];
      y.data[offset(to, index)] = f(in);
    });
  };
}

/// The step of differences of f that a reference takes for each row: so small that elements keep their order, and a
/// power of two, with which those of a linear f are exact.
inline constexpr double row_step = 0x1p-13;

/// f of every row along a dim; the result's row has as many elements as f leaves.
inline Reference rows(const std::string& dim, const std::function<void(std::vector<double>&)>& f) {
  struct Places {
    std::size_t from, to;
    std::int64_t from_step, to_step;
  };
  const auto each_row = [dim](const Global& in, const Global& out, const auto& act) {
    const Shape from = strides_along(in, in.names), to = strides_along(out, in.names);
    const auto d = static_cast<std::size_t>(std::find(in.names.begin(), in.names.end(), dim) - in.names.begin());
    Shape heads = in.shape;
    heads[d] = 1;
    for_each_index(heads, [&](const Shape& head) {
      const Places at{offset(from, head), offset(to, head), from[d], to[d]};
      std::vector<double> row;
      for (std::int64_t i = 0; i < in.shape[d]; ++i)
        row.push_back(in.data[at.from + static_cast<std::size_t>(i * at.from_step)]);
      act(row, at);
    });
  };
  return {[=](const std::vector<Global>& x, Global& y) {
            each_row(x[0], y, [&](std::vector<double>& row, const Places& at) {
              f(row);
              for (std::size_t i = 0; i < row.size(); ++i)
                y.data[at.to + i * static_cast<std::size_t>(at.to_step)] = row[i];
            });
          },
          [=](const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx) {
            each_row(x[0], ct, [&](const std::vector<double>& row, const Places& at) {
              for (std::size_t i = 0; i < row.size(); ++i) {
                auto up = row, down = row;
                up[i] += row_step;
                down[i] -= row_step;
                f(up);
                f(down);
                double slope = 0;
                for (std::size_t j = 0; j < up.size(); ++j)
                  slope += ct.data[at.to + j * static_cast<std::size_t>(at.to_step)] * (up[j] - down[j]);
                dx[0].data[at.from + i * static_cast<std::size_t>(at.from_step)] = slope / (2 * row_step);
              }
            });
          }};
}
/// Rows for it: softmax, rms_norm, and layer_norm with an epsilon of 0.25.
inline void softmax_row(std::vector<double>& row) {
  double total = 0;
  for (double& v : row) total += v = std::exp(v);
  for (double& v : row) v /= total;
}
inline void rms_norm_row(std::vector<double>& row) {
  double squares = 0;
  for (const double v : row) squares += v * v;
  for (double& v : row) v /= std::sqrt(squares / static_cast<double>(row.size()) + 1e-6);
}
inline void layer_norm_row(std::vector<double>& row) {
  const auto n = static_cast<double>(row.size());
  const double mean = std::accumulate(row.begin(), row.end(), 0.0) / n;
  double squares = 0;
  for (double& v : row) squares += (v - mean) * (v - mean);
  for (double& v : row) v = (v - mean) / std::sqrt(squares / n + 0.25);
}

/// f of the elements of the one operand that one element of the result is made of.
inline Reference folded(const std::function<double(const std::vector<double>&)>& f) {
  struct Part {
    std::vector<double> elements;
    std::vector<std::size_t> at;
  };
  const auto parts_of = [](const Global& x, const Global& y) {
    const Shape from = strides_along(x, x.names), to = strides_along(y, x.names);
    std::vector<Part> parts(y.data.size());
    for_each_index(x.shape, [&](const Shape& i) {
      Part& part = parts[offset(to, i)];
      part.at.push_back(offset(from, i));
      part.elements.push_back(x.data[part.at.back()]);
    });
    return parts;
  };
  return {[=](const std::vector<Global>& x, Global& y) {
            const auto parts = parts_of(x[0], y);
            for (std::size_t i = 0; i < parts.size(); ++i) y.data[i] = f(parts[i].elements);
          },
          [=](const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx) {
            auto parts = parts_of(x[0], ct);
            for (std::size_t i = 0; i < parts.size(); ++i)
              for (std::size_t k = 0; k < parts[i].at.size(); ++k) {
                double& element = parts[i].elements[k];
                const double value = element;
                element = value + row_step;
                const double up = f(parts[i].elements);
                element = value - row_step;
                dx[0].data[parts[i].at[k]] = ct.data[i] * (up - f(parts[i].elements)) / (2 * row_step);
                element = value;
              }
          }};
}

/// Calls f(offset in y, offset in x) for the greatest element of x, or the least, behind each element of y, which has
/// some of x's dims. Of equal ones the first. Elements are compared as they were drawn, in sixteenths, so that
/// differences of a reference choose the same.
inline void first_extrema(const Global& x, const Names& y, bool least,
                          const std::function<void(std::size_t, std::size_t)>& f) {
  Global kept{y, {}, {}};
  for (const auto& name : y)
    kept.shape.push_back(
        x.shape[static_cast<std::size_t>(std::find(x.names.begin(), x.names.end(), name) - x.names.begin())]);
  const Shape from = strides_along(x, x.names), to = strides_along(kept, x.names);
  std::map<std::size_t, std::pair<double, std::size_t>> best;
  for_each_index(x.shape, [&](const Shape& i) {
    const std::size_t at = offset(from, i);
    const double element = (least ? -1 : 1) * std::round(16 * x.data[at]);
    const auto [it, first] = best.try_emplace(offset(to, i), element, at);
    if (!first && element > it->second.first) it->second = {element, at};
  });
  for (const auto& [out, element] : best) f(out, element.second);
}
/// The greatest of what is reduced, or the least.
inline Reference extrema(bool least) {
  return {[least](const std::vector<Global>& x, Global& y) {
            first_extrema(x[0], y.names, least,
                          [&](std::size_t to, std::size_t from) { y.data[to] = x[0].data[from]; });
          },
          [least](const std::vector<Global>& x, const Global& ct, std::vector<Global>& dx) {
            first_extrema(x[0], ct.names, least,
                          [&](std::size_t to, std::size_t from) { dx[0].data[from] += ct.data[to]; });
          }};
}

// ---- values --------------------------------------------------------------------------------------------------------

/// The values that elements are drawn from. All are exact in every dtype, and so are the sums and products that tests
/// take of them, so that linear ops can be compared exactly.
enum class Draw {
  odd,       ///< odd sixteenths in (-2, 2): never 0, and never equal to an even one
  even,      ///< even sixteenths in [-2, 2)
  positive,  ///< odd sixteenths in (0, 4)
  integers,  ///< -8 to 7
  naturals,  ///< 0 to 15
  truth,     ///< 0 and 1
  index      ///< 0 to 11
};

inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}
inline double draw(Draw kind, std::uint64_t seed, std::size_t i) {
  const auto h = mix(mix(seed) + i);
  const auto below = [h](std::uint64_t n) { return static_cast<double>(h % n); };
  switch (kind) {
    case Draw::odd:
      return (2 * below(32) - 31) / 16;
    case Draw::even:
      return (2 * below(32) - 32) / 16;
    case Draw::positive:
      return (2 * below(32) + 1) / 16;
    case Draw::integers:
      return below(16) - 8;
    case Draw::naturals:
      return below(16);
    case Draw::truth:
      return below(2);
    case Draw::index:
      break;
  }
  return below(10);
}

/// While one lives, the dims that tests shard have sizes that most meshes do not divide, and are padded.
class Padding {
 public:
  Padding() { on() = true; }
  Padding(const Padding&) = delete;
  Padding& operator=(const Padding&) = delete;
  ~Padding() { on() = false; }
  static bool& on() {
    static bool value = false;
    return value;
  }
};

/// The sizes behind the names: padded, each divides by the product of any axes that the tests put on it. E is never
/// padded.
inline DimSize size_of_dim(std::string_view name) {
  static const std::map<std::string, std::int64_t, std::less<>> sizes{
      {"A", 24}, {"B", 12}, {"C", 6},  {"D", 5},  {"E", 12}, {"H", 6},   {"K", 4},
      {"L", 6},  {"M", 12}, {"V", 12}, {"F", 24}, {"N", 27}, {"two", 2}, {"more", 2}};
  const std::int64_t size = sizes.find(name)->second;
  if (Padding::on() && size % 6 == 0 && name != "E") return {size / 6 * 5, size};
  return size;
}
inline NamedSize sized(std::string_view name) {
  const DimSize size = size_of_dim(name);
  return {std::string(name), size.size, size.padded};
}
inline Global shell(const TensorSpec& spec) {
  Global x;
  for (const Dim& dim : spec.dims) {
    const DimSize size = dim.is_integer() ? DimSize(dim.integer) : size_of_dim(dim.name);
    x.names.emplace_back(dim.name);
    x.shape.push_back(size.size);
    x.padded.push_back(size.padded);
  }
  x.data.resize(count_of(x.shape));
  return x;
}
inline Global random_global(const TensorSpec& spec, Draw kind, std::uint64_t seed) {
  Global x = shell(spec);
  for (std::size_t i = 0; i < x.data.size(); ++i) x.data[i] = draw(kind, seed, i);
  return x;
}

inline double load_element(DType dtype, const std::byte* data, std::size_t i) {
  return visit_dtype(dtype, [&](auto zero) {
    const auto* p = reinterpret_cast<const decltype(zero)*>(data) + i;
    if constexpr (std::is_same_v<decltype(zero), bf16>)
      return static_cast<double>(static_cast<float>(*p));
    else
      return static_cast<double>(*p);
  });
}
inline void store_element(DType dtype, std::byte* data, std::size_t i, double value) {
  visit_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    T& element = reinterpret_cast<T*>(data)[i];
    if constexpr (std::is_same_v<T, bf16>)
      element = bf16(static_cast<float>(value));
    else if constexpr (std::is_same_v<T, bool_>)
      element = value != 0;
    else
      element = static_cast<T>(value);
  });
}
/// The value in the dtype, rounded once.
inline double rounded(DType dtype, double value) {
  std::byte element[8];
  store_element(dtype, element, 0, value);
  return load_element(dtype, element, 0);
}

// ---- placement, written without the library's own ------------------------------------------------------------------

/// A device's coordinates, by axis.
using Coordinates = std::map<std::string, int, std::less<>>;
inline Coordinates coordinates_of(const std::vector<AxisSize>& mesh, int device) {
  Coordinates place;
  for (std::size_t i = mesh.size(); i-- > 0;) {
    place[mesh[i].name] = device % mesh[i].size;
    device /= mesh[i].size;
  }
  return place;
}
inline int size_of_axis(const std::vector<AxisSize>& mesh, std::string_view axis) {
  for (const auto& [name, size] : mesh)
    if (name == axis) return size;
  throw Failure("no axis " + std::string(axis));
}
/// Which of the shards or summands over the axes a device holds, and how many there are: the first axis is the major.
inline std::pair<std::int64_t, std::int64_t> part_of(const std::vector<AxisSize>& mesh, const Coordinates& place,
                                                     const Axes& axes) {
  std::int64_t at = 0, count = 1;
  for (const auto axis : axes) {
    at = at * size_of_axis(mesh, axis) + place.find(axis)->second;
    count *= size_of_axis(mesh, axis);
  }
  return {at, count};
}

/// The local shape of a device's shard and the offset of each of its elements in the whole array.
struct Shard {
  Shape shape;
  std::vector<std::size_t> offsets;
};
inline Shard shard_of(const std::vector<AxisSize>& mesh, const Coordinates& place, const TensorSpec& spec,
                      const Shape& shape) {
  Shard shard;
  Shape first;
  for (int i = 0; i < spec.rank(); ++i) {
    const auto [at, count] = part_of(mesh, place, spec.dims[i].axes);
    const std::int64_t extent = shape[static_cast<std::size_t>(i)] / count;
    shard.shape.push_back(extent);
    first.push_back(at * extent);
  }
  const Shape strides = strides_along({Names(shape.size()), shape, {}}, Names(shape.size()));
  const std::size_t start = offset(strides, first);
  for_each_index(shard.shape, [&](const Shape& index) { shard.offsets.push_back(start + offset(strides, index)); });
  return shard;
}

/// This device's part of x. Of a partial spec, summands that differ and make up x in sum. `spec` must outlive the
/// value.
inline detail::ValuePtr place(const DevicePtr& device, DType dtype, const TensorSpec& spec, const Global& x,
                              std::uint64_t seed = 0) {
  const Shape& padded = x.padded.empty() ? x.shape : x.padded;
  detail::GlobalSizes global;
  for (std::size_t i = 0; i < x.shape.size(); ++i) global.push_back({x.shape[i], padded[i]});
  const auto whole = resized(x.data, x.shape, padded);
  const auto counts = resized(std::vector<double>(x.data.size(), 1), x.shape, padded);
  auto value = detail::make_value({"test", {}, {}}, device, dtype, spec, global);
  const Buffer elements = device->host_pool()->allocate(value->bytes());
  const Coordinates here = coordinates_of(device->axes(), device->rank());
  const Shard shard = shard_of(device->axes(), here, spec, padded);
  expect(Shape(value->local.begin(), value->local.end()) == shard.shape, "local shape");
  const auto [mine, summands] = part_of(device->axes(), here, spec.partial);
  const Draw kind = is_floating(dtype) ? Draw::odd : Draw::integers;
  for (std::size_t i = 0; i < shard.offsets.size(); ++i) {
    const std::size_t at = shard.offsets[i];
    const auto summand = [&, seed = seed](std::int64_t s) {
      return draw(kind, seed + 1000 + static_cast<std::uint64_t>(s), at);
    };
    double element = whole[at];
    if (counts[at] == 0)
      element = 0;
    else if (mine > 0)
      element = summand(mine);
    else
      for (std::int64_t s = 1; s < summands; ++s) element -= summand(s);
    store_element(dtype, elements.data(), i, element);
  }
  value->storage->buffer = device->to_device(elements);
  return value;
}

/// Everybody's `mine`, in the order of the devices.
inline std::vector<std::byte> everybodys(Device& device, const void* mine, std::size_t bytes) {
  std::vector<std::string_view> axes;
  for (const auto& axis : device.axes()) axes.emplace_back(axis.name);
  std::vector<std::byte> send(bytes), all(bytes * static_cast<std::size_t>(device.size()));
  std::memcpy(send.data(), mine, bytes);
  device.group(axes).all_gather(Buffer(send.data(), bytes, nullptr), Buffer(all.data(), all.size(), nullptr)).wait();
  return all;
}

/// The whole array put together by the spec: shards side by side, summands added, replicas the same bits; the
/// padding, which must be zero, is cut off.
inline Global assemble(const detail::Value& value, const TensorSpec& spec) {
  const auto& mesh = value.device->axes();
  Global x;
  for (const Dim& dim : spec.dims) x.names.emplace_back(dim.name);
  x.shape.assign(value.global.padded.begin(), value.global.padded.end());
  x.data.resize(count_of(x.shape));
  expect(x.names.size() == x.shape.size(), "the value has another rank than its spec");
  const std::size_t element = size_of(value.dtype);
  expect(value.data().bytes() == value.bytes(), "the buffer's size");
  const auto all = everybodys(*value.device, value.on_host().data(), value.bytes());
  const auto summands = static_cast<std::size_t>(part_of(mesh, coordinates_of(mesh, 0), spec.partial).second);
  std::vector<const std::byte*> seen(summands * x.data.size(), nullptr);
  for (int r = 0; r < value.device->size(); ++r) {
    const Coordinates place = coordinates_of(mesh, r);
    const Shard shard = shard_of(mesh, place, spec, x.shape);
    expect(shard.shape == Shape(value.local.begin(), value.local.end()), "local shape of the result");
    const auto summand = static_cast<std::size_t>(part_of(mesh, place, spec.partial).first);
    const std::byte* data = all.data() + static_cast<std::size_t>(r) * value.bytes();
    for (std::size_t i = 0; i < shard.offsets.size(); ++i) {
      const auto*& first = seen[summand * x.data.size() + shard.offsets[i]];
      if (first == nullptr) {
        first = data + i * element;
        x.data[shard.offsets[i]] += load_element(value.dtype, data, i);
      } else {
        expect(std::memcmp(first, data + i * element, element) == 0, "replicas differ in their bits");
      }
    }
  }
  for (const auto* p : seen) expect(p != nullptr, "an element is on no device");
  x.padded = x.shape;
  x.shape.assign(value.global.logical.begin(), value.global.logical.end());
  const auto counts = resized(std::vector<double>(count_of(x.shape), 1), x.shape, x.padded);
  for (std::size_t i = 0; i < seen.size(); ++i)
    if (counts[i % counts.size()] == 0)
      expect(load_element(value.dtype, seen[i], 0) == 0,
             "the padding holds " + show(load_element(value.dtype, seen[i], 0)));
  x.data = resized(x.data, x.padded, x.shape);
  return x;
}

/// Equal after rounding to the dtype, or with a tolerance within that much of the largest element.
inline void expect_close(const Global& actual, const Global& expected, DType dtype, double tolerance,
                         const std::string& what) {
  expect(actual.shape == expected.shape, what + ": another shape");
  expect(actual.padded == (expected.padded.empty() ? expected.shape : expected.padded), what + ": padded differently");
  double scale = 1;
  for (const double v : expected.data) scale = std::max(scale, std::abs(v));
  for (std::size_t i = 0; i < expected.data.size(); ++i) {
    const double a = actual.data[i], e = expected.data[i];
    const bool ok = tolerance == 0 ? a == rounded(dtype, e) : std::abs(a - e) <= tolerance * scale;
    if (!ok) expect(false, what + ": element " + show(i) + " is " + show(a) + " instead of " + show(e));
  }
}

/// The greatest difference of two shards, as a part of the greatest element of the second, or of `least`.
template <class T>
double off(const T& found, const T& right, double least = 0) {
  using A = accumulator_t<typename T::value_type>;
  double scale = least, worst = 0;
  const auto x = found.span(), y = right.span();
  for (std::size_t i = 0; i < y.size(); ++i) {
    const auto one = static_cast<double>(static_cast<A>(x[i])), other = static_cast<double>(static_cast<A>(y[i]));
    scale = std::max(scale, std::abs(other));
    worst = std::max(worst, std::abs(one - other));
  }
  return worst == 0 ? 0 : worst / scale;
}

}  // namespace shardlib::test
