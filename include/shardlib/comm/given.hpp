// What a program gives its devices that its types say is the same on several of them. Their collectives compare it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shardlib/support/error.hpp"
#include "shardlib/types/call_site.hpp"

namespace shardlib::detail {

/// A hash of texts and numbers that is the same in all processes (64-bit FNV-1a).
class Fingerprint {
 public:
  Fingerprint& add(std::string_view text) {
    for (const char c : text) add_byte(static_cast<unsigned char>(c));
    return add(text.size());
  }
  Fingerprint& add(std::uint64_t number) {
    for (int i = 0; i < 8; ++i) add_byte((number >> (8 * i)) & 255U);
    return *this;
  }
  [[nodiscard]] std::uint64_t value() const { return hash_; }

 private:
  void add_byte(std::uint64_t byte) { hash_ = (hash_ ^ byte) * 1099511628211U; }
  std::uint64_t hash_ = 14695981039346656037U;
};

/// The fingerprint of an op's call: its name, op spec and line.
inline std::uint64_t fingerprint(const OpInfo& op) {
  return Fingerprint()
      .add(op.name)
      .add(op.spec)
      .add(op.site.file_name())
      .add(op.site.line())
      .add(op.site.column())
      .value();
}

/// Something that a program has given to a device. Plain data.
struct GivenInput {
  enum Kind : std::uint8_t {
    data,   ///< a host array; `first` is the checksum of the device's shard
    key,    ///< of random numbers; `first` is the seed, `second` the stream
    update  ///< a step of an optimizer; `first` has the bits of the learning rate, `second` is the step
  };
  Kind kind = data;
  OpInfo op = {};
  std::uint64_t first = 0, second = 0;
  std::uint64_t count = 0;  ///< how often the program has called this op at this line before

  /// The learning rate, with which optimizers compute in f32.
  [[nodiscard]] float rate() const { return static_cast<float>(std::bit_cast<double>(first)); }
  /// "random_normal<`M F`> at trainer.cpp:12 with the key {1, 5}"
  [[nodiscard, gnu::cold]] std::string describe() const {
    const std::string call = op.describe();
    if (kind == key) return call + " with the key {" + std::to_string(first) + ", " + std::to_string(second) + "}";
    if (kind == data) return call + " with data of the checksum " + std::to_string(first);
    std::array<char, 32> digits = {};
    char* const end = std::to_chars(digits.data(), digits.data() + digits.size(), rate()).ptr;
    return call + " with the learning rate " + std::string(digits.data(), end) + " at step " + std::to_string(second) +
           ", its update number " + std::to_string(count + 1);
  }
};

/// What a device was given between two collectives of a group: sums of hashes, and the last entries. The order does not
/// count. `calls` hashes what was called and how often, `values` what it was given. If two members made the same calls,
/// they must have given the same values. Otherwise nothing is known: a member may do more than another. Plain data.
struct GivenWindow {
  struct Sum {
    std::uint32_t calls = 0, values = 0;
  };
  Sum inputs = {}, updates = {};        ///< of data and keys, and of updates
  std::array<GivenInput, 3> last = {};  ///< the newest first
  std::uint8_t entries = 0;             ///< in `last`

  /// The sums, as a message has them.
  [[nodiscard]] std::array<std::uint64_t, 2> sums() const {
    const auto both = [](const Sum& sum) { return std::uint64_t{sum.calls} << 32 | sum.values; };
    return {both(inputs), both(updates)};
  }
  /// A line for each entry of `last`.
  [[nodiscard, gnu::cold]] std::string describe() const {
    std::string text;
    for (std::size_t i = 0; i < entries; ++i) text += (i == 0 ? "" : "\n") + last[i].describe();
    return text;
  }
};

/// Whether members with these sums made the same calls with other values.
inline bool contradict(const std::array<std::uint64_t, 2>& a, const std::array<std::uint64_t, 2>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i] && a[i] >> 32 == b[i] >> 32) return true;
  return false;
}
inline bool contradict(const GivenWindow& a, const GivenWindow& b) {
  return contradict(a.sums(), b.sums());
}

/// All that a device was given. A set of mesh axes is a number with a bit for each axis.
class GivenInputs {
 public:
  using AxisSet = std::uint64_t;

