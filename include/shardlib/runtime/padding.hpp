// The padding of a shard: its position, and how it is set to zero.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "shardlib/ops/record.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// The error of an op that would move the padding of a dim between elements.
[[noreturn, gnu::cold]] SHARDLIB_INLINE void fail_padded(const OpInfo& op, const Device& device, std::string_view dim,
                                                         DimSize size, const char* why);

/// Calls f(shape, offset, strides), in elements, for each box of a shard's padding.
[[gnu::cold]] SHARDLIB_INLINE void for_each_padding(
    const Value& shape,
    const std::function<void(std::span<const std::int64_t>, std::int64_t, std::span<const std::int64_t>)>& f);

/// Sets the padding of a shard to zero, on the devices whose shard has padding. Other elements stay unchanged.
[[gnu::cold]] SHARDLIB_INLINE void zero_padding(const Value& shape, const Buffer& shard);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/runtime/impl/padding.hpp"
#endif
