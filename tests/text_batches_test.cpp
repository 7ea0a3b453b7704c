// Batches from text: the same on every mesh, every window once an epoch, documents kept apart.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <shardlib/io/text_batches.hpp>
#include <string>
#include <vector>

#include "support.hpp"

using namespace shardlib;
using io::TextBatch;
using io::TextBatches;
using shardlib::test::expect_error;

namespace {

/// A file of this process's own, removed at the end.
class TextFile {
 public:
  explicit TextFile(const std::string& text) {
    static int files = 0;
    path_ = "/tmp/shardlib_text_" + std::to_string(getpid()) + "_" + std::to_string(files++) + ".txt";
    std::ofstream(path_, std::ios::binary) << text;
  }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  ~TextFile() { std::remove(path_.c_str()); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// "000 001 002 ...": windows of 4 bytes that tell their place.
std::string numbered(int windows) {
  std::string text;
  for (int i = 0; i < windows; ++i) {
    const std::string number = std::to_string(i);
    text += std::string(3 - number.size(), '0') + number + " ";
  }
  return text;
}

std::string as_text(const std::vector<std::int32_t>& tokens) {
  return {tokens.begin(), tokens.end()};
}

/// The numbers of a batch's windows, in its order.
std::vector<int> windows(const TextBatch& batch) {
  std::vector<int> numbers;
  const std::string text = as_text(batch.targets);
  for (std::size_t i = 0; i < text.size(); i += 4) numbers.push_back(std::stoi(text.substr(i, 4)));
  return numbers;
}

bool alike(const TextBatch& a, const TextBatch& b) {
  return a.inputs == b.inputs && a.targets == b.targets && a.segments == b.segments;
}

/// All rows of the only batch, in the order of the text.
TextBatch in_order(const TextBatches& text, std::int64_t rows, std::size_t length) {
  const TextBatch batch = text.rows(0, 0, rows);
  std::vector<TextBatch> sorted;
  for (std::size_t begin = 0; begin < batch.targets.size(); begin += length) {
    const auto row = [&](const std::vector<std::int32_t>& x) {
      const auto first = x.begin() + static_cast<std::ptrdiff_t>(begin);
      return std::vector<std::int32_t>(first, first + static_cast<std::ptrdiff_t>(length));
    };
    sorted.push_back({row(batch.inputs), row(batch.targets), row(batch.segments)});
  }
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.targets < b.targets; });
  TextBatch joined;
  for (const TextBatch& row : sorted) {
    joined.inputs.insert(joined.inputs.end(), row.inputs.begin(), row.inputs.end());
    joined.targets.insert(joined.targets.end(), row.targets.begin(), row.targets.end());
    joined.segments.insert(joined.segments.end(), row.segments.begin(), row.segments.end());
  }
  return joined;
}

}  // namespace

TEST_CASE("text batches: a pure function of seed and step", "[text]") {
  const TextFile file(numbered(100));
  const TextBatches text(file.path(), 8, 4, 3), same(file.path(), 8, 4, 3), other(file.path(), 8, 4, 4);
  std::vector<TextBatch> forward;
  for (int step = 0; step < 30; ++step) forward.push_back(text.rows(step, 0, 8));
  int repeated = 0;
  for (int step = 30; step-- > 0;) {
    CHECK(alike(same.rows(step, 0, 8), forward[static_cast<std::size_t>(step)]));
    repeated += alike(other.rows(step, 0, 8), forward[static_cast<std::size_t>(step)]) ? 1 : 0;
  }
  CHECK(repeated == 0);
}

TEST_CASE("text batches: devices' rows join to the same batch, however many they are", "[text]") {
  const TextFile file(numbered(100));
  const TextBatches text(file.path(), 12, 4, 0);
  for (const int step : {0, 7, 8, 1000}) {
    const TextBatch whole = text.rows(step, 0, 12);
    CHECK(whole.targets.size() == 48);
    for (const int devices : {1, 2, 3, 4, 6, 12}) {
      TextBatch joined;
      for (int i = 0; i < devices; ++i) {
        const TextBatch part = text.rows(step, i * 12 / devices, 12 / devices);
        joined.inputs.insert(joined.inputs.end(), part.inputs.begin(), part.inputs.end());
        joined.targets.insert(joined.targets.end(), part.targets.begin(), part.targets.end());
        joined.segments.insert(joined.segments.end(), part.segments.begin(), part.segments.end());
      }
      CHECK(alike(joined, whole));
    }
  }
}

