// Definitions of schedule.hpp: all but CSV.
#pragma once

#include "shardlib/pipeline/schedule.hpp"

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <map>

#include "shardlib/pipeline/validate.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::pipeline {

SHARDLIB_INLINE int Schedule::mpmd_dim() const {
  return owners_.empty() ? 0 : *std::max_element(owners_.begin(), owners_.end()) + 1;
}

SHARDLIB_INLINE int Schedule::rank_of(int stage) const {
  if (stage < 0 || stage >= num_stages())
    throw UsageError(name_ + ": there is no stage " + std::to_string(stage) + " among its " +
                     std::to_string(num_stages()));
  return owners_[static_cast<std::size_t>(stage)];
}

SHARDLIB_INLINE std::vector<int> Schedule::stages_of(int rank) const {
  std::vector<int> stages;
  for (int stage = 0; stage < num_stages(); ++stage)
    if (rank_of(stage) == rank) stages.push_back(stage);
  return stages;
}

SHARDLIB_INLINE TaskLists Schedule::tasks(int microbatches) const {
  if (microbatches < 1)
    throw UsageError(name_ + ": " + std::to_string(microbatches) + " microbatches; a training step needs at least 1");
  TaskLists lists = generator_(microbatches);
  validate(name_, lists, owners_, microbatches);
  return lists;
}

namespace detail {

/// Writes a rank's list; microbatches of a stage come in order, so each stage's are counted for each kind of task.
class Writer {
 public:
  Task next(TaskKind kind, int stage) { return {kind, stage, count_[{kind, stage}]++}; }
  Task fwd(int stage) { return next(TaskKind::fwd, stage); }
  Task bwd(int stage) { return next(TaskKind::bwd, stage); }
  Task bwdA(int stage) { return next(TaskKind::bwdA, stage); }
  Task bwdW(int stage) { return next(TaskKind::bwdW, stage); }
  /// How many tasks of this kind there are already.
  [[nodiscard]] int count(TaskKind kind, int stage) const {
    const auto found = count_.find({kind, stage});
    return found == count_.end() ? 0 : found->second;
  }
  template <class... Tasks>
  void add(const Tasks&... tasks) {
    (list.push_back(tasks), ...);
  }
  template <class... Tasks>
  void fuse(const Tasks&... tasks) {
    list.push_back(FusedTask(std::vector<Task>{tasks...}));
  }

  TaskList list;

