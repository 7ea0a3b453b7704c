// What a program gives its devices that its types say is the same on several of them. Their collectives compare it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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
    data,    ///< a host array; `first` is the checksum of the device's shard
    key,     ///< of random numbers; `first` is the seed, `second` the stream
    update,  ///< a step of an optimizer; `first` has the bits of the learning rate, `second` is the step
    average  ///< a step of an average; `first` has the bits of the part that it keeps
  };
  Kind kind = data;
  OpInfo op = {};
  std::uint64_t first = 0, second = 0;
  float setting = 1;        ///< the scale of an update's gradients, the rate of a key's dropout, otherwise 1
  std::uint64_t size = 0;   ///< the number of leaves of a step, otherwise the bytes of the device's shard
  std::uint64_t count = 0;  ///< how often the program has called this op at this line before

  /// What `describe` writes before the number of a step.
  static constexpr std::string_view numbered = ", its update number ";
  /// Whether it is a step, which changes a tree in place.
  [[nodiscard]] bool is_step() const { return kind == update || kind == average; }
  /// The learning rate, with which optimizers compute in f32, or the part that an average keeps.
  [[nodiscard]] float rate() const { return static_cast<float>(std::bit_cast<double>(first)); }
  /// "random_normal<`M F`> at trainer.cpp:12 with the key {1, 5}"
  [[nodiscard, gnu::cold]] std::string describe() const {
    const std::string call = op.describe();
    if (kind == data) return call + " with data of the checksum " + std::to_string(first);
    const auto digits = [](float x) {
      std::array<char, 32> text = {};
      return std::string(text.data(), std::to_chars(text.data(), text.data() + text.size(), x).ptr);
    };
    if (kind == key)
      return call + " with the key {" + std::to_string(first) + ", " + std::to_string(second) + "}" +
             (setting == 1 ? "" : " and the rate " + digits(setting));
    const std::string number = " for " + std::to_string(size) + (size == 1 ? " leaf" : " leaves") +
                               std::string(numbered) + std::to_string(count + 1);
    if (kind == average) return call + " with the kept part " + digits(rate()) + number;
    return call + " with the learning rate " + digits(rate()) + " at step " + std::to_string(second) +
           (setting == 1 ? "" : ", the gradients times " + digits(setting)) + number;
  }
};

/// The parts that are compared apart: data and keys, and updates.
enum class GivenPart : std::uint8_t { inputs, updates };

/// The sums of a GivenWindow's parts. Plain data, so other processes can read it.
struct GivenSums {
  std::array<std::uint64_t, 2> of_part = {};
};

/// What a device was given between two collectives of a group: of each part sums of hashes, and the newest entries. The
/// order does not count. `calls` hashes what was called and how often, `values` what it was given. If two members made
/// the same calls, they must have given the same values. Otherwise nothing is known, as a member may do more than
/// another. Of updates, all members make the same calls.
struct GivenWindow {
  static constexpr std::size_t most = 3;
  static constexpr std::string_view all_updates = "these are all updates";
  struct Sum {
    std::uint32_t calls = 0, values = 0;
  };
  struct Part {
    Sum sum = {};
    std::vector<GivenInput> newest = {};  ///< at most `most`, the newest first
  };
  std::array<Part, 2> parts = {};

  [[nodiscard]] GivenSums sums() const {
    const auto both = [](const Sum& sum) { return std::uint64_t{sum.calls} << 32 | sum.values; };
    return {{both(parts[0].sum), both(parts[1].sum)}};
  }
  /// A line for each entry of the part, and the line `all_updates` if there are no other updates. It ends with a
  /// newline, so a reader knows whether the text was cut there.
  [[nodiscard, gnu::cold]] std::string describe(GivenPart part) const {
    const Part& p = parts[static_cast<std::size_t>(part)];
    std::string text;
    for (const GivenInput& given : p.newest) text += given.describe() + "\n";
    if (part == GivenPart::updates && p.newest.size() < most) text += std::string(all_updates) + "\n";
    return text;
  }
};

