// Products with epilogues on a GPU, with a stand-in for cuBLASLt that checks what a call demands and computes it.
#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include <cublasLt.h>

#include "shardlib/device/exec.hpp"
#include "shardlib/device/launch.hpp"
#include "shardlib/kernels/einsum_epilogue.hpp"
#include "shardlib/kernels/einsum_plan.hpp"
#include "shardlib/kernels/epilogue.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/spec/dtype.hpp"

using namespace shardlib;

namespace {

double gelu_of(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
}
double slope_of(double x) {
  return (gelu_of(x + 1e-4) - gelu_of(x - 1e-4)) / 2e-4;
}

/// The sizes of dims, each named by a letter, and a product of arrays of T in a GPU's memory.
template <class T>
class Product {
 public:
  Product(std::string_view lhs, std::string_view rhs, std::string_view out, const std::int64_t (&sizes)[26])
      : names_{lhs, rhs, out}, sizes_(sizes) {
    stand_in_lt = {};
    for (const std::string_view names : names_) {
      auto& array = arrays_.emplace_back(static_cast<std::size_t>(count(names)));
      for (double& x : array) x = next();
    }
    at_ = arrays_[2];
    std::fill(arrays_[2].begin(), arrays_[2].end(), 0.0);
    for_each([&](std::size_t a, std::size_t b, std::size_t c) { arrays_[2][c] += arrays_[0][a] * arrays_[1][b]; });
  }

  std::size_t left_at = 0;  ///< where the left operand begins in its block, in bytes

  enum class With { bias, gelu, slope };
  /// Runs it with an epilogue; false where there is none. `bias` names dims of the result.
  bool run(With with, std::string_view bias = "") {
    const Exec exec{.pool = pool_.get()};
    const Buffer a = there(arrays_[0], left_at), b = there(arrays_[1]), c = there(at_), y = there(at_);
    std::vector<double> added(static_cast<std::size_t>(count(bias)));
    for (double& x : added) x = next();
    const Buffer of_bias = there(added);
    kernels::Epilogue epilogue;
    if (with == With::slope) {
      epilogue.slope_at = y.data();
    } else {
      epilogue.bias = of_bias.data();
      epilogue.bias_size = count(bias);
      if (with == With::gelu) epilogue.gelu = y.data();
    }
    const std::vector<int> ids[] = {ids_of(names_[0]), ids_of(names_[1]), ids_of(names_[2])};
    if (!kernels::einsum_with_epilogue(exec, kernels::plan_einsum(ids[0], ids[1], ids[2]), dtype_v<T>, a.data(),
                                       shape(names_[0]), b.data(), shape(names_[1]), c.data(), epilogue))
      return false;
    std::vector<double> sum = arrays_[2], second(sum.size());
    for (std::size_t i = 0; i < sum.size(); ++i) {
      if (with == With::slope)
        sum[i] *= slope_of(at_[i]);
      else
        sum[i] += added[i % added.size()];
      second[i] = with == With::gelu ? gelu_of(sum[i]) : at_[i];
    }
    check(c, sum);
    check(y, second);
    return true;
  }

 private:
  [[nodiscard]] std::int64_t size(char name) const { return sizes_[name - 'A']; }
  [[nodiscard]] std::int64_t count(std::string_view names) const {
    std::int64_t n = 1;
    for (const char name : names) n *= size(name);
    return n;
  }
  [[nodiscard]] std::vector<std::int64_t> shape(std::string_view names) const {
    std::vector<std::int64_t> sizes;
    for (const char name : names) sizes.push_back(size(name));
    return sizes;
  }
  static std::vector<int> ids_of(std::string_view names) { return {names.begin(), names.end()}; }
  /// Numbers between -1 and 1 that each dtype has.
  double next() {
    state_ = state_ * 1103515245U + 12345U;
    return static_cast<double>(state_ >> 16U & 127U) / 64 - 1;
  }
  [[nodiscard]] Buffer there(const std::vector<double>& values, std::size_t at = 0) const {
    const Buffer here = host_->allocate(values.size() * sizeof(T));
    const Buffer gpu = pool_->allocate(at + here.bytes()).slice(at, here.bytes());
    for (std::size_t i = 0; i < values.size(); ++i) here.as<T>()[i] = static_cast<T>(static_cast<float>(values[i]));
    copy(gpu, here);
    return gpu;
  }
  void check(const Buffer& gpu, const std::vector<double>& expected) const {
    const Buffer here = host_->allocate(gpu.bytes());
    copy(here, gpu);
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double found = static_cast<double>(static_cast<float>(here.as<T>()[i]));
      worst = std::max(worst, std::abs(found - expected[i]) / (1 + std::abs(expected[i])));
    }
    CHECK(worst < (std::is_same_v<T, bf16> ? 0.005 : 1e-6));
  }
  /// Calls f with the elements of lhs, rhs and result of each product.
  template <class F>
  void for_each(const F& f) const {
    std::vector<char> all(names_[2].begin(), names_[2].end());
    for (const std::string_view names : {names_[0], names_[1]})
      for (const char name : names)
        if (std::find(all.begin(), all.end(), name) == all.end()) all.push_back(name);
    std::vector<std::int64_t> index(26, 0);
    const auto place = [&](std::string_view names) {
      std::int64_t at = 0;
      for (const char name : names) at = at * size(name) + index[static_cast<std::size_t>(name - 'A')];
      return static_cast<std::size_t>(at);
    };
    for (;;) {
      f(place(names_[0]), place(names_[1]), place(names_[2]));
      std::size_t d = 0;
      for (; d < all.size(); ++d) {
        std::int64_t& i = index[static_cast<std::size_t>(all[d] - 'A')];
        if (++i < size(all[d])) break;
        i = 0;
      }
      if (d == all.size()) return;
    }
  }