 private:
  std::map<std::pair<TaskKind, int>, int> count_;
};

/// f(rank) for all ranks.
template <class F>
TaskLists for_ranks(int ranks, const F& f) {
  TaskLists lists;
  for (int rank = 0; rank < ranks; ++rank) lists.push_back(f(rank));
  return lists;
}

/// "GPipe(num_stages=4)". Throws for a size below 1.
inline std::string named(const char* schedule, std::initializer_list<std::pair<const char*, int>> arguments) {
  std::string text;
  for (const auto& [name, value] : arguments)
    text += (text.empty() ? "" : ", ") + std::string(name) + "=" + std::to_string(value);
  text = std::string(schedule) + "(" + text + ")";
  for (const auto& [name, value] : arguments)
    if (value < 1) throw UsageError(text + ": " + name + " must be at least 1");
  return text;
}

inline std::string interleaved_name(const char* schedule, const Interleaved1F1B::Arguments& arguments) {
  const std::string name = named(schedule, {{"num_stages", arguments.num_stages}, {"mpmd_dim", arguments.mpmd_dim}});
  if (arguments.num_stages % arguments.mpmd_dim != 0)
    throw UsageError(
        name +
        ": every rank must have as many stages as the others, but mpmd_dim does not divide "
        "num_stages; take " +
        std::to_string(arguments.num_stages / arguments.mpmd_dim * arguments.mpmd_dim + arguments.mpmd_dim) +
        " stages, or another number of ranks");
  return name;
}

/// Stage s on rank s % mpmd_dim. It also accepts sizes that a later check refuses.
inline std::vector<int> looped(int num_stages, int mpmd_dim) {
  std::vector<int> owners;
  for (int stage = 0; stage < num_stages; ++stage) owners.push_back(stage % std::max(1, mpmd_dim));
  return owners;
}
inline std::vector<int> one_each(int num_stages) {
  return looped(num_stages, num_stages);
}

inline std::string dual_pipe_v_name(const DualPipeV::Arguments& arguments) {
  const std::string name = named("DualPipeV", {{"num_stages", arguments.num_stages}, {"mpmd_dim", arguments.mpmd_dim}});
  if (arguments.num_stages != 2 * arguments.mpmd_dim)
    throw UsageError(name + ": every rank has two stages, so num_stages must be 2 * mpmd_dim = " +
                     std::to_string(2 * arguments.mpmd_dim));
  return name;
}

/// Stages 0, 1, ... on the ranks in order, and the same number back.
inline std::vector<int> folded(int mpmd_dim) {
  std::vector<int> owners;
  for (int rank = 0; rank < mpmd_dim; ++rank) owners.push_back(rank);
  for (int rank = mpmd_dim - 1; rank >= 0; --rank) owners.push_back(rank);
  return owners;
}

/// 1F1B with `ahead` forward passes for each later stage before the first backward pass.
inline TaskLists one_forward_one_backward(int num_stages, int microbatches, int ahead) {
  return for_ranks(num_stages, [&](int rank) {
    Writer w;
    const int warmup = std::min(microbatches, ahead * (num_stages - 1 - rank));
    for (int i = 0; i < warmup; ++i) w.add(w.fwd(rank));
    for (int i = warmup; i < microbatches; ++i) w.add(w.fwd(rank), w.bwd(rank));
    for (int i = 0; i < warmup; ++i) w.add(w.bwd(rank));
    return w.list;
  });
}

inline TaskList zero_bubble(int num_stages, int rank, int microbatches) {
  Writer w;
  for (int i = rank; i < num_stages; ++i) w.add(w.fwd(rank));
  for (int i = 0; i < rank; ++i) w.add(w.bwdA(rank), w.fwd(rank));
  for (int i = 0; i < microbatches; ++i) {
    if (w.count(TaskKind::bwdA, rank) < microbatches) w.add(w.bwdA(rank));
    w.add(w.bwdW(rank));
    if (w.count(TaskKind::fwd, rank) < microbatches) w.add(w.fwd(rank));
  }
  return w.list;
}

/// The microbatches of a round: each stage of a rank takes one round before the next stage does.
inline int round_size(const std::string& name, int mpmd_dim, int microbatches) {
  const auto rounds = [&](int m) { return std::max(1, m / mpmd_dim); };
  if (microbatches % rounds(microbatches) != 0) {
    int below = microbatches, above = microbatches;
    while (below % rounds(below) != 0) --below;
    while (above % rounds(above) != 0) ++above;
    throw UsageError(name + ": " + std::to_string(microbatches) + " microbatches make " +
                     std::to_string(rounds(microbatches)) + " rounds of at least mpmd_dim=" + std::to_string(mpmd_dim) +
                     ", which must all have the same size, but " + std::to_string(rounds(microbatches)) +
                     " does not divide " + std::to_string(microbatches) + "; take " + std::to_string(below) + " or " +
                     std::to_string(above) + " microbatches");
  }
  return microbatches / rounds(microbatches);
}

/// The forward passes of a rank before its first backward pass, in 1F1B of several stages on a rank.
inline int interleaved_warmup(const Interleaved1F1B::Arguments& arguments, int rank, int round) {
  return (arguments.num_stages / arguments.mpmd_dim - 1) * round + 2 * (arguments.mpmd_dim - 1 - rank);
}

inline TaskList interleaved(const Interleaved1F1B::Arguments& arguments, int rank, int microbatches, int round,
                            int most_warmup) {
  const auto& [num_stages, mpmd_dim, fuse] = arguments;
  const int chunks = num_stages / mpmd_dim, total = chunks * microbatches;
  const auto stage = [&, p = mpmd_dim](int chunk) { return chunk * p + rank; };
  const int warmup = std::min(total, most_warmup);
  Writer w;
  const auto forward = [&](int i) { return w.fwd(stage(i / round % chunks)); };
  const auto backward = [&](int i) { return w.bwd(stage(chunks - 1 - i / round % chunks)); };
  for (int i = 0; i < warmup; ++i) w.add(forward(i));
  for (int i = warmup; i < total; ++i) {
    const Task fwd = forward(i), bwd = backward(i - warmup);
    if (fuse || fwd.stage == num_stages - 1)
      w.fuse(fwd, bwd);
    else
      w.add(fwd, bwd);
  }
  for (int i = total - warmup; i < total; ++i) w.add(backward(i));
  return w.list;
}

inline TaskList dual_pipe_v(int ranks, int rank, int microbatches) {
  const int there = rank, back = 2 * ranks - 1 - rank, behind = ranks - 1 - rank;
  Writer w;
  // A whole backward pass is written in two halves, so that the gradient leaves after the first one.
  const auto whole = [&](int stage) {
    const Task a = w.bwdA(stage), weights = w.bwdW(stage);
    return std::pair{a, weights};
  };
  const auto backward = [&](int stage) {
    const auto [a, weights] = whole(stage);
    w.fuse(a, weights);
  };
  const auto both = [&](int forward_stage, int backward_stage) {
    const Task fwd = w.fwd(forward_stage);
    const auto [a, weights] = whole(backward_stage);
    w.fuse(fwd, a, weights);
  };
  for (int i = 0; i < 2 * behind; ++i) w.add(w.fwd(there));
  for (int i = 0; i <= rank; ++i) w.add(w.fwd(there), w.fwd(back));
  for (int i = 0; i < behind; ++i) w.add(w.bwdA(back), w.bwdW(back), w.fwd(back));
  for (int i = 0; i < microbatches - 2 * ranks + rank + 1; ++i) {
    if (i == 0 && behind == 0) {
      // Here the last forward pass of `back` came right before, so there is nothing to overlap with yet.
      w.add(w.fwd(there));
      backward(back);
    } else {
      both(there, back);
    }
    both(back, there);
  }
  for (int i = 0; i < behind; ++i) {
    backward(back);
    both(back, there);
  }
  // The end: halves of the weights are put off, by odd ranks those of `back`, by even ranks those of `there`; but not
  // on the first stage, whose gradients no other task needs.
  for (int i = 0; i <= rank; ++i) {
    const bool late = i >= (rank + 1) / 2;
    if (late && rank % 2 == 1)
      w.add(w.bwdA(back));
    else
      backward(back);
    if (late && rank % 2 == 0 && there != 0)
      w.add(w.bwdA(there));
    else
      backward(there);
  }
  for (int i = 0; i < behind; ++i) {
    if (there != 0)
      w.add(w.bwdA(there));
    else
      backward(there);
  }
  for (int i = 0; i < microbatches; ++i)
    for (const int stage : {there, back})
      if (w.count(TaskKind::bwdW, stage) == i) w.add(w.bwdW(stage));
  return w.list;
}

inline void need_microbatches(const std::string& name, int microbatches, int least) {
  if (microbatches < least)
    throw UsageError(name + ": it needs at least num_stages=" + std::to_string(least) +
                     " microbatches to fill the pipeline, not " + std::to_string(microbatches));
}

}  // namespace detail

