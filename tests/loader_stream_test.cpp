// Batches straight from text files: every document in one row's part, the same batches on every mesh.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <shardlib/io/data/read_ahead.hpp>
#include <shardlib/io/data/text_stream.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using io::TextStream;
using io::TextStreamOptions;
using io::TokenBatch;

namespace {

const std::string separator(io::end_of_text_mark);

/// "{17:aaaa}" with lengths that vary.
std::string piece(int i) {
  return "{" + std::to_string(i) + ":" + std::string(static_cast<std::size_t>(1 + i * 7 % 23), 'a') + "}";
}

/// Each row of the batch as text, with | before each document.
std::vector<std::string> read_rows(const std::string& path, const TextStreamOptions& options, int steps) {
  TextStream stream(path, options, 0, options.batch);
  std::vector<std::string> rows(static_cast<std::size_t>(options.batch));
  for (int step = 0; step < steps; ++step) {
    const TokenBatch batch = stream.next();
    const auto length = static_cast<std::size_t>(options.length);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (std::size_t i = 0; i < length; ++i) {
        const std::size_t at = r * length + i;
        const bool new_segment = i > 0 && batch.segments[at] != batch.segments[at - 1];
        // A row's first token has no past either way; what is in a document's middle goes on with the same segment.
        if (new_segment) rows[r] += '|';
        test::expect((batch.inputs[at] == 0) == (i == 0 || new_segment), "inputs are 0 at starts only");
        if (i > 0 && !new_segment)
          test::expect(batch.inputs[at] == batch.targets[at - 1], "inputs are shifted targets");
        test::expect(batch.weights[at] == 1.0F, "every token counts");
        rows[r] += static_cast<char>(batch.targets[at]);
      }
    }
  }
  return rows;
}

/// Bytes, ended by 1; remembers what it was given.
class Recorder final : public io::Tokenizer {
 public:
  Recorder() : Tokenizer("recorder", "recorder", 256, 1) {}
  mutable std::vector<std::string> pieces;

 private:
  void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const override {
    pieces.emplace_back(text);
    io::ByteTokenizer().encode(text, ids);
  }
  void append_text(std::uint32_t id, std::string& text) const override { text += static_cast<char>(id); }
};

/// In how many rows a text occurs.
int rows_with(const std::vector<std::string>& rows, const std::string& text) {
  return static_cast<int>(std::count_if(rows.begin(), rows.end(),
                                        [&](const std::string& row) { return row.find(text) != std::string::npos; }));
}

}  // namespace

TEST_CASE("stream: every document is in one row's part, whole, whatever the files", "[stream]") {
  const Scratch folder;
  int documents = 0;
  for (const char* name : {"a.txt", "b/c.txt", "b/d/e", "z.txt"}) {
    std::string text;
    for (int i = 0; i < 60; ++i)
      text += (i > 0 ? separator : "") + (i % 9 == 4 ? " \n" + separator : "") + piece(documents++);
    folder.put(name, text);
  }
  folder.put(".hidden", "HIDDEN");
  folder.put(".git/x", "HIDDEN");
  folder.put("empty", "");
  std::set<std::vector<std::string>> orders;
  for (const std::int64_t batch : {1, 2, 3, 8}) {
    for (const std::uint64_t seed : std::vector<std::uint64_t>{0, 1, 2, 3, 4}) {
      INFO("batch " << batch << ", seed " << seed);
      // One token a row: a mark for each document's start would be lost otherwise.
      const auto rows = read_rows(folder.path(), {.batch = batch, .length = 9000, .seed = seed}, 1);
      for (int i = 0; i < documents; ++i) REQUIRE(rows_with(rows, piece(i)) == 1);
      for (int i = 0; i < documents; ++i) REQUIRE(rows_with(rows, "|" + piece(i) + "|") == 1);
      REQUIRE(rows_with(rows, "HIDDEN") == 0);
      orders.insert(rows);
    }
  }
  CHECK(orders.size() == 20);
}

TEST_CASE("stream: a text without documents is shared out by lines", "[stream]") {
  const Scratch folder;
  std::string text;
  for (int i = 0; i < 300; ++i) text += piece(i) + "\n";
  const std::string path = folder.put("lines", text);
  for (const std::uint64_t seed : std::vector<std::uint64_t>{0, 1, 2}) {
    const auto rows = read_rows(path, {.batch = 5, .length = 8000, .seed = seed}, 1);
    for (int i = 0; i < 300; ++i) REQUIRE(rows_with(rows, piece(i)) == 1);
  }
}

TEST_CASE("stream: a text of one line is cut between characters", "[stream]") {
  const Scratch folder;
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "\xe2\x82\xac";  // the euro sign
  const std::string path = folder.put("line", text);
  for (const std::uint64_t seed : std::vector<std::uint64_t>{0, 1, 2, 3})
    for (const std::string& row : read_rows(path, {.batch = 7, .length = 1200, .seed = seed}, 2))
      REQUIRE(row.starts_with("\xe2"));
}

