// Definitions of tokenizer.hpp: the reader of tokenizer.json.
#pragma once

#include "shardlib/io/tokenizer/tokenizer.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shardlib/io/file.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/io/tokenizer/bpe.hpp"
#include "shardlib/io/tokenizer/impl/json_place.hpp"
#include "shardlib/io/tokenizer/impl/json_tokenizer.hpp"
#include "shardlib/io/tokenizer/impl/tokenizer_json_steps.hpp"
#include "shardlib/io/tokenizer/impl/vocabulary.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/sha256.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io {
namespace detail {

// ---- model ----------------------------------------------------------------------------------------------------------

/// The spellings of all tokens by id, those of the model and the added ones; a gap between ids is empty.
inline std::vector<std::string> read_vocabulary(const JsonPlace& file) {
  const JsonPlace vocabulary = file.at("model").at("vocab");
  std::vector<std::string> tokens;
  std::size_t most = 2 * vocabulary.object().size() + 1024;
  const auto place = [&](const std::string& token, const JsonPlace& id) {
    const std::size_t at = id.number();
    if (at >= most) id.refuse("ids that are close together");
    if (at >= tokens.size()) tokens.resize(at + 1);
    if (token.empty() || (!tokens[at].empty() && tokens[at] != token))
      id.damaged("one token, with a spelling, for an id");
    tokens[at] = token;
  };
  for (const auto& [token, id] : vocabulary.object()) place(token, vocabulary.at(token, id));
  if (!file.has("added_tokens")) return tokens;
  const JsonPlace added = file.at("added_tokens");
  // Tokens that are not in the model get the next ids. Their ids in the file do not count.
  std::size_t next = vocabulary.object().size();
  most += added.array().size();
  for (std::size_t i = 0; i < added.array().size(); ++i) {
    const JsonPlace id = added.at(i).at("id");
    const std::string& token = added.at(i).at("content").text();
    const auto in_model = vocabulary.object().find(token);
    const std::size_t expected = in_model != vocabulary.object().end() ? vocabulary.at(token).number() : next;
    if (id.number() != expected)
      id.refuse("the ids that the model's tokens have, or the next ones, here " + std::to_string(expected));
    place(token, id);
    next = std::max(next, expected + 1);
  }
  return tokens;
}

/// A merge, "left right" or ["left", "right"].
inline std::pair<std::string_view, std::string_view> read_merge(const JsonPlace& merge) {
  if (merge.value().is_array()) {
    if (merge.array().size() != 2) merge.damaged("two tokens");
    return {merge.at(0).text(), merge.at(1).text()};
  }
  const std::string_view both = merge.text();
  const std::size_t space = both.find(' ');
  if (space == std::string_view::npos || both.find(' ', space + 1) != std::string_view::npos)
    merge.damaged("two tokens with a space between them");
  return {both.substr(0, space), both.substr(space + 1)};
}

inline void read_merges(const JsonPlace& model, TokenizerParts& parts) {
  const auto& vocabulary = model.at("vocab").object();
  std::unordered_map<std::string_view, std::uint32_t> ids(vocabulary.size());
  for (const auto& [token, id] : vocabulary) ids.emplace(token, id.get<std::uint32_t>());
  const JsonPlace merges = model.at("merges");
  const std::size_t count = merges.array().size();
  std::string joined;
  parts.pairs.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const JsonPlace merge = merges.at(i);
    if (merge.value().is_string() && merge.text().starts_with("#version")) continue;
    const auto [left, right] = read_merge(merge);
    joined.assign(left).append(right);
    const auto id = [&](std::string_view token) {
      const auto found = ids.find(token);
      if (found == ids.end())
        merge.damaged("tokens of 'model.vocab', which has no \"" + shardlib::detail::excerpt(token) + "\",");
      return found->second;
    };
    parts.pairs.push_back({id(left), id(right), static_cast<std::uint32_t>(parts.pairs.size()), id(joined)});
  }
}