SHARDLIB_INLINE GPipe::GPipe(int num_stages)
    : Schedule(detail::named("GPipe", {{"num_stages", num_stages}}), detail::one_each(num_stages),
               [num_stages](int microbatches) {
                 return detail::for_ranks(num_stages, [&](int rank) {
                   detail::Writer w;
                   for (int i = 0; i < microbatches; ++i) w.add(w.fwd(rank));
                   for (int i = 0; i < microbatches; ++i) w.add(w.bwd(rank));
                   return w.list;
                 });
               }) {}

SHARDLIB_INLINE Std1F1B::Std1F1B(int num_stages)
    : Schedule(
          detail::named("Std1F1B", {{"num_stages", num_stages}}), detail::one_each(num_stages),
          [num_stages](int microbatches) { return detail::one_forward_one_backward(num_stages, microbatches, 1); }) {}

SHARDLIB_INLINE Eager1F1B::Eager1F1B(int num_stages)
    : Schedule(
          detail::named("Eager1F1B", {{"num_stages", num_stages}}), detail::one_each(num_stages),
          [num_stages](int microbatches) { return detail::one_forward_one_backward(num_stages, microbatches, 2); }) {}

SHARDLIB_INLINE ZeroBubble::ZeroBubble(int num_stages)
    : Schedule(detail::named("ZeroBubble", {{"num_stages", num_stages}}), detail::one_each(num_stages),
               [num_stages, name = detail::named("ZeroBubble", {{"num_stages", num_stages}})](int microbatches) {
                 detail::need_microbatches(name, microbatches, num_stages);
                 return detail::for_ranks(
                     num_stages, [&](int rank) { return detail::zero_bubble(num_stages, rank, microbatches); });
               }) {}

