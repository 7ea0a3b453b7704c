// Multiple-choice evaluation: questions from files, rows of endings, and the two scores.
#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "scratch.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/run/evaluate.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

namespace {

/// Bytes except tabs, and a space before each text, as Llama 2's tokenizer puts one.
class SpaceFirst final : public io::Tokenizer {
 public:
  SpaceFirst() : Tokenizer("space", "space", 256, 0) {}

 private:
  void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const override {
    if (!text.empty()) ids.push_back(' ');
    for (const char c : text)
      if (c != '\t') ids.push_back(static_cast<unsigned char>(c));
  }
  void append_text(std::uint32_t id, std::string& text) const override { text += static_cast<char>(id); }
};

std::vector<std::int32_t> ids(const std::string& text) {
  std::vector<std::int32_t> result;
  for (const auto id : io::load_tokenizer("bytes")->encode(text)) result.push_back(static_cast<std::int32_t>(id));
  return result;
}

}  // namespace

TEST_CASE("questions are read from lines of JSON", "[run]") {
  const Scratch scratch;
  const auto questions = run::read_questions(
      scratch.put("questions.jsonl",
                  "{\"ctx\": \"A man\", \"endings\": [\"sleeps.\", \"flies.\"], \"label\": 1, \"ind\": 24}\n\n"
                  "{\"ctx\": \"B\", \"endings\": [\"a\", \"b\", \"c\"], \"label\": \"0\"}"));
  REQUIRE(questions.size() == 2);
  CHECK(questions[0].context == "A man");
  CHECK(questions[0].endings == std::vector<std::string>{"sleeps.", "flies."});
  CHECK(questions[0].label == 1);
  CHECK(questions[1].label == 0);
}

TEST_CASE("a line that is not a question is an error with its number", "[run]") {
  const Scratch scratch;
  const std::string form = ": give a file with one JSON object a line, with \"ctx\", \"endings\" and \"label\"";
  const std::string good = "{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"], \"label\": 0}\n";
  const auto error = [&](const std::string& line) {
    const std::string path = scratch.put("questions.jsonl", good + line);
    std::string text = error_of<UsageError>([&] { static_cast<void>(run::read_questions(path)); });
    CHECK(text.starts_with(path + ":2: "));
    return text.substr(std::min(text.size(), path.size() + 4));
  };
  CHECK(error("[1, 2") == "the line is not a JSON object" + form);
  CHECK(error("[1, 2]") == "it has no \"ctx\"" + form);
  CHECK(error("{\"ctx\": \"A\", \"label\": 0}") == "it has no \"endings\"" + form);
  CHECK(error("{\"ctx\": 3, \"endings\": [\"b\", \"c\"], \"label\": 0}") == "\"ctx\" is not a text");
  CHECK(error("{\"ctx\": \"A\", \"endings\": [\"b\"], \"label\": 0}") ==
        "\"endings\" is not a list of two texts or more");
  CHECK(error("{\"ctx\": \"A\", \"endings\": [\"b\", \"\"], \"label\": 0}") ==
        "\"endings\" has an entry that is not a text, or an empty one");
  for (const char* label : {"2", "-1", "1.5", "\"\"", "99999999999", "null"})
    CHECK(error("{\"ctx\": \"A\", \"endings\": [\"b\", \"c\"], \"label\": " + std::string(label) + "}")
              .ends_with(", but the endings have the numbers 0 to 1"));
  CHECK(error_of<UsageError>([&] {
          static_cast<void>(run::read_questions(scratch.put("questions.jsonl", "\n \n")));
        }).ends_with("has no question" + form));
  expect_error<UsageError>([&] { static_cast<void>(run::read_questions(scratch.path())); },
                           "'" + scratch.path() + "' is a folder: give a file in HellaSwag's format");
}