inline void read_model(const JsonPlace& file, TokenizerParts& parts) {
  const JsonPlace model = file.at("model");
  if (model.has("type") && model.at("type").text() != "BPE") model.at("type").refuse("BPE");
  model.only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
              "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (model.has("dropout") && model.at("dropout").value() != 0.0) model.at("dropout").refuse("null");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (model.has(key) && !model.at(key).text().empty()) model.at(key).refuse("null");
  parts.ignore_merges = model.flag("ignore_merges", false);
  parts.tokens = read_vocabulary(file);
  parts.findable.assign(parts.tokens.size(), false);
  for (const auto& [token, id] : model.at("vocab").object()) parts.findable[id.get<std::uint32_t>()] = true;
  read_merges(model, parts);
  parts.byte_ids.fill(no_token);
  if (!parts.byte_level && !model.flag("byte_fallback", false))
    model.at("byte_fallback").refuse("true, or a pre_tokenizer that ends with ByteLevel, so that all texts have ids");
  // unk_token and fuse_unk are for characters that have no id, which is none where all bytes have one.
  const ByteAlphabet alphabet;
  for (std::size_t id = 0; id < parts.tokens.size(); ++id) {
    std::string& token = parts.tokens[id];
    int byte = spelled_byte(token);
    if (parts.byte_level) {
      const std::string bytes = alphabet.decode(token);
      byte = bytes.size() == 1 ? static_cast<unsigned char>(bytes[0]) : -1;
      if (bytes.empty())
        parts.findable[id] = false;  // no text is spelled so
      else
        token = bytes;
    }
    if (byte >= 0 && parts.findable[id])
      parts.byte_ids[static_cast<std::size_t>(byte)] = static_cast<std::uint32_t>(id);
  }
  for (std::size_t byte = 0; byte < 256; ++byte)
    if (parts.byte_ids[byte] == no_token)
      model.at("vocab").refuse("vocabularies with a token for each byte, and there is none for " +
                               std::to_string(byte));
}

/// As in transformers, `added_tokens_decoder` of the configuration overrides the settings of a token.
inline void read_added(const JsonPlace& file, const JsonPlace& config, TokenizerParts& parts) {
  std::map<std::string_view, JsonPlace> configured;
  if (config.has("added_tokens_decoder"))
    for (const auto& [id, value] : config.at("added_tokens_decoder").object()) {
      const JsonPlace token = config.at("added_tokens_decoder").at(id, value);
      configured.emplace(token.at("content").text(), token);
    }
  std::set<std::string_view> contents;
  const auto add = [&](const JsonPlace& token, std::uint32_t id, bool special) {
    if (token.at("single_word").flag()) token.at("single_word").refuse("false");
    const AddedToken found{id, special, token.at("lstrip").flag(), token.at("rstrip").flag()};
    const std::string& content = token.at("content").text();
    if (!contents.insert(content).second) token.at("content").refuse("added tokens that differ");
    const bool normalized = token.at("normalized").flag();
    const std::string text = normalized ? rewritten(content, parts.rewrites) : content;
    if (text != content) {
      const std::string bytes = parts.byte_level ? ByteAlphabet().decode(text) : std::string();
      parts.rewritten_tokens[found.id] = bytes.empty() ? text : bytes;
    }
    if (!(normalized ? parts.added_normalized : parts.added).add(text, found))
      token.at("content").refuse("added tokens that differ");
  };
  const auto add_configured = [&](const JsonPlace& token, std::uint32_t id, bool special) {
    add(token, id, special);
    parts.overrides += "\n" + std::to_string(id) + " " + token.value().dump();
  };
  for (std::size_t i = 0; file.has("added_tokens") && i < file.at("added_tokens").array().size(); ++i) {
    const JsonPlace token = file.at("added_tokens").at(i);
    token.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    const auto other = configured.find(token.at("content").text());
    const bool special = token.at("special").flag();
    const auto differs = [&](const char* key) { return token.at(key).value() != other->second.at(key).value(); };
    if (other != configured.end() && (differs("single_word") || differs("lstrip") || differs("rstrip") ||
                                      differs("normalized") || (!special && differs("special"))))
      add_configured(other->second, token.at("id").number(), special || other->second.at("special").flag());
    else
      add(token, token.at("id").number(), special);
  }
  for (const auto& [content, token] : configured) {
    if (contents.contains(content)) continue;
    const JsonPlace vocabulary = file.at("model").at("vocab");
    if (!vocabulary.has(std::string(content))) token.refuse("the tokens of the tokenizer.json");
    add_configured(token, vocabulary.at(std::string(content)).number(), token.at("special").flag());
  }
}

