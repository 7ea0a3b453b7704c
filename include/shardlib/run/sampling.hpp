// Generates text with a model: the choice of the next token, and the loop that feeds tokens back.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::run {

/// The options by which `generate` draws tokens, at most max_tokens of them. The same seed draws the same tokens.
struct SampleOptions {
  std::int64_t max_tokens = 200;
  std::int64_t top_k = 0;    ///< keep only the k likeliest; 0 keeps all
  double top_p = 1;          ///< then keep the smallest set of tokens with this total probability
  double temperature = 1.0;  ///< 0 always takes the likeliest
  std::uint64_t seed = 0;
  std::vector<std::string> stops = {};    ///< texts that end the sample, which does not include them
  std::optional<std::int32_t> begin = 0;  ///< the token that stands before a document's first; packed rows have 0
};

/// Draws the next token from softmax(logits / temperature) over the top_k likeliest and the top_p of them (Holtzman et
/// al. 2019). The random number is a pure function of (seed, position), so every device draws the same token. Throws
/// Error if logits are not finite. `draw_token(logits, options, position)`
[[nodiscard]] SHARDLIB_INLINE std::int32_t draw_token(std::span<const float> logits, const SampleOptions& options,
                                                      std::int64_t position);

/// The model: takes the tokens at positions [position, position + ids.size()), which follow those of earlier calls
/// (position 0 begins a new text), and returns the logits of the token after the last of them.
using Decode = std::function<std::vector<float>(std::span<const std::int32_t> ids, std::int64_t position)>;

/// Continues the prompt until max_tokens, an end-of-text token or one of options.stops. Where prompt and text outgrow
/// `context` tokens, the model is given the last half of them again, and continues from there. `show` is given each
/// piece of text as soon as its UTF-8 is whole, the prompt first. Only tokens that the tokenizer has are drawn: the
/// model's vocabulary may be larger. Returns prompt and continuation, up to the token before which `stop`, which must
/// say the same on every device, was true. Every device calls it. `generate(*tokenizer, "Once", 1024, decode, {.top_k =
/// 40})`
SHARDLIB_INLINE std::string generate(const io::Tokenizer& tokenizer, std::string_view prompt, std::int64_t context,
                                     const Decode& decode, const SampleOptions& options,
                                     const std::function<void(std::string_view)>& show = nullptr,
                                     const std::function<bool()>& stop = nullptr);

/// Throws UsageError if `write_logits` cannot take the prompt: it has more than `context` tokens, or ids beyond the
/// model's vocabulary. Programs call it long before they sample. `require_logits(*tokenizer, "Once", 1024, 50257)`
SHARDLIB_INLINE void require_logits(const io::Tokenizer& tokenizer, std::string_view prompt, std::int64_t context,
                                    std::int64_t vocabulary);

/// Writes the prompt's tokens and, for each of them, the logits of what follows, as a safetensors file: for comparison
/// with other implementations. The prompt must be one that `require_logits` accepts. Every device calls it.
/// `write_logits(device, *tokenizer, "Once", decode, "logits.safetensors")`
SHARDLIB_INLINE void write_logits(Device& device, const io::Tokenizer& tokenizer, std::string_view prompt,
                                  const Decode& decode, const std::string& path);

}  // namespace shardlib::run

#ifndef SHARDLIB_COMPILED
#include "shardlib/run/impl/sampling.hpp"
#endif
