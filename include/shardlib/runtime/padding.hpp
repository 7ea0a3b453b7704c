// Where the padding of a shard lies, and how it becomes zero.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "shardlib/ops/record.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::detail {

/// For ops that would bring the padding of a dim between its elements: the error that says so.
[[noreturn, gnu::cold]] SHARDLIB_INLINE void fail_padded(const OpInfo& op, const Device& device, std::string_view dim,
                                                         DimSize size, const char* why);

/// Calls f(shape, offset, strides), in elements, for each of the boxes that make up the padding of a shard.
[[gnu::cold]] SHARDLIB_INLINE void for_each_padding(
    const Value& shape,
    const std::function<void(std::span<const std::int64_t>, std::int64_t, std::span<const std::int64_t>)>& f);

/// Sets the padding of a shard to zero, on the devices whose shard has some. Touches nothing else.
[[gnu::cold]] SHARDLIB_INLINE void zero_padding(const Value& shape, const Buffer& shard);

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/runtime/impl/padding.hpp"
#endif