  /// Adds what the members along `axes` are given alike. `size` is that of the tensor's shard.
  void add(GivenInput given, std::uint64_t size, AxisSet axes) {
    const std::uint64_t call = Fingerprint().add(fingerprint(given.op)).add(given.kind).add(size).value();
    given.count = counts_[call]++;
    // A device may be given more than another, or earlier: only calls of the same number are compared. It may not make
    // more updates: their number is a part of the value.
    const bool is_update = given.kind == GivenInput::update;
    const std::uint64_t number = is_update ? 0 : given.count;
    const std::uint64_t calls = Fingerprint().add(call).add(number).value();
    const std::uint64_t value = Fingerprint()
                                    .add(call)
                                    .add(is_update ? std::bit_cast<std::uint32_t>(given.rate()) : given.first)
                                    .add(given.second)
                                    .add(is_update ? given.count : 0)
                                    .value();
    Total& total = totals_of(axes);
    add(is_update ? total.updates : total.inputs, {folded(calls), folded(value)});
    newest_[added_++ % newest_.size()] = {axes, given};
  }

  /// What a group over `axes` has compared.
  struct Seen {
    GivenWindow::Sum inputs = {}, updates = {};
    std::uint64_t added = 0;
  };
  /// What was given since the last call with `seen` to tensors that the members along `axes` have alike.
  [[nodiscard]] GivenWindow since(Seen& seen, AxisSet axes) const {
    GivenWindow window;
    if (seen.added == added_) return window;
    Seen now{.added = added_};
    for (const Total& total : totals_) {
      if ((total.axes & axes) != axes) continue;
      add(now.inputs, total.inputs);
      add(now.updates, total.updates);
    }
    window.inputs = difference(now.inputs, seen.inputs);
    window.updates = difference(now.updates, seen.updates);
    const std::uint64_t kept = std::min<std::uint64_t>(added_ - seen.added, newest_.size());
    for (std::uint64_t i = 0; i < kept && window.entries < window.last.size(); ++i) {
      const auto& [there, given] = newest_[(added_ - 1 - i) % newest_.size()];
      if ((there & axes) == axes) window.last[window.entries++] = given;
    }
    seen = now;
    return window;
  }

 private:
  struct Total {
    AxisSet axes = 0;
    GivenWindow::Sum inputs = {}, updates = {};
  };
  static std::uint32_t folded(std::uint64_t hash) { return static_cast<std::uint32_t>(hash ^ hash >> 32); }
  static void add(GivenWindow::Sum& to, const GivenWindow::Sum& sum) {
    to.calls += sum.calls;
    to.values += sum.values;
  }
  static GivenWindow::Sum difference(const GivenWindow::Sum& a, const GivenWindow::Sum& b) {
    return {a.calls - b.calls, a.values - b.values};
  }
  Total& totals_of(AxisSet axes) {
    const auto found = std::ranges::find(totals_, axes, &Total::axes);
    return found != totals_.end() ? *found : totals_.emplace_back(Total{.axes = axes});
  }

  std::unordered_map<std::uint64_t, std::uint64_t> counts_;  ///< of each call
  std::vector<Total> totals_;
  std::array<std::pair<AxisSet, GivenInput>, 8> newest_ = {};
  std::uint64_t added_ = 0;
};

/// The inputs as one group of the device reads them.
class GivenReader {
 public:
  GivenReader() = default;
  GivenReader(std::shared_ptr<const GivenInputs> inputs, GivenInputs::AxisSet axes)
      : inputs_(std::move(inputs)), axes_(axes) {}
  [[nodiscard]] GivenWindow next() { return inputs_ ? inputs_->since(seen_, axes_) : GivenWindow(); }

 private:
  std::shared_ptr<const GivenInputs> inputs_;
  GivenInputs::AxisSet axes_ = 0;
  GivenInputs::Seen seen_;
};

/// Throws the error for two members that were given other values; `theirs` is as GivenWindow::describe returns it.
[[noreturn]] inline void fail_given(int rank, std::size_t size, const GivenWindow& mine, int other,
                                    std::string_view theirs) {
  const auto has_line = [](std::string_view text, std::string_view line) {
    return ("\n" + std::string(text) + "\n").find("\n" + std::string(line) + "\n") != std::string::npos;
  };
  // Of each member, the newest entry that the other lacks. It may be older than the entries that are kept.
  std::string here = "something else before that", there = here;
  bool is_update = false;
  for (std::size_t i = mine.entries; i-- > 0;) {
    if (const std::string line = mine.last[i].describe(); !has_line(theirs, line)) {
      here = line;
      is_update = mine.last[i].kind == GivenInput::update;
    }
  }
  const std::string all = mine.describe();
  for (std::string_view rest = theirs; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (has_line(all, line)) continue;
    there = line;
    break;
  }
  throw Error("rank " + std::to_string(rank) + " of " + std::to_string(size) + " has called " + here + ", where rank " +
              std::to_string(other) + " has called " + there + ": " +
              (is_update ? "all ranks make the same steps; let all of them skip a step or none, and compute the "
                           "learning rate from what they share"
                         : "a tensor is the same on all ranks of an axis that its spec does not name; give them the "
                           "same, or name the axis, as in `dim/axis`"));
}

}  // namespace shardlib::detail
