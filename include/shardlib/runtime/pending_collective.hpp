// A collective that has started, and whose result nothing has read yet.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "shardlib/comm/communicator.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/handle.hpp"

namespace shardlib::detail {

/// An asynchronous collective, as the tape keeps it: the Request of the communicator with the values that wait for it.
/// A program may hold an InFlight of it. The first op that reads its result waits for it. The destructor does not wait,
/// because a failing device must not wait for the others.
struct PendingCollective : Counted {
  Request request;
  std::shared_ptr<Buffer> result;  ///< set once `request` is complete
  std::uint64_t hook;              ///< ProgramState::hooks at its start, or at the latest request for it
  bool done = false;

  ValuePtr operand;   ///< for a gather, or while ProgramState::keep_shards is set
  ValuePtr gathered;  ///< for a gather: receives the result at the first read
  /// For the sum of a gradient, or a shift: likewise. It lives as long as its deferred function, which holds a handle
  /// to this.
  Storage* deferred = nullptr;
  /// The operand of a sum or a shift, held until `request` is complete, so that memory use does not depend on when
  /// peers read it.
  Buffer sent;

  PendingCollective(Request r, std::shared_ptr<Buffer> b, std::uint64_t h)
      : request(std::move(r)), result(std::move(b)), hook(h) {}
  PendingCollective(const PendingCollective&) = delete;
  PendingCollective& operator=(const PendingCollective&) = delete;
  ~PendingCollective() noexcept override { request.drop(); }
};

}  // namespace shardlib::detail
