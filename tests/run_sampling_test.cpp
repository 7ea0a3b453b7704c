// Which token a sample draws, and where a sample ends.
#include <cmath>
#include <set>
#include <shardlib/io/tokenizer/tokenizer.hpp>
#include <shardlib/run/sampling.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "support.hpp"

using namespace shardlib;
using run::draw_token;
using run::generate;
using run::SampleOptions;

namespace {

/// The ids of 200 draws from these probabilities.
std::set<std::int32_t> drawn(const std::vector<float>& probabilities, const SampleOptions& options) {
  std::vector<float> logits;
  for (const float p : probabilities) logits.push_back(std::log(p) + 3);
  std::set<std::int32_t> ids;
  for (std::int64_t position = 0; position < 200; ++position) ids.insert(draw_token(logits, options, position));
  return ids;
}

/// A sample of a model that goes on with `text`, and checks that the pieces shown are the sample.
std::string sampled(const std::string& text, const SampleOptions& options) {
  std::size_t at = 0;
  const auto decode = [&](std::span<const std::int32_t>, std::int64_t) {
    std::vector<float> logits(256, 0.0F);
    logits.at(static_cast<unsigned char>(text.at(at++))) = 1;
    return logits;
  };
  std::string shown;
  const std::string all =
      generate(io::ByteTokenizer(), "STOP ", 64, decode, options, [&](std::string_view piece) { shown += piece; }, {});
  CHECK(shown == all);
  return all;
}

}  // namespace

TEST_CASE("top_k and top_p leave the likeliest tokens") {
  using Ids = std::set<std::int32_t>;
  const std::vector<float> p{0.15F, 0.5F, 0.05F, 0.3F};
  CHECK(drawn(p, {}) == Ids{0, 1, 2, 3});
  CHECK(drawn(p, {.top_k = 2}) == Ids{1, 3});
  CHECK(drawn(p, {.top_p = 0.75}) == Ids{1, 3});
  CHECK(drawn(p, {.top_p = 0.9}) == Ids{0, 1, 3});
  CHECK(drawn(p, {.top_p = 0}) == Ids{1});
  CHECK(drawn(p, {.top_k = 3, .top_p = 0.8}) == Ids{1, 3});            // of the three: 0.53, 0.84, 1
  CHECK(drawn(p, {.top_p = 0.75, .temperature = 4}) == Ids{0, 1, 3});  // of a flatter distribution
  CHECK(drawn(p, {.temperature = 0}) == Ids{1});
}

TEST_CASE("a sample ends before the first stop, and never shows a part of it") {
  const SampleOptions likeliest{.max_tokens = 10, .temperature = 0};
  const auto with = [&](std::vector<std::string> stops) {
    SampleOptions options = likeliest;
    options.stops = std::move(stops);
    return options;
  };
  CHECK(sampled("abcSTOPxyzuvw", likeliest) == "STOP abcSTOPxyz");
  CHECK(sampled("abcSTOPxyzuvw", with({"STOP"})) == "STOP abc");  // the prompt's own is none
  CHECK(sampled("abcSTOPxyzuvw", with({"yz", "OP"})) == "STOP abcST");
  CHECK(sampled("abcSTabcSTuvw", with({"STOP"})) == "STOP abcSTabcST");  // begun and not ended
}
