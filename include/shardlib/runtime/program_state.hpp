// A device's state of the running program: the mode, the counter of the tape, the open scopes of names, pending
// collectives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/runtime/op_report.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/handle.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/support/stopwatch.hpp"
#include "shardlib/support/with_value.hpp"
#include "shardlib/types/numbers_in.hpp"

namespace shardlib::detail {

class NameSizes;           // names.hpp
struct PendingCollective;  // pending_collective.hpp

/// A RecomputePolicy, parsed: the results that the forward pass keeps for the backward pass.
struct Kept : Counted {
  explicit Kept(bool m = true, std::vector<std::string> o = {}, bool all = false)
      : marked(m), ops(std::move(o)), all_occur(all) {}

  bool marked;                   ///< it keeps the arguments of save_for_backward
  std::vector<std::string> ops;  ///< it keeps the results of these ops
  bool all_occur;                ///< an op that does not occur is an error
};

/// A part of the model, as its leaves name it: "layers/3".
struct ModelPart : Counted {
  explicit ModelPart(std::string n) : name(std::move(n)) {}
  std::string name;
};

/// A record of one run of a checkpointed function: the number of its ops, and a hash of their names, specs, sizes,
/// numbers and operands. The record of the second run has to equal that of the first.
struct FunctionRun {
  std::uint64_t number = 0;  ///< of the call, which its second run has, too
  std::size_t ops = 0;
  std::size_t calls = 0;

  void mix(std::size_t value) {
    calls = (calls ^ value) * 0x9e3779b97f4a7c15U;
    calls ^= calls >> 32U;
  }
  /// The number of a tensor: of the result of the last op, or of one that no op has made.
  [[nodiscard]] std::uint64_t tensor(std::size_t op) const { return number << 32U | op; }
  friend bool operator==(const FunctionRun&, const FunctionRun&) = default;
};

/// The VJP that runs now, if its result is differentiated again. Each op that reads a value of the tape must then have
/// a derivative by it.
struct Transposing {
  const OpInfo& op;                       ///< whose VJP it is
  std::vector<Slot> differentiable = {};  ///< the operands that the op running now has VJPs for
};

/// State of one device's program.
struct ProgramState {
  enum class Mode {
    eager,       ///< compute, and record for differentiation
    checkpoint,  ///< forward pass inside explicit_activation_checkpointing: compute, record nothing
    replay,      ///< the same function in the backward pass: record, compute when read
    start        ///< start gathers and scatters, compute when read, record nothing
  };
  Mode mode = Mode::eager;
  /// Whether ops compute their results at once.
  [[nodiscard]] bool computes() const { return mode == Mode::eager || mode == Mode::checkpoint; }
  std::vector<ValuePtr> saved;  ///< the values that save_for_backward keeps (checkpoint) or returns (replay)
  std::size_t next_saved = 0;
  FunctionRun ran;               ///< of the function that is checkpointed or replayed
  std::uint64_t numbers = 0;     ///< counts the calls of checkpointed functions, and the tensors that these were given
  Handle<const Kept> kept;       ///< the policy of the function that is checkpointed or replayed
  std::uint64_t sequence = 0;    ///< numbers the nodes of the tape
  std::uint64_t began = 0;       ///< the last number before the outermost value_and_grad
  std::uint64_t tape = 0;        ///< a number of the outermost value_and_grad, or of a pipeline's microbatch; else 0
  std::uint64_t checkpoint = 0;  ///< the number of the node that the checkpointed call gets which runs forward; else 0
  std::vector<Handle<NameSizes>> scopes;           ///< the innermost one applies; a replay shares it
  std::vector<Handle<PendingCollective>> pending;  ///< in the order of their start
  bool overlaps = false;    ///< the differentiated function calls prefetch, so sums of gradients are asynchronous
  std::uint64_t hooks = 0;  ///< number of times that `prefetch` has run, forward or backward

  struct Count {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;  ///< sent by this device in collectives
    double flops = 0;        ///< of products; a multiply-add counts as two
  };
  std::map<std::string, Count, std::less<>> counts;

  OpWork work;                                    ///< of the op that runs now, while there is an observer
  std::function<void(const OpReport&)> observer;  ///< called after each op
  bool note_reads = false;
  bool keep_shards = false;        ///< an op's operands keep their shards until the observer has the op's report
  std::size_t residual_bytes = 0;  ///< bytes of the pool that the last value_and_grad kept for its backward pass
  enum class Pass { none, forward, backward };
  Pass pass = Pass::none;        ///< of value_and_grad
  bool counting = false;         ///< run::count_step runs a step of the trainer
  bool defers_products = false;  ///< a VJP runs whose result a gelu's VJP reads, which may be one kernel with a product
  bool twice = false;            ///< the derivatives of what runs now are themselves differentiated
  Transposing* transposing = nullptr;  ///< null: no VJP that is differentiated runs now
  Handle<const ModelPart> part;  ///< what runs now; null outside of checkpointed functions and their backward pass
  std::string stage_axis;        ///< of the StagedMesh, if there is one: a mesh without it is a stage's
  Stopwatch stopwatch;           ///< times of value_and_grad's passes and of the collectives, since the last reset
};

[[gnu::cold]] SHARDLIB_INLINE ProgramState& program_state(const DevicePtr& device);

/// Adds an op to the run of the function that is checkpointed or replayed.
[[gnu::cold]] SHARDLIB_INLINE void note_op(ProgramState& state, const Value& out, NumbersIn numbers = {});
/// Adds an operand of the next op to that run: which of the function's own tensors it is, or of the others. Tensors of
/// one type and size are told apart, so that a function that takes another one when it runs again is found.
[[gnu::cold]] SHARDLIB_INLINE void note_operand(const Value& x);
/// The number of a tensor for functions that run again. It gets one here if no op has numbered it.
[[nodiscard, gnu::cold]] SHARDLIB_INLINE std::uint64_t tensor_number(const Value& x);
/// The next of the values that a checkpointed function has saved, for its replay, which needs it in place of `due`.
[[nodiscard, gnu::cold]] SHARDLIB_INLINE const Value& next_saved(ProgramState& state, const Value& due);
/// The error of a checkpointed function that is not the same when it runs again: `op` is where that shows.
[[noreturn, gnu::cold]] SHARDLIB_INLINE void fail_replay(const OpInfo& op, const std::string& why,
                                                         const DevicePtr& device);

/// Sets the program's mode and resets it on every exit from the C++ block.
class WithMode {
 public:
  WithMode(ProgramState& state, ProgramState::Mode mode, std::vector<ValuePtr> saved = {},
           Handle<const Kept> kept = nullptr)
      : mode_(state.mode, mode),
        kept_(state.kept, std::move(kept)),
        saved_(state.saved, std::move(saved)),
        next_(state.next_saved, 0),
        ran_(state.ran, {}),
        checkpoint_(state.checkpoint, 0) {}

 private:
  WithValue<ProgramState::Mode> mode_;
  WithValue<Handle<const Kept>> kept_;
  WithValue<std::vector<ValuePtr>> saved_;
  WithValue<std::size_t> next_;
  WithValue<FunctionRun> ran_;
  WithValue<std::uint64_t> checkpoint_;
};

}  // namespace shardlib::detail

#ifndef SHARDLIB_COMPILED
#include "shardlib/runtime/impl/program_state.hpp"
#endif
