// Definitions of scans.hpp.
#pragma once

#include "shardlib/kernels/scans.hpp"

#include <string>
#include <type_traits>

#include "shardlib/kernels/body/reduction.hpp"
#include "shardlib/kernels/body/scans.hpp"
#include "shardlib/kernels/impl/floating.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::kernels {

namespace detail {

template <class Scan>
void scan_columns(const Exec& exec, const Along& along, bool reverse, const Scan& scan) {
  using Kernel = body::ScanColumns<Scan>;
  const std::int64_t blocks = (along.inner + Kernel::width - 1) / Kernel::width;
  exec.for_items(along.outer * blocks, 0, Kernel{along.n, along.inner, blocks, reverse, scan});
}

template <class A>
body::PassedOn<A> passed_on(const ScanEnds& all, std::int64_t columns, bool reverse) {
  return {static_cast<const A*>(all.all), all.rows, all.shards, all.rank, columns, reverse};
}

}  // namespace detail

template <class Op, class AnyDType>
void cumulate(const Exec& exec, AnyDType dtype, const void* x, void* y, const Along& along, bool reverse) {
  visit_dtype(dtype, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, bool_>) {
      const bool ordered = std::is_same_v<Op, detail::MaxOp>;
      throw Error("cum" + std::string(Op::name) + ": bool_ has no " + (ordered ? "order" : "arithmetic") +
                  "; cast it to i32");
    } else {
      detail::scan_columns(exec, along, reverse, body::Cumulative<Op, T>{static_cast<const T*>(x), static_cast<T*>(y)});
    }
  });
}

template <class AnyDType>
void cumprod_backward(const Exec& exec, AnyDType dtype, const void* x, const void* y, const void* ct, void* out,
                      const Along& along) {
  detail::visit_floating(dtype, "cumprod", [&]<class T>(T) {
    detail::scan_columns(exec, along, true,
                         body::CumulativeProductBackward<T>{{},
                                                            static_cast<const T*>(x),
                                                            static_cast<const T*>(y),
                                                            static_cast<const T*>(ct),
                                                            static_cast<T*>(out),
                                                            along.inner});
  });
}

template <class AnyDType>
void cummax_backward(const Exec& exec, AnyDType dtype, const void* x, const void* ct, void* out, const Along& along) {
  detail::visit_floating(dtype, "cummax", [&]<class T>(T) {
    detail::scan_columns(exec, along, false,
                         body::CumulativeMaximumBackward<T>{
                             {}, static_cast<const T*>(x), static_cast<const T*>(ct), static_cast<T*>(out)});
  });
}

template <class AnyDType>
void linear_scan(const Exec& exec, AnyDType dtype, const void* a, const void* b, void* h, const Along& along,
                 bool reverse, const ScanEnds& ends) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    detail::scan_columns(exec, along, reverse,
                         body::LinearScan<T>{detail::passed_on<accumulator_t<T>>(ends, along.rows(), reverse),
                                             static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(h)});
  });
}

template <class AnyDType>
void linear_scan_ends(const Exec& exec, AnyDType dtype, const void* a, const void* b, void* ends, const Along& along,
                      bool reverse) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    detail::scan_columns(exec, along, reverse,
                         body::LinearScanEnds<T>{static_cast<const T*>(a), static_cast<const T*>(b),
                                                 static_cast<accumulator_t<T>*>(ends), along.rows()});
  });
}

template <class AnyDType>
void linear_scan_backward(const Exec& exec, AnyDType dtype, const void* a, const void* h, const void* ct, void* out,
                          const Along& along, bool reverse, const ScanEnds& ends) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    detail::scan_columns(
        exec, along, !reverse,
        body::LinearScanBackward<T>{detail::passed_on<accumulator_t<T>>(ends, along.rows(), !reverse),
                                    static_cast<const T*>(a), static_cast<const T*>(h), static_cast<const T*>(ct),
                                    static_cast<T*>(out), along.n, along.inner, reverse ? along.inner : -along.inner,
                                    reverse ? along.n - 1 : 0});
  });
}

template <class AnyDType>
void linear_scan_backward_ends(const Exec& exec, AnyDType dtype, const void* a, const void* h, const void* ct,
                               void* ends, const Along& along, bool reverse) {
  detail::visit_floating(dtype, "linear_scan", [&]<class T>(T) {
    detail::scan_columns(
        exec, along, !reverse,
        body::LinearScanBackwardEnds<T>{static_cast<const T*>(a), static_cast<const T*>(h), static_cast<const T*>(ct),
                                        static_cast<accumulator_t<T>*>(ends), along.n, along.inner, along.rows(),
                                        reverse ? 0 : along.n - 1});
  });
}

}  // namespace shardlib::kernels
