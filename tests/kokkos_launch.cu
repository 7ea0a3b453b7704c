// A kernel that Kokkos starts on a GPU, and a shard there as Kokkos' view. That they compile, against Kokkos or its
// stand-in, is the test.
#include <cstdint>

#include "shardlib/device/exec.hpp"
#include "shardlib/interop/arrays.hpp"

namespace {

struct Squares {
  float* out;
  template <class Team>
  SHARDLIB_FUNCTION void operator()(const Team& team, std::int64_t item) const {
    float* const tile = team.template tile<float, 64>();
    team.lanes(64, [&](std::int64_t i) { tile[i] = static_cast<float>(i * i); });
    team.barrier();
    team.lanes(64, [&](std::int64_t i) { out[item * 64 + i] = tile[63 - i]; });
  }
};

}  // namespace

void run_squares(const shardlib::Exec& exec, float* out) {
  exec.for_items_on_gpu(4, 0, Squares{out});
}

auto shown(const shardlib::Tensor<shardlib::f32, "B/d M">& x) {
  return shardlib::as_kokkos<Kokkos::CudaSpace>(x);
}