/// The part in which members with these sums made the same calls with other values, or other updates.
inline std::optional<GivenPart> contradiction(const GivenSums& a, const GivenSums& b) {
  for (std::size_t i = 0; i < a.of_part.size(); ++i) {
    const std::uint64_t one = a.of_part[i], two = b.of_part[i];
    const auto part = static_cast<GivenPart>(i);
    if (one != two && (one >> 32 == two >> 32 || part == GivenPart::updates)) return part;
  }
  return std::nullopt;
}

/// All that a device was given. A set of mesh axes is a number with a bit for each axis.
class GivenInputs {
 public:
  using AxisSet = std::uint64_t;

  /// Adds what the members along `axes` are given alike.
  void add(GivenInput given, AxisSet axes) {
    const std::uint64_t call =
        Fingerprint().add(fingerprint(given.op)).add(given.kind).add(given.size).add(axes).value();
    given.count = counts_[call]++;
    // A device may be given more than another, or earlier: only calls of the same number are compared. It may not make
    // more updates: their number is a part of the value.
    const bool is_update = given.is_step();
    const std::uint64_t number = is_update ? 0 : given.count;
    const std::uint64_t calls = Fingerprint().add(call).add(number).value();
    const std::uint64_t value = Fingerprint()
                                    .add(call)
                                    .add(is_update ? std::bit_cast<std::uint32_t>(given.rate()) : given.first)
                                    .add(given.second)
                                    .add(std::bit_cast<std::uint32_t>(given.setting))
                                    .add(is_update ? given.count : 0)
                                    .value();
    Part& part = total_of(axes).parts[static_cast<std::size_t>(is_update ? GivenPart::updates : GivenPart::inputs)];
    add(part.sum, {folded(calls), folded(value)});
    std::ranges::move_backward(part.newest.begin(), part.newest.end() - 1, part.newest.end());
    part.newest.front() = {++added_, given};
  }

  /// What a group over `axes` has compared.
  struct Seen {
    std::array<GivenWindow::Sum, 2> sums = {};
    std::uint64_t added = 0;
  };
  /// What was given since the last call with `seen` to tensors that the members along `axes` have alike.
  [[nodiscard]] GivenWindow since(Seen& seen, AxisSet axes) const {
    GivenWindow window;
    if (seen.added == added_) return window;
    for (std::size_t i = 0; i < window.parts.size(); ++i) {
      GivenWindow::Part& part = window.parts[i];
      GivenWindow::Sum now;
      std::vector<Entry> entries;
      for (const Total& total : totals_) {
        if ((total.axes & axes) != axes) continue;
        add(now, total.parts[i].sum);
        for (const Entry& entry : total.parts[i].newest)
          if (entry.number > seen.added) entries.push_back(entry);
      }
      part.sum = difference(now, std::exchange(seen.sums[i], now));
      std::ranges::sort(entries, std::ranges::greater(), &Entry::number);
      entries.resize(std::min(entries.size(), GivenWindow::most));
      for (const Entry& entry : entries) part.newest.push_back(entry.given);
    }
    seen.added = added_;
    return window;
  }

 private:
  struct Entry {
    std::uint64_t number = 0;  ///< in the order of `add`, from 1
    GivenInput given = {};
  };
  struct Part {
    GivenWindow::Sum sum = {};
    std::array<Entry, GivenWindow::most> newest = {};  ///< the newest first
  };
  struct Total {
    AxisSet axes = 0;
    std::array<Part, 2> parts = {};
  };
  static std::uint32_t folded(std::uint64_t hash) { return static_cast<std::uint32_t>(hash ^ hash >> 32); }
  static void add(GivenWindow::Sum& to, const GivenWindow::Sum& sum) {
    to.calls += sum.calls;
    to.values += sum.values;
  }
  static GivenWindow::Sum difference(const GivenWindow::Sum& a, const GivenWindow::Sum& b) {
    return {a.calls - b.calls, a.values - b.values};
  }
  Total& total_of(AxisSet axes) {
    const auto found = std::ranges::find(totals_, axes, &Total::axes);
    return found != totals_.end() ? *found : totals_.emplace_back(Total{.axes = axes});
  }

