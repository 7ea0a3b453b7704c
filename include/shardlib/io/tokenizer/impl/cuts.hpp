// The steps that cut a text into pieces one after another, for impl/ headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/io/tokenizer/impl/normalize.hpp"
#include "shardlib/io/tokenizer/impl/pieces.hpp"

namespace shardlib::io::detail {

/// The treatment of a pattern's matches.
enum class Matches : std::uint8_t { isolated, removed, with_previous, with_next, contiguous };

struct Cut {
  enum Kind : std::uint8_t {
    gpt2,          ///< into the pieces of GPT-2
    llama3,        ///< of Llama 3
    qwen2,         ///< of Qwen 2
    text,          ///< at `pattern`, as `matches` says
    numbers,       ///< at characters that are numbers, as `matches` says
    spaces,        ///< each space becomes `pattern`, which is put before the text as well, as `before` says
    prefix_space,  ///< not at all: a space is put before a text that has none
  } kind;
  std::string pattern = {};
  Matches matches = Matches::isolated;
  bool inverted = false;  ///< what does not match is a match, and the other way round
  enum Before : std::uint8_t { always, first, never } before = never;
  bool whole = false;  ///< `spaces` does not cut
};

struct Part {
  std::size_t begin, end;
  bool matches;
};

/// The parts of `text` that match and those that do not, in order.
inline std::vector<Part> parts_of(const Cut& cut, std::string_view text) {
  std::vector<Part> parts;
  const auto add = [&](std::size_t begin, std::size_t end, bool matches) {
    if (begin < end) parts.push_back({begin, end, matches != cut.inverted});
  };
  std::size_t begin = 0;
  if (cut.kind == Cut::numbers) {
    for (std::size_t at = 0; at < text.size();) {
      const Character c = character(text.data() + at, text.data() + text.size());
      if (c.kind == Kind::number) {
        add(begin, at, false);
        add(at, begin = at + c.size, true);
      }
      at += c.size;
    }
  } else {
    for (std::size_t at = text.find(cut.pattern); at != std::string_view::npos; at = text.find(cut.pattern, begin)) {
      add(begin, at, false);
      add(at, begin = at + cut.pattern.size(), true);
    }
  }
  add(begin, text.size(), false);
  return parts;
}

/// The pieces that are made of the parts. A match joins one neighbor only, and only one that does not match.
inline std::vector<Part> pieces_of(const std::vector<Part>& parts, Matches matches) {
  std::vector<Part> pieces;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const bool after_match = i > 0 && parts[i - 1].matches;
    const bool joins = matches == Matches::with_previous ? part.matches && !after_match && i > 0
                       : matches == Matches::with_next   ? !part.matches && after_match
                       : matches == Matches::contiguous  ? i > 0 && part.matches == after_match
                                                         : false;
    if (joins)
      pieces.back().end = part.end;
    else if (!(matches == Matches::removed && part.matches))
      pieces.push_back(part);
  }
  return pieces;
}

inline const char* piece_end(Cut::Kind rule, const char* p, const char* end) {
  return rule == Cut::gpt2 ? piece_end(p, end) : llama_piece_end(p, end, rule == Cut::llama3 ? 3 : 1);
}

/// Calls f(piece) for the pieces of `text` in order. `first`: the text is the beginning of what is encoded.
template <class F>
void for_each_piece(std::span<const Cut> cuts, std::string_view text, bool first, const F& f) {
  if (text.empty()) return;
  if (cuts.empty()) return f(text);
  const Cut& cut = cuts.front();
  const std::span<const Cut> later = cuts.subspan(1);
  const auto pass_on = [&](std::string_view whole, std::size_t begin, std::size_t end) {
    for_each_piece(later, whole.substr(begin, end - begin), first && begin == 0, f);
  };
  const auto pass_on_pieces = [&](std::string_view whole, Matches matches) {
    for (const Part& piece : pieces_of(parts_of(cut, whole), matches)) pass_on(whole, piece.begin, piece.end);
  };
  switch (cut.kind) {
    case Cut::gpt2:
    case Cut::llama3:
    case Cut::qwen2:
      for (const char *p = text.data(), *const end = p + text.size(); p < end;) {
        const char* const next = piece_end(cut.kind, p, end);
        pass_on(text, static_cast<std::size_t>(p - text.data()), static_cast<std::size_t>(next - text.data()));
        p = next;
      }
      return;
    case Cut::text:
    case Cut::numbers:
      return pass_on_pieces(text, cut.matches);
    case Cut::spaces: {
      std::string spelled = replaced(text, " ", cut.pattern);
      const bool before = cut.before == Cut::always || (cut.before == Cut::first && first);
      if (before && !spelled.starts_with(cut.pattern)) spelled.insert(0, cut.pattern);
      if (cut.whole) return pass_on(spelled, 0, spelled.size());
      return pass_on_pieces(spelled, Matches::with_next);
    }
    case Cut::prefix_space:
      if (text.starts_with(' ')) return pass_on(text, 0, text.size());
      const std::string spaced = " " + std::string(text);
      return pass_on(spaced, 0, spaced.size());
  }
}

}  // namespace shardlib::io::detail
