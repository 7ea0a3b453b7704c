// Matrix product of bf16 on CPUs that have instructions for it, by oneDNN's matmul.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#if defined(SHARDLIB_WITH_DNNL)
#include <dnnl.hpp>
#endif

#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

#if defined(SHARDLIB_WITH_DNNL) && defined(__x86_64__)

/// Whether the CPU multiplies bf16 faster than f32: an AMD CPU with avx512_bf16. The instruction of Intel's CPUs
/// without AMX is slower than two of f32; with AMX nothing was measured. The environment variable
/// ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI says no. One answer for the whole run: results differ in their rounding.
inline bool has_bf16_gemm() {
  static const bool has = [] {
    __builtin_cpu_init();
    constexpr unsigned wanted = dnnl_cpu_isa_avx512_core_bf16;
    return __builtin_cpu_is("amd") != 0 && (static_cast<unsigned>(dnnl_get_effective_cpu_isa()) & wanted) == wanted;
  }();
  return has;
}

namespace detail {

inline const dnnl::engine& dnnl_engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

/// C = op(A) op(B), plus C if `accumulate` is set, with C in f32 or bf16. Sums are f32.
struct Bf16Gemm {
  bool trans_a, trans_b;
  std::int64_t m, n, k, lda, ldb, ldc;
  bool accumulate, narrow;  ///< `narrow`: C is bf16

  auto operator<=>(const Bf16Gemm&) const = default;

  void run(const bf16* a, const bf16* b, void* c) const {
    try {
      // The library takes 40 us to make a product of new sizes. Each thread keeps its own.
      thread_local std::map<Bf16Gemm, Product> products;
      auto found = products.find(*this);
      if (found == products.end()) {
        if (products.size() >= 1024) products.clear();
        found = products.emplace(*this, Product(*this)).first;
      }
      found->second.run(a, b, c);
    } catch (const dnnl::error& error) {
      const auto text = [](std::int64_t v) { return std::to_string(v); };
      throw Error("gemm: oneDNN's matmul of bf16 failed: " + std::string(error.what()) + ", on m=" + text(m) +
                  " n=" + text(n) + " k=" + text(k) + " lda=" + text(lda) + " ldb=" + text(ldb) + " ldc=" + text(ldc) +
                  "; check the leading dims, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI");
    }
  }

 private:
  class Product {
   public:
    explicit Product(const Bf16Gemm& g) {
      using Desc = dnnl::memory::desc;
      using Type = dnnl::memory::data_type;
      const auto strides = [](bool transposed, std::int64_t ld) {
        return transposed ? dnnl::memory::dims{1, ld} : dnnl::memory::dims{ld, 1};
      };
      const Desc a({g.m, g.k}, Type::bf16, strides(g.trans_a, g.lda));
      const Desc b({g.k, g.n}, Type::bf16, strides(g.trans_b, g.ldb));
      const Desc c({g.m, g.n}, g.narrow ? Type::bf16 : Type::f32, strides(false, g.ldc));
      dnnl::primitive_attr attributes;
      if (g.accumulate) {
        dnnl::post_ops sum;
        sum.append_sum(1);
        attributes.set_post_ops(sum);
      }
#if DNNL_VERSION_MAJOR >= 3
      dnnl::matmul::primitive_desc chosen(dnnl_engine(), a, b, c, attributes);
#else
      dnnl::matmul::primitive_desc chosen({a, b, c}, attributes, dnnl_engine());
#endif
      // The library prefers other kernels for some strides, which sum in another order. With one kind of kernel a
      // part of C has the bits of the whole, so that results do not depend on the number of threads.
      auto other = chosen;
      do {
        if (!std::string_view(other.impl_info_str()).starts_with("gemm")) continue;
        chosen = other;
        break;
      } while (other.next_impl());
      product_ = dnnl::matmul(chosen);
      operands_ = {dnnl::memory(a, dnnl_engine(), nullptr), dnnl::memory(b, dnnl_engine(), nullptr),
                   dnnl::memory(c, dnnl_engine(), nullptr)};
    }
    void run(const bf16* a, const bf16* b, void* c) {
      thread_local dnnl::stream stream(dnnl_engine());
      operands_[0].set_data_handle(const_cast<bf16*>(a));  // reads only
      operands_[1].set_data_handle(const_cast<bf16*>(b));
      operands_[2].set_data_handle(c);
      product_.execute(stream,
                       {{DNNL_ARG_SRC, operands_[0]}, {DNNL_ARG_WEIGHTS, operands_[1]}, {DNNL_ARG_DST, operands_[2]}});
    }

   private:
    dnnl::matmul product_;
    std::array<dnnl::memory, 3> operands_;
  };
};

}  // namespace detail

#else

inline bool has_bf16_gemm() {
  return false;
}

namespace detail {
struct Bf16Gemm {
  bool trans_a, trans_b;
  std::int64_t m, n, k, lda, ldb, ldc;
  bool accumulate, narrow;
  [[noreturn]] void run(const bf16* /*a*/, const bf16* /*b*/, void* /*c*/) const {
    throw Error("gemm: this build has no product of bf16; convert to f32, or build with SHARDLIB_WITH_DNNL on x86-64");
  }
};
}  // namespace detail

#endif

}  // namespace shardlib::kernels