TEST_CASE("an ending is a row in which only its own tokens count", "[run]") {
  const auto tokenizer = io::load_tokenizer("bytes");
  const auto weights = [](std::size_t before, std::size_t count, std::size_t length) {
    std::vector<float> w(length);
    for (std::size_t i = before; i < before + count; ++i) w[i] = 1.0F / static_cast<float>(count);
    return w;
  };
  const auto row = run::row_of(*tokenizer, "ab", "cd", 8, 0);
  CHECK(row.tokens == 3);  // with the space
  CHECK(run::row_of(*tokenizer, "ab ", "cd", 8, 0).tokens == 3);
  auto inputs = ids(std::string("ab c"));
  inputs.insert(inputs.begin(), 0);
  inputs.resize(8);
  auto targets = ids("ab cd");
  targets.resize(8);
  CHECK(row.row.inputs == inputs);
  CHECK(row.row.targets == targets);
  CHECK(row.row.segments == std::vector<std::int32_t>{0, 0, 0, 0, 0, 1, 1, 1});
  CHECK(row.row.weights == weights(2, 3, 8));
  // The context loses its beginning; white space is not doubled; without a first token, nothing stands before.
  const auto cut = run::row_of(*tokenizer, "abcdef", "\nxy", 4, 0);
  CHECK(cut.row.targets == ids("f\nxy"));
  CHECK(cut.row.inputs == ids("ef\nx"));
  CHECK(cut.row.weights == weights(1, 3, 4));
  const auto bare = run::row_of(*tokenizer, "ab", "c", 4, {});
  CHECK(bare.row.inputs[0] == ids("a")[0]);
  CHECK(bare.row.weights == weights(1, 2, 4));
  CHECK(run::row_of(*tokenizer, "", "cd", 4, {}).tokens == 2);  // of three tokens, the first has nothing before it
  CHECK(error_of<UsageError>([&] { static_cast<void>(run::row_of(*tokenizer, "a", "bcdef", 4, 0)); }) ==
        "the ending 'bcdef' has 6 tokens, more than a row of 4: choose a longer --seq");
  const auto spaced = run::row_of(SpaceFirst(), "ab", "cd", 6, 0);
  CHECK(spaced.row.targets == ids(" ab cd"));
  CHECK(spaced.tokens == 3);
  CHECK(error_of<UsageError>([&] { static_cast<void>(run::row_of(SpaceFirst(), "a", "\t", 6, 0)); }) ==
        "the ending ' ' has no token of its own: give another one, or another --tokenizer");
}

TEST_CASE("the likeliest ending answers, by the whole and by its characters", "[run]") {
  const auto tokenizer = io::load_tokenizer("bytes");
  // Each token of `a` costs 1, of others 2.
  const auto loss = [&](const io::TokenBatch& row) {
    double sum = 0;
    for (std::size_t i = 0; i < row.targets.size(); ++i)
      sum += static_cast<double>(row.weights[i]) * (row.targets[i] == ids("a")[0] ? 1 : 2);
    return sum;
  };
  const std::vector<run::Question> questions{
      {"x", {"aaaa", "b"}, 0},  // 6 against 4: the short one; by characters 1.5 against 4: the long one
      {"x", {"aaaa", "b"}, 1},
      {"x", {"aa", "bb", "bc"}, 0},
      {"x", {"aa", "bb", "bc"}, 2},
  };
  const run::Evaluation result = run::evaluate(questions, *tokenizer, 16, 0, loss);
  CHECK(result.questions == 4);
  CHECK(result.right == 2);
  CHECK(result.right_normalized == 2);
  CHECK(std::abs(result.chance - (0.5 + 0.5 + 1.0 / 3 + 1.0 / 3) / 4) < 1e-12);
  CHECK(run::evaluate({questions[1]}, *tokenizer, 16, 0, loss).right == 1);
  int asked = 0;
  CHECK(run::evaluate(questions, *tokenizer, 16, 0, loss, [&] { return ++asked > 3; }).questions == 3);
  const auto broken = [](const io::TokenBatch&) { return std::nan(""); };
  CHECK(error_of([&] {
          static_cast<void>(run::evaluate(questions, *tokenizer, 16, 0, broken));
        }).starts_with("question 1, ending 0: the model's loss is not finite"));
  CHECK(run::evaluate({questions[0]}, *tokenizer, 16, 0, loss).right_normalized == 1);
  // 10 against 4: 5 for each of two characters, not 2.5 for each of four bytes.
  CHECK(run::evaluate({{"x", {"\xc3\xa9\xc3\xa9", "b"}, 1}}, *tokenizer, 16, 0, loss).right_normalized == 1);
}