/// Refuses an `add_prefix_space` of the configuration with which transformers would build another pre_tokenizer.
inline void require_configured_prefix(const JsonPlace& config, const TokenizerParts& parts) {
  const bool prefix =
      std::ranges::any_of(parts.rewrites, [](const Rewrite& step) { return step.kind == Rewrite::prepend; }) ||
      std::ranges::any_of(parts.cuts, [](const Cut& cut) {
        return cut.kind == Cut::prefix_space || (cut.kind == Cut::spaces && cut.before != Cut::never);
      });
  if (config.flag("add_prefix_space", prefix) != prefix)
    config.at("add_prefix_space").refuse((prefix ? "true" : "false") + std::string(", as the tokenizer.json says"));
}

// ---- the end of text ------------------------------------------------------------------------------------------------

/// The token of the configuration's `eos_token`. Without one it is the only special token with a usual name.
inline std::uint32_t end_of_text_id(const std::string& path, const JsonPlace& file, const JsonPlace& config,
                                    const TokenizerParts& parts) {
  std::map<std::string, std::uint32_t> special, all;
  if (file.has("added_tokens"))
    for (const auto& token : file.at("added_tokens").array()) {
      const auto& content = token.at("content").get_ref<const std::string&>();
      all.emplace(content, token.at("id").get<std::uint32_t>());
      if (token.at("special").get<bool>()) special.emplace(content, token.at("id").get<std::uint32_t>());
    }
  const nlohmann::json none = "";
  const JsonPlace said = config.has("eos_token") ? config.at("eos_token") : config.at("eos_token", none);
  if (const std::string end = said.value().is_object() ? said.at("content").text() : said.text(); !end.empty()) {
    if (const auto found = all.find(end); found != all.end()) return found->second;
    const JsonPlace vocabulary = file.at("model").at("vocab");
    if (vocabulary.has(end)) return vocabulary.at(end).number();
    throw UsageError("'" + path + "' has no token \"" + shardlib::detail::excerpt(end) +
                     "\", which the tokenizer_config.json beside it has as its eos_token: the files do not belong " +
                     "together; get both again");
  }
  std::uint32_t found = no_token;
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>"}) {
    const auto token = special.find(name);
    if (token == special.end()) continue;
    if (found != no_token) found = static_cast<std::uint32_t>(parts.tokens.size());
    if (found == no_token) found = token->second;
  }
  if (found < parts.tokens.size()) return found;
  throw UsageError(
      "'" + path + "' does not say which token ends a text, and has " + (found == no_token ? "none" : "more than one") +
      " of the usual names (<|endoftext|>, </s>): put the tokenizer_config.json that belongs to it beside " +
      "it, with its eos_token");
}

// ---- identity -------------------------------------------------------------------------------------------------------