TEST_CASE("text batches: each epoch visits every window at most once, in an order of its own", "[text]") {
  for (const auto& [count, batch] : {std::pair{96, 8}, {103, 8}, {1, 1}, {2, 1}, {17, 17}, {64, 5}}) {
    const TextFile file(numbered(count) + "abc");  // the rest is shorter than a window
    const TextBatches text(file.path(), batch, 4, 5);
    const std::int64_t steps = text.steps_per_epoch();
    INFO(count << " windows in batches of " << batch);
    CHECK(steps == count / batch);
    CHECK(text.bytes() == 4 * count + 3);
    std::set<std::vector<int>> orders;
    for (int epoch = 0; epoch < 4; ++epoch) {
      std::vector<int> order;
      for (std::int64_t step = 0; step < steps; ++step)
        for (const int window : windows(text.rows(epoch * steps + step, 0, batch))) order.push_back(window);
      orders.insert(order);
      const std::set<int> visited(order.begin(), order.end());
      CHECK(visited.size() == static_cast<std::size_t>(steps * batch));
      CHECK(*visited.begin() >= 0);
      CHECK(*visited.rbegin() < count);
    }
    if (count > 16) CHECK(orders.size() == 4);
  }
}

TEST_CASE("text batches: a shuffled order has no trace of the text's", "[text]") {
  const TextFile file(numbered(1000));
  const TextBatches text(file.path(), 1000, 4, 0);
  const auto order = windows(text.rows(0, 0, 1000));
  int fixed = 0, neighbours = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    fixed += order[i] == static_cast<int>(i) ? 1 : 0;
    neighbours += i > 0 && std::abs(order[i] - order[i - 1]) == 1 ? 1 : 0;
  }
  // Both numbers are about Poisson: with mean 1 and with mean 2.
  CHECK(fixed < 8);
  CHECK(neighbours < 12);
}

TEST_CASE("text batches: inputs are the bytes before, 0 at starts; segments number the documents", "[text]") {
  // Empty documents vanish: at the start, in a row, at the end.
  const std::string end = "<|endoftext|>";
  const TextFile file(end + "abcde" + end + "fg" + end + end + "hijklmno\xff" + end);
  const TextBatches text(file.path(), 2, 8, 0);
  CHECK(text.bytes() == 16);
  const TextBatch batch = in_order(text, 2, 8);
  // Windows "abcdefgh" (three documents) and "ijklmno\xff" (the third goes on, but a row begins without a past).
  CHECK(as_text(batch.targets) == "abcdefghijklmno\xff");
  CHECK(batch.targets[15] == 255);
  CHECK(batch.inputs == std::vector<std::int32_t>{0, 'a', 'b', 'c', 'd', 0, 'f', 0,  //
                                                  0, 'i', 'j', 'k', 'l', 'm', 'n', 'o'});
  CHECK(batch.segments == std::vector<std::int32_t>{0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0});

  // A document that starts where a row does is the row's first.
  const TextFile even("abcd" + end + "efgh");
  const TextBatch rows = in_order(TextBatches(even.path(), 2, 4, 0), 2, 4);
  CHECK(rows.segments == std::vector<std::int32_t>(8, 0));
  CHECK(rows.inputs == std::vector<std::int32_t>{0, 'a', 'b', 'c', 0, 'e', 'f', 'g'});
}

TEST_CASE("text batches: errors", "[text]") {
  expect_error<UsageError>([] { TextBatches("/tmp/no such/file.txt", 1, 1, 0); },
                           "cannot read the text file '/tmp/no such/file.txt': check --data");
  expect_error<UsageError>([] { TextBatches("/tmp", 1, 1, 0); }, "cannot read the text file '/tmp': check --data");
  const TextFile file("0123456789<|endoftext|>");
  expect_error<UsageError>([&] { TextBatches(file.path(), 4, 3, 0); },
                           "the text file '" + file.path() +
                               "' has 10 bytes, enough for 3 rows of 3, but a batch has 4: choose a longer text, or a "
                               "smaller --batch or --seq");
  for (const auto& [batch, length] : {std::pair{0, 1}, {1, 0}})
    expect_error<UsageError>([&, b = batch, l = length] { TextBatches(file.path(), b, l, 0); },
                             "TextBatches: a batch has at least one row, a row at least one byte");
  const TextBatches text(file.path(), 3, 3, 0);
  CHECK(text.steps_per_epoch() == 1);
  expect_error<Error>([&] { static_cast<void>(text.rows(5, 2, 2)); },
                      "TextBatches: rows 2 to 4 of step 5 are outside the batch of 3");
  expect_error<Error>([&] { static_cast<void>(text.rows(-1, 0, 1)); },
                      "TextBatches: rows 0 to 1 of step -1 are outside the batch of 3");
  const TextFile empty("");
  expect_error<UsageError>([&] { TextBatches(empty.path(), 1, 1, 0); },
                           "the text file '" + empty.path() +
                               "' has 0 bytes, enough for 0 rows of 1, but a batch has 1: choose a longer text, or a "
                               "smaller --batch or --seq");
}