namespace detail {

/// A schedule of several stages on a rank; warmup(rank, microbatches, round) is the number of forward passes before the
/// rank's first backward pass.
template <class F>
Schedule looped_schedule(const char* schedule, const Interleaved1F1B::Arguments& arguments, const F& warmup) {
  std::string name = interleaved_name(schedule, arguments);
  return {name, looped(arguments.num_stages, arguments.mpmd_dim), [=](int microbatches) {
            const int round = round_size(name, arguments.mpmd_dim, microbatches);
            return for_ranks(arguments.mpmd_dim, [&](int rank) {
              return interleaved(arguments, rank, microbatches, round, warmup(rank, microbatches, round));
            });
          }};
}

}  // namespace detail

SHARDLIB_INLINE Interleaved1F1B::Interleaved1F1B(const Arguments& arguments)
    : Schedule(detail::looped_schedule("Interleaved1F1B", arguments, [arguments](int rank, int, int round) {
        return detail::interleaved_warmup(arguments, rank, round);
      })) {}

SHARDLIB_INLINE KimiK2::KimiK2(const Interleaved1F1B::Arguments& arguments)
    : Schedule(detail::looped_schedule("KimiK2", arguments, [arguments](int rank, int, int round) {
        return detail::interleaved_warmup(arguments, rank, round) + 1;
      })) {}

SHARDLIB_INLINE InterleavedGPipe::InterleavedGPipe(const Arguments& arguments)
    : Schedule(detail::looped_schedule("InterleavedGPipe", {arguments.num_stages, arguments.mpmd_dim},
                                       [stages = arguments.num_stages](int, int microbatches, int) {
                                         return stages * microbatches;  // all, as a rank has no more
                                       })) {}

SHARDLIB_INLINE DualPipeV::DualPipeV(const Arguments& arguments)
    : Schedule(detail::dual_pipe_v_name(arguments), detail::folded(arguments.mpmd_dim),
               [ranks = arguments.mpmd_dim, name = detail::dual_pipe_v_name(arguments)](int microbatches) {
                 detail::need_microbatches(name, microbatches, 2 * ranks);
                 return detail::for_ranks(ranks,
                                          [&](int rank) { return detail::dual_pipe_v(ranks, rank, microbatches); });
               }) {}

SHARDLIB_INLINE const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names{
      "gpipe", "1f1b", "eager-1f1b", "zero-bubble", "interleaved-1f1b", "interleaved-gpipe", "kimi-k2", "dualpipe-v"};
  return names;
}

SHARDLIB_INLINE Schedule make_schedule(std::string_view name, int num_stages, int mpmd_dim) {
  const std::string title(name);
  const auto checked = [&](Schedule schedule) {
    if (schedule.num_stages() != num_stages || schedule.mpmd_dim() != mpmd_dim)
      throw UsageError("schedule `" + title + "` has " + std::to_string(schedule.num_stages()) + " stages on " +
                       std::to_string(schedule.mpmd_dim()) + " ranks, but the program has " +
                       std::to_string(num_stages) + " on " + std::to_string(mpmd_dim) +
                       "; choose as many ranks and stages as the schedule has, or another schedule");
    return schedule;
  };
  if (name.ends_with(".csv")) return checked(read_csv(title));
  if (name == "interleaved-1f1b") return Interleaved1F1B({.num_stages = num_stages, .mpmd_dim = mpmd_dim});
  if (name == "interleaved-gpipe") return InterleavedGPipe({.num_stages = num_stages, .mpmd_dim = mpmd_dim});
  if (name == "kimi-k2") return KimiK2({.num_stages = num_stages, .mpmd_dim = mpmd_dim});
  if (name == "dualpipe-v") return DualPipeV({.num_stages = num_stages, .mpmd_dim = mpmd_dim});
  if (name == "gpipe") return checked(GPipe(num_stages));
  if (name == "1f1b") return checked(Std1F1B(num_stages));
  if (name == "eager-1f1b") return checked(Eager1F1B(num_stages));
  if (name == "zero-bubble") return checked(ZeroBubble(num_stages));
  std::string known;
  for (const std::string& each : schedule_names()) known += each + ", ";
  throw UsageError("there is no schedule `" + title + "`; there are " + known + "and files that end in .csv");
}

}  // namespace shardlib::pipeline
