// Kernels that look for wrong operands.
#pragma once

#include <cstdint>

#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/strided.hpp"
#include "shardlib/memory/faults.hpp"
#include "shardlib/support/function.hpp"

namespace shardlib::kernels::body {

/// Looks for the first of the places of `nest` with fault(place), whose fault.value(place) an error names. An item is a
/// part of them.
template <class F>
struct FindFault {
  static constexpr std::int64_t items = shardlib::detail::Faults::teams;
  F fault;
  Nest<1> nest;
  shardlib::detail::FaultWord* words;

  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    using Word = shardlib::detail::FaultWord;
    constexpr std::int64_t parts = items, none = Word::none;
    const std::int64_t n = nest.count(), first = n / parts * item + (item < n % parts ? item : n % parts);
    const std::int64_t length = n / parts + (item < n % parts ? 1 : 0);
    const std::int64_t number = detail::team_reduce<detail::MinOp, std::int64_t>(
        team, length,
        [first, f = fault, at = nest](std::int64_t i) { return f(at.offsets(first + i)[0]) ? first + i : none; });
    team.one([number, f = fault, at = nest, to = words + item] {
      *to = {number, number == none ? 0 : f.value(at.offsets(number)[0])};
    });
  }
};

/// Ids that are not in [0, count).
template <class I>
struct IdOutside {
  const I* ids;
  std::int64_t count;
  SHARDLIB_FUNCTION std::int64_t value(std::int64_t at) const { return static_cast<std::int64_t>(ids[at]); }
  SHARDLIB_FUNCTION bool operator()(std::int64_t at) const { return value(at) < 0 || value(at) >= count; }
};

/// Integers that are zero, as bytes.
template <class U>
struct ZeroInteger {
  const U* x;
  SHARDLIB_FUNCTION std::int64_t value(std::int64_t /*at*/) const { return 0; }
  SHARDLIB_FUNCTION bool operator()(std::int64_t at) const { return x[at] == U{}; }
};

}  // namespace shardlib::kernels::body
