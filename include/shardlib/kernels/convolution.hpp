// Convolutions of images by oneDNN, on the host and in f32. Each thread computes those of some images.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#if defined(SHARDLIB_WITH_DNNL)
#include <dnnl.hpp>
#endif

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/bf16_gemm.hpp"
#include "shardlib/kernels/body/elementwise.hpp"
#include "shardlib/kernels/elementwise.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/openmp.hpp"

namespace shardlib::kernels {

/// One length of an image convolution, and the distance of a window's elements in the array of weights.
struct ImageLength {
  std::int64_t in = 1, window = 1, out = 1, stride = 1, dilation = 1, before = 0, weights = 1;
  /// Zeros after the operand that windows see; negative if they leave out its end.
  [[nodiscard]] std::int64_t after() const { return (out - 1) * stride + (window - 1) * dilation + 1 - in - before; }
  auto operator<=>(const ImageLength&) const = default;
};
/// A convolution of "B H W C" into "B Y X F", or of "B L C" into "B N F". The weights, such as "P Q C F", may have any
/// order: `channel` and `filter` are the distances between two channels and between two filters.
struct ImageConv {
  std::int64_t images = 1, channels = 1, filters = 1, channel = 1, filter = 1;
  int rank = 2;
  std::array<ImageLength, 2> lengths{};

