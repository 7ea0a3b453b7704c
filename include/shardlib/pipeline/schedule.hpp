// Pipeline schedules as values: which rank runs which task when. The names and arguments are JaxPP's.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/pipeline/task.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::pipeline {

/// Any schedule: for each number of microbatches, a list of tasks for each rank of the stage axis.
class Schedule {
 public:
  /// The lists for this many microbatches, at least one. It may throw UsageError for a number without lists.
  using Generator = std::function<TaskLists(int microbatches)>;

  /// A schedule of your own. `owners` has the rank of each stage; `name` appears in messages.
  Schedule(std::string name, std::vector<int> owners, Generator generator)
      : name_(std::move(name)), owners_(std::move(owners)), generator_(std::move(generator)) {}
  /// A compile error for a name with numbers, which a schedule of the library has.
  template <class Name, class... Number>
  requires(std::is_convertible_v<Name, std::string_view> &&
           (std::is_arithmetic_v<Number> && ...)) explicit Schedule(const Name& /*name*/, Number... /*sizes*/) {
    static_assert(std::is_void_v<Name>,
                  "Schedule: it is made of a name, owners and a generator; a schedule of the library has a function, "
                  "make_schedule(\"1f1b\", num_stages, mpmd_dim)");
  }

  [[nodiscard]] const std::string& name() const { return name_; }
  /// The number of stages on all ranks together.
  [[nodiscard]] int num_stages() const { return static_cast<int>(owners_.size()); }
  /// The number of ranks, the size of the stage axis.
  [[nodiscard]] SHARDLIB_INLINE int mpmd_dim() const;
  /// The rank that holds the stage's weights and runs its tasks. Throws UsageError for a stage that is not there.
  [[nodiscard]] SHARDLIB_INLINE int rank_of(int stage) const;
  /// The stages of a rank, in ascending order.
  [[nodiscard]] SHARDLIB_INLINE std::vector<int> stages_of(int rank) const;

  /// The tasks of each rank, checked by `validate`. Throws UsageError when the schedule has none for this number of
  /// microbatches: then with the reason, and a number that fits.
  [[nodiscard]] SHARDLIB_INLINE TaskLists tasks(int microbatches) const;

 private:
  std::string name_;
  std::vector<int> owners_;
  Generator generator_;
};

// All constructors throw UsageError for sizes that do not fit together. With one stage for each rank, stage s is on
// rank s.

/// All forward passes, then all backward passes (Huang et al. 2018). Keeps the activations of all microbatches.
struct GPipe : Schedule {
  SHARDLIB_INLINE explicit GPipe(int num_stages);
};

/// One forward, one backward, after one forward pass for each later stage (Narayanan et al. 2019).
struct Std1F1B : Schedule {
  SHARDLIB_INLINE explicit Std1F1B(int num_stages);
};

/// 1F1B with twice as many forward passes ahead, so that transfers in both directions overlap with tasks (Zhuang et al.
/// 2022).
struct Eager1F1B : Schedule {
  SHARDLIB_INLINE explicit Eager1F1B(int num_stages);
};

/// 1F1B with halved backward passes: those of the weights fill the waits at the end (Qi et al. 2023, ZB-H1). Needs at
/// least as many microbatches as stages.
struct ZeroBubble : Schedule {
  SHARDLIB_INLINE explicit ZeroBubble(int num_stages);
};

/// 1F1B with v = num_stages / mpmd_dim stages on each rank, s on rank s % mpmd_dim (Narayanan et al. 2021).
/// Microbatches go in rounds of at least mpmd_dim, all of the same size. The last stage's forward and backward tasks
/// are fused; with `fuse_steady_state` all such pairs are.
struct Interleaved1F1B : Schedule {
  /// The numbers of stages and of ranks, and whether to fuse more.
  struct Arguments {
    int num_stages = 1, mpmd_dim = 1;
    bool fuse_steady_state = false;
  };
  SHARDLIB_INLINE explicit Interleaved1F1B(const Arguments& arguments);
};

/// Interleaved1F1B with one more forward pass ahead on each rank, so that a transfer can overlap with a task (Kimi Team
/// 2025). The last stage's tasks are fused where they follow each other.
struct KimiK2 : Schedule {
  SHARDLIB_INLINE explicit KimiK2(const Interleaved1F1B::Arguments& arguments);
};

/// All forward passes in the order of Interleaved1F1B, then all backward passes: GPipe with several stages on a rank.
struct InterleavedGPipe : Schedule {
  /// The numbers of stages, `num_stages`, and of ranks, `mpmd_dim`.
  struct Arguments {
    int num_stages = 1, mpmd_dim = 1;
  };
  SHARDLIB_INLINE explicit InterleavedGPipe(const Arguments& arguments);
};

/// Two stages on each rank, r and 2 * mpmd_dim - 1 - r, so that microbatches go there and back (DeepSeek 2025).
/// All backward passes are halved. Needs at least num_stages = 2 * mpmd_dim microbatches.
struct DualPipeV : Schedule {
  /// The numbers of stages and of ranks.
  struct Arguments {
    int num_stages = 2, mpmd_dim = 1;
  };
  SHARDLIB_INLINE explicit DualPipeV(const Arguments& arguments);
};

/// CSV: a row for each rank, a task in each cell. Fused tasks are quoted, because of their commas.
[[nodiscard]] SHARDLIB_INLINE std::string to_csv(const TaskLists& lists);

/// Reads what `to_csv` writes. Empty cells are skipped, so that a spreadsheet can show waiting times; a FusedTask need
/// not be quoted. A stage belongs to the rank of its row. The schedule is for exactly the microbatches of the text.
/// `name`, usually the file, begins every message. Throws UsageError with row and cell when the text is wrong, and as
/// `validate` does when the schedule is. `parse_csv("fwd_0__0,bwd_0__0", "mine")`
[[nodiscard]] SHARDLIB_INLINE Schedule parse_csv(std::string_view text, const std::string& name);

/// Reads a schedule from a file, as `parse_csv` does. Throws UsageError when it cannot be read.
[[nodiscard]] SHARDLIB_INLINE Schedule read_csv(const std::string& path);

/// The names that `make_schedule` takes: "gpipe", "1f1b", "eager-1f1b", "zero-bubble", "interleaved-1f1b",
/// "interleaved-gpipe", "kimi-k2", "dualpipe-v".
[[nodiscard]] SHARDLIB_INLINE const std::vector<std::string>& schedule_names();

/// The schedule of this name, or, where it ends in ".csv", that of the file. Throws UsageError when there is none, or
/// when it does not go with the numbers of stages and ranks. `make_schedule("1f1b", 4, 4)`, `make_schedule("mine.csv",
/// 4, 2)`
[[nodiscard]] SHARDLIB_INLINE Schedule make_schedule(std::string_view name, int num_stages, int mpmd_dim);

}  // namespace shardlib::pipeline

#ifndef SHARDLIB_COMPILED
#include "shardlib/pipeline/impl/schedule.hpp"
#include "shardlib/pipeline/impl/schedule_csv.hpp"
#endif
