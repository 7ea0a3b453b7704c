// Definitions of sampling.hpp.
#pragma once

#include "shardlib/run/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <numeric>

#include "shardlib/io/agree.hpp"
#include "shardlib/io/formats/safetensors.hpp"
#include "shardlib/kernels/random.hpp"
#include "shardlib/run/impl/growing_text.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::run {

SHARDLIB_INLINE std::int32_t draw_token(std::span<const float> logits, const SampleOptions& options,
                                        std::int64_t position) {
  if (logits.empty()) throw Error("sampling: the model gave no logits");
  for (const float x : logits)
    if (!std::isfinite(x))
      throw Error("sampling: the logits at position " + std::to_string(position) + " are not finite");
  if (options.temperature == 0)
    return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto likelier = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  if (options.top_k > 0 && options.top_k < static_cast<std::int64_t>(ids.size())) {
    std::nth_element(ids.begin(), ids.begin() + options.top_k, ids.end(), likelier);
    ids.resize(static_cast<std::size_t>(options.top_k));
  }
  const double highest = logits[static_cast<std::size_t>(*std::ranges::min_element(ids, likelier))];
  const auto weight = [&](std::int32_t id) {
    return std::exp((static_cast<double>(logits[static_cast<std::size_t>(id)]) - highest) / options.temperature);
  };
  // Always in one order of summation, whatever nth_element did.
  const auto running_sums = [&] {
    std::vector<double> sums;
    for (double total = 0; const std::int32_t id : ids) sums.push_back(total += weight(id));
    return sums;
  };
  if (options.top_p < 1) {
    std::ranges::sort(ids, likelier);
    const std::vector<double> sums = running_sums();
    const auto enough = std::ranges::lower_bound(sums, options.top_p * sums.back()) - sums.begin();
    ids.resize(static_cast<std::size_t>(std::min<std::ptrdiff_t>(enough + 1, std::ssize(ids))));
  }
  std::ranges::sort(ids);
  const std::vector<double> sums = running_sums();
  constexpr std::uint64_t stream = 0x73616d706c65;  // "sample": apart from the weights' and dropout's
  const double u = kernels::uniform(options.seed, stream, static_cast<std::uint64_t>(position));
  const auto at = std::upper_bound(sums.begin(), sums.end(), u * sums.back()) - sums.begin();
  return ids[static_cast<std::size_t>(std::min<std::ptrdiff_t>(at, std::ssize(ids) - 1))];
}

SHARDLIB_INLINE std::string generate(const io::Tokenizer& tokenizer, std::string_view prompt, std::int64_t context,
                                     const Decode& decode, const SampleOptions& options,
                                     const std::function<void(std::string_view)>& show,
                                     const std::function<bool()>& stop) {
  std::vector<std::uint32_t> tokens = tokenizer.encode(prompt);
  detail::GrowingText text(tokenizer, std::string(prompt), 0, options.stops, show);
  std::vector<std::int32_t> seen(tokens.begin(), tokens.end());
  if (options.begin) seen.insert(seen.begin(), *options.begin);
  if (seen.empty()) throw UsageError("the prompt is empty, and this model needs a first token: give --prompt");
  std::size_t given = 0, begin = 0;  // of `seen`: what the model has been given, and where its context begins
  for (std::int64_t i = 0; i < options.max_tokens && !(stop && stop()); ++i) {
    if (std::ssize(seen) - static_cast<std::ptrdiff_t>(begin) > context) {
      begin = seen.size() - static_cast<std::size_t>(std::max<std::int64_t>(1, context / 2));
      given = begin;
    }
    const auto logits = decode(std::span(seen).subspan(given), static_cast<std::int64_t>(given - begin));
    given = seen.size();
    const auto known = std::min<std::size_t>(logits.size(), tokenizer.vocabulary_size());
    const std::int32_t id = draw_token(std::span(logits).first(known), options, std::ssize(seen));
    const auto drawn = static_cast<std::uint32_t>(id);
    if (drawn == tokenizer.end_of_text()) break;
    seen.push_back(id);
    if (!text.add(drawn)) break;
  }
  return text.finish();
}

SHARDLIB_INLINE void require_logits(const io::Tokenizer& tokenizer, std::string_view prompt, std::int64_t context,
                                    std::int64_t vocabulary) {
  const std::vector<std::uint32_t> tokens = tokenizer.encode(prompt);
  if (std::ssize(tokens) > context)
    throw UsageError("--logits: --prompt has " + std::to_string(tokens.size()) + " tokens, but the model takes " +
                     std::to_string(context) + ": give a shorter one");
  for (const std::uint32_t id : tokens)
    if (static_cast<std::int64_t>(id) >= vocabulary)
      throw UsageError("--logits: --prompt has the token " + std::to_string(id) +
                       ", but the model's vocabulary ends at " + std::to_string(vocabulary - 1) +
                       ": give another prompt, or the model's --tokenizer");
}

SHARDLIB_INLINE void write_logits(Device& device, const io::Tokenizer& tokenizer, std::string_view prompt,
                                  const Decode& decode, const std::string& path) {
  const std::vector<std::uint32_t> tokens = tokenizer.encode(prompt);
  std::vector<float> logits;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto id = static_cast<std::int32_t>(tokens[i]);
    std::ranges::copy(decode(std::span(&id, 1), static_cast<std::int64_t>(i)), std::back_inserter(logits));
  }
  const auto bytes = [](const auto& values) {
    const auto view = std::as_bytes(std::span(values));
    return io::Bytes(view.begin(), view.end());
  };
  const std::int64_t count = std::ssize(tokens), vocabulary = count == 0 ? 0 : std::ssize(logits) / count;
  io::together(device, "", [&] {
    if (device.rank() != 0) return;
    io::write_safetensors(path, {{"tokens", "U32", {count}, [&] { return bytes(tokens); }},
                                 {"logits", "F32", {count, vocabulary}, [&] { return bytes(logits); }}});
  });
}

}  // namespace shardlib::run
