// Causal attention of bf16 on a device with memory of its own, by the kernels of body/fused_attention*.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "shardlib/device/exec.hpp"
#include "shardlib/kernels/attention.hpp"
#include "shardlib/kernels/body/attention.hpp"
#include "shardlib/kernels/body/fused_attention.hpp"
#include "shardlib/kernels/body/fused_attention_backward.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::kernels::detail {

/// Whether the fused kernels can read the operands, which they do in pieces of 16 bytes, and write the results.
inline bool fuses_attention(const AttentionLoops& loops, std::initializer_list<const void*> arrays) {
  using L = AttentionLoops;
  constexpr std::int64_t piece = 8, widest = 128;
  bool fits = loops.width > 0 && loops.width <= widest && loops.width % piece == 0 && loops.scale > 0 &&
              loops.groups.count() > 0;
  for (const std::size_t operand : {L::query, L::key}) {
    fits = fits && loops.along_width[operand] == 1 && loops.along_length[operand] % piece == 0;
    for (const auto* nest : {&loops.heads, &loops.groups})
      for (int d = 0; d < nest->depth; ++d) fits = fits && nest->loop(d).strides[operand] % piece == 0;
  }
  for (const void* array : arrays) fits = fits && reinterpret_cast<std::uintptr_t>(array) % 16 == 0;
  const std::int64_t blocks =
      loops.heads.count() * loops.groups.count() *
      ((std::max(loops.length, loops.keys()) + body::FusedAttention::block - 1) / body::FusedAttention::block);
  return fits && std::max(loops.length, loops.keys()) <= std::numeric_limits<std::int32_t>::max() / 2 &&
         blocks <= std::numeric_limits<std::int32_t>::max();
}

/// An attention, and the list of its query heads.
class FusedHeads {
 public:
  FusedHeads(const Exec& exec, const AttentionLoops& loops, const AttentionSegments& segments)
      : count_(loops.heads.count() * loops.groups.count()),
        list_(exec.pool->allocate(static_cast<std::size_t>(count_) * sizeof(body::HeadOffsets))) {
    Nest<4> heads = loops.heads;
    for (int d = 0; d < loops.groups.depth; ++d) heads.push(loops.groups.loop(d).extent, loops.groups.loop(d).strides);
    auto* const list = list_.as<body::HeadOffsets>();
    constexpr std::int64_t group = body::ListHeads::group;
    exec.for_items((count_ + group - 1) / group, 0, body::ListHeads{heads, 0, count_, list});
    using L = AttentionLoops;
    all_ = {.heads = list,
            .groups = static_cast<int>(loops.groups.count()),
            .length = static_cast<int>(loops.length),
            .key_count = static_cast<int>(loops.keys()),
            .width = static_cast<int>(loops.width),
            .scale = static_cast<float>(loops.scale),
            .earlier = loops.earlier,
            .along_queries = loops.along_length[L::query],
            .along_keys = loops.along_length[L::key],
            .along_sums = loops.along_length[L::sum],
            .along_segments = loops.along_length[L::segment],
            .query_segments = segments.queries,
            .key_segments = segments.queries == nullptr || !loops.earlier ? segments.queries : segments.keys};
  }
  [[nodiscard]] const body::FusedAttention& all() const { return all_; }
  /// The blocks of all query heads, and of all heads of keys.
  [[nodiscard]] std::int64_t query_items() const { return count_ * all_.blocks(); }
  [[nodiscard]] std::int64_t key_items() const { return count_ / all_.groups * all_.key_blocks(); }

 private:
  std::int64_t count_;
  Buffer list_;
  body::FusedAttention all_;
};

/// Calls f with a width of the kernels, as a constant.
template <class F>
void with_kernel_width(std::int64_t width, const F& f) {
  if (width <= 64)
    f(std::integral_constant<int, 64>{});
  else
    f(std::integral_constant<int, 128>{});
}

/// causal_attention by a fused kernel.
template <class R>
void attention_fused(const Exec& exec, const AttentionLoops& loops, const bf16* q, const bf16* k, const bf16* v,
                     const AttentionSegments& segments, R* out, float* sums) {
  if (loops.heads.count() == 0 || loops.length == 0 || loops.keys() == 0) return;
  const FusedHeads heads(exec, loops, segments);
  with_kernel_width(loops.width, [&]<int Width>(std::integral_constant<int, Width> /*width*/) {
    exec.for_items_on_device(heads.query_items(), 0,
                             body::FusedAttentionForward<Width, R>{heads.all(), q, k, v, out, sums});
  });
}

/// causal_attention_backward by fused kernels. Each result has a kernel whose teams have its rows to themselves, so
/// that sums have one order.
template <class R>
void attention_fused_backward(const Exec& exec, const AttentionLoops& loops, const bf16* q, const bf16* k,
                              const bf16* v, const AttentionSegments& segments, const bf16* out, const float* sums,
                              const bf16* ct, R* dq, R* dk, R* dv) {
  if (loops.heads.count() == 0 || loops.length == 0 || loops.keys() == 0) return;
  const FusedHeads heads(exec, loops, segments);
  const body::FusedAttention& all = heads.all();
  constexpr std::size_t block = body::FusedAttention::block;
  const Buffer list =
      exec.pool->allocate(static_cast<std::size_t>(heads.query_items()) * block * sizeof(body::AttentionTerms));
  auto* const terms = list.as<body::AttentionTerms>();
  exec.for_items_on_device(heads.query_items(), 0, body::ListAttentionTerms{all, out, ct, sums, terms});
  with_kernel_width(loops.width, [&]<int Width>(std::integral_constant<int, Width> /*width*/) {
    if (dq != nullptr)
      exec.for_items_on_device(heads.query_items(), 0,
                               body::FusedAttentionQueries<Width, R>{all, q, k, v, ct, terms, dq});
    const auto run = [&]<bool OfKeys, bool OfValues>(std::bool_constant<OfKeys>, std::bool_constant<OfValues>) {
      exec.for_items_on_device(heads.key_items(), 0,
                               body::FusedAttentionKeys<Width, R, OfKeys, OfValues>{all, q, k, v, ct, terms, dk, dv});
    };
    if constexpr (Width <= 64) {
      if (dk != nullptr || dv != nullptr) run(std::true_type{}, std::true_type{});
    } else {  // a lane has no variables for both
      if (dk != nullptr) run(std::true_type{}, std::false_type{});
      if (dv != nullptr) run(std::false_type{}, std::true_type{});
    }
  });
}

}  // namespace shardlib::kernels::detail
