// Runs kernels on teams of one lane and of several, and compares the bits.
#pragma once

#include "catch.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "shardlib/device/exec.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/region.hpp"

namespace shardlib {

inline std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}
/// Calls f with a number of each type.
template <class... T, class F>
void for_types(const F& f) {
  (f(T{}), ...);
}

/// A device whose memory f sees as arrays of the host: `run` copies them there and back.
struct Place {
  std::shared_ptr<Pool> pool;
  Exec exec;
  explicit Place(bool simulated, int threads = 1)
      : pool(simulated ? Pool::make(Region::make_simulated()) : Pool::make()),
        exec{.pool = pool.get(), .threads = threads} {}
  template <class F, class... T>
  void run(const F& f, std::vector<T>&... arrays) const {
    on_blocks(f, std::index_sequence_for<T...>{}, arrays...);
  }
  /// What f makes of `out`, its last array.
  template <class T, class F, class... In>
  [[nodiscard]] std::vector<T> result(std::vector<T> out, const F& f, std::vector<In>... in) const {
    run(f, in..., out);
    return out;
  }

 private:
  template <class F, class... Arrays, std::size_t... I>
  void on_blocks(const F& f, std::index_sequence<I...> /*arrays*/, Arrays&... arrays) const {
    const auto size = [](const auto& array) { return array.size() * sizeof array[0]; };
    const std::array<Buffer, sizeof...(I)> blocks{pool->allocate(size(arrays) + 1)...};
    (exec.copy(blocks[I].data(), arrays.data(), size(arrays)), ...);
    f(exec, blocks[I].template as<typename Arrays::value_type>()...);
    (exec.copy(arrays.data(), blocks[I].data(), size(arrays)), ...);
  }
};

template <class T>
std::vector<T> numbers(std::int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<T> all(at(n));
  for (T& x : all) x = static_cast<T>(normal(random));
  return all;
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Runs f on arrays on the host and on the simulated device. The arrays must come back the same.
template <class F, class... T>
void same_everywhere(const F& f, const std::vector<T>&... arrays) {
  std::tuple<std::vector<T>...> host{arrays...}, lanes{arrays...};
  std::apply([&](auto&... x) { Place(false, 2).run(f, x...); }, host);
  std::apply([&](auto&... x) { Place(true).run(f, x...); }, lanes);
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    CHECK((same_bits(std::get<I>(host), std::get<I>(lanes)) && ...));
  }
  (std::index_sequence_for<T...>{});
}

}  // namespace shardlib