TEST_CASE("stream: the same batches on every mesh, and again", "[stream]") {
  const Scratch folder;
  for (int f = 0; f < 5; ++f) {
    std::string text;
    for (int i = 0; i < 200; ++i) text += piece(200 * f + i) + (i % 3 == 0 ? separator : "\n");
    folder.put("f" + std::to_string(f), text);
  }
  const TextStreamOptions options{.batch = 4, .length = 33, .seed = 2};
  TextStream whole(folder.path(), options, 0, 4);
  std::vector<std::unique_ptr<TextStream>> halves, quarters;
  for (int i = 0; i < 2; ++i) halves.push_back(std::make_unique<TextStream>(folder.path(), options, 2 * i, 2));
  for (int i = 0; i < 4; ++i) quarters.push_back(std::make_unique<TextStream>(folder.path(), options, i, 1));
  io::ReadAhead ahead([&](std::int64_t) { return halves[0]->next(); }, 0);
  for (int step = 0; step < 400; ++step) {
    const TokenBatch all = whole.next();
    const auto targets = [&](std::vector<TokenBatch> parts) {
      std::vector<std::int32_t> joined;
      for (const auto& part : parts) joined.insert(joined.end(), part.targets.begin(), part.targets.end());
      return joined;
    };
    REQUIRE(targets({ahead.get(step), halves[1]->next()}) == all.targets);
    REQUIRE(targets({quarters[0]->next(), quarters[1]->next(), quarters[2]->next(), quarters[3]->next()}) ==
            all.targets);
  }
}

TEST_CASE("stream: a long document is tokenized in pieces that lose and mark nothing", "[stream]") {
  const Scratch folder;
  std::string text;
  while (text.size() < 1500000)
    text += piece(static_cast<int>(text.size() % 977)) + (text.size() % 5 == 0 ? " \n\n" : "\n");
  const std::string path = folder.put("long", text);
  TextStreamOptions options{.batch = 1, .length = 1000, .seed = 3};
  const auto tokenizer = std::make_shared<Recorder>();
  options.text = {tokenizer, true};
  TextStream stream(path, options, 0, 1);
  std::string read;
  int segments = 0;
  while (read.size() < 2 * text.size()) {
    const TokenBatch batch = stream.next();
    for (std::size_t i = 0; i < batch.targets.size(); ++i) {
      read += static_cast<char>(batch.targets[i]);
      segments += i > 0 && batch.segments[i] != batch.segments[i - 1] ? 1 : 0;
    }
  }
  // One turn of the ring: from the cut behind the seed's place to the end, and from the beginning to it.
  const std::size_t end = read.find('\1');
  REQUIRE(end < text.size());
  REQUIRE(text.ends_with(read.substr(0, end)));
  const std::string turn = read.substr(0, end) + '\1' + text.substr(0, text.size() - end) + '\1';
  REQUIRE(read.compare(0, turn.size(), turn) == 0);
  CHECK(segments >= 2);
  CHECK(segments <= 5);
  const std::vector<std::string>& pieces = tokenizer->pieces;
  REQUIRE(pieces.size() > 5);
  int inner = 0;
  for (const std::string& part : pieces) inner += part.starts_with("\n") && part.size() > 100000 ? 1 : 0;
  CHECK(inner >= 4);
  for (const std::string& part : pieces) CHECK(part.size() <= (std::size_t{1} << 19));
}

TEST_CASE("stream: errors", "[stream]") {
  const Scratch folder;
  const auto open = [](const std::string& path, TextStreamOptions options, std::int64_t first = 0,
                       std::int64_t count = 1) {
    return [=] { static_cast<void>(TextStream(path, options, first, count).next()); };
  };
  const TextStreamOptions one{.batch = 1, .length = 4};
  expect_error<UsageError>(open(folder.path(), one),
                           "'" + folder.path() + "' holds no text: choose a file or a folder with some");
  expect_error<UsageError>(open("/tmp/no such", one), "cannot read '/tmp/no such': No such file or directory");
  const std::string small = folder.put("small/a", std::string(127, 'x'));
  expect_error<UsageError>(open(small, {.batch = 2, .length = 4}),
                           "'" + small +
                               "' has 127 bytes of text, but a stream needs at least 64 for each of the 2 rows of a "
                               "batch: choose more text, or a smaller --batch");
  expect_error<UsageError>(
      open(small, {.batch = 0, .length = 4}),
      "a batch of 0 rows of 4 tokens: both are at least 1, and their product at most 2^31; check --batch and --seq");
  expect_error(open(small, one, 1, 1), "rows 1 to 2 are asked for, but a batch has 1");
  const std::string blank = folder.put("blank/a", std::string(500, ' '));
  expect_error<UsageError>(open(blank, one), "row 0 of a batch finds only white space in its part of the text, near '" +
                                                 blank + "': choose more text, or a smaller --batch");
  const std::string binary = folder.put("binary/a", std::string(70, 'x') + '\0' + std::string(70, 'x'));
  expect_error<UsageError>(
      open(binary, {.batch = 1, .length = 500}),
      "'" + binary + "' is not a text file: it has a zero byte at 70; keep other files out of the folder of --stream");
  const std::string compressed = folder.put("compressed/a", "\x28\xb5\x2f\xfd" + std::string(500, 'x'));
  expect_error<UsageError>(open(compressed, one), "'" + compressed +
                                                      "' is compressed by zstd, which training does not read: "
                                                      "`tokenize` makes a data set of it");
  TextStreamOptions narrow{.batch = 1, .length = 4, .text = {}, .vocabulary = 120};
  expect_error<UsageError>(open(small, narrow),
                           "a text near byte 127 of '" + small +
                               "' has the token id 120, but the vocabulary has 120 tokens: choose a larger vocabulary "
                               "(--vocabulary of the trainers; that of a loaded model is fixed), or another tokenizer");
}
