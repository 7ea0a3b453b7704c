// Checks of a communication's arguments, which all backends share, and the errors of a communication.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/comm/reduce_tree.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/system.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail {

inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

/// The buffer, or a copy of it if its handles do not keep its memory alive.
inline Buffer owned(const Buffer& buffer) {
  if (buffer.is_owned() || buffer.device_memory() != nullptr) return buffer;
  const auto bytes = std::make_shared<std::vector<std::byte>>(buffer.data(), buffer.data() + buffer.bytes());
  return {bytes->data(), bytes->size(), bytes};
}

/// The pairs of buffer sizes that a collective over n devices accepts.
enum class Fit { same, recv_n_times, send_n_times };

inline void check_fit(std::string_view op, int n, const Buffer& send, const Buffer& recv, Fit fit) {
  const auto fail = [&](const std::string& why) {
    throw Error(std::string(op) + " over " + std::to_string(n) + " devices: send has " + std::to_string(send.bytes()) +
                " bytes, recv has " + std::to_string(recv.bytes()) + " bytes: " + why);
  };
  const std::size_t times = static_cast<std::size_t>(n);
  const std::string n_times = std::to_string(n) + " times the bytes of ";
  if (fit == Fit::same && send.bytes() != recv.bytes()) fail("make them equal");
  if (fit == Fit::recv_n_times && recv.bytes() != times * send.bytes()) fail("recv must have " + n_times + "send");
  if (fit == Fit::send_n_times && send.bytes() != times * recv.bytes()) fail("send must have " + n_times + "recv");
  if (send.data() == recv.data() && send.bytes() != 0) fail("they are the same memory: give recv its own");
}

/// Checks that a block can be split into rows. `block` and `element` count bytes: of one rank's block, and of one
/// element. `rows` is the number of rows of the whole.
inline void check_rows(std::string_view op, std::size_t block, std::size_t element, std::size_t rows, bool takes_rows) {
  if (rows == 1) return;
  const std::string call = std::string(op) + " in " + std::to_string(rows) + " rows: ";
  if (!takes_rows)
    throw Error(call + "these devices share no memory: put the blocks in rank order, and leave out rows");
  if (rows == 0 || block % (rows * element) != 0) {
    throw Error(call + "a block has " + std::to_string(block) +
                " bytes: they must split into as many equal pieces, of " + std::to_string(element) +
                " bytes an element");
  }
}

/// A view consists of whole pages. It pays off where a copy takes longer than changing page tables.
inline bool fits_view(std::size_t bytes) {
  return bytes >= Pool::long_block && bytes % page_bytes() == 0;
}
[[noreturn]] inline void fail_view() {
  throw Error("gather_view: this group has no views of blocks of these bytes (has_views): use all_gather");
}

inline void check_all_to_all(int n, const Buffer& send, const Buffer& recv) {
  check_fit("all_to_all", n, send, recv, Fit::same);
  if (send.bytes() % static_cast<std::size_t>(n) != 0) {
    throw Error("all_to_all over " + std::to_string(n) + " devices: send has " + std::to_string(send.bytes()) +
                " bytes: they must split into " + std::to_string(n) + " equal blocks");
  }
}

inline void check_reduction(std::string_view op, int n, const Buffer& send, const Buffer& recv, Fit fit, DType dtype) {
  check_fit(op, n, send, recv, fit);
  if (!is_reducible(dtype)) {
    throw Error(std::string(op) + " of " + std::string(name(dtype)) +
                ": only f32, bf16, f64, i32 and u32 can be reduced: convert first");
  }
  if (recv.bytes() % size_of(dtype) != 0) {
    throw Error(std::string(op) + " of " + std::string(name(dtype)) + ": recv has " + std::to_string(recv.bytes()) +
                " bytes: they must be a multiple of " + std::to_string(size_of(dtype)));
  }
}

inline void check_peer(std::string_view op, int n, int peer) {
  if (peer < 0 || peer >= n) {
    throw Error(std::string(op) + " rank " + std::to_string(peer) + ": the group has the ranks 0 to " +
                std::to_string(n - 1));
  }
}

[[noreturn]] inline void fail_recv(int from, std::size_t expected, const std::string& sent) {
  throw Error("recv from rank " + std::to_string(from) + ": " + sent + " bytes were sent, but " +
              std::to_string(expected) + " were expected: send and recv must agree on the size");
}
[[noreturn]] inline void fail_recv(int from, std::size_t expected, std::size_t sent) {
  fail_recv(from, expected, std::to_string(sent));
}

/// `device` is rank `rank` of the n members of the group.
[[noreturn]] inline void fail_absent(std::string_view op, int device, int rank, int n) {
  throw Error(std::string(op) + ": device " + std::to_string(device) + " (rank " + std::to_string(rank) + " of " +
              std::to_string(n) + ") has returned without taking part: every device of a group must make the same " +
              "calls");
}

/// The process of `device` has ended. `last` is the last communication that it started, if that is known.
[[noreturn]] inline void fail_died(std::string_view op, int device, std::size_t rank, std::size_t n,
                                   const std::string& last) {
  throw Error(std::string(op) + ": device " + std::to_string(device) + " (rank " + std::to_string(rank) + " of " +
              std::to_string(n) + ") has died" + (last.empty() ? "" : ", after it began " + last) +
              ": its output or the system log may say why (killed for lack of memory?); start again, from the last " +
              "checkpoint if there is one");
}

}  // namespace shardlib::detail
