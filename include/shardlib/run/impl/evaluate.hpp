// Definitions of evaluate.hpp.
#pragma once

#include "shardlib/run/evaluate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <string_view>

#include "shardlib/io/file.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/regular_file.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::run {

namespace detail {

inline constexpr const char* question_form =
    ": give a file with one JSON object a line, with \"ctx\", \"endings\" and \"label\"";

inline Question question_of(std::string_view line) {
  using nlohmann::json;
  const json object = io::detail::parse_json(line);
  const auto at = [&](const char* key) -> const json& { return io::detail::member(object, key, question_form); };
  Question question;
  const json &context = at("ctx"), &endings = at("endings"), &label = at("label");
  if (!context.is_string()) throw Error("\"ctx\" is not a text");
  question.context = context.get<std::string>();
  if (!endings.is_array() || endings.size() < 2) throw Error("\"endings\" is not a list of two texts or more");
  for (const json& ending : endings) {
    if (!ending.is_string() || ending.get_ref<const std::string&>().empty())
      throw Error("\"endings\" has an entry that is not a text, or an empty one");
    question.endings.push_back(ending.get<std::string>());
  }
  // Some copies of HellaSwag have the number as a text.
  const std::string number = label.is_string() ? label.get<std::string>() : label.dump();
  const std::size_t digits = number.find_first_not_of("0123456789");
  if (number.empty() || number.size() > 9 || digits != std::string::npos || std::stoul(number) >= endings.size())
    throw Error(fmt::format("\"label\" is {}, but the endings have the numbers 0 to {}",
                            shardlib::detail::excerpt(number), endings.size() - 1));
  question.label = std::stoul(number);
  return question;
}

}  // namespace detail

SHARDLIB_INLINE std::vector<Question> read_questions(const std::string& path) {
  shardlib::detail::refuse_folder(path, "give a file in HellaSwag's format");
  const io::Bytes bytes = io::read_file(path);
  std::string_view rest = io::as_text(bytes);
  std::vector<Question> questions;
  for (std::int64_t number = 1; !rest.empty(); ++number) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    try {
      questions.push_back(detail::question_of(line));
    } catch (const Error& error) {
      throw UsageError(fmt::format("{}:{}: {}", path, number, error.what()));
    } catch (const std::exception&) {
      throw UsageError(fmt::format("{}:{}: the line is not a JSON object{}", path, number, detail::question_form));
    }
  }
  if (questions.empty()) throw UsageError(fmt::format("'{}' has no question{}", path, detail::question_form));
  return questions;
}

SHARDLIB_INLINE EndingRow row_of(const io::Tokenizer& tokenizer, const std::string& context, const std::string& ending,
                                 std::int64_t length, std::optional<std::int32_t> begin) {
  constexpr std::string_view white = " \t\n\r";
  const std::size_t end = context.find_last_not_of(white) + 1;  // white space behind it belongs to the ending
  const bool has_space = white.find(ending.front()) != std::string_view::npos || end < context.size();
  // As one text: some tokenizers put a space before each text that they encode.
  const auto ids = tokenizer.encode(context + (has_space ? "" : " ") + ending);
  std::vector<std::int32_t> tokens(ids.begin(), ids.end());
  if (begin) tokens.insert(tokens.begin(), *begin);
  const std::int64_t added = std::ssize(ids) - std::ssize(tokenizer.encode(context.substr(0, end)));
  if (added < 1)
    throw UsageError(fmt::format("the ending '{}' has no token of its own: give another one, or another --tokenizer",
                                 shardlib::detail::excerpt(ending, 40)));
  // A first token without a token before it has no likelihood.
  const std::int64_t count = std::min(added, std::ssize(tokens) - 1);
  if (count > length)
    throw UsageError(fmt::format("the ending '{}' has {} tokens, more than a row of {}: choose a longer --seq",
                                 shardlib::detail::excerpt(ending, 40), count, length));
  const auto extra = static_cast<std::ptrdiff_t>(std::max<std::int64_t>(0, std::ssize(tokens) - 1 - length));
  tokens.erase(tokens.begin(), tokens.begin() + extra);

  EndingRow result{io::detail::empty_rows(1, length), count};
  const std::size_t n = tokens.size() - 1;
  std::copy_n(tokens.begin(), n, result.row.inputs.begin());
  std::copy_n(tokens.begin() + 1, n, result.row.targets.begin());
  std::fill(result.row.segments.begin() + static_cast<std::ptrdiff_t>(n), result.row.segments.end(), 1);
  std::fill_n(result.row.weights.begin() + static_cast<std::ptrdiff_t>(n) - count, count,
              1.0F / static_cast<float>(std::max<std::int64_t>(count, 1)));
  return result;
}

SHARDLIB_INLINE Evaluation evaluate(const std::vector<Question>& questions, const io::Tokenizer& tokenizer,
                                    std::int64_t length, std::optional<std::int32_t> begin,
                                    const std::function<double(const io::TokenBatch& row)>& mean_loss,
                                    const std::function<bool()>& stop) {
  Evaluation result;
  for (const Question& question : questions) {
    if (stop && stop()) break;
    struct Best {
      double score = -std::numeric_limits<double>::infinity();
      std::size_t at = 0;
      void consider(double other, std::size_t i) {
        if (other > score) *this = {other, i};
      }
    } plain, normalized;
    for (std::size_t i = 0; i < question.endings.size(); ++i) {
      const EndingRow ending = row_of(tokenizer, question.context, question.endings[i], length, begin);
      const double likelihood = -mean_loss(ending.row) * static_cast<double>(ending.tokens);
      if (!std::isfinite(likelihood))
        throw Error(
            fmt::format("question {}, ending {}: the model's loss is not finite, so it has no answer; "
                        "--find-nan finds the op at fault in training",
                        result.questions + 1, i));
      plain.consider(likelihood, i);
      const auto characters = std::ranges::count_if(
          question.endings[i], [](char byte) { return !shardlib::detail::continues_character(byte); });
      normalized.consider(likelihood / static_cast<double>(characters), i);
    }
    ++result.questions;
    result.right += plain.at == question.label ? 1 : 0;
    result.right_normalized += normalized.at == question.label ? 1 : 0;
    result.chance += 1 / static_cast<double>(question.endings.size());
  }
  if (result.questions > 0) result.chance /= static_cast<double>(result.questions);
  return result;
}

}  // namespace shardlib::run
