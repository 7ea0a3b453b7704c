// Kernels that look for wrong operands.
#pragma once

#include <cstdint>

#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/memory/faults.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// Looks for the first of n elements with fault(i), whose fault.value(i) an error names. An item is a part of them.
template <class F>
struct FindFault {
  static constexpr std::int64_t items = shardlib::detail::Faults::teams;
  F fault;
  std::int64_t n;
  shardlib::detail::FaultWord* words;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    using Word = shardlib::detail::FaultWord;
    constexpr std::int64_t parts = items, none = Word::none;
    const std::int64_t first = n / parts * item + (item < n % parts ? item : n % parts);
    const std::int64_t length = n / parts + (item < n % parts ? 1 : 0);
    const std::int64_t place = detail::team_reduce<detail::MinOp, std::int64_t>(
        team, length, [first, f = fault](std::int64_t i) { return f(first + i) ? first + i : none; });
    team.one([place, f = fault, to = words + item] { *to = {place, place == none ? 0 : f.value(place)}; });
  }
};

/// Ids that are not in [0, count).
template <class I>
struct IdOutside {
  Nest<1> nest;
  const I* ids;
  std::int64_t count;

  SHARDLIB_FUNCTION std::int64_t value(std::int64_t i) const {
    return static_cast<std::int64_t>(ids[nest.offsets(i)[0]]);
  }
  SHARDLIB_FUNCTION bool operator()(std::int64_t i) const { return value(i) < 0 || value(i) >= count; }
};

/// Integers that are zero, as bytes.
template <class U>
struct ZeroInteger {
  Nest<1> nest;
  const U* x;

  SHARDLIB_FUNCTION std::int64_t value(std::int64_t /*i*/) const { return 0; }
  SHARDLIB_FUNCTION bool operator()(std::int64_t i) const { return x[nest.offsets(i)[0]] == U{}; }
};

}  // namespace shardlib::kernels::body