  std::unordered_map<std::uint64_t, std::uint64_t> counts_;  ///< of each call
  std::vector<Total> totals_;
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

/// The lines of what GivenWindow::describe returned, without a last one that was cut.
inline std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> found;
  for (std::size_t end = 0; (end = text.find('\n')) != text.npos; text.remove_prefix(end + 1))
    found.push_back(text.substr(0, end));
  return found;
}
/// The newest entry of `mine` and one of `theirs` that are the same call with other values, of updates the same number.
/// A difference may be older than their entries.
inline std::optional<std::pair<std::string, std::string>> first_difference(
    const std::vector<std::string_view>& mine, const std::vector<std::string_view>& theirs) {
  const auto call = [](std::string_view line) { return line.substr(0, line.rfind(" with ")); };
  const auto number = [](std::string_view line) {
    return line.substr(std::min(line.size(), line.rfind(GivenInput::numbered)));
  };
  for (const std::string_view a : mine) {
    if (std::ranges::find(theirs, a) != theirs.end()) continue;
    for (const std::string_view b : theirs)
      if (call(a) == call(b) && number(a) == number(b) && std::ranges::find(mine, b) == mine.end())
        return std::pair(std::string(a), std::string(b));
  }
  return std::nullopt;
}
/// The newest update of `mine` that is certainly none of theirs. `""` if there is none.
inline std::string_view extra_update(const std::vector<std::string_view>& mine,
                                     const std::vector<std::string_view>& theirs) {
  if (theirs.empty() || theirs.back() != GivenWindow::all_updates) return {};
  for (const std::string_view a : mine)
    if (a != GivenWindow::all_updates && std::ranges::find(theirs, a) == theirs.end()) return a;
  return {};
}

/// Throws the error for two members that were given other values in this part; `theirs` is as GivenWindow::describe
/// returns it.
[[noreturn]] inline void fail_given(int rank, std::size_t size, const GivenWindow& mine, GivenPart part, int other,
                                    std::string_view theirs) {
  const bool is_update = part == GivenPart::updates;
  const std::string one = "rank " + std::to_string(rank), two = "rank " + std::to_string(other);
  const std::string of = " of " + std::to_string(size);
  const std::string text = mine.describe(part);
  const std::vector<std::string_view> here = lines_of(text), there = lines_of(theirs);
  const auto alone = [&](const std::string& caller, std::string_view call, const std::string& without) {
    return caller + of + " has called " + std::string(call) + ", and " + without + " has not";
  };
  const auto both = [&](std::string_view call, std::string_view other_call) {
    return one + of + " has called " + std::string(call) + ", where " + two + " has called " + std::string(other_call);
  };
  std::string what = one + " and " + two + of +
                     (is_update ? " made different updates" : " were given different data or keys") +
                     " since their last collective";
  const std::string_view call = extra_update(here, there), other_call = extra_update(there, here);
  if (const auto difference = first_difference(here, there))
    what = both(difference->first, difference->second);
  else if (!call.empty() && !other_call.empty())
    what = both(call, other_call);
  else if (!call.empty())
    what = alone(one, call, two);
  else if (!other_call.empty())
    what = alone(two, other_call, one);
  throw Error(what + ": " +
              (is_update
                   ? "all ranks make the same steps, called at the same line; let all of them skip a step or none, "
                     "and compute the learning rate and the scale from what they share; for updates of some "
                     "ranks alone, or a learning rate for each index of an axis, use a submesh of that axis"
                   : "a tensor is the same on all ranks of an axis that its spec does not name; give them the "
                     "same, or name the axis, as in `dim/axis`"));
}

}  // namespace shardlib::detail
