// The steps that a tokenizer.json lists: rewriting, cutting into pieces, and spelling. For impl/ headers.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/io/tokenizer/impl/cuts.hpp"
#include "shardlib/io/tokenizer/impl/json_place.hpp"
#include "shardlib/io/tokenizer/impl/json_tokenizer.hpp"
#include "shardlib/io/tokenizer/impl/normalize.hpp"
#include "shardlib/io/tokenizer/impl/pieces.hpp"

namespace shardlib::io::detail {

/// The steps of a `Sequence`, whose list has this name, of the steps within it, or of one step alone; none of null.
inline std::vector<JsonPlace> steps_of(const JsonPlace& parent, const std::string& name, const std::string& list) {
  if (!parent.has(name)) return {};
  std::vector<JsonPlace> steps, open = {parent.at(name)};
  while (!open.empty()) {
    const JsonPlace step = open.back();
    open.pop_back();
    if (step.at("type").text() != "Sequence") {
      steps.push_back(step);
      continue;
    }
    step.only({"type", list});
    const JsonPlace all = step.at(list);
    for (std::size_t i = all.array().size(); i > 0; --i) open.push_back(all.at(i - 1));
  }
  return steps;
}

/// A pattern that is a text: {"String": "..."}.
inline std::string text_pattern(const JsonPlace& pattern) {
  if (!pattern.has("String") || pattern.object().size() != 1) pattern.refuse("a String");
  if (pattern.at("String").text().empty()) pattern.refuse("a String that is not empty");
  return pattern.at("String").text();
}

inline Rewrite read_rewrite(const JsonPlace& step) {
  const std::string& type = step.at("type").text();
  constexpr std::array<std::pair<std::string_view, Rewrite::Kind>, 4> forms = {
      {{"NFC", Rewrite::nfc}, {"NFD", Rewrite::nfd}, {"NFKC", Rewrite::nfkc}, {"NFKD", Rewrite::nfkd}}};
  for (const auto& [name, form] : forms) {
    if (type != name) continue;
    step.only({"type"});
    return {form, {}, {}};
  }
  if (type == "Prepend") {
    step.only({"type", "prepend"});
    return {Rewrite::prepend, {}, step.at("prepend").text()};
  }
  if (type != "Replace") step.at("type").refuse("NFC, NFD, NFKC, NFKD, Prepend, Replace and Sequence");
  step.only({"type", "pattern", "content"});
  if (step.at("content").text().empty()) step.at("content").refuse("a text that is not empty");
  return {Rewrite::replace, text_pattern(step.at("pattern")), step.at("content").text()};
}

inline Matches read_behavior(const JsonPlace& behavior) {
  constexpr std::array<std::pair<std::string_view, Matches>, 5> all = {{{"Isolated", Matches::isolated},
                                                                        {"Removed", Matches::removed},
                                                                        {"MergedWithPrevious", Matches::with_previous},
                                                                        {"MergedWithNext", Matches::with_next},
                                                                        {"Contiguous", Matches::contiguous}}};
  for (const auto& [name, matches] : all)
    if (behavior.text() == name) return matches;
  behavior.damaged("Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous");
}

inline constexpr std::array<std::pair<std::string_view, Cut::Kind>, 4> known_patterns = {
    {{R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", Cut::gpt2},
     {R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)", Cut::gpt2},
     {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
      R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
      Cut::llama3},
     {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
      R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
      Cut::qwen2}}};

inline Cut read_split(const JsonPlace& step) {
  step.only({"type", "pattern", "behavior", "invert"});
  const Matches matches = read_behavior(step.at("behavior"));
  const bool inverted = step.flag("invert", false);
  const JsonPlace pattern = step.at("pattern");
  if (!pattern.has("Regex")) return {Cut::text, text_pattern(pattern), matches, inverted};
  if (pattern.object().size() != 1) pattern.refuse("one pattern");
  for (const auto& [regex, kind] : known_patterns) {
    if (pattern.at("Regex").text() != regex) continue;
    // These patterns match all of a text, so the behaviors that keep the matches apart are equal.
    if (matches != Matches::isolated && !(matches == Matches::removed && inverted))
      step.at("behavior").refuse("Isolated, or Removed and inverted, with this Regex");
    return {kind};
  }
  pattern.at("Regex").refuse("the regular expressions of GPT-2, Llama 3 and Qwen 2");
}

inline Cut read_metaspace(const JsonPlace& step) {
  step.only({"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  Cut cut{Cut::spaces, step.at("replacement").text()};
  if (cut.pattern.empty()) step.at("replacement").damaged("a character");
  const std::string scheme = step.has("prepend_scheme") ? step.at("prepend_scheme").text() : "always";
  if (scheme != "always" && scheme != "first" && scheme != "never")
    step.at("prepend_scheme").damaged("always, first or never");
  cut.before = scheme == "always" ? Cut::always : scheme == "first" ? Cut::first : Cut::never;
  if (cut.before != Cut::never && !step.flag("add_prefix_space", true))
    step.at("add_prefix_space").refuse("true where 'prepend_scheme' is not never");
  cut.whole = !step.flag("split", true);
  return cut;
}

/// Throws UsageError for the scheme `first` after a step that moves or repeats the beginning of the text: then a piece
/// no longer shows whether it stood first in the original text.
inline void require_first(const JsonPlace& step, const std::vector<Rewrite>& rewrites, const std::vector<Cut>& before) {
  const bool moves = std::ranges::any_of(rewrites, [](const Rewrite& rewrite) {
    return rewrite.kind == Rewrite::replace &&
           character(rewrite.from.data(), rewrite.from.data() + rewrite.from.size()).size < rewrite.from.size();
  });
  const bool inserts = std::ranges::any_of(before, [](const Cut& cut) { return cut.kind == Cut::spaces; });
  if (moves || (!before.empty() && (inserts || !rewrites.empty())))
    step.at("prepend_scheme").refuse("first as the first step, without a Replace of several characters before it");
}

/// The cuts; returns whether bytes are spelled as characters behind them.
inline bool read_cuts(const JsonPlace& file, const std::vector<Rewrite>& rewrites, std::vector<Cut>& cuts) {
  const std::vector<JsonPlace> steps = steps_of(file, "pre_tokenizer", "pretokenizers");
  for (const JsonPlace& step : steps) {
    const std::string& type = step.at("type").text();
    if (type == "ByteLevel") {
      step.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
      if (step.key() != steps.back().key()) step.refuse("ByteLevel only as the last step");
      if (step.at("add_prefix_space").flag()) cuts.push_back({Cut::prefix_space});
      if (step.flag("use_regex", true)) cuts.push_back({Cut::gpt2});
      return true;
    }
    if (type == "Split") {
      cuts.push_back(read_split(step));
    } else if (type == "Digits") {
      step.only({"type", "individual_digits"});
      cuts.push_back(
          {Cut::numbers, {}, step.flag("individual_digits", false) ? Matches::isolated : Matches::contiguous});
    } else if (type == "Metaspace") {
      const Cut cut = read_metaspace(step);
      if (cut.before == Cut::first) require_first(step, rewrites, cuts);
      cuts.push_back(cut);
    } else {
      step.at("type").refuse("ByteLevel, Split, Digits, Metaspace and Sequence");
    }
  }
  return false;
}

inline void read_spellings(const JsonPlace& file, TokenizerParts& parts) {
  const std::vector<JsonPlace> steps = steps_of(file, "decoder", "decoders");
  bool fused = false, bytes = false;
  // Decoding goes token by token, so it does not see what several bytes spell together.
  const auto require_token = [&](const JsonPlace& step, const std::string& pattern) {
    if (bytes && pattern.size() > 1 && !file.at("model").at("vocab").has(pattern))
      step.at("type").refuse("ByteFallback only as a later step, where the vocabulary has no \"" + pattern + "\"");
  };
  for (const JsonPlace& step : steps) {
    const std::string& type = step.at("type").text();
    if (parts.byte_level) {
      if (type != "ByteLevel" || steps.size() != 1)
        step.at("type").refuse("ByteLevel, as the pre_tokenizer ends with it");
      return;
    }
    if (fused && type != "Strip") step.refuse("only Strip after Fuse");
    if (type == "Replace") {
      step.only({"type", "pattern", "content"});
      parts.spellings.push_back({Spelling::replace, text_pattern(step.at("pattern")), step.at("content").text()});
      require_token(step, parts.spellings.back().from);
    } else if (type == "ByteFallback") {
      step.only({"type"});
      parts.spellings.push_back({Spelling::bytes});
      bytes = true;
    } else if (type == "Fuse") {
      step.only({"type"});
      fused = true;
    } else if (type == "Strip") {
      step.only({"type", "content", "start", "stop"});
      if (!fused) step.refuse("Strip only behind Fuse");
      if (step.at("content").text() != " ") step.at("content").refuse("\" \"");
      if (step.at("start").number() > 1) step.at("start").refuse("0 or 1");
      if (step.at("stop").number() != 0) step.at("stop").refuse("0");
      if (step.at("start").number() == 1) parts.spellings.push_back({Spelling::strip_first});
    } else if (type == "Metaspace") {
      const Cut cut = read_metaspace(step);
      require_token(step, cut.pattern);
      parts.spellings.push_back(cut.before == Cut::never ? Spelling{Spelling::replace, cut.pattern, " "}
                                                         : Spelling{Spelling::spaces, cut.pattern});
    } else {
      step.at("type").refuse("Replace, ByteFallback, Fuse, Strip, Metaspace and Sequence, or ByteLevel with a " +
                             std::string("pre_tokenizer that ends with it"));
    }
  }
  if (steps.empty()) file.at("decoder").refuse("a decoder");
}

}  // namespace shardlib::io::detail