  [[nodiscard]] std::int64_t windows() const { return images * lengths[0].out * lengths[1].out; }
  [[nodiscard]] std::int64_t weights() const { return channels * filters * lengths[0].window * lengths[1].window; }
  auto operator<=>(const ImageConv&) const = default;
};
/// Which of three arrays a pass computes from the other two: the result, the gradient of the images or of the weights.
enum class ConvPass { result, images, weights };

#if defined(SHARDLIB_WITH_DNNL) && defined(__x86_64__)

namespace detail {

/// oneDNN runs on the calling thread alone while this lives, and makes primitives for one thread. So the bits do not
/// depend on the number of threads, and threads that call it get no threads of their own.
class OneThread {
 public:
  OneThread() {
    if (shardlib_omp_set_num_threads != nullptr) shardlib_omp_set_num_threads(1);
  }
  ~OneThread() {
    if (shardlib_omp_set_num_threads != nullptr) shardlib_omp_set_num_threads(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = shardlib_omp_get_max_threads != nullptr ? shardlib_omp_get_max_threads() : 1;
};

/// oneDNN's primitive of a pass, with weights in the order that it prefers.
class ConvPrimitive {
 public:
  using Desc = dnnl::memory::desc;
  Desc images, weights, plain_weights, results, scratch;
  bool fast = false;  ///< whether oneDNN generates a kernel for the sizes, and does not take its reference loops

  /// oneDNN takes milliseconds to make one, so each thread keeps those that it has made.
  static ConvPrimitive of(ConvPass pass, const ImageConv& c) {
    thread_local std::map<std::pair<ConvPass, ImageConv>, ConvPrimitive> made;
    const auto found = made.find({pass, c});
    if (found != made.end()) return found->second;
    if (made.size() >= 1024) made.clear();
    const OneThread alone;
    return made.emplace(std::pair(pass, c), ConvPrimitive(pass, c)).first->second;
  }
  void run(float* x, float* w, float* y, void* scratchpad) const {
    const auto memory = [](const Desc& desc, void* data) { return dnnl::memory(desc, dnnl_engine(), data); };
    thread_local dnnl::stream stream(dnnl_engine());
    primitive_.execute(stream,
                       {{pass_ == ConvPass::images ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, memory(images, x)},
                        {pass_ == ConvPass::weights ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, memory(weights, w)},
                        {pass_ == ConvPass::result ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, memory(results, y)},
                        {DNNL_ARG_SCRATCHPAD, memory(scratch, scratchpad)}});
  }

 private:
  ConvPass pass_;
  dnnl::primitive primitive_;

  ConvPrimitive(ConvPass pass, const ImageConv& c) : pass_(pass) {
    using Memory = dnnl::memory;
    constexpr auto type = Memory::data_type::f32;
    Memory::dims in{c.images, c.channels}, window{c.filters, c.channels}, out{c.images, c.filters};
    Memory::dims distances{c.filter, c.channel}, strides, gaps, before, after;
    for (int i = 0; i < c.rank; ++i) {
      const ImageLength& l = c.lengths[static_cast<std::size_t>(i)];
      in.push_back(l.in);
      window.push_back(l.window);
      out.push_back(l.out);
      distances.push_back(l.weights);
      strides.push_back(l.stride);
      gaps.push_back(l.dilation - 1);
      before.push_back(l.before);
      after.push_back(l.after());
    }
    const auto order = c.rank == 1 ? Memory::format_tag::nwc : Memory::format_tag::nhwc;
    images = Desc(in, type, order);
    results = Desc(out, type, order);
    plain_weights = Desc(window, type, distances);
    const Desc any(window, type, Memory::format_tag::any);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    // Only a forward pass has a `kind`, and only the others have the `forward` pass as a hint.
    const auto choose = [&]<class P, class... Forward>(std::type_identity<P>, std::tuple<Forward...> forward,
                                                       auto... kind) {
      constexpr auto way = dnnl::algorithm::convolution_direct;
      return std::apply(
          [&](const auto&... hint) {
#if DNNL_VERSION_MAJOR >= 3
            return typename P::primitive_desc(dnnl_engine(), kind..., way, images, any, results, strides, gaps, before,
                                              after, hint..., attributes);
#else
            return typename P::primitive_desc({kind..., way, images, any, results, strides, gaps, before, after},
                                              attributes, dnnl_engine(), hint...);
#endif
          },
          forward);
    };
    const auto take = [&]<class P>(std::type_identity<P>, const auto& chosen, const Desc& order_of_weights) {
      weights = order_of_weights;
      scratch = chosen.scratchpad_desc();
      const std::string_view kernel = chosen.impl_info_str();
      fast = kernel.starts_with("jit") || kernel.starts_with("brg");
      primitive_ = P(chosen);
    };
    constexpr std::type_identity<dnnl::convolution_forward> forward;
    constexpr std::type_identity<dnnl::convolution_backward_data> backward;
    constexpr std::type_identity<dnnl::convolution_backward_weights> of_weights;
    const auto hint = choose(forward, std::tuple(), dnnl::prop_kind::forward_training);
    if (pass == ConvPass::result) {
      take(forward, hint, hint.weights_desc());
    } else if (pass == ConvPass::images) {
      const auto chosen = choose(backward, std::tuple(hint));
      take(backward, chosen, chosen.weights_desc());
    } else {
      const auto chosen = choose(of_weights, std::tuple(hint));
      take(of_weights, chosen, chosen.diff_weights_desc());
    }
  }
};

inline void copy_weights(const ConvPrimitive::Desc& from_order, void* from, const ConvPrimitive::Desc& to_order,
                         void* to) {
  dnnl::memory in(from_order, dnnl_engine(), from), out(to_order, dnnl_engine(), to);
  dnnl::stream stream(dnnl_engine());
  dnnl::reorder(in, out).execute(stream, in, out);
}

/// The number of parts of the batch, which have equally many images. One thread computes a part. The sizes alone
/// determine the number, so that bits do not depend on the number of threads. For the gradient of the weights each part
/// has an array of sums, so these parts have more windows, and their arrays 32 MiB together at most.
inline std::int64_t parts_of(ConvPass pass, const ImageConv& c) {
  const bool sums = pass == ConvPass::weights;
  const std::int64_t most = sums ? (std::int64_t{1} << 23) / c.weights() : c.images, least = sums ? 512 : 128;
  std::int64_t parts = std::clamp<std::int64_t>(std::min(most, c.windows() / least), 1, c.images);
  while (c.images % parts != 0) --parts;
  return parts;
}
inline ConvPrimitive conv_of_part(ConvPass pass, ImageConv c) {
  c.images /= parts_of(pass, c);
  return ConvPrimitive::of(pass, c);
}

}  // namespace detail

/// Whether oneDNN takes the pass: where it is faster than copies of windows and their products, or as `wanted` says. It
/// is not faster with few windows, because it copies the weights into its own order. Copies of windows are cheap with
/// many channels, and with windows of one element whose operand has fewer channels than the other. Few parts would
/// leave threads without work.
inline bool has_image_conv(const Exec& exec, ConvPass pass, const ImageConv& c, std::optional<bool> wanted) {
  if (exec.on_device() || !wanted.value_or(true) || std::min(c.windows(), c.weights()) < 1) return false;
  for (const ImageLength& l : c.lengths)
    if (l.after() <= -l.stride) return false;
  const bool backwards = pass == ConvPass::images;
  const std::int64_t copied = backwards ? c.filters : c.channels, other = backwards ? c.channels : c.filters;
  const bool copies_much = c.weights() == copied * other ? copied >= other : std::min(copied, other) < 512;
  const bool faster = copies_much && c.windows() >= 2 * std::max(copied, other) && detail::parts_of(pass, c) >= 4;
  return wanted.value_or(faster) && detail::conv_of_part(pass, c).fast;
}

/// Runs a pass over dense arrays of images, weights and results, one of which it writes. It allocates the weights in
/// oneDNN's order, or for a gradient of weights an array for each part, and oneDNN's scratch memory; so does a dry run.
inline void image_conv(const Exec& exec, ConvPass pass, const ImageConv& c, float* x, float* w, float* y) {
  const bool sums = pass == ConvPass::weights;
  const std::int64_t parts = detail::parts_of(pass, c), arrays = sums ? parts : 1;
  const detail::ConvPrimitive primitive = detail::conv_of_part(pass, c);
  const bool copied = arrays > 1 || primitive.weights != primitive.plain_weights;
  const auto numbers = static_cast<std::int64_t>(primitive.weights.get_size() / sizeof(float));
  const Buffer copies =
      copied ? exec.pool->allocate(primitive.weights.get_size() * static_cast<std::size_t>(arrays)) : Buffer();
  float* const weights = copied ? copies.as<float>() : w;
  if (copied && !sums) exec.run([&] { detail::copy_weights(primitive.plain_weights, w, primitive.weights, weights); });
  const auto per_part = [](const dnnl::memory::desc& desc) {
    return static_cast<std::int64_t>(desc.get_size() / sizeof(float));
  };
  exec.count_scratch(parts, primitive.scratch.get_size());
  {
    const detail::OneThread alone;
    exec.for_each(parts, [&](std::int64_t i) {
      const Buffer scratch = exec.pool->allocate(primitive.scratch.get_size());
      primitive.run(x + i * per_part(primitive.images), weights + (sums ? i * numbers : 0),
                    y + i * per_part(primitive.results), scratch.data());
    });
  }
  if (!sums || !copied) return;
  const std::array shape{numbers}, steps{std::int64_t{1}};
  for (std::int64_t i = 1; i < parts; ++i)
    apply(exec, shape, body::AddElement{}, Operand<const float>(weights + i * numbers, steps),
          Operand<float>(weights, steps));
  exec.run([&] { detail::copy_weights(primitive.weights, weights, primitive.plain_weights, w); });
}

#else

inline bool has_image_conv(const Exec& /*exec*/, ConvPass /*pass*/, const ImageConv& /*c*/,
                           std::optional<bool> /*wanted*/) {
  return false;
}
inline void image_conv(const Exec& /*exec*/, ConvPass /*pass*/, const ImageConv& /*c*/, float* /*x*/, float* /*w*/,
                       float* /*y*/) {}

#endif

}  // namespace shardlib::kernels