/// A text that is equal where the encodings are.
inline std::string described(const JsonPlace& file, const TokenizerParts& parts) {
  std::string text = "byte_level " + std::to_string(parts.byte_level ? 1 : 0) + " ignore_merges " +
                     std::to_string(parts.ignore_merges ? 1 : 0) + " end " + std::to_string(parts.end_of_text) + "\n";
  for (std::size_t id = 0; id < parts.tokens.size(); ++id)
    text += (parts.findable[id] ? "+" : "-") + std::to_string(parts.tokens[id].size()) + ":" + parts.tokens[id];
  for (const BpeModel::Pair& pair : parts.pairs)
    text += "\n" + std::to_string(pair.left) + " " + std::to_string(pair.right) + " " + std::to_string(pair.id);
  for (const char* key : {"normalizer", "added_tokens"})
    text += "\n" + (file.has(key) ? file.at(key).value().dump() : std::string("null"));
  for (const Cut& cut : parts.cuts)
    text += "\n" + std::to_string(cut.kind) + " " + std::to_string(static_cast<int>(cut.matches)) + " " +
            std::to_string(cut.inverted ? 1 : 0) + " " + std::to_string(cut.before) + " " +
            std::to_string(cut.whole ? 1 : 0) + " " + cut.pattern;
  return text + parts.overrides;
}

/// GPT-2's tokens, where the file is its tokenizer; otherwise none.
inline std::vector<std::string> gpt2_tokens(const JsonPlace& file, const TokenizerParts& parts) {
  const std::size_t n = parts.tokens.size() - 1;
  const bool plain = parts.byte_level && parts.rewrites.empty() && parts.overrides.empty() && parts.cuts.size() == 1 &&
                     parts.cuts[0].kind == Cut::gpt2 && parts.end_of_text == n && parts.pairs.size() + 256 == n &&
                     parts.tokens[n] == end_of_text_mark && file.has("added_tokens") &&
                     file.at("added_tokens").array().size() == 1;
  if (!plain) return {};
  const JsonPlace mark = file.at("added_tokens").at(0);
  if (mark.at("lstrip").flag() || mark.at("rstrip").flag() || !mark.at("special").flag()) return {};
  for (std::size_t i = 0; i < parts.pairs.size(); ++i)
    if (parts.pairs[i].id != 256 + i) return {};
  std::vector<std::string> tokens(parts.tokens.begin(), parts.tokens.end() - 1);
  return vocabulary_digest(tokens) == gpt2_digest ? tokens : std::vector<std::string>();
}

}  // namespace detail

SHARDLIB_INLINE std::shared_ptr<const Tokenizer> read_tokenizer_json(const std::string& path) {
  nlohmann::json json;
  try {
    const Bytes bytes = read_file(path);
    json = detail::parse_json(as_text(bytes));
  } catch (const nlohmann::json::exception& error) {
    throw Error("'" + path + "' is not JSON: it is not a tokenizer.json, or it is damaged; get it again (" +
                shardlib::detail::excerpt(error.what(), 200) + ")");
  } catch (const detail::DeepJson& error) {
    throw Error("'" + path + "': " + error.what() + ": it is not a tokenizer.json, or it is damaged; get it again");
  }
  const detail::JsonPlace file(path, json);
  file.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
             "decoder", "model"});
  if (file.has("version") && file.at("version").text() != "1.0") file.at("version").refuse("1.0");
  detail::TokenizerParts parts;
  for (const detail::JsonPlace& step : detail::steps_of(file, "normalizer", "normalizers"))
    parts.rewrites.push_back(detail::read_rewrite(step));
  parts.byte_level = detail::read_cuts(file, parts.rewrites, parts.cuts);
  detail::read_spellings(file, parts);
  detail::read_model(file, parts);
  const std::string config_path = (std::filesystem::path(path).parent_path() / "tokenizer_config.json").string();
  const nlohmann::json config_json = detail::read_config(config_path);
  const detail::JsonPlace config(config_path, config_json);
  detail::read_added(file, config, parts);
  detail::require_configured_prefix(config, parts);
  parts.end_of_text = detail::end_of_text_id(path, file, config, parts);
  if (const std::vector<std::string> tokens = detail::gpt2_tokens(file, parts); !tokens.empty())
    return std::make_shared<BpeTokenizer>(tokens, "'" + path + "'");
  const std::string digest = hex(sha256(detail::described(file, parts)));
  return std::make_shared<detail::JsonTokenizer>(std::move(parts), digest);
}

}  // namespace shardlib::io