  std::vector<std::string_view> names_;
  const std::int64_t* sizes_;
  std::vector<std::vector<double>> arrays_;
  std::vector<double> at_;
  unsigned state_ = 1;
  std::shared_ptr<Pool> pool_ = Pool::make(Region::make_gpu(0, 1)), host_ = Pool::make();
};

// B, D, F, H, K, L and O are the dims of the tests, by their letters.
constexpr std::int64_t sizes[26] = {0, 2, 0, 8, 0, 16, 0, 3, 0, 0, 24, 5, 0, 0, 9};
constexpr std::size_t mib = std::size_t{1} << 20;

template <class T>
void check_products() {
  using P = Product<T>;
  using With = typename P::With;
  for (const With with : {With::bias, With::gelu, With::slope}) {
    CHECK(P("LK", "KF", "LF", sizes).run(with, "F"));
    CHECK(P("BLK", "KF", "BLF", sizes).run(with, "F"));     // rows of two dims
    CHECK(P("BLK", "KHD", "BLHD", sizes).run(with, "HD"));  // columns of two
    CHECK(P("LK", "FK", "LF", sizes).run(with, "F"));       // the right operand is stored transposed
    CHECK(P("KF", "KD", "FD", sizes).run(with, "D"));       // the left one
    CHECK(P("KF", "KD", "DF", sizes).run(with, "F"));       // the result
    CHECK(stand_in_lt.products == 1);
    CHECK_FALSE(P("LK", "KO", "LO", sizes).run(with, "O"));     // 9 columns
    CHECK_FALSE(P("BLK", "BKF", "BLF", sizes).run(with, "F"));  // a batch of products
    CHECK_FALSE(P("LK", "HF", "LF", sizes).run(with, "F"));     // a dim that one operand alone has
    CHECK(stand_in_lt.heuristics == 0);
  }
  CHECK_FALSE(P("FK", "KD", "FD", sizes).run(With::bias, "F"));    // not a bias of the columns
  CHECK_FALSE(P("LK", "KHD", "LHD", sizes).run(With::bias, "D"));  // of some of them
}

}  // namespace

TEST_CASE("products with epilogues are the calls that cuBLASLt documents") {
  if (world_size() > 1) return;
  stand_in = {.total = 1000 * mib};
  check_products<f32>();
  check_products<bf16>();
  CHECK_FALSE(Product<f64>("LK", "KF", "LF", sizes).run(Product<f64>::With::bias, "F"));  // has no epilogues
  stand_in = {};
}

TEST_CASE("cuBLASLt chooses an algorithm for each kind of product, and each alignment, once") {
  if (world_size() > 1) return;
  stand_in = {.total = 1000 * mib};
  using P = Product<f32>;
  {
    P product("LK", "KF", "LF", sizes);
    for (int i = 0; i < 3; ++i) CHECK(product.run(P::With::gelu, "F"));
    CHECK(product.run(P::With::bias, "F"));
    CHECK(stand_in_lt.heuristics == 2);
    CHECK(stand_in_lt.products == 4);
  }
  {
    P product("LK", "KF", "LF", sizes);
    for (int round = 0; round < 2; ++round)
      for (const std::size_t at : {0, 16, 32}) {  // an algorithm may need what is aligned well to be so
        product.left_at = at;
        CHECK(product.run(P::With::bias, "F"));
      }
    CHECK(stand_in_lt.heuristics == 3);
    CHECK(stand_in_lt.products == 6);
  }
  {
    P product("BK", "KF", "BF", sizes);
    stand_in_lt.has_algorithms = false;
    for (int i = 0; i < 3; ++i) CHECK_FALSE(product.run(P::With::slope));
    CHECK(stand_in_lt.heuristics == 1);
  }
  stand_in = {};
}
